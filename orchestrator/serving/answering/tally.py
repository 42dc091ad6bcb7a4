"""How the requests of a session have gone since it began: how they ended, and how long their clients waited. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

FIRST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
"""Bounds between which the waits for first tokens are counted, in seconds."""
GAP_S = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""The same of the waits for each next token."""
_UNSERVABLE = {"invalid_request", "context_length_exceeded", "no_chat_template"}
"""Codes of failures for which the request is to blame."""


class Outcome(StrEnum):
    """How a request ended."""

    ANSWERED = "answered"
    CANCELLED = "cancelled"
    """Its client has gone."""
    REFUSED = "refused"
    """It cannot be served as it is: its prompt is longer than the context, say."""
    TOO_MANY = "too_many"
    """It came when the session had as many requests as it takes."""
    FAILED = "failed"


def outcome_of(finish: str, failure_code: str) -> Outcome:
    """How a request ended, by its last `motley.protocol.mesh_pb2.Delta`: what it says and the code of its failure, ""
    if it has none."""
    if finish in ("stop", "length") and not failure_code:
        return Outcome.ANSWERED
    return Outcome.REFUSED if failure_code in _UNSERVABLE else Outcome.FAILED


class Histogram:
    """How many of some times lie up to each of some bounds.

    Attributes:
        bounds: in seconds, rising.
        counts: of the times up to each bound and above the one before it; the last is of those above all.
        sum: of all times, in seconds.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds


@dataclass
class Tally:
    """Of one session.

    Attributes:
        ended: requests, by how they ended.
        first_s: from when a request came to the first token of its answer.
        gap_s: from each token of an answer to the next one; tokens that come at once count as one.
    """

    ended: Counter[Outcome] = field(default_factory=Counter)
    first_s: Histogram = field(default_factory=lambda: Histogram(FIRST_S))
    gap_s: Histogram = field(default_factory=lambda: Histogram(GAP_S))


@dataclass
class AdapterTally:
    """Of those requests of a session that have the same adapter.

    Attributes:
        ended: requests, by how they ended.
        tokens: that were generated for them.
    """

    ended: Counter[Outcome] = field(default_factory=Counter)
    tokens: int = 0
