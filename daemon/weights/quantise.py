"""Block quantisation of weights: symmetric, along K, one float32 scale per block.

In int8 the value of largest magnitude in a block, with its sign, becomes the lowest code (as in GGML's Q4_0), so that a
block uses one code more than with ``scale = max|x| / 127``; values of the opposite sign saturate at the highest code. A
scale may therefore be negative. In int4 that is the first of seven scales that are tried: the codes are those that
leave the least squared error once they are multiplied by what fits them best (`native/kernels/codes.c`). RMS error of
int4 on Gaussian weights, and on heavy-tailed ones (Student's t, 5 degrees of freedom), in percent of their RMS:

=====  =========  ===============  ===========  ===============
block  Gaussian   by the peak      heavy tails  by the peak
=====  =========  ===============  ===========  ===============
   32        8.1              8.6         10.3             10.8
   64        9.0              9.5         12.2             12.8
  128        9.8             10.3         14.2             15.1
=====  =========  ===============  ===========  ===============

Every code depends on its own block only, and only on operations that IEEE 754 rounds exactly: the result is the
same on every machine and however a matrix is cut between blocks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from motley.daemon.weights.spec import Encoding
from motley.plugins.native.encoding import encode

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

ZERO_POINT = {Encoding.INT8: 128, Encoding.INT4: 8}


def quantise(values: F32, block: int, encoding: Encoding) -> tuple[U8, F32]:
    """Quantise rows of finite weights.

    Args:
        values: f32[N, K]; beyond 2^100 a scale of int4 may be infinite, which who writes a share refuses.
        block: divides K; even.

    Returns:
        codes, u8[N, K] for int8 or packed u8[N, K/2] for int4 (first of a pair in the low nibble), and
        scales, f32[N, K/block]. A weight is ``(code - zero point) * scale``.
    """
    assert values.shape[1] % block == 0
    assert block % 2 == 0
    return encode(np.ascontiguousarray(values), block, 4 if encoding is Encoding.INT4 else 8)


def pack(codes: U8) -> U8:
    """Pack 4-bit codes, u8[N, K], in pairs, u8[N, K/2], the first in the low nibble."""
    pairs: npt.NDArray[np.uint16] = codes.view("<u2")
    return (pairs | pairs >> 4).astype(np.uint8)  # low byte: first | second << 4


def unpack(packed: U8) -> U8:
    """Undo `pack`."""
    return np.stack((packed & 15, packed >> 4), axis=-1).reshape(packed.shape[0], 2 * packed.shape[1])
