"""Quantising weights in blocks, see codes.c."""

from __future__ import annotations

import ctypes

import numpy as np

from motley.plugins.native.library import F32, U8, address, library
from motley.plugins.native.structs import Encoding


def encode(values: F32, block: int, bits: int) -> tuple[U8, F32]:
    """Quantise rows of finite weights.

    Args:
        values: f32[N, K], C-contiguous.
        block: even; divides K.
        bits: 4 or 8.

    Returns:
        codes, u8[N, K * bits / 8] (of 4 bits the first of a pair in the low ones), and scales, f32[N, K / block].

    Raises:
        ValueError: values have another type, or are not contiguous.
    """
    rows, columns = values.shape
    codes = np.empty((rows, columns * bits // 8), np.uint8)
    scales = np.empty((rows, columns // block), np.float32)
    task = Encoding(
        values=address("values", values, np.float32, rows, columns),
        codes=codes.ctypes.data,
        scales=scales.ctypes.data,
        blocks=scales.size,
        block=block,
        bits=bits,
    )
    library().motley_encode(ctypes.byref(task))
    return codes, scales
