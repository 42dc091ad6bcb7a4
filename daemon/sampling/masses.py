"""Logarithms of sums of exponentials, over blocks of the vocabulary."""

from __future__ import annotations

import numpy as np

from motley.daemon.sampling.noise import F64, Ids
from motley.plugins.engine import F32
from motley.plugins.native.sampling import masses


def log_sums_exp(values: F32, starts: Ids, temperature: float = 1.0) -> F64:
    """Log-sum-exp of ``values / temperature`` over stretches: f64[B].

    Args:
        values: none of them NaN or +inf.
        starts: where each stretch begins, i64[B], ascending, the first at 0.
    """
    peaks, sums = masses(values, starts, temperature)
    with np.errstate(divide="ignore"):
        return peaks / temperature + np.log(sums)


def log_sum_exp(values: F64) -> float:
    """Log-sum-exp of all values; -inf where there are none."""
    peak = values.max(initial=-np.inf)
    return float(peak + np.log(np.exp(values - peak).sum())) if peak > -np.inf else -np.inf
