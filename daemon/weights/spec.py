"""What a rank's share file holds and where, declared before a byte is read.

The graph builder declares the weights of a share; `motley.daemon.weights.share_file` writes them, streaming, to
one file whose layout is fixed by the declarations alone; engines map that file.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import prod

SHARE_FILE = "share.bin"
"""What a share file is called: the graph's external data names it."""
ALIGNMENT = 65536
"""Offsets in the share file: the allocation granularity of Windows, a multiple of every page size."""


class Encoding(StrEnum):
    """How a weight is stored."""

    FP32 = "fp32"
    FP16 = "fp16"
    INT8 = "int8"
    """uint8, one float32 scale per block along K; zero point 128, or one per block."""
    INT4 = "int4"
    """uint4 packed in pairs (first in the low nibble), scales likewise; zero point 8, or one per block."""

    @property
    def float_bytes(self) -> int:
        """How many bytes each value has where they are floats; 0 where they are codes in blocks."""
        return _FLOAT_BYTES.get(self, 0)


_FLOAT_BYTES = {Encoding.FP32: 4, Encoding.FP16: 2}


@dataclass(frozen=True)
class Piece:
    """A rectangle of a checkpoint tensor: some rows of it, and some columns of those (None: a vector)."""

    tensor: str
    rows: range
    columns: range | None = None

    @property
    def ranges(self) -> tuple[range, ...]:
        """The range that is taken of every dimension."""
        return (self.rows,) if self.columns is None else (self.rows, self.columns)

    def lies_in(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape holds it."""
        return len(shape) == len(self.ranges) and all(
            0 <= own.start <= own.stop <= extent and own.step > 0
            for own, extent in zip(self.ranges, shape, strict=True)
        )

    @property
    def region(self) -> str:
        """``[0:8, 32:64]``: for messages."""
        return f"[{', '.join(f'{own.start}:{own.stop}' for own in self.ranges)}]"


@dataclass(frozen=True)
class Weight:
    """One initializer: pieces stacked along rows. A quantised one has a second, ``<name>.scale``.

    Attributes:
        pieces: stacked top to bottom; all have equally many columns (or are all vectors).
        encoding: of the values; vectors are FP32.
        block: quantisation block along K; divides the number of columns and, for a piece that is cut by columns,
            the place of the cut, so that quantising a share equals cutting the quantised whole.
        zeros: each block has a zero point of its own: a third initializer ``<name>.zero`` of the codes' type. Rows of
            int4 have an even number of blocks then, so that each row's zero points are whole bytes.
        offset: what is added to every value while loading; of floats only.
    """

    name: str
    pieces: tuple[Piece, ...]
    encoding: Encoding = Encoding.FP32
    block: int = 0
    zeros: bool = False
    offset: float = 0.0

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """``(N,)`` or ``(N, K)`` in elements."""
        rows = sum(len(piece.rows) for piece in self.pieces)
        columns = self.pieces[0].columns
        return (rows,) if columns is None else (rows, len(columns))

    @property
    def data_bytes(self) -> int:
        elements = prod(self.shape)
        each = self.encoding.float_bytes
        return each * elements if each else self._code_bytes(elements)

    @cached_property
    def scale_shape(self) -> tuple[int, int] | None:
        if self.encoding.float_bytes:
            return None
        rows, columns = self.shape
        return rows, columns // self.block

    @property
    def scale_bytes(self) -> int:
        return 4 * prod(self.scale_shape) if self.scale_shape else 0

    @property
    def zero_bytes(self) -> int:
        return self._code_bytes(prod(self.scale_shape)) if self.scale_shape and self.zeros else 0

    @property
    def all_bytes(self) -> int:
        """All that the weight takes, without alignment."""
        return self.data_bytes + self.scale_bytes + self.zero_bytes

    def _code_bytes(self, count: int) -> int:
        return count // 2 if self.encoding is Encoding.INT4 else count


@dataclass(frozen=True)
class Placed:
    """A weight with its place in the share file: where its values or codes, scales and zero points begin, in bytes.

    What a weight does not have takes no bytes there.
    """

    weight: Weight
    data_offset: int
    scale_offset: int
    zero_offset: int


def lay_out(weights: list[Weight]) -> tuple[list[Placed], int]:
    """Give every weight its place; returns the places and the file's size in bytes."""
    placed = []
    end = 0
    for weight in weights:
        data_offset = end
        scale_offset = _aligned(data_offset + weight.data_bytes)
        zero_offset = _aligned(scale_offset + weight.scale_bytes)
        end = _aligned(zero_offset + weight.zero_bytes)
        placed.append(Placed(weight, data_offset, scale_offset, zero_offset))
    return placed, end


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
