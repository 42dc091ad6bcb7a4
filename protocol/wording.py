"""Sizes and counts in words, for messages and tables of every part of Motley."""

from __future__ import annotations

import math


def human_bytes(count: float, *, short: bool = False) -> str:
    """Say so many bytes in decimal units: ``1.50 GB``, ``153.20 MB``, ``17 bytes``.

    Args:
        count: negative where bytes are too few.
        short: three digits at most of what is less than 1000, and no zeros behind the point: ``1.5 GB``, ``153 MB``.
            For tables; figures that a reader may add up should have the same two decimals.
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            amount = count / size
            if not short:
                return f"{amount:.2f} {unit}"
            return f"{round(amount, max(0, 2 - int(math.log10(abs(amount))))):g} {unit}"
    return f"{count:.0f} bytes"


def counted(count: int, thing: str) -> str:
    """Say how many there are of a thing whose plural ends in s: ``1 rank``, ``2 ranks``."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"
