"""What the kernels in ``device`` are called with: their constants, rows of values and matrices on the device."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

WARP = 32
THREADS = 128
"""Threads of a block."""
ROWS = {1: 1, 2: 2, 4: 2, 8: 4}
"""Outputs per warp of a product by floats, by the tokens that it multiplies together, as in the source."""
TOKENS = tuple(ROWS)
"""The numbers of tokens that a warp can multiply together by floats: there is a kernel for each."""
LANE_ROWS = 2
"""Rows of codes that a thread has of a product of one token; several tokens are multiplied in tiles."""
NARROW = 8192
"""Outputs of such a product up to which more of each row is read ahead: with so few an H200 has too few warps."""
TILES = ((16, 8), (16, 16), (16, 32), (32, 32))
"""Rows of codes and tokens that a warp has together of a product in tiles, as in the source."""
TILE_GROUP = 32
"""Tokens whose activations for tiles are together in each stretch, as in the source."""
KINDS: dict[int, tuple[str, int]] = {
    TensorProto.FLOAT: ("fp32", 4),
    TensorProto.FLOAT16: ("fp16", 8),
    TensorProto.UINT8: ("int8", 4),
    TensorProto.UINT4: ("int4", 8),
}
"""How kernels call a type of weights, and how many of them they read at once: a run."""
PLACE = np.dtype(
    [
        ("blocks", "u8", 2),
        ("turns", "u8"),
        ("position", "i8"),
        ("adapter", "i8"),
        ("before", "i4"),
        ("after", "i4"),
    ]
)
"""`Place` in the source: where a row finds its sequence's blocks and rotary tables, where it stands in it, the slot of
its adapter, and how many rows of its span come before and after it."""
CODED = {"int4": 4, "int8": 8}
"""Bits of the weights that products take as codes, by kind."""
BLOCKS = (16, 32, 64, 128, 256)
"""Columns that may have a scale of their own together."""
STRETCH = 64
"""Bytes of a row of codes for which there is one stretch of quantised activations, as in the source."""
PARTS = 16
"""Of a stretch; so many threads quantise one, and have a row of codes, as in the source."""
HEAD_BYTES = 64
"""Of a stretch of quantised activations, before their codes, as in the source."""
HEADS = {64: 32, 128: 32, 256: 16, 576: 8}
"""By the widths up to which there is a kernel for heads, how many queries a block has, as in the source."""
ROW_HEADS, ROW_THREADS = 2, 256
"""Heads and threads of a block that attends for one row, as in the source."""
ROW_RUN = 16
"""Of so many elements heads are made that such a block can have: in every format whole copies of 16 bytes."""
GATES = {"Swish": 1, "Relu": 2, "Gelu": 3}
"""What is made of rows that are multiplied by what opens a gate (`RowSource.made`), by the operator that opens it."""
NORM, LAYER_NORM = 4, 5
"""What is made of rows that are normalised, likewise; by the latter of what is left of them without their mean."""
NORM_PART = 512
"""Elements of a group that a warp normalises, and of a row that a block of threads makes, as in the source."""
INDEX_WIDTH = 256
"""Elements of an index key at most, as in the source."""
PART = 256
"""Positions, from a multiple of it on, that a row attends to apart from others, as in the source."""


@dataclass(frozen=True)
class View:
    """f32[T, width] on the device, or a part of such rows.

    Attributes:
        stride: elements from one row to the next.
    """

    address: int
    width: int
    stride: int

    @property
    def is_in_fours(self) -> bool:
        """Whether every row is aligned to four elements."""
        return not (self.address % 16 or self.stride % 4)

    def after(self, rows: int) -> View:
        """All but the first rows."""
        return View(self.address + 4 * rows * self.stride, self.width, self.stride)


class RowSource(ctypes.Structure):
    """`RowSource` in the source: rows that a kernel reads as they are, or what it makes of them as it reads."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "other", "gain", "bias", "sum", "result")),
        *((f"{name}_stride", ctypes.c_int) for name in ("x", "other", "sum", "result")),
        *((name, ctypes.c_int) for name in ("width", "made", "in_fours")),
        ("epsilon", ctypes.c_float),
    )

    @staticmethod
    def of(
        x: View,
        made: int = 0,
        other: View | None = None,
        gain: int = 0,
        epsilon: float = 0.0,
        sum: View | None = None,
        bias: int = 0,
    ) -> RowSource:
        """
        Args:
            made: one of `GATES`, `NORM` or `LAYER_NORM`; 0: rows are read as they are.
            other: what a gate is multiplied by, or what is added before a norm.
            gain, bias: the addresses of a norm's; it may have no bias, 0.
            epsilon: a norm's.
            sum: where what is normalised goes.
        """
        none = View(0, 0, 0)
        views = [x, other or none, sum or none]
        fours = all(each.is_in_fours for each in views) and not (x.width % 4 or gain % 16 or bias % 16)
        addresses = [views[0].address, views[1].address, gain, bias, views[2].address, 0]
        return RowSource(*addresses, *(each.stride for each in views), 0, x.width, made, int(fours), epsilon)

    def kept(self, result: View) -> RowSource:
        """The same, with a place where what is read goes too."""
        made = RowSource.from_buffer_copy(self)
        made.result, made.result_stride, made.in_fours = (
            result.address,
            result.stride,
            self.in_fours & result.is_in_fours,
        )
        return made


