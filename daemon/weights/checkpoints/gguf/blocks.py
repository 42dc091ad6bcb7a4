"""GGML's block formats: the exact ones as codes and scales, all others dequantised by the ``gguf`` package.

Rows of bytes in, one row for each of a tensor's; a row is a sequence of blocks. Layouts: ``block_q4_0`` and so on in
https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h.

What fits the engine's affine blocks, ``(code - zero point) * scale``, keeps its values: Q4_0 as int4, and those of
`EXACT` besides as int8, whose codes may stand for values out of a table. Those with a minimum per block (Q4_K, Q5_K,
Q4_1, ...) do not: ``minimum / scale`` is no whole number, hence no zero point. Values of IQ1 to IQ3 come from tables of
whole rows of 4 or 8, which the package has. What each costs, ``docs/formats.md`` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np

from motley.daemon.weights.checkpoints import mxfp4
from motley.daemon.weights.checkpoints.fp4 import CODES
from motley.daemon.weights.quantise import pack
from motley.daemon.weights.spec import Encoding
from motley.daemon.weights.stored import F32, U8, Codes, Format, dequantised


@dataclass(frozen=True)
class Exact:
    """A format that is codes and scales of ours.

    Attributes:
        encoding: of the codes, whose zero point it has.
        block: elements to a scale.
        unpack: u8[blocks of the file, bytes] to (codes u8[blocks, elements], one to a byte; scales f32[blocks, S]).
    """

    encoding: Encoding
    block: int
    unpack: Callable[[U8], tuple[U8, F32]]


def _half(raw: U8) -> F32:
    """float16 scales, u8[N, 2], as f32[N, 1]."""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def _q4_0(blocks: U8) -> tuple[U8, F32]:
    """f16 scale, 16 bytes: elements 0 to 15 in the low nibbles, 16 to 31 in the high ones."""
    codes: U8 = np.concatenate((blocks[:, 2:] & np.uint8(15), blocks[:, 2:] >> np.uint8(4)), axis=1)
    return codes, _half(blocks[:, :2])


def _q8_0(blocks: U8) -> tuple[U8, F32]:
    """f16 scale, 32 signed bytes."""
    return blocks[:, 2:] ^ np.uint8(128), _half(blocks[:, :2])


def _q6_k(blocks: U8) -> tuple[U8, F32]:
    """128 bytes of low nibbles, 64 of high bit pairs, 16 signed scales, f16 scale of those; elements are -32 to 31.

    Of each half, 128 elements, the quarters' low bits lie in the 64 bytes' low, then high nibbles, and their high
    bits in the four bit pairs of 32 bytes.
    """
    low = blocks[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None]  # [N, half, nibble, 64]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    codes: U8 = ((low & np.uint8(15)).reshape(-1, 2, 4, 32) | (high & np.uint8(3)) << np.uint8(4)).reshape(-1, 256)
    scales: F32 = blocks[:, 192:208].view(np.int8).astype(np.float32) * _half(blocks[:, 208:])
    return codes + np.uint8(128 - 32), scales


def _mxfp4(blocks: U8) -> tuple[U8, F32]:
    """An exponent, 16 bytes: elements 0 to 15 in the low nibbles, 16 to 31 in the high ones."""
    nibbles = np.concatenate((blocks[:, 1:] & np.uint8(15), blocks[:, 1:] >> np.uint8(4)), axis=1)
    return mxfp4.decoded(nibbles, blocks[:, :1])


def _q5_0(blocks: U8) -> tuple[U8, F32]:
    """f16 scale, a high bit for each of 32 elements, 16 bytes as in Q4_0; elements are -16 to 15."""
    high = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little")
    codes: U8 = np.concatenate((blocks[:, 6:] & np.uint8(15), blocks[:, 6:] >> np.uint8(4)), axis=1)
    return (codes | high << np.uint8(4)) + np.uint8(128 - 16), _half(blocks[:, :2])


def _q3_k(blocks: U8) -> tuple[U8, F32]:
    """32 bytes of high bits, 64 of low bit pairs, 16 scales of 6 bits, f16 scale of those; elements are -4 to 3.

    Of each half, 128 elements, the quarters' low bits lie in the four bit pairs of 32 bytes; the eight quarters' high
    bits are the eight bits of the high bytes.
    """
    low = blocks[:, 32:96].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = blocks[:, :32].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8)[:, None]
    codes: U8 = (low & np.uint8(3)).reshape(-1, 256) | (high & np.uint8(1)).reshape(-1, 256) << np.uint8(2)
    fine = blocks[:, 96:104].reshape(-1, 1, 8) >> np.array([0, 4], np.uint8)[:, None] & np.uint8(15)
    coarse = blocks[:, 104:108].reshape(-1, 1, 4) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & np.uint8(3)
    scales = (fine.reshape(-1, 16) | coarse.reshape(-1, 16) << np.uint8(4)).astype(np.float32) - np.float32(32)
    return codes + np.uint8(128 - 4), scales * _half(blocks[:, 108:])


_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
"""The values of four bits in IQ4_NL and IQ4_XS."""
_IQ4_CODES = (_IQ4 + 128).astype(np.uint8)


def _iq4_nl(blocks: U8) -> tuple[U8, F32]:
    """As Q4_0, of values out of a table."""
    nibbles, scales = _q4_0(blocks)
    return _IQ4_CODES[nibbles], scales


def _iq4_xs(blocks: U8) -> tuple[U8, F32]:
    """f16 scale of eight scales of 6 bits: high bits in 2 bytes, low nibbles in 4; 8 times 16 bytes as in Q4_0."""
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)
    low = blocks[:, 4:8, None] >> np.array([0, 4], np.uint8) & np.uint8(15)
    scales = (low.reshape(-1, 8) | high.astype(np.uint8) << np.uint8(4)).astype(np.float32) - np.float32(32)
    pairs = blocks[:, 8:].reshape(-1, 8, 1, 16) >> np.array([0, 4], np.uint8)[:, None] & np.uint8(15)
    return _IQ4_CODES[pairs.reshape(-1, 256)], scales * _half(blocks[:, :2])


def _nvfp4(blocks: U8) -> tuple[U8, F32]:
    """Four scales in FP8, 4 times 8 bytes: elements 0 to 7 in the low nibbles, 8 to 15 in the high ones."""
    pairs = blocks[:, 4:].reshape(-1, 4, 1, 8) >> np.array([0, 4], np.uint8)[:, None] & np.uint8(15)
    fine = (blocks[:, :4] & np.uint8(127)).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return CODES[pairs.reshape(-1, 64)], fine * np.float32(0.5)


EXACT = {
    "Q4_0": Exact(Encoding.INT4, 32, _q4_0),
    "Q8_0": Exact(Encoding.INT8, 32, _q8_0),
    "Q6_K": Exact(Encoding.INT8, 16, _q6_k),
    "Q5_0": Exact(Encoding.INT8, 32, _q5_0),
    "Q3_K": Exact(Encoding.INT8, 16, _q3_k),
    "IQ4_NL": Exact(Encoding.INT8, 32, _iq4_nl),
    "IQ4_XS": Exact(Encoding.INT8, 32, _iq4_xs),
    "NVFP4": Exact(Encoding.INT8, 16, _nvfp4),
    "MXFP4": Exact(mxfp4.FORMAT.encoding, mxfp4.FORMAT.block, _mxfp4),
}


def exact_format(type_: str) -> Format | None:
    """How rows of a type are codes and scales of ours; None: they are not."""
    exact = EXACT.get(type_)
    return Format(exact.encoding, exact.block, called=type_) if exact else None


def unpack(raw: U8, type_: str) -> Codes:
    """Rows of an exact format, u8[N, bytes], as its codes and scales."""
    exact, (elements, size) = EXACT[type_], block_size(type_)
    with np.errstate(invalid="ignore"):  # a damaged scale; whoever uses it finds out
        codes, scales = exact.unpack(raw.reshape(-1, size))
    columns = raw.shape[1] // size * elements
    codes = codes.reshape(len(raw), columns)
    return Codes(
        pack(codes) if exact.encoding is Encoding.INT4 else codes, scales.reshape(len(raw), columns // exact.block)
    )


def dequantise(raw: U8, type_: str) -> F32:
    """Rows of any readable type, u8[N, bytes], as f32[N, K]: the values that the ``gguf`` package gives."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    if not raw.size:
        elements, size = block_size(type_)
        return np.empty((len(raw), raw.shape[1] // size * elements), np.float32)
    if form := exact_format(type_):
        return dequantised(unpack(raw, type_), form)
    with np.errstate(invalid="ignore", over="ignore"):
        values: F32 = dequantize(raw, GGMLQuantizationType[type_])
    return values


@cache
def block_size(type_: str) -> tuple[int, int]:
    """Elements and bytes of a block."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[type_]]
    return elements, size


READABLE = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
)
"""The types a weight may have."""
