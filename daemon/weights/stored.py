"""Checkpoints that are quantised already: what a file stores, and keeping its codes exactly.

A file's codes are affine in blocks along K, ``(code - zero point) * scale``, and so are a share's. Where a share's
format can express a file's, the codes are carried over without rounding: a block may be cut into smaller ones that
repeat its scale and zero point, a common zero point may be written out per block, and every int4 code is an int8
code: ``code - zero point + 128``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from motley.daemon.weights.quantise import ZERO_POINT, pack, unpack
from motley.daemon.weights.spec import Encoding, Piece

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Format:
    """How a matrix is stored, in a checkpoint or in a share.

    Attributes:
        encoding: in a checkpoint FP32 stands for every type that is not blocks of affine codes: its values are floats.
        block: elements along K that share a scale (0 for floats).
        zeros: each block has a zero point of its own; without, it is 128 (int8) or 8 (int4).
        called: what the checkpoint's format calls it, for messages: ``"GPTQ int4"``, ``"Q5_K"``, ``"BF16"``.
    """

    encoding: Encoding
    block: int = 0
    zeros: bool = False
    called: str = field(default="", compare=False)

    @classmethod
    def floats(cls, called: str) -> Self:
        """The format of a tensor in a checkpoint that is not blocks of affine codes."""
        return cls(Encoding.FP32, called=called)

    def expresses(self, other: Format) -> bool:
        """Whether every matrix of the `other` format, in blocks of codes, is one of this format, bit for bit."""
        if self.encoding.float_bytes or other.encoding.float_bytes or other.block % self.block:
            return False
        if self.encoding is other.encoding:
            return self.zeros or not other.zeros
        return self.encoding is Encoding.INT8


@dataclass(frozen=True)
class Codes:
    """Some rows and columns of a quantised matrix.

    Attributes:
        codes: u8[N, K] for int8; u8[N, K/2] for int4, the first of a pair in the low nibble.
        scales: f32[N, K/block], finite.
        zeros: u8[N, K/block], not packed; None where the format has no zero points of its own.
    """

    codes: U8
    scales: F32
    zeros: U8 | None = None


class Source(Protocol):
    """A model's weights in a file format, as pieces of matrices and vectors by their Hugging Face names.

    Not thread-safe. Methods raise `motley.daemon.weights.checkpoints.checkpoint.CheckpointError`, which names file,
    tensor and difference.
    """

    @property
    def path(self) -> Path:
        """The folder or file where the weights lie, for messages."""

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Make sure that these tensors are there, readable, and of these shapes: all that is wrong in one error."""

    def check(self, piece: Piece) -> None:
        """Make sure that a piece lies within its tensor."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a whole tensor."""

    def format(self, name: str) -> Format:
        """How the matrix `name` is stored."""

    def transposed(self, name: str) -> bool:
        """Whether a matrix lies with columns for rows, so that few rows at a time are slow to read."""

    def read(self, piece: Piece) -> F32:
        """A piece's values, dequantised if need be: f32[rows, columns] or f32[rows]."""

    def codes(self, piece: Piece) -> Codes:
        """A piece of a quantised matrix, exactly as it is stored; its columns are whole blocks of its format."""

    def rows(self, name: str, ids: Sequence[int]) -> F32:
        """Rows of a matrix, such as embeddings of tokens: f32[len(ids), D], in the order of `ids`."""

    def fingerprint(self) -> str:
        """Identify the model: equal on two machines whose files are equal."""

    def stamp(self) -> str:
        """Changes whenever a file does, on this machine."""

    def close(self) -> None:
        """Close the files."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def whole_blocks(columns: range, block: int) -> range:
    """The blocks that `columns` touch, as columns."""
    return range(columns.start // block * block, -(-columns.stop // block) * block)


def within(wanted: range, covering: range) -> slice:
    """Where some rows or columns are among those that `covering` has."""
    return slice(wanted.start - covering.start, wanted.stop - covering.start, wanted.step)


def converted(stored: Codes, of: Format, columns: range, to: Format) -> Codes:
    """Codes of one format as those of another that expresses it.

    Args:
        columns: which of the columns of `stored`, counted from its first one; they are whole blocks of `to`.
    """
    assert to.expresses(of), (of, to)
    blocks = np.arange(columns.start, columns.stop, to.block) // of.block
    scales = stored.scales.take(blocks, axis=1)  # unlike indexing, it keeps rows together
    centre = ZERO_POINT[of.encoding]
    zeros = np.full(scales.shape, centre, np.uint8) if stored.zeros is None else stored.zeros.take(blocks, axis=1)
    if of.encoding is to.encoding:
        per_byte = 2 if of.encoding is Encoding.INT4 else 1
        codes = stored.codes[:, columns.start // per_byte : columns.stop // per_byte]
    else:
        codes = unpack(stored.codes)[:, columns.start : columns.stop]
        offsets = ZERO_POINT[Encoding.INT8] - zeros
        codes = (codes.reshape(*scales.shape, to.block) + offsets[:, :, None]).reshape(codes.shape)
        zeros = np.full_like(zeros, ZERO_POINT[Encoding.INT8])
    return Codes(np.ascontiguousarray(codes), scales, zeros if to.zeros else None)


def dequantised(stored: Codes, of: Format) -> F32:
    """The weights that codes stand for: f32[N, K]; exact where a scale has at most 16 significant bits."""
    codes = unpack(stored.codes) if of.encoding is Encoding.INT4 else stored.codes
    levels = codes.astype(np.float32).reshape(*stored.scales.shape, of.block)
    levels -= np.float32(ZERO_POINT[of.encoding]) if stored.zeros is None else stored.zeros[:, :, None]
    with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale; whoever uses the values finds out
        levels *= stored.scales[:, :, None]
    return levels.reshape(codes.shape)


def packed_zeros(zeros: U8, encoding: Encoding) -> U8:
    """Zero points as a share file has them: those of int4 in pairs."""
    return pack(zeros) if encoding is Encoding.INT4 else zeros
