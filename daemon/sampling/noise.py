"""The noise that draws a token: a function of (seed, step, token) alone, the same on every rank but for a last bit."""

from __future__ import annotations

from math import log

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_MASK = 2**64 - 1
# SHARED with sampling_kernel.h:
_GOLDEN = 0x9E3779B97F4A7C15
_MIXER = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def _mix(value: int) -> int:
    value &= _MASK
    for shift, factor in _MIXER:
        value = (value ^ (value >> shift)) * factor & _MASK
    return value ^ (value >> 31)


def state_of(seed: int, step: int, token: int) -> int:
    """What the noise of a token is mixed of, from 0 to 2^64 - 1; of the token after it, it is `_GOLDEN` more."""
    return (_mix(_mix(seed + _GOLDEN) + step * _GOLDEN) + token * _GOLDEN) & _MASK


def noise_of(seed: int, step: int, token: int) -> float:
    """What `gumbel` gives for a single token, but for the last bit of a logarithm."""
    return -log(-log(((_mix(state_of(seed, step, token)) >> 12) + 0.5) * 2.0**-52))


def gumbel(seed: int, step: int, ids: Ids) -> F64:
    """Standard Gumbel noise of the given tokens, f64[n]: a function of (seed, step, id), whatever else is asked.

    The uniform behind it is output `id` of SplitMix64 (Steele et al. 2014) started at a hash of (seed, step),
    its upper 52 bits placed strictly inside (0, 1).
    """
    state = ids.astype(np.uint64)
    state *= np.uint64(_GOLDEN)
    state += np.uint64(state_of(seed, step, 0))
    for shift, factor in _MIXER:
        state ^= state >> np.uint64(shift)
        state *= np.uint64(factor)
    state ^= state >> np.uint64(31)
    noise = (state >> np.uint64(12)).astype(np.float64)
    noise += 0.5
    noise *= 2.0**-52
    for _ in range(2):
        np.log(noise, out=noise)
        np.negative(noise, out=noise)
    return noise
