"""Sizes and counts in words, for messages and tables of every part of Motley."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

_UNITS = ("kB", "MB", "GB", "TB")
MAX_PROBLEMS = 8
"""Of many things that are wrong, as many are named."""


def human_bytes(count: float) -> str:
    """Say so many bytes in decimal units with two decimals, as readers may add figures up: ``1.50 GB``, ``17 bytes``.

    A negative count keeps its sign.
    """
    return _in_units(count, lambda amount: f"{amount:.2f}")


def short_bytes(count: float) -> str:
    """Say so many bytes as shortly as a table wants it, in about three digits: ``1.5 GB``, ``153 MB``, ``17 bytes``.

    A negative count keeps its sign.
    """
    return _in_units(count, _three_digits)


def counted(count: int, thing: str) -> str:
    """Say how many there are of a thing whose plural ends in s: ``1 rank``, ``2 ranks``."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def lines_of(problems: Sequence[str]) -> str:
    """Tell problems, a line each, at most `MAX_PROBLEMS` of them, and how many more there are."""
    more = len(problems) - MAX_PROBLEMS
    return "\n".join([*problems[:MAX_PROBLEMS], *([f"... and {more} more"] if more > 0 else [])])


def _in_units(count: float, say: Callable[[float], str]) -> str:
    """A size in the unit in which `say` writes it with three digits before the point, so never as ``1000 kB``."""
    sign, amount = "-" if count < 0 else "", abs(count)
    whole = f"{amount:.0f}"
    if float(whole) < 1000:
        return "0 bytes" if whole == "0" else f"{sign}{whole} byte{'s' * (whole != '1')}"
    *units, largest = _UNITS
    for unit in units:
        amount /= 1000
        said = say(amount)
        if float(said) < 1000:
            return f"{sign}{said} {unit}"
    return f"{sign}{say(amount / 1000)} {largest}"


def _three_digits(amount: float) -> str:
    """A number from about 1, without zeros behind the point."""
    decimals = max(0, 2 - int(math.log10(max(1.0, amount))))
    said = f"{amount:.{decimals}f}"
    return said.rstrip("0").rstrip(".") if decimals else said
