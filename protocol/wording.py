"""Sizes and counts in words, for messages and tables of every part of Motley."""

from __future__ import annotations

import math

_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


def human_bytes(count: float) -> str:
    """Say so many bytes in decimal units with two decimals, as readers may add figures up: ``1.50 GB``, ``17 bytes``.

    A negative count keeps its sign.
    """
    for unit, size in _UNITS:
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} bytes"


def short_bytes(count: float) -> str:
    """Say so many bytes as shortly as a table wants it, in about three digits: ``1.5 GB``, ``153 MB``, ``17 bytes``."""
    for unit, size in _UNITS:
        if count >= size:
            amount = count / size
            return f"{round(amount, max(0, 2 - int(math.log10(amount)))):g} {unit}"
    return f"{count:.0f} bytes"


def counted(count: int, thing: str) -> str:
    """Say how many there are of a thing whose plural ends in s: ``1 rank``, ``2 ranks``."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"
