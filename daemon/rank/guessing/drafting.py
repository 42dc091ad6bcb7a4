"""Decides when a draft model is asked how texts go on, how far, and what that may cost. Pure: no I/O, no clock.

A draft model is a small model on rank 0 (`motley.daemon.rank.guessing.draft_model`). While it computes, all ranks wait
for it. So it is asked where that is expected to make tokens come faster, by the measured chances of its guesses, the
measured times of its tokens and those of the session's steps. Expectations may be wrong: therefore accounts are kept of
the time that it takes and of the time that it saves, and what it may take in advance is little.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from motley.daemon.rank.guessing.drafts import AT_FIRST, F64, HOPELESS, MOST, PROBE, Luck, how_many
from motley.daemon.rank.scheduling.pace import power_of_two

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
LATEST_WEIGHT = 0.2
"""What the latest measurement weighs in an average."""
FADING = 0.9
"""How much of the time that its tokens took is believed after it was found too long: machines get idle."""
REST = 4
"""Whether to ask it is considered again so many steps after the answer was no."""
PROBES = 3
"""So often in a row it is asked, at first and after every `PROBE` times that it was not, as if it were surely right:
otherwise neither its times nor those of steps with so many rows would be known."""
PROBED = 2
"""Tokens that it is then asked for at most."""
REMEASURED = 50
"""In one of so many steps it is not asked, so that it is known how long such steps take."""

R = TypeVar("R")
Asked = TypeVar("Asked", contravariant=True)


class Drafter(Protocol[Asked]):
    """A model that guesses how the texts of requests go on. A text only gets longer between two calls."""

    def unread(self, request: Asked) -> int | None:
        """How many tokens of a text it has not read; None: it cannot guess how that goes on, now or ever."""
        ...

    def read(self, request: Asked, tokens: int) -> float:
        """Read the next ones, so many at most; the seconds that it took."""
        ...

    def guess(self, wanted: Sequence[tuple[Asked, int]]) -> tuple[list[list[int]], float]:
        """Guess the next tokens of some texts, of each as many as wanted, or fewer; and the seconds that it took."""
        ...

    def forget(self, request: Asked) -> None:
        """Let go of what is kept of a text; it may come again."""
        ...


class Drafts(NamedTuple, Generic[R]):
    """What a draft model has guessed for a step.

    Attributes:
        guesses: by request its guesses, and the chances that the first one, the first two, ... are right. Nobody who is
            not there has better ones than those that cost nothing.
        without: tokens per second that were expected of the step without the draft model; 0: it has no part in it.
    """

    guesses: Mapping[R, tuple[list[int], list[float]]]
    without: float


class Drafting(Generic[R]):
    """When to ask a draft model."""

    def __init__(self, drafter: Drafter[R]) -> None:
        self.drafter = drafter
        self._steps = self._due = 0
        """Steps in which it might have been asked, and the next of them in which it may be."""
        self._probes, self._declined = PROBES, 0
        """How often it is to be asked next whatever is expected of it, and how often it was not as little was."""
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
        self._lucks: dict[R, Luck] = {}

    def guesses(
        self,
        answered: Sequence[R],
        may: Sequence[bool],
        looked_up: Sequence[Sequence[float]],
        seconds: Callable[[int, int], F64],
    ) -> Drafts[R]:
        """Have the draft model guess for those for which that is worth its time, or read what it has to know for it.

        Args:
            answered: the requests in the next step.
            may: whether each of them may be guessed for.
            looked_up: for each of them, the chances of guesses that cost nothing, as `how_many` has them.
            seconds: see `how_many`.
        """
        self._steps += 1
        if self._balance <= 0 or self._steps < self._due or not self._steps % REMEASURED:
            return Drafts({}, 0.0)
        unread = [self.drafter.unread(one) if own else None for one, own in zip(answered, may, strict=True)]
        hopes = [self.luck(one).worth() if left is not None else [] for one, left in zip(answered, unread, strict=True)]
        if self._probes:
            hopes = [[1.0] * min(PROBED, len(own)) for own in hopes]
        wanted, without = self._worth(hopes, looked_up, seconds)
        asked = [(one, number, left or 0) for one, number, left in zip(answered, wanted, unread, strict=True) if number]
        if not asked:
            self._due = self._steps + REST
            self._declined += 1
            self._probes = 0 if self._declined % PROBE else PROBES
            self._token_s = {number: FADING * took for number, took in self._token_s.items()}
            return Drafts({}, 0.0)
        self._read([(one, left) for one, _, left in asked if left > CHUNK])
        ready = [(one, number) for one, number, left in asked if left <= CHUNK]
        if not ready:
            return Drafts({}, 0.0)
        self._probes = max(0, self._probes - 1)
        guessed, took = self.drafter.guess(ready)
        self._balance -= took
        self._learn(len(ready), took / max(1, *(number for _, number in ready)))
        hoped_of = dict(zip(answered, hopes, strict=True))
        guesses = {one: (own, hoped_of[one][: len(own)]) for (one, _), own in zip(ready, guessed, strict=True) if own}
        return Drafts(guesses, without)

    def luck(self, request: R) -> Luck:
        """How often its guesses for a request have been right."""
        return self._lucks.setdefault(request, Luck(self._usual))

    def computed(self, seconds: float, answers: int, without: float) -> None:
        """A step took so long, in which so many requests got a token that was not guessed; `without` as in `Drafts`."""
        if self._balance < ADVANCE_S:
            self._balance = min(ADVANCE_S, self._balance + SHARE * seconds)
        if without:
            self._balance += answers / without - seconds

    def told(self, request: R, drafted: bool, right: int, wrong: bool, without: float) -> None:
        """Learn of the guesses for a request, the draft model's or others, that the first ones were `right`, and
        perhaps the one after them was `wrong`.

        Args:
            without: of the step in which they were verified, as in `Drafts`.
        """
        if without:
            self._balance = min(SAVED_S, self._balance + right / without)
        if drafted:
            luck = self.luck(request)
            luck.tried(right, wrong)
            self._usual += LATEST_WEIGHT * (luck.chance - self._usual)

    def forget(self, request: R) -> None:
        """A request goes out of the steps, for now or for ever."""
        self.drafter.forget(request)
        self._lucks.pop(request, None)

    def _worth(
        self,
        hopes: Sequence[Sequence[float]],
        looked_up: Sequence[Sequence[float]],
        seconds: Callable[[int, int], F64],
    ) -> tuple[list[int], float]:
        """How many guesses of each request the draft model is worth being asked for, and how many tokens per second are
        expected without it.

        It is asked for all of them together, so for as many of each, but for those of which fewer have any chance.

        Args:
            hopes: of each request, the chances of its guesses; none: it is not to be asked.
            looked_up, seconds: see `guesses`.
        """
        requests = len(hopes)
        found, without = how_many(looked_up, seconds)
        chances = np.array([[*own, *[0.0] * (MOST - len(own))] for own in hopes])
        chances[chances < HOPELESS] = 0.0
        most = np.count_nonzero(chances, axis=1)
        best = [sum(own[:number]) for own, number in zip(looked_up, found, strict=True)]
        drafted = chances.sum(axis=1) > [sum(own) for own in looked_up]
        if not drafted.any():
            return [0] * requests, without
        depths = np.arange(1, MOST + 1)
        numbers = np.where(drafted[:, None], np.minimum(depths, most[:, None]), np.array(found)[:, None])
        right = np.where(drafted[:, None], np.cumsum(chances, axis=1), np.array(best)[:, None])
        rows = numbers.sum(axis=0)
        asking = depths * self._seconds_of(int(drafted.sum()), float(seconds(requests, requests)[0]))
        rates = (requests + right.sum(axis=0)) / (asking + seconds(requests, requests + int(rows.max()))[rows])
        depth = int(np.argmax(rates))
        if rates[depth] <= without:
            return [0] * requests, without
        return np.where(drafted, numbers[:, depth], 0).tolist(), without

    def _read(self, waiting: Sequence[tuple[R, int]]) -> None:
        """Have it read a chunk of the first text of which the rest is expected to take no more time than it may."""
        for request, left in waiting:
            if left * self._row_s <= self._balance:
                rows = min(CHUNK, left)
                took = self.drafter.read(request, rows)
                self._balance -= took
                self._row_s += (LATEST_WEIGHT if self._row_s else 1.0) * (took / rows - self._row_s)
                return

    def _seconds_of(self, requests: int, step: float) -> float:
        """How long a token each for so many requests is thought to take, where a step takes so long."""
        if not self._token_s:
            return CHEAP * step
        key = power_of_two(requests)
        return self._token_s[min(self._token_s, key=lambda known: abs(known - key))]

    def _learn(self, requests: int, seconds: float) -> None:
        key = power_of_two(requests)
        known = self._token_s.get(key)
        if known is not None:
            self._token_s[key] = known + LATEST_WEIGHT * (seconds - known)
        elif key in self._met:
            self._token_s[key] = seconds
        self._met.add(key)
