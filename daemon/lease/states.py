"""The course of a device that is taken back and given again. Pure: what is true now comes in, what follows comes out.

=========  ====================================  =======================================================
state      meaning                               left when
=========  ====================================  =======================================================
normal     ranks may compute on it               there is a lease: draining, or leased if none does
draining   there is a lease, and ranks compute   none does any more: leased; no lease: restoring
leased     there is a lease, and nobody does     a rank came all the same: draining; no lease: restoring
restoring  the lease is over                     a rank is back, or none came for a while: normal
=========  ====================================  =======================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

DRAIN_S = 20.0
"""The mesh has so long to do without a device; then its ranks are ended: it is their owner's."""
RESTORE_S = 60.0
"""So long after a lease a device is told to be on its way back, if nothing computes on it earlier."""


class State(StrEnum):
    """See the table above."""

    NORMAL = "normal"
    DRAINING = "draining"
    LEASED = "leased"
    RESTORING = "restoring"


@dataclass(frozen=True)
class Course:
    """Where a device stands.

    Attributes:
        device: that is, or was, leased; empty in state normal.
        since: when the state began, by any clock that only goes on.
    """

    state: State = State.NORMAL
    device: str = ""
    since: float = 0.0

    def overdue(self, now: float) -> bool:
        """Whether its ranks have had all the time that they get."""
        return self.state is State.DRAINING and now - self.since >= DRAIN_S

    def next(self, wanted: str, is_busy: Callable[[str], bool], now: float) -> Course:
        """Where it stands now.

        Args:
            wanted: the device that there is a lease of; empty: there is no lease.
            is_busy: whether a rank is on a device.
        """
        if wanted:
            state = State.DRAINING if is_busy(wanted) else State.LEASED
            return self if (state, wanted) == (self.state, self.device) else Course(state, wanted, now)
        match self.state:
            case State.DRAINING | State.LEASED:
                return Course(State.RESTORING, self.device, now)
            case State.RESTORING if is_busy(self.device) or now - self.since >= RESTORE_S:
                return Course(since=now)
            case _:
                return self
