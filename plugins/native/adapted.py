"""What adapters add to the rows of a product, ``y += up @ (down @ x)``, or have in its place, ``y = down @ x``.

Each row is computed with the matrices of its own adapter.

The arithmetic is stated in adapted.c. Results are the same to the bit on every CPU and for any number of threads, and a
row's depend neither on which other rows are computed with it nor on what other adapters are loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .library import F32, U8, address, library, place
from .matmul import Pool, QuantisedMatrix
from .rows import Action
from .structs import Adapted, AdaptedGroup, AdaptedPart, AdaptedRows, Factors

KINDS: Mapping[np.dtype[np.generic], int] = {
    np.dtype(np.float32): 0,
    np.dtype(np.float16): 1,
    np.dtype(ml_dtypes.bfloat16): 2,
}
"""What matrices may be kept as: the numbers that adapted.h calls them by."""
PANEL_ROWS, PANEL_STRETCH, PANEL_COLUMNS = 4, 16, 64
"""As in adapted.h: the order in which matrices are read."""
CACHE_LINE = 64

Matrix = npt.NDArray[np.generic]


class Packed(NamedTuple):
    """A matrix, u8, in the order in which it is read, and what its elements are."""

    data: U8
    dtype: np.dtype[np.generic]


class PackedFactors(NamedTuple):
    """What an adapter adds to a part of a product, or has in its place.

    Attributes:
        rank: of its matrices; width, where there is no up.
        down: [rank, columns].
        up: [width, rank]; None: the part is multiplied with `down` alone, in place of the base's matrix.
    """

    rank: int
    columns: int
    width: int
    down: Packed
    up: Packed | None


def down_bytes(matrix: Matrix) -> int:
    """The bytes that `pack_down` needs for a matrix, in whole cache lines."""
    rank, columns = matrix.shape
    return _whole_lines(rank * -(-columns // PANEL_STRETCH) * PANEL_STRETCH * matrix.itemsize)


def up_bytes(matrix: Matrix) -> int:
    """The bytes that `pack_up` needs for a matrix, in whole cache lines."""
    width, rank = matrix.shape
    return _whole_lines(rank * -(-width // PANEL_COLUMNS) * PANEL_COLUMNS * matrix.itemsize)


def pack_down(matrix: Matrix, place: U8) -> Packed:
    """Lay out ``down``, [R, K], as adapted.h says, in a place that is aligned."""
    rank, columns = matrix.shape
    stretches = -(-columns // PANEL_STRETCH)
    whole = rank // PANEL_ROWS * PANEL_ROWS
    bits = _padded(_bits(matrix), rank, stretches * PANEL_STRETCH).reshape(rank, stretches, PANEL_STRETCH)
    into = place[: bits.nbytes].view(bits.dtype)
    panels = into[: whole * stretches * PANEL_STRETCH].reshape(-1, stretches, PANEL_ROWS, PANEL_STRETCH)
    panels[...] = bits[:whole].reshape(-1, PANEL_ROWS, stretches, PANEL_STRETCH).swapaxes(1, 2)
    rest = into[whole * stretches * PANEL_STRETCH :].reshape(stretches, rank - whole, PANEL_STRETCH)
    rest[...] = bits[whole:].swapaxes(0, 1)
    return Packed(place, matrix.dtype)


def pack_up(matrix: Matrix, place: U8) -> Packed:
    """Lay out ``up``, [N, R], as adapted.h says, in a place that is aligned."""
    width, rank = matrix.shape
    panels = -(-width // PANEL_COLUMNS)
    bits = _padded(_bits(matrix), panels * PANEL_COLUMNS, rank)
    into = place[: bits.nbytes].view(bits.dtype).reshape(panels, rank, PANEL_COLUMNS)
    into[...] = bits.reshape(panels, PANEL_COLUMNS, rank).swapaxes(1, 2)
    return Packed(place, matrix.dtype)


def _whole_lines(size: int) -> int:
    return -(-size // CACHE_LINE) * CACHE_LINE


def _bits(matrix: Matrix) -> Matrix:
    """A matrix's elements as whole numbers, which are moved faster."""
    return matrix.view(np.uint16 if matrix.itemsize == 2 else np.uint32)


def _padded(matrix: Matrix, rows: int, columns: int) -> Matrix:
    more = rows - len(matrix), columns - matrix.shape[1]
    return np.pad(matrix, ((0, more[0]), (0, more[1]))) if any(more) else matrix


