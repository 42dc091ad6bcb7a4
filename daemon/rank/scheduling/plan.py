"""What a step computes, as it is planned: of which requests, and what is to be done before. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from motley.daemon.rank.scheduling.request import Request


@dataclass(frozen=True)
class Part:
    """What one request has of a step.

    Attributes:
        position: of the first of its rows.
        tokens: that are computed; the last ones may be guesses.
        wanted: after how many of them, the last ones, the next token is to be chosen.
        guesses: how many are guesses.
        blocks: those that it has got since the last step that it was in.
        windowed: those that layers with a window have for them, see `BlockStore.windowed`.
        drafted: whether the guesses are a draft model's.
        without: of its step, see `motley.daemon.rank.guessing.drafting.Drafts`.
    """

    request: Request
    position: int
    tokens: Sequence[int]
    wanted: int
    guesses: int
    blocks: Sequence[int]
    windowed: Sequence[int]
    drafted: bool
    without: float


@dataclass
class Plan:
    """What every rank is to do next.

    Attributes:
        copied: recurrent states that are to be copied before all else, in this order: from which slot to which.
        moved: blocks of running requests that have been copied, and the far ones that these have instead from now on;
            to be told first.
        closed: slots of requests that have stepped back, to be closed then.
        loads: adapters to be loaded into slots that nobody uses: the slot and the fingerprint of each.
        opened: requests that have been admitted, to be opened after that.
        parts: the step.
        halved: whether it is to be computed in two micro-chunks.
        answers: how many of its rows are of requests that are being answered.
        fresh: whether it begins a prompt.
        revisits: whether its size is tried again, see `Pace`.
        without: see `motley.daemon.rank.guessing.drafting.Drafts`.
    """

    copied: list[tuple[int, int]] = field(default_factory=list)
    moved: list[tuple[int, int]] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    loads: list[tuple[int, str]] = field(default_factory=list)
    opened: list[Request] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    halved: bool = False
    answers: int = 0
    fresh: bool = False
    revisits: bool = False
    without: float = 0.0

    @property
    def rows(self) -> int:
        """How many rows all parts have together."""
        return sum(len(part.tokens) for part in self.parts)