@dataclass(frozen=True)
class HeadPart:
    """A part of each head of some rows, where it is: f32[T, heads, width].

    Attributes:
        size: elements of a whole head.
        first: those of it before the part.
    """

    rows: View
    size: int
    first: int
    width: int

    @property
    def heads(self) -> int:
        return self.rows.width // self.size

    @property
    def view(self) -> View | None:
        """The rows, if nothing else lies between their heads."""
        if self.heads == 1:
            return View(self.rows.address + 4 * self.first, self.width, self.rows.stride)
        return self.rows if self.width == self.size else None


@dataclass(frozen=True)
class Matrix:
    """Weights of a product, on the device: [outputs, columns].

    Attributes:
        kind: how kernels call their type.
        run: how many of them are read at once.
        shift: 2^shift columns have one scale.
        weights: an address, as are the scales and the zeros; 0: there are none.
    """

    kind: str
    run: int
    outputs: int
    columns: int
    shift: int
    weights: int
    scales: int
    zeros: int

    @property
    def is_fp32(self) -> bool:
        """Whether cuBLAS takes it as it is."""
        return self.kind in ("fp32", "odd_fp32")

    @property
    def coded(self) -> Coded | None:
        """How its rows are multiplied as codes; None: they are floats."""
        bits = CODED.get(self.kind)
        return Coded(bits, self.columns, self.shift) if bits else None


@dataclass(frozen=True)
class Coded:
    """How rows of codes are cut in stretches, and what is multiplied by them quantised, as in the source.

    Attributes:
        shift: 2^shift columns have one scale.
    """

    bits: int
    columns: int
    shift: int

    @property
    def block_shift(self) -> int:
        """2^block_shift bytes have one scale."""
        return self.shift - (self.bits == 4)

    @property
    def block_stretches(self) -> int:
        """In a block that is longer than one, else 1."""
        return max(1, (1 << self.block_shift) // STRETCH)

    @property
    def stretches(self) -> int:
        """In a row, the last of which may be incomplete."""
        return -(-self.row_bytes // STRETCH)

    @property
    def quantising_threads(self) -> int:
        """Of a token, which has whole blocks of them."""
        return -(-self.stretches // self.block_stretches * PARTS // THREADS) * THREADS

    @property
    def row_bytes(self) -> int:
        """Of codes."""
        return self.columns * self.bits // 8

    def activation_bytes(self, tokens: int) -> int:
        """Of the memory for so many tokens' activations: those for products in tiles are in whole groups."""
        return -(-tokens // TILE_GROUP) * TILE_GROUP * self.stretches * (HEAD_BYTES + STRETCH * (8 // self.bits))

    @property
    def is_short(self) -> bool:
        """Whether pieces are half as long, as blocks are so short."""
        return 1 << self.block_shift < STRETCH // 4

    def quantise(self, tokens: int) -> str:
        """The kernel that quantises activations for the product of so many tokens."""
        return f"quantise_int{self.bits}_{self.block_stretches}{'_tiles' if tokens > 1 else ''}"

    def product(self, outputs: int, tokens: int, zeros: bool) -> tuple[str, int]:
        """The kernel that multiplies so many tokens by a matrix of so many rows, of codes with zero points of their own
        or without, and how many threads that takes."""
        name = self._products(zeros)
        if tokens == 1:
            return name + ("_narrow" if outputs <= NARROW else ""), self._threads(outputs)
        most = 2 if self.is_short else 3 if self.bits == 8 and zeros else 4  # for which there are registers
        rows, together = next((each for each in TILES[:most] if each[1] >= tokens), TILES[most - 1])
        of_a_block = 2 * rows if self.is_short else rows  # by its four warps, of which all or two have the same
        return f"{name}_{rows}x{together}", -(-outputs // of_a_block) * -(-tokens // together) * THREADS

    def expert_product(self, outputs: int, tokens: int, zeros: bool) -> tuple[str, int]:
        """As `product`, of tokens that have a matrix each."""
        return f"expert_{self._products(zeros)}", self._threads(outputs) * tokens

    def _products(self, zeros: bool) -> str:
        return f"products_int{self.bits}{'_short' if self.is_short else ''}{'_zeros' if zeros else ''}"

    @staticmethod
    def _threads(outputs: int) -> int:
        """That multiply one token."""
        return -(-outputs // (WARP // PARTS * LANE_ROWS)) * WARP


def pointer(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address)


def rows_of(view: View) -> tuple[ctypes.c_void_p, ctypes.c_int]:
    """Rows as kernels take them: where they begin, and their stride."""
    return ctypes.c_void_p(view.address), ctypes.c_int(view.stride)


def integers(*values: int) -> tuple[ctypes.c_int, ...]:
    return tuple(map(ctypes.c_int, values))


def parts_of(positions: int, most: int = 0) -> int:
    """In how many parts a row attends at most that sees the last of so many positions: all, or no more than `most`."""
    parts = -(-positions // PART)
    return min(parts, (most - 2) // PART + 2) if most else parts
