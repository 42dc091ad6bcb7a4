"""Durations as people type them: ``90s``, ``30m``, ``1.5h``."""

from __future__ import annotations

import re

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s?([smh])")


def seconds(text: str) -> float:
    """The seconds of a duration; 0 needs no unit.

    Raises:
        ValueError: it is none; the message says how one is written.
    """
    if text.strip() == "0":
        return 0.0
    typed = _DURATION.fullmatch(text.strip().lower())
    if typed is None:
        raise ValueError(f"{text!r} is no duration; write 90s, 30m or 1.5h")
    return float(typed[1]) * _SECONDS[typed[2]]
