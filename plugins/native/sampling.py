"""Our own kernels for what sampling must know of all tokens of a slice of the vocabulary, see sampling.c.

Results are the same to the bit on every CPU. Logits must not be NaN or +inf. All functions raise `ValueError` if an
operand has another shape or type, is not contiguous or aligned, or says something impossible (the message names it),
and `ImportError` if the compiled kernels are missing.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from .library import F32, address, library
from .structs import Draw, Masses


def contenders(logits: F32, temperature: float, least: float, state: int) -> npt.NDArray[np.int64]:
    """The tokens that may win a draw by Gumbel noise, i64[n], ascending: all others have a lower score than `least`.

    Args:
        logits: f32[V].
        least: a score that some token has, its logit over the temperature and its noise: the greater it is, the fewer
            contend.
        state: from 0 to 2^64 - 1, what the noise of the first token is mixed of, see `motley.daemon.sampling.noise`.
    """
    rows = np.empty(len(logits), np.int32)
    draw = Draw(
        logits=address("logits", logits, np.float32, len(logits)),
        contenders=rows.ctypes.data,
        tokens=len(logits),
        state=state,
        temperature=temperature,
        least=least,
    )
    return rows[: library().motley_contenders(ctypes.byref(draw))].astype(np.int64)


def masses(
    logits: F32, starts: npt.NDArray[np.int64], temperature: float
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Sums of exponentials over stretches of logits.

    Args:
        logits: f32[V].
        starts: i64[B], where each stretch begins, ascending, the first at 0, all below V.

    Returns:
        Of each stretch its greatest logit (0 where all are -inf) and the sum of ``exp((logit - greatest) /
        temperature)``, f64[B] each.
    """
    if not len(starts) or starts[0] or starts[-1] >= len(logits) or (np.diff(starts) < 0).any():
        raise ValueError(f"starts must ascend from 0 and be below {len(logits)}, and are {starts}")
    peaks, sums = np.empty(len(starts)), np.empty(len(starts))
    task = Masses(
        logits=address("logits", logits, np.float32, len(logits)),
        starts=address("starts", starts, np.int64, len(starts)),
        peaks=peaks.ctypes.data,
        sums=sums.ctypes.data,
        tokens=len(logits),
        stretches=len(starts),
        temperature=temperature,
    )
    library().motley_masses(ctypes.byref(task))
    return peaks, sums
