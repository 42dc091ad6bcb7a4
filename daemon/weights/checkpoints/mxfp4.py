"""MXFP4: blocks of 32 four-bit floats (E2M1) that share a power of two, as gpt-oss' experts are stored.

A value is ``FP4[nibble] * 2 ** (exponent - 127)``, its magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6 (OCP Microscaling
Formats, https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf). Twice these are whole
numbers, so int8 codes with ``scale = 2 ** (exponent - 128)`` hold every value without loss. int4 codes cannot: they
are quantised anew like floats, in blocks of 32 with an RMS error of 7.0 % of the RMS value where all nibbles are
equally frequent, and of 6.6 % where the values were Gaussian before they became MXFP4.
"""

from __future__ import annotations

import numpy as np

from motley.daemon.weights.checkpoints.fp4 import CODES, LEVELS
from motley.daemon.weights.spec import Encoding
from motley.daemon.weights.stored import F32, U8, Format

FORMAT = Format(Encoding.INT8, 32, called="MXFP4")

_NAN = 255
"""The exponent of a block that is no number."""
_SURE = 252
"""The largest exponent with which every nibble is a finite float32."""


def decoded(nibbles: U8, exponents: U8) -> tuple[U8, F32]:
    """The codes and scales of rows.

    Args:
        nibbles: u8[N, K], one to a byte.
        exponents: u8[N, K/32].

    Returns:
        u8[N, K] and f32[N, K/32]; a scale is NaN where a block is no number, and infinite where float32 ends before a
        value of it.
    """
    scales: F32 = np.ldexp(np.float32(1), exponents.astype(np.int32) - 128)
    if exponents.max(initial=0) > _SURE:
        with np.errstate(over="ignore"):
            largest = np.abs(LEVELS[nibbles]).reshape(*exponents.shape, FORMAT.block).max(axis=-1) * scales
        scales[np.isinf(largest)] = np.inf
        scales[exponents == _NAN] = np.nan
    return CODES[nibbles], scales
