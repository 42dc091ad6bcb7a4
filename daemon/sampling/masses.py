"""Logarithms of sums of exponentials, over blocks of the vocabulary."""

from __future__ import annotations

import numpy as np

from motley.daemon.sampling.noise import F64, Ids
from motley.plugins.engine import F32

_WHOLE = np.zeros(1, np.int64)


def log_sums_exp(values: F32 | F64, starts: Ids, temperature: float = 1.0) -> F64:
    """Log-sum-exp of ``values / temperature`` over stretches: f64[B].

    Args:
        starts: where each stretch begins, i64[B], ascending, the first at 0.
    """
    peaks = np.maximum.reduceat(values, starts).astype(np.float64)
    peaks[peaks == -np.inf] = 0
    exponents = values.astype(np.float64)
    exponents -= np.repeat(peaks, np.diff(starts, append=len(values)))
    exponents /= temperature
    sums = np.add.reduceat(np.exp(exponents, out=exponents), starts)
    with np.errstate(divide="ignore"):
        return peaks / temperature + np.log(sums)


def log_sum_exp(values: F64) -> float:
    """Log-sum-exp of all values; -inf where there are none."""
    return float(log_sums_exp(values, _WHOLE)[0]) if len(values) else -np.inf
