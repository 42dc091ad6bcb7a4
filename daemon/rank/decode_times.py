"""Where the time of a rank's decode steps goes: computing, sending and receiving, or waiting for other ranks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from motley.transport import StatsSnapshot

STEP_HISTORY = 4096
"""Decode steps whose times are remembered."""


class Clocks(Protocol):
    """What tells where the time of a rank's collectives went."""

    def snapshot(self) -> StatsSnapshot:
        """The clocks as they are now, in seconds since the session began."""
        ...


@dataclass
class DecodeTimes:
    """Where the time of this rank's decode steps went, cumulative, in seconds. Sequences of one step share it.

    Decode steps are those in which every sequence has the token that was just chosen, and perhaps guesses of the next
    ones. Choosing among the logits (penalties, candidates, sums) does not count.
    """

    tokens: int = 0
    """One for each sequence of each step; guesses that were right are not counted."""
    compute: float = 0.0
    wire: float = 0.0
    wait: float = 0.0
    collectives: int = 0
    count: int = 0
    """Decode steps so far."""
    steps: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=STEP_HISTORY))
    """(compute, wire, wait) of each of the latest steps, until someone has told of them and clears it."""

    def add(self, tokens: int, seconds: float, before: StatsSnapshot, after: StatsSnapshot) -> None:
        """Take in a decode step of so many sequences, with the clocks of collectives before and after it."""
        wire, wait = after.wire_s - before.wire_s, after.wait_s - before.wait_s
        compute = seconds - wire - wait
        self.tokens += tokens
        self.wire += wire
        self.wait += wait
        self.compute += compute
        self.count += 1
        self.steps.append((compute, wire, wait))
        self.collectives += after.collectives - before.collectives
