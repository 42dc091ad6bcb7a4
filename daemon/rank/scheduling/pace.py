"""How many rows a step gets: whole chunks of prompts while nobody is being answered, else what answers can bear.

How fast steps of a size are depends on the engines, the links and the slowest rank, so it is measured and not
predicted. No text depends on it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

SIZES = (64, 128, 256)
"""The sizes of steps that are tried while there are prompts only, in rows."""
TRIES = 2
"""Times that each size is tried. The first time that a size is met, memory is allocated and plans are made."""
NEARLY = 0.95
"""The smallest size is taken whose rate is at least this part of the highest: the requests of others wait for it."""
WORTH_HALVING = 32
"""Rows that a step has at least, to be computed in halves; halves of fewer take the engine as long as the whole."""
BEARABLE = 2.0
"""A step may take so many times as long because prompts are in it, too, while others wait for their next tokens."""
FREE = 1.3
"""Or so many times as long as one with the fewest rows of prompts: where a step takes its time whatever is in it (on a
GPU, to which it is submitted node by node), more rows are nearly free, and few in each of many steps are not."""
MIXED = (8, 16, 32, 64, 128, 256)
"""The sizes of steps in which prompts are computed beside answers, in rows: few, as engines prepare each."""
SLOPE = 0.1
"""By how much of a step of no row each row is thought to make it longer, where that was not measured."""
REVISIT = 500
"""After so many steps it is tried again what was slower: answers the other way, whole or in halves; and a size of steps
that answers could not bear."""
LATEST_WEIGHT = 0.3
"""What the latest measurement weighs in an average."""
K = TypeVar("K", int, "Size")


class Size(NamedTuple):
    """Rows that a step computes, and whether as two micro-chunks (see `motley.plugins.engine.micro_chunks`)."""

    rows: int
    halved: bool = False


class Pace:
    """Chooses the sizes of a session's steps and learns from how long they took. Touches no clock.

    Attributes:
        revisits: whether the size that was chosen last was slower before and is tried again. The time that it takes now
            replaces what it took, or one step that was held up would make it seem slow for thousands of steps.
    """

    def __init__(self, max_rows: int, halves: bool) -> None:
        """
        Args:
            max_rows: the most rows that a step may have.
            halves: whether steps may be computed in halves, as there are sums that could hide behind computing.
        """
        sizes = [size for size in SIZES if size <= max_rows] or [max_rows]
        self._max_rows = max_rows
        self._sizes = [Size(size, halved) for size in sizes for halved in ((False, True) if halves else (False,))]
        self._rates: dict[Size, list[float]] = {size: [] for size in self._sizes}
        """Of steps of prompts only, rows per second."""
        self._best = Size(sizes[-1])
        self._halves = halves
        self._met: dict[Size, int] = {}
        """How many steps of answers only there were of each size; those in halves by the next power of two."""
        self._alone: dict[Size, float] = {}
        """Average seconds of such steps."""
        self._known: list[int] = []
        """The rows of those that were not in halves, ascending."""
        self.revisits = False
        self._settled: dict[int, int] = {}
        """How often answers were computed the quicker way since the other was tried, by the next power of two."""
        self._mixed: dict[int, float] = {}
        """Average seconds of a step of both, by its rows; not of the first of that size."""
        self._tried: set[int] = set()
        """The rows of those that there were."""
        self._passed: dict[int, int] = {}
        """How often such a size was passed over since it was last tried, as it takes too long."""

    def choose(self, answers: int, prompts: int, fresh: bool) -> Size:
        """Choose the size of the next step.

        Args:
            answers: rows of those that are being answered; all of them are in the step.
            prompts: rows of prompts that have not been computed.
            fresh: whether the next of these are the first ones of a prompt.
        """
        self.revisits = False
        if not prompts:
            return Size(answers, self._halves and answers > 1 and self._halve(answers))
        if answers:
            return Size(min(answers + prompts, self._bearable(answers), self._max_rows))
        if fresh:
            untried = [size for size in self._sizes if len(self._rates[size]) < TRIES and size.rows <= prompts]
            if untried:
                return min(untried, key=lambda size: len(self._rates[size]))
        rows = min(self._best.rows, prompts)
        return Size(rows, self._best.halved and rows >= WORTH_HALVING)

    def took(self, size: Size, answers: int, fresh: bool, seconds: float, revisited: bool = False) -> None:
        """Learn how long a step took, of whose rows so many were of answers.

        Args:
            fresh: as in `choose`.
            revisited: what `revisits` was when its size was chosen.
        """
        if not answers:
            rates = self._rates.get(size)
            if fresh and rates is not None and len(rates) < TRIES:
                rates.append(size.rows / seconds)
                self._best = _smallest_of_the_fastest(self._sizes, self._rates)
        elif size.rows == answers:
            key = _like(size)
            if self._met.get(key):  # the first time memory is allocated and plans are made
                if not size.halved and size not in self._alone:
                    insort(self._known, size.rows)
                if revisited:
                    self._alone[key] = seconds
                else:
                    _average(self._alone, key, seconds)
            self._met[key] = self._met.get(key, 0) + 1
        elif size.rows in MIXED:
            if size.rows in self._tried:
                _average(self._mixed, size.rows, seconds)
            self._tried.add(size.rows)

    @property
    def measured(self) -> bool:
        """Whether it is known how long any step of answers took."""
        return bool(self._known)

    def seconds(self, rows: int) -> float:
        """Estimate how long a step of answers only takes that has so many rows; see `seconds_up_to`."""
        return float(self.seconds_up_to(rows, rows)[0])

    def seconds_up_to(self, least: int, most: int) -> F64:
        """Estimate how long steps of answers only take that have from `least` to `most` rows, f64[most - least + 1],
        from those that there were.

        In arbitrary units, if there was none yet.
        """
        rows: F64 = np.arange(least, most + 1, dtype=np.float64)
        known = self._known
        if not known:
            return 1.0 + SLOPE * rows
        known = known[max(0, bisect_left(known, least) - 1) : bisect_right(known, most) + 1]
        times = [self._alone[Size(each)] for each in known]
        whole: F64 = np.interp(rows, known, times).astype(np.float64)
        for outside, end in ((slice(0, max(0, known[0] - least)), 0), (slice(max(0, known[-1] + 1 - least), None), -1)):
            whole[outside] = times[end] * (1.0 + SLOPE * rows[outside]) / (1.0 + SLOPE * known[end])
        if self._halves:
            like = power_of_two(least)
            while like < 2 * most:
                if (seconds := self._alone.get(Size(like, True))) is not None:
                    own = slice(max(0, like // 2 + 1 - least), like + 1 - least)
                    whole[own] = np.minimum(whole[own], seconds)
                like *= 2
        return whole

    def _halve(self, answers: int) -> bool:
        """Whether to compute so many answers in halves. That reads the weights twice; it pays where sums take long.

        Both ways are tried at first, then the quicker one is kept, and the other tried again now and then.
        """
        whole, halved, like = Size(answers), _like(Size(answers, True)), power_of_two(answers)
        for size in (whole, halved):
            if self._met.get(size, 0) <= TRIES:
                return size.halved
        self._settled[like] = (self._settled.get(like, 0) + 1) % REVISIT
        quicker, slower = (halved, whole) if self._alone[halved] < self._alone[whole] else (whole, halved)
        self.revisits = not self._settled[like]
        return (slower if self.revisits else quicker).halved

    def _bearable(self, answers: int) -> int:
        """Rows of a step that does not keep so many answers waiting for too long: the most that are known to be, or the
        next size after that. At first the least."""
        sizes = [size for size in MIXED if size >= 2 * answers] or [2 * answers]
        if not self._alone:
            return sizes[0]
        bearable = max(BEARABLE * self.seconds(answers), FREE * self._mixed.get(sizes[0], 0.0))
        rows = sizes[0]
        for size in sizes:
            if self._mixed.get(size, 0.0) > bearable:
                self._passed[size] = (self._passed.get(size, 0) + 1) % REVISIT
                if self._passed[size]:
                    break
                del self._mixed[size]
            rows = size
            if size not in self._mixed:
                break
        return rows


def _average(averages: dict[K, float], key: K, value: float) -> None:
    averages[key] = averages[key] + LATEST_WEIGHT * (value - averages[key]) if key in averages else value


def power_of_two(count: int) -> int:
    """The next one that is not smaller."""
    return 1 << (count - 1).bit_length()


def _like(size: Size) -> Size:
    """What stands for a size of answers: all sizes in halves between two powers of two count as one."""
    return Size(power_of_two(size.rows), True) if size.halved else size


def _smallest_of_the_fastest(sizes: Sequence[Size], rates: dict[Size, list[float]]) -> Size:
    best = {size: max(rates[size]) for size in sizes if rates[size]}
    return next(size for size, rate in best.items() if rate >= NEARLY * max(best.values()))
