"""What adapters add to the rows of a product, ``y += up @ (down @ x)``: each row with the matrices of its own adapter.

The arithmetic is stated in adapted.c. Results are the same to the bit on every CPU and for any number of threads, and a
row's depend neither on which other rows are computed with it nor on what other adapters are loaded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .library import F32, Adapted, AdaptedGroup, AdaptedPart, AdaptedRows, Factors, address, library, place
from .matmul import Pool
from .rows import Action

KINDS: Mapping[np.dtype[np.generic], int] = {
    np.dtype(np.float32): 0,
    np.dtype(np.float16): 1,
    np.dtype(ml_dtypes.bfloat16): 2,
}
"""What matrices may be kept as: the numbers that adapted.h calls them by."""


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
        self._kept: dict[tuple[int, int], tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]] = {}
        """The matrices that are in slots, by these and the numbers of the parts."""

    def load(self, slot: int, part: int, down: npt.NDArray[np.generic], up: npt.NDArray[np.generic]) -> None:
        """Have an adapter's matrices for a part. They are used where they are.

        Args:
            down: [R, K], C-contiguous.
            up: [N, R], Fortran-contiguous.

        Raises:
            ValueError: one has another shape, type or order, or is not aligned.
        """
        rank = len(down)
        if not {down.dtype, up.dtype} <= {*KINDS}:
            raise ValueError(f"down and up must be of {', '.join(map(str, KINDS))}, not {down.dtype} and {up.dtype}")
        self._factors[part][slot] = Factors(
            address("down", down, down.dtype, rank, self._columns),
            address("up transposed", up.T, up.dtype, rank, self._widths[part]),
            rank,
            KINDS[down.dtype],
            KINDS[up.dtype],
        )
        self._kept[slot, part] = down, up

    def unload(self, slot: int) -> None:
        """Forget what is in a slot."""
        for part, factors in enumerate(self._factors):
            factors[slot] = Factors()
            self._kept.pop((slot, part), None)

    def bind(self, x: F32, y: F32, rows: StepRows) -> Action:
        """Fix the operands; each call of the result then adds to y what the adapters of its rows make of x.

        Args:
            x: f32[M, K].
            y: f32[M, N].

        Raises:
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
        adapted.kept = (self, x, y, rows)
        return partial(library().motley_adapted, ctypes.byref(adapted))
