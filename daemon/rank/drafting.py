"""Decides when a draft model is asked how texts go on, how far, and what that may cost. Pure: no I/O, no clock.

A draft model is a small model on rank 0 (`motley.daemon.rank.draft_model`). While it computes, all ranks wait for it. So
it is asked where that is expected to make tokens come faster, by the measured chances of its guesses, the measured
times of its tokens and those of the session's steps. Expectations may be wrong: therefore accounts are kept of the time
that it takes and of the time that it saves, and what it may take in advance is little.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from motley.daemon.rank.drafts import AT_FIRST, F64, MOST, Luck, how_many

DEPTHS = (1, 2, 3, 4, 6, 8, 11, MOST)
"""How many tokens ahead a draft model may be asked for."""
CHUNK = 64
"""Tokens of a text that a draft model reads at most beside a step of the session."""
SHARE = 0.02
"""The part of all time that a draft model may take without saving any."""
ADVANCE_S = 0.5
"""Seconds that it may take before it has saved any. No more than that is put by from `SHARE`."""
SAVED_S = 10.0
"""Seconds at most that it may have saved and not taken again: what it saved yesterday excuses no losses today."""
CHEAP = 0.2
"""What part of a step's time a token of the draft model is thought to take before one was measured."""
NEWEST = 0.2
"""What the latest measurement weighs in an average."""
FADING = 0.98
"""How much of the time that its tokens took is believed after a step in which it was not asked: machines get idle."""

R = TypeVar("R")


class Drafter(Protocol[R]):
    """A model that guesses how the texts of requests go on. A text only gets longer between two calls."""

    def unread(self, request: R) -> int | None:
        """How many tokens of a text it has not read; None: it cannot guess how that goes on, now or ever."""
        ...

    def read(self, request: R, tokens: int) -> float:
        """Read the next ones, so many at most; the seconds that it took."""
        ...

    def guess(self, wanted: Sequence[tuple[R, int]]) -> tuple[list[list[int]], float]:
        """Guess the next tokens of some texts, of each as many as wanted, or fewer; and the seconds that it took."""
        ...

    def forget(self, request: R) -> None:
        """Let go of what is kept of a text; it may come again."""
        ...


class Drafting(Generic[R]):
    """When to ask a draft model."""

    def __init__(self, drafter: Drafter[R]) -> None:
        self.drafter = drafter
        self._balance = ADVANCE_S
        """Seconds that the draft model may take."""
        self._usual = AT_FIRST
        """How likely its first guess for a request is thought to be right that it has guessed nothing of."""
        self._token_s: dict[int, float] = {}
        """Average seconds of one token each for some requests, by the next power of two of their number."""
        self._met: set[int] = set()
        """Such numbers that it has guessed for; the first time memory is allocated and plans are made."""
        self._row_s = 0.0
        """Average seconds of a token that it reads; 0: it has read nothing."""
        self._rate = 0.0
        """Tokens per second that were expected of the step under way without it; 0: it has no part in that."""
        self._lucks: dict[R, Luck] = {}

    def guesses(
        self,
        answered: Sequence[R],
        may: Sequence[bool],
        looked_up: Sequence[Sequence[float]],
        seconds: Callable[[int, int], F64],
    ) -> Mapping[R, tuple[list[int], list[float]]]:
        """Have the draft model guess for those for which that is worth its time, or read what it has to know for it.

        Args:
            answered: the requests in the next step.
            may: whether each of them may be guessed for.
            looked_up: for each of them, the chances of guesses that cost nothing, as `how_many` has them.
            seconds: see `how_many`.

        Returns:
            By request its guesses, and the chances that the first one, the first two, ... are right. Nobody who is not
            there has better ones than those that cost nothing.
        """
        if self._balance <= 0:
            return {}
        unread = [self.drafter.unread(one) if own else None for one, own in zip(answered, may, strict=True)]
        hopes = [
            self.luck(one).worth() if left is not None else [] for one, left in zip(answered, unread, strict=True)
        ]
        if not any(hopes):
            return {}
        _, without = how_many(looked_up, seconds)
        token_s = self._seconds_of(sum(map(bool, hopes)), float(seconds(len(answered), len(answered))[0]))
        best, wanted = without, [0] * len(answered)
        for depth in DEPTHS:
            hoped = [own[:depth] for own in hopes]
            drafted = [sum(own) > sum(found) for own, found in zip(hoped, looked_up, strict=True)]
            chances = [
                own if draft else found for own, found, draft in zip(hoped, looked_up, drafted, strict=True)
            ]
            numbers, rate = how_many(chances, seconds, depth * token_s)
            if rate > best:
                best = rate
                wanted = [number if draft else 0 for number, draft in zip(numbers, drafted, strict=True)]
        asked = [(one, number, left or 0) for one, number, left in zip(answered, wanted, unread, strict=True) if number]
        self._read([(one, left) for one, _, left in asked if left > CHUNK])
        ready = [(one, number) for one, number, left in asked if left <= CHUNK]
        if not ready:
            self._token_s = {known: FADING * took for known, took in self._token_s.items()}
            return {}
        guessed, took = self.drafter.guess(ready)
        self._rate = without
        self._balance -= took
        self._learn(len(ready), took / max(1, *(number for _, number in ready)))
        chances = dict(zip(answered, hopes, strict=True))
        return {one: (own, chances[one][: len(own)]) for (one, _), own in zip(ready, guessed, strict=True) if own}

    def next_step(self) -> None:
        """The next step is being decided."""
        self._rate = 0.0

    def luck(self, request: R) -> Luck:
        """How often its guesses for a request have been right."""
        return self._lucks.setdefault(request, Luck(self._usual))

    def computed(self, seconds: float, answers: int) -> None:
        """A step took so long, in which so many requests got a token that was not guessed."""
        if self._balance < ADVANCE_S:
            self._balance = min(ADVANCE_S, self._balance + SHARE * seconds)
        if self._rate:
            self._balance += answers / self._rate - seconds

    def told(self, request: R, drafted: bool, right: int, wrong: bool) -> None:
        """Of the guesses for a request, the draft model's or others, the first ones were right, and perhaps the one
        after them was `wrong`."""
        if self._rate:
            self._balance = min(SAVED_S, self._balance + right / self._rate)
        if drafted:
            luck = self.luck(request)
            luck.tried(right, wrong)
            self._usual += NEWEST * (luck.chance - self._usual)

    def forget(self, request: R) -> None:
        """A request goes out of the steps, for now or for ever."""
        self.drafter.forget(request)
        self._lucks.pop(request, None)

    def _read(self, waiting: Sequence[tuple[R, int]]) -> None:
        """Have it read a chunk of the first text of which the rest is expected to take no more time than it may."""
        for request, left in waiting:
            if left * self._row_s <= self._balance:
                rows = min(CHUNK, left)
                took = self.drafter.read(request, rows)
                self._balance -= took
                self._row_s += (NEWEST if self._row_s else 1.0) * (took / rows - self._row_s)
                return

    def _seconds_of(self, requests: int, step: float) -> float:
        """How long a token each for so many requests is thought to take, where a step takes so long."""
        if not self._token_s:
            return CHEAP * step
        key = 1 << (requests - 1).bit_length()
        return self._token_s[min(self._token_s, key=lambda known: abs(known - key))]

    def _learn(self, requests: int, seconds: float) -> None:
        key = 1 << (requests - 1).bit_length()
        known = self._token_s.get(key)
        if known is not None:
            self._token_s[key] = known + NEWEST * (seconds - known)
        elif key in self._met:
            self._token_s[key] = seconds
        self._met.add(key)
