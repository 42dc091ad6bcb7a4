"""Cutting units into shares for tests; the orchestrator's planner has its own way, which follows speed and memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from motley.daemon.models.cutting.share import ShareError


def cut(counts: Sequence[int]) -> list[range]:
    """Consecutive ranges of the given lengths: ``cut([2, 0, 1]) == [range(0, 2), range(2, 2), range(2, 3)]``."""
    if any(count < 0 for count in counts):
        raise ShareError(f"a rank cannot own a negative number of units: {list(counts)}")
    return [range(start, stop) for start, stop in pairwise(accumulate(counts, initial=0))]


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Split `total` units in proportion to `weights`, exactly (largest remainder; ties to the lower rank)."""
    whole = sum(weights)
    if not weights or whole <= 0 or any(weight < 0 for weight in weights):
        raise ShareError(f"weights must be non-negative and not all zero: {list(weights)}")
    exact = [total * weight / whole for weight in weights]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(weights)), key=lambda rank: (counts[rank] - exact[rank], rank))
    for rank in by_remainder[: total - sum(counts)]:
        counts[rank] += 1
    return counts
