"""Nodes that come and go again and again are set aside for a while: a plan with them would have to be made anew each
time. Pure: the clock is given."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

TIMES = 3
"""A node that has gone so often ..."""
WITHIN_S = 600.0
"""... within so long ..."""
ASIDE_S = 600.0
"""... is set aside for so long from then on."""


class Flapping:
    """When nodes have gone lately, by name."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._gone: dict[str, deque[float]] = {}

    def went(self, name: str) -> None:
        """Note that a node is gone, for whatever reason."""
        now = self._clock()
        self._gone = {one: times for one, times in self._gone.items() if now - times[-1] < max(WITHIN_S, ASIDE_S)}
        self._gone.setdefault(name, deque(maxlen=TIMES)).append(now)

    def aside_s(self, name: str) -> float:
        """For how many seconds more a node is set aside; 0: it is not."""
        times = self._gone.get(name)
        if times is None or len(times) < TIMES or times[-1] - times[0] > WITHIN_S:
            return 0.0
        return max(0.0, times[-1] + ASIDE_S - self._clock())
