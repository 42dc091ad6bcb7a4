"""What a trunk rank knows of an expert host that it asks: whether it is there, what it owes, and how quick it is."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

PATIENCE = 20.0
"""A host is late that has not answered after so many times the expected time, but `PATIENCE_S` at least."""
PATIENCE_S = 0.25
"""No host is late before so many seconds."""
SILENT_S = 5.0
"""A host that owes an answer and says nothing for so many seconds, or `PATIENCE` times the expected, is dropped."""
REDIAL_S = 1.0
"""A host that was lost is dialled again after so many seconds; the pause doubles with every failure."""
REDIAL_MAX_S = 30.0
"""The longest pause before a host is dialled again."""

FIRST_ROW_S = 0.01
"""Seconds per row that a host is expected to take which has never answered."""
SMOOTHING = 0.125
"""Weight of the latest answer in a running estimate."""
FADING_S = 10.0
"""The estimate of a host that is not asked halves in this time, so that one that was slow once is tried again; when it
answers, what was known of it counts half as much."""


@dataclass(eq=False)
class Asked:
    """A question that a host owes an answer to. Times are by one clock, in seconds.

    Attributes:
        number: of the call that it belongs to.
        missing: experts whose results have not come.
        rows: of all experts that were asked for.
        heard_at: when the host last answered this or an earlier question; it answers them in order.
        expected_s: how long the answer was expected to take.
        idle_s: how long the host had not been asked before.
        late: whether patience with it has ended.
        busy_s: how long the host says that it has computed what has come.
        repeats: how often the host has wanted some of it again.
    """

    number: int
    missing: set[int]
    rows: int
    sent_at: float
    heard_at: float
    expected_s: float
    idle_s: float
    late: bool = False
    busy_s: float = 0.0
    repeats: int = 0

    @property
    def late_at(self) -> float:
        """When patience ends; infinity: it has ended."""
        return math.inf if self.late else self.sent_at + patience_s(self.expected_s)

    @property
    def silent_at(self) -> float:
        """When the host is to be dropped, unless it says something before."""
        return self.heard_at + max(SILENT_S, PATIENCE * self.expected_s)


@dataclass
class Host:
    """What is known of a host. Times are by one clock, in seconds.

    Attributes:
        connected: whether there is a link to it.
        lost: why there is none; empty while there is, or before the first try.
        calls, rows: that it has answered.
        computed_s: how long it has computed them, as it says.
        owing_s: how long it has owed an answer, up to when it last owed none.
        waited_s: how long this rank has waited for it; divided, where it waited for several.
        stalls_s: what failing over from it has cost, per call, since it was last reported.
        round_trip_s, row_s: estimates of a message there and back, and of computing a row; None: it has never answered.
        asked: questions that it owes an answer to, the oldest first.
        queued: rows of these.
        owing_since: since when it owes answers, if it does.
        asked_at: when it was last asked.
        dialled: whether it is being reached at the moment.
        redial_at: when it is to be dialled; infinity: not at all.
        pause_s: the pause before that, which grows with every failure.
        barred: it computes wrongly, or the orchestrator has given it up: not dialled until it has been started anew.
    """

    connected: bool = False
    lost: str = ""
    calls: int = 0
    rows: int = 0
    computed_s: float = 0.0
    owing_s: float = 0.0
    waited_s: float = 0.0
    stalls_s: list[float] = field(default_factory=list)
    round_trip_s: float | None = None
    row_s: float | None = None
    asked: list[Asked] = field(default_factory=list)
    queued: int = 0
    owing_since: float = 0.0
    asked_at: float = 0.0
    dialled: bool = False
    redial_at: float = math.inf
    pause_s: float = REDIAL_S
    barred: bool = False

    @property
    def suspect(self) -> bool:
        """Whether it is late with an answer."""
        return any(asked.late for asked in self.asked)

    def expected_s(self, rows: int) -> float:
        """Estimate how long it takes to answer all that it owes and so many rows more; 0: it has never answered."""
        return (self.round_trip_s or 0.0) + (self.queued + rows) * (self.row_s or 0.0)

    def faded_s(self, rows: int, now: float) -> float:
        """The estimate of `expected_s`, which fades while a host is not asked."""
        return self.expected_s(rows) * math.exp2((self.asked_at - now) / FADING_S)

    def patient_s(self, rows: int) -> float:
        """The estimate of `expected_s` for those who count on it: not too short for a host that has never answered."""
        return self.expected_s(rows) if self.row_s is not None else (self.queued + rows) * FIRST_ROW_S

    def measure(self, asked: Asked, now: float) -> None:
        """Learn from a question that has been answered in full."""
        row_s = asked.busy_s / asked.rows
        round_trip_s = max(0.0, now - asked.sent_at - asked.busy_s)
        weight = 1 - (1 - SMOOTHING) * math.exp2(-asked.idle_s / FADING_S)
        self.row_s = row_s if self.row_s is None else self.row_s + weight * (row_s - self.row_s)
        before = self.round_trip_s
        self.round_trip_s = round_trip_s if before is None else before + weight * (round_trip_s - before)


def patience_s(expected_s: float) -> float:
    """After how many seconds a host is late, of which an answer is expected within `expected_s`."""
    return max(PATIENCE_S, PATIENCE * expected_s)
