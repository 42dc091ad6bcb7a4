"""The plans that a rank has made: for each call the schedule of the lowest forecast, compiled once and kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import UsageError
from ..formats import Codecs, WireFormat
from ..links.link import Link
from ..links.wire import DTYPE_CODES, Op
from . import schedule
from .compiler import Compiler
from .forecast import Choice, Network, choose
from .plan import Element, Layout, Plan
from .schedule import Algorithm, Goal, Operation

MAX_PLANS = 64
"""Calls whose plans are kept; a decoder meets one or two sizes, prefill as many as there are chunk lengths..."""
MAX_PLAN_BYTES = 64 << 20
"""...and the memory of their frames, in each of a rank's two sets. Those used longest ago go first; the latest stays in
any case."""

Key = tuple[Any, ...]
"""What tells one kind of call from another: operation, sizes, element type, and whatever else its plan depends on."""


class Plans:
    """Makes and keeps the plans of one rank.

    Attributes:
        kept: the plans, which callers look up by the `Key` of their call before they `make` one.
        network: what algorithms are chosen by; the same on all ranks.
    """

    def __init__(self, rank: int, links: Mapping[int, Link], wire_format: WireFormat) -> None:
        """`links`: to every other rank, by rank; `wire_format`: how the terms of sums travel."""
        size = len(links) + 1
        self.kept: dict[Key, Plan] = {}
        self.network = Network([[0.0] * size for _ in range(size)], [[1e9] * size for _ in range(size)])
        self._rank = rank
        self._size = size
        self._codecs = Codecs(wire_format)
        self._compiler = Compiler(rank, links, self._codecs)
        self._elements: dict[np.dtype[Any], Element] = {}

    def make(self, key: Key, op: Op, element: Element, goal: Goal, algorithm: Algorithm | None) -> Plan:
        """Make and keep this rank's plan for a goal, and forget those that were used longest ago if room is short.

        Raises:
            UsageError: as `choose`.
        """
        plan = self._compiler.compile(op, element, self.choose(goal, element, algorithm), self._layout(goal))
        room = MAX_PLAN_BYTES - plan.nbytes
        while self.kept and (len(self.kept) >= MAX_PLANS or sum(kept.nbytes for kept in self.kept.values()) > room):
            del self.kept[min(self.kept, key=lambda each: self.kept[each].sequence)]
        self.kept[key] = plan
        return plan

    def choose(self, goal: Goal, element: Element, algorithm: Algorithm | None) -> Choice:
        """The schedule of `algorithm`, or else of the one with the lowest forecast, and that forecast.

        Raises:
            UsageError: the operation has no such algorithm, or sums and such elements cannot be summed.
        """
        itemsize = element.storage.itemsize
        wire_itemsize: float = itemsize
        if goal.operation in schedule.SUMMED:
            self.check_summable(element, goal.operation)
            wire_itemsize = self._codecs.of(element.name)[1].size(1 << 16) / (1 << 16)
        if algorithm is not None and algorithm not in schedule.ALGORITHMS[goal.operation]:
            raise UsageError(f"{goal.operation} has no {algorithm} algorithm")
        return choose(goal, itemsize, self.network, wire_itemsize=wire_itemsize, algorithm=algorithm)

    def _layout(self, goal: Goal) -> Layout:
        """Where the elements of a goal lie in this rank's arrays."""
        parts = [piece.part for piece in goal.pieces]
        everything = [range(goal.elements)]
        match goal.operation:
            case Operation.REDUCE_SCATTER:
                return Layout(everything, [parts[self._rank]])
            case Operation.ALL_GATHER:
                return Layout([parts[self._rank]], parts)
            case Operation.ALL_TO_ALL:
                row = self._rank * self._size
                return Layout(parts[row : row + self._size], parts[self._rank :: self._size])
            case _:
                return Layout(everything, everything)

    def element(self, dtype: np.dtype[Any]) -> Element:
        """How elements of a type travel.

        Raises:
            UsageError: they cannot.
        """
        element = self._elements.get(dtype)
        if element is None:
            try:
                element = self._elements[dtype] = Element(dtype)
            except KeyError:
                raise UsageError(f"arrays of {dtype} cannot travel; {', '.join(DTYPE_CODES)} can") from None
        return element

    def check_summable(self, element: Element, what: str) -> None:
        """
        Args:
            what: the call, for the message.

        Raises:
            UsageError: such elements cannot be summed.
        """
        if element.name not in self._codecs:
            raise UsageError(f"{what} sums float32, float16, bfloat16 and float64, not {element.name}")
