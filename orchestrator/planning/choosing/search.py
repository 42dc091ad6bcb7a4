"""The search where there are too many arrangements to look at all: downhill by an estimate, then the best by forecast.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count, islice
from math import inf
from typing import Generic, TypeVar

from motley.orchestrator.planning.choosing.arrangement import Choice, Groups, Members, better

DOUBT = 1.25
"""What is estimated to take so many times as long as the best so far is forecast to is not the best."""

T = TypeVar("T", Members, Groups)


class Descent(Generic[T]):
    """Looks for arrangements of nodes, and remembers the estimates of all that it has met.

    Args:
        estimate: about what a token takes; infinite where an arrangement is not possible.
    """

    def __init__(self, estimate: Callable[[T], float]) -> None:
        self._estimate: Callable[[T], float] = estimate
        self._met: dict[T, float] = {}

    def rough_s(self, one: T) -> float:
        """The estimate of an arrangement, made once."""
        if one not in self._met:
            self._met[one] = self._estimate(one)
        return self._met[one]

    def descend(
        self, starts: Iterable[T], most: int, changes: Callable[[T], Iterable[T]], rounds: int | None = None
    ) -> None:
        """Go from the best few of some beginnings to the best change, as long as that is better.

        Args:
            most: beginnings.
            changes: what an arrangement can be changed to.
            rounds: changes from each beginning, at most; None: any number.
        """
        for start in sorted(set(starts), key=lambda one: (self.rough_s(one), one))[:most]:
            now = start
            for _ in islice(count(), rounds):
                changed = min(changes(now), key=self.rough_s, default=now)
                if self.rough_s(changed) >= self.rough_s(now):
                    break
                now = changed

    def best(self, of: Callable[[T], Choice | None], forecasts: int, bound: float = inf) -> Choice | None:
        """The best by full forecast of those that look best; None: none is possible.

        Args:
            of: forecasts an arrangement; None: the model does not fit.
            forecasts: how many; up to four times as many while none has been possible.
            bound: what is estimated to take as long is not forecast.
        """
        by_size: dict[int, list[T]] = {}
        for one in sorted((one for one in self._met if self._met[one] < bound), key=self.rough_s):
            by_size.setdefault(len(one), []).append(one)
        # An estimate errs alike for arrangements of one size, so the best of each size come before the second ones.
        turns = ((place, self.rough_s(one), one) for own in by_size.values() for place, one in enumerate(own))
        promising = [one for _, _, one in sorted(turns)]
        best: Choice | None = None
        for tried, one in enumerate(promising[: 4 * forecasts]):
            if tried >= forecasts and best is not None:
                break
            if best is None or self.rough_s(one) < DOUBT * best.forecast.token_s:
                best = better(best, of(one))
        return best
