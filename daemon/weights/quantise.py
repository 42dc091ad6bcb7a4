"""Block quantisation of weights: symmetric, along K, one float32 scale per block.

The value of largest magnitude in a block, with its sign, becomes the lowest code (as in GGML's Q4_0), so that a
block uses one code more than with ``scale = max|x| / 7``; values of the opposite sign saturate at the highest code.
A scale may therefore be negative. RMS error of int4 on Gaussian weights, in percent of their RMS:

=====  =========  =============  ==============
block  this rule  ``max|x| / 7`` ``max|x| / 8``
=====  =========  =============  ==============
   32        8.6            9.7             9.4
   64        9.5           10.8             9.9
  128       10.3           11.7            10.6
=====  =========  =============  ==============

Every code depends on its own block only, and only on operations that IEEE 754 rounds exactly: the result is the
same on every machine and however a matrix is cut between blocks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from motley.daemon.weights.spec import Encoding

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

ZERO_POINT = {Encoding.INT8: 128, Encoding.INT4: 8}

_SMALLEST_PEAK = np.float32(1e-30)
"""Stands in for the peak of a block of zeros (or of next to nothing), which has no finite reciprocal."""


def quantise(values: F32, block: int, encoding: Encoding) -> tuple[U8, F32]:
    """Quantise rows of finite weights.

    Args:
        values: f32[N, K], C-contiguous.
        block: divides K; even for int4.

    Returns:
        codes, u8[N, K] for int8 or packed u8[N, K/2] for int4 (first of a pair in the low nibble), and
        scales, f32[N, K/block]. A weight is ``(code - zero point) * scale``.
    """
    rows, columns = values.shape
    zero = ZERO_POINT[encoding]
    assert columns % block == 0
    assert encoding is not Encoding.INT4 or block % 2 == 0
    starts = np.arange(0, values.size, block)
    lowest: F32 = np.minimum.reduceat(values.reshape(-1), starts)  # several times faster than min(axis=1)
    highest: F32 = np.maximum.reduceat(values.reshape(-1), starts)
    peaks: F32 = np.where(highest > -lowest, highest, lowest)
    np.copyto(peaks, _SMALLEST_PEAK, where=np.abs(peaks) < _SMALLEST_PEAK)
    levels = values.reshape(-1, block) * (np.float32(-zero) / peaks)[:, None]
    levels += np.float32(zero + 0.5)  # the conversion truncates, so half more rounds
    np.clip(levels, 0, 2 * zero - 1, out=levels)
    codes = levels.astype(np.uint8).reshape(rows, columns)
    scales: F32 = (peaks / np.float32(-zero)).reshape(rows, columns // block)
    return (pack(codes) if encoding is Encoding.INT4 else codes), scales


def pack(codes: U8) -> U8:
    """Pack 4-bit codes, u8[N, K], in pairs, u8[N, K/2], the first in the low nibble."""
    pairs: npt.NDArray[np.uint16] = codes.view("<u2")
    return (pairs | pairs >> 4).astype(np.uint8)  # low byte: first | second << 4


def unpack(packed: U8) -> U8:
    """Undo `pack`."""
    return np.stack((packed & 15, packed >> 4), axis=-1).reshape(packed.shape[0], 2 * packed.shape[1])
