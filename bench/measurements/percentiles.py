"""Percentiles of times, told alike by every measurement."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def percentiles(times_ms: Sequence[float], percents: Sequence[int] = (50, 95, 99)) -> dict[str, float]:
    """``{"p50": 12.345, ...}`` of times in milliseconds, rounded to the microsecond; empty if there are no times."""
    if not len(times_ms):
        return {}
    found = np.percentile(times_ms, percents)
    return {f"p{percent}": round(float(value), 3) for percent, value in zip(percents, found, strict=True)}
