"""What a trunk rank knows of an expert host that it asks: whether it is there, what it owes, and how quick it is."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

PATIENCE = 20.0
"""A host that has not answered after so many times the expected..."""
PATIENCE_S = 0.25
"""...and at least these seconds is late."""
SILENT_S = 5.0
"""A host that owes an answer and says nothing for so long, or `PATIENCE` times the expected, is dropped."""
REDIAL_S = 1.0
"""A host that was lost is dialled again after so long, after a second failure twice that..."""
REDIAL_MAX_S = 30.0
"""...and so on, but no longer than this."""

FIRST_ROW_S = 0.01
"""What a host that has never answered may take per row before anybody loses patience."""
SMOOTHING = 0.125
"""Weight of the latest answer in a running estimate."""
FADING_S = 10.0
"""The estimate of a host that is not asked halves in this time, so that one that was slow once is tried again; when it
answers, what was known of it counts half as much."""


@dataclass(eq=False)
class Asked:
    """A question that a host owes an answer to."""

    number: int
    missing: set[int]
    rows: int
    sent_at: float
    heard_at: float
    """When the host last answered this or an earlier question: it answers them in order."""
    expected_s: float
    idle_s: float
    """For so long the host had not been asked."""
    late: bool = False
    busy_s: float = 0.0

    @property
    def late_at(self) -> float:
        return math.inf if self.late else self.sent_at + patience_s(self.expected_s)

    @property
    def silent_at(self) -> float:
        return self.heard_at + max(SILENT_S, PATIENCE * self.expected_s)


@dataclass
class Host:
    """What is known of a host."""

    connected: bool = False
    lost: str = ""
    """Why it is not."""
    calls: int = 0
    rows: int = 0
    """Answered, both."""
    computed_s: float = 0.0
    owing_s: float = 0.0
    """In which it owed an answer."""
    waited_s: float = 0.0
    """In which this rank waited for it; divided, where it waited for several."""
    stalls_s: list[float] = field(default_factory=list)
    """What failing over from it has cost, per call."""
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
    """It computes wrongly, or the orchestrator has given it up: not dialled until it has been started anew."""

    @property
    def suspect(self) -> bool:
        """It is late with an answer."""
        return any(asked.late for asked in self.asked)

    def expected_s(self, rows: int) -> float:
        """Until it has answered all that it owes and so many rows more; 0 for a host that has never answered."""
        return (self.round_trip_s or 0.0) + (self.queued + rows) * (self.row_s or 0.0)

    def faded_s(self, rows: int, now: float) -> float:
        """`expected_s`, less if it has not been asked for long."""
        return self.expected_s(rows) * math.exp2((self.asked_at - now) / FADING_S)

    def patient_s(self, rows: int) -> float:
        """`expected_s` for whom it would be wrong to expect too little."""
        return self.expected_s(rows) if self.row_s is not None else (self.queued + rows) * FIRST_ROW_S

    def measure(self, asked: Asked, now: float) -> None:
        row_s = asked.busy_s / asked.rows
        round_trip_s = max(0.0, now - asked.sent_at - asked.busy_s)
        weight = 1 - (1 - SMOOTHING) * math.exp2(-asked.idle_s / FADING_S)
        self.row_s = row_s if self.row_s is None else self.row_s + weight * (row_s - self.row_s)
        before = self.round_trip_s
        self.round_trip_s = round_trip_s if before is None else before + weight * (round_trip_s - before)


def patience_s(expected_s: float) -> float:
    """After how many seconds a host is late, of which an answer is expected within `expected_s`."""
    return max(PATIENCE_S, PATIENCE * expected_s)
