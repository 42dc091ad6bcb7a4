"""A lease: for how long a device of this machine is somebody else's, and who that is. Pure.

Programs write it as JSON (docs/lease.md). What does not hold it to the letter is no lease, and is told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from motley.protocol.devices import ALL, CPU, GPU

LIMIT_S = 7200.0
"""A lease lasts so long at most, unless the daemon was told otherwise: somebody may forget to give it back."""
CLOCK_S = 60.0
"""So far in the future may a lease have been granted: clocks of programs are not all alike."""
BEGUN_S = 2.0
"""Systems tell when a process began to no more than about a second."""
Device = Annotated[str, Field(pattern=rf"^({ALL}|{CPU}|{GPU}\d{{1,2}})$")]
Words = Annotated[str, Field(max_length=200, pattern=r"^[^\x00-\x1f\x7f]*$")]


class LeaseError(Exception):
    """A lease cannot be read, or not be had; the message says why."""


class _Told(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Holder(_Told):
    """Who has a lease.

    Attributes:
        name: for people.
        pid: of a process with whose end the lease ends; None: it lasts until it is given back, or expires.
        started_at: when that process began, in Unix time; None: before the lease was granted.
    """

    name: Annotated[Words, Field(min_length=1)]
    pid: Annotated[int, Field(gt=0, lt=2**31)] | None = None
    started_at: float | None = None


class Lease(_Told):
    """See above.

    Attributes:
        device: as `motley.protocol.devices` calls it.
        granted_at, expires_at: in Unix time.
        reason: what for, for people.
    """

    holder: Holder
    granted_at: float
    expires_at: float
    device: Device = ALL
    reason: Words = ""

    def end(self, limit_s: float) -> float:
        """When it is over, in Unix time, whoever holds it then."""
        return min(self.expires_at, self.granted_at + limit_s)

    def over(self, now: float, limit_s: float, began: Callable[[int], float | None]) -> str:
        """Why the lease counts no more; empty: it does.

        Args:
            now: in Unix time.
            limit_s: no lease lasts longer.
            began: when the process of a number began, in Unix time; NaN: nobody knows; None: there is none.
        """
        if self.granted_at > now + CLOCK_S:
            return f"it is granted only in {self.granted_at - now:.0f} s: is a clock wrong?"
        if now >= self.end(limit_s):
            return "its time is over"
        pid = self.holder.pid
        if pid is None:
            return ""
        since = began(pid)
        if since is None:
            return f"process {pid} of {self.holder.name!r} has ended"
        told = self.holder.started_at
        another = since > self.granted_at + BEGUN_S if told is None else abs(since - told) > BEGUN_S
        return f"process {pid} is another by now than that of {self.holder.name!r}" if another else ""


def read_lease(content: bytes) -> Lease:
    """The lease that a file has.

    Raises:
        LeaseError: there is none in it; the message says what is wrong.
    """
    try:
        return Lease.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise LeaseError(f"{where}: {first['msg']}" if where else first["msg"]) from error


def write_lease(lease: Lease) -> bytes:
    """A lease as a file has it."""
    return lease.model_dump_json(exclude_none=True, indent=1).encode() + b"\n"
