"""Measures how far ahead of their use products should fetch weights on this processor, with the weights at hand.

Of 4-bit weights that stream from memory a core of Zen 4 reads 25 GB/s when they are fetched 8 KB ahead for the level-2
cache, 17 when the level-1 cache is asked to have them too; Zen 5 and Sapphire Rapids are the faster for the latter.
Results are the same to the bit whatever is chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .library import library

REACHES = ((8192, 0), (4096, 1024), (0, 4096), (0, 0))
"""What is tried: bytes ahead for the level-2 and for the level-1 cache; 0: no more than what is in use."""
LEAST, MOST = 1 << 25, 1 << 28
"""Bytes of weights that are worth a measurement, and that a pass reads: more than most caches keep."""
PASSES = 3

Product = tuple[int, Callable[[], None]]
"""A product: the bytes of its weights, and what computes it."""

_chosen: dict[int, tuple[int, int]] = {}


def is_chosen(bits: int) -> bool:
    """Whether it was measured in this process for weights of so many bits."""
    return bits in _chosen


def choose_reach(bits: int, products: Sequence[Product]) -> None:
    """Let all products of this process by weights of so many bits fetch as far ahead as these are fastest with.

    Only the first call for each of `bits` that has enough weights does something.

    It takes some tenths of a second, and nothing where there are too few weights to tell.
    """
    if is_chosen(bits) or sum(size for size, _ in products) < LEAST:
        return
    some, total = [], 0
    for size, product in products:
        if total < MOST:
            some.append(product)
            total += size
    times = [(_pass(bits, reach, some), reach) for _ in range(PASSES) for reach in REACHES]
    _chosen[bits] = min(times)[1]
    library().motley_set_reach(bits, *_chosen[bits])


def _pass(bits: int, reach: tuple[int, int], products: Sequence[Callable[[], None]]) -> float:
    library().motley_set_reach(bits, *reach)
    start = time.perf_counter()
    for product in products:
        product()
    return time.perf_counter() - start