class StepRows:
    """Whose rows are whose, set before each step; a product that is bound to it reads it whenever it is computed."""

    def __init__(self, most: int) -> None:
        """`most`: rows that a step may have."""
        self._rows = np.zeros(most, np.int64)
        self._groups = (AdaptedGroup * most)()
        self.struct = AdaptedRows(address("rows", self._rows, np.int64, most), self._groups, 0)

    def set(self, rows: Mapping[int, Sequence[int]]) -> None:
        """Say which rows are computed with the adapter of each slot; others with none.

        Raises:
            ValueError: there are more than there may be.
        """
        if sum(map(len, rows.values())) > len(self._rows):
            raise ValueError(f"a step has at most {len(self._rows)} rows")
        done = 0
        for number, (slot, own) in enumerate(rows.items()):
            self._rows[done : done + len(own)] = own
            self._groups[number] = AdaptedGroup(slot, done, len(own))
            done += len(own)
        self.struct.count = len(rows)


class AdaptedProduct:
    """A product that adapters may add to, and what those in slots have for its parts, which lie side by side."""

    def __init__(self, columns: int, widths: Sequence[int], slots: int, pool: Pool) -> None:
        """
        Args:
            columns: of x.
            widths: columns of y of each part.
            slots: how many there are, numbered from 1.
            pool: computes.
        """
        self._pool = pool
        self._columns = columns
        self._widths = list(widths)
        self._factors = [(Factors * (slots + 1))() for _ in widths]
        starts = accumulate(widths, initial=0)
        parts = zip(self._factors, starts, widths, strict=False)
        self._parts = (AdaptedPart * len(self._widths))(*(AdaptedPart(*part) for part in parts))
        self._kept: dict[tuple[int, int], PackedFactors] = {}
        """What is in slots, by these and the numbers of the parts."""

    def load(self, slot: int, part: int, factors: PackedFactors) -> None:
        """Have an adapter's matrices for a part. They are used where they are.

        Raises:
            ValueError: they are of other shapes or types, or not aligned.
        """
        rank, columns, width, down, up = factors
        dtypes = [each.dtype for each in (down, up) if each]
        if not {*dtypes} <= {*KINDS}:
            raise ValueError(f"matrices must be of {', '.join(map(str, KINDS))}, not {' and '.join(map(str, dtypes))}")
        if up is None and rank != width:
            raise ValueError(f"a matrix of {rank} rows is none for the {width} columns of a part")
        if (columns, width) != (self._columns, self._widths[part]):
            raise ValueError(f"an adapter's {width} by {columns} is not {self._widths[part]} by {self._columns}")
        self._factors[part][slot] = Factors(
            address("down", down.data, np.uint8, len(down.data)),
            address("up", up.data, np.uint8, len(up.data)) if up else None,
            rank,
            KINDS[down.dtype],
            KINDS[up.dtype] if up else 0,
        )
        self._kept[slot, part] = factors

    def unload(self, slot: int) -> None:
        """Forget what is in a slot."""
        for part, factors in enumerate(self._factors):
            factors[slot] = Factors()
            self._kept.pop((slot, part), None)

    def bind(self, x: F32, y: F32, rows: StepRows, base: QuantisedMatrix | None = None) -> Action:
        """Fix the operands; each call of the result then adds to y what the adapters of its rows make of x.

        Args:
            x: f32[M, K].
            y: f32[M, N].
            base: first, y is overwritten with what this makes of x, which takes less time than in a call by itself. Its
                pool is this one's.

        Raises:
            MemoryError: there is no memory for quantised activations.
            ValueError: an operand has another shape or type, is not contiguous or aligned, or `y` is read-only.
        """
        tokens, width = len(x), sum(self._widths)
        adapted = Adapted(
            pool=self._pool.handle,
            step=ctypes.pointer(rows.struct),
            parts=self._parts,
            x=address("x", x, np.float32, tokens, self._columns),
            y=place("y", y, np.float32, tokens, width),
            tokens=tokens,
            columns=self._columns,
            width=width,
            count=len(self._widths),
        )
        product = base.operands(x, y) if base else None
        adapted.kept = (self, x, y, rows)
        return partial(library().motley_adapted, ctypes.byref(adapted), ctypes.byref(product) if product else None)
