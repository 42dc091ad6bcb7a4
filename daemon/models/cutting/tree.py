"""A fixed binary tree of sums, so that a sum over leaves has the same bits however the leaves are dealt out to ranks.

Floating-point addition is not associative: a sum depends on its order. The tree depends on the number of leaves alone:
a span of leaves is the sum of its two halves, the left one rounded down. A rank sums the subtrees that its leaves fill;
all of them together are summed on by the same tree. Nothing is ever added for a rank without leaves (adding 0.0 would
turn a sum of -0.0 into 0.0).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")


def subtrees(leaves: range, total: int) -> list[range]:
    """The fewest spans of the tree over `total` leaves that make up `leaves`, in order; at most two per level."""

    def within(span: range) -> list[range]:
        if span.stop <= leaves.start or leaves.stop <= span.start:
            return []
        if leaves.start <= span.start and span.stop <= leaves.stop:
            return [span]
        left, right = _halves(span)
        return within(left) + within(right)

    return within(range(total))


def fold(span: range, values: Mapping[range, T], add: Callable[[range, T, T], T]) -> T:
    """The sum of a span of the tree from values of spans below it (or of itself).

    Args:
        values: by span; together they make up `span`.
        add: called with a span and the sums of its halves, lower spans first.
    """
    if span in values:
        return values[span]
    left, right = (fold(half, values, add) for half in _halves(span))
    return add(span, left, right)


def _halves(span: range) -> tuple[range, range]:
    middle = (span.start + span.stop) // 2
    assert span.start < middle, f"no value for leaf {span.start}"
    return range(span.start, middle), range(middle, span.stop)
