"""Sizes as people type them."""

from __future__ import annotations

import re
from fractions import Fraction

from motley.protocol.wording import counted

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}
_BARE = 1_000_000
"""A number without a unit must be so many bytes at least."""


def parse_size(text: str) -> int:
    """Bytes from "6GB", "512MiB" or "1.5g": decimal units, or binary ones with an i; any case.

    Without a unit, it is bytes, a megabyte or more: "6" was meant to be something else.

    Raises:
        ValueError: `text` is not a size of at least one byte.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([a-z]*)", text.strip().lower())
    if not match or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a size: write a number and a unit, as in 6GB, 512MiB or 1.5g")
    size = int(Fraction(match[1]) * _UNITS[match[2]])
    if size < 1:
        raise ValueError(f"{text!r} is less than one byte")
    if not match[2] and size < _BARE:
        raise ValueError(f"{text!r} is {counted(size, 'byte')}: write a number and a unit, as in 6GB, 512MiB or 1.5g")
    return size
