"""How many requests a session has taken, and how soon there is a place for another. Pure: no I/O, no clock."""

from __future__ import annotations

import math
from collections import deque

LATELY_S = 60.0
"""Requests that ended longer ago say nothing about how soon another ends; nobody is told to wait longer either."""
ENDS = 64
"""The latest ends of requests are counted, at most so many."""


class Places:
    """The places of one session: for each request that is under way or waits, one.

    Attributes:
        number: how many there are.
        taken: how many requests have one.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.taken = 0
        self._ends: deque[float] = deque(maxlen=ENDS)
        """When the latest requests ended."""

    def take(self, count: int = 1) -> bool:
        """Give each of some requests a place; False: there are not so many, and none has got one."""
        if self.taken + count > self.number:
            return False
        self.taken += count
        return True

    def leave(self, now: float) -> None:
        """A request ends, however that is, at `now` seconds."""
        self.taken -= 1
        self._ends.append(now)

    def retry_after(self, now: float) -> int:
        """Seconds until a place becomes free, as far as the requests tell that ended lately: from 1 to 60."""
        while self._ends and now - self._ends[0] > LATELY_S:
            self._ends.popleft()
        if not self._ends:
            return int(LATELY_S)
        return max(1, math.ceil((now - self._ends[0]) / len(self._ends)))
