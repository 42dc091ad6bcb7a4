"""What adapters make of a product, on NumPy or CuPy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx

from motley.plugins.adapted_engine import Factor
from motley.plugins.adapters import parts_of
from motley.plugins.engine import F32
from motley.plugins.reference.device import Array, ArrayModule


def columns_of_parts(node: onnx.NodeProto) -> dict[str, slice]:
    """The columns of each part of an Adapted node's product, by its name."""
    places, end = {}, 0
    for part, width, _ in parts_of(node):
        places[part] = slice(end, end + width)
        end += width
    return places


def transposed(matrices: Iterable[Factor]) -> tuple[F32, ...]:
    """Matrices as they are multiplied with from the right."""
    return tuple(each.astype(np.float32).T for each in matrices)


def adapted(
    rows_of: Mapping[int, Sequence[int]],
    factors: Mapping[int, Mapping[str, tuple[Array, ...]]],
    places: Mapping[str, slice],
    xp: ArrayModule,
    x: Array,
    y: Array,
) -> Array:
    """What adapters make of a product y of x.

    Args:
        rows_of: the rows of each slot.
        factors: A and B, or what is in place of the base's matrix, transposed, by the slots and the names of the parts.
        places: the columns of each part.
    """
    if not rows_of:
        return y
    made_of = y.copy()
    for slot, numbers in rows_of.items():
        rows = xp.asarray(numbers)
        for part, columns in places.items():
            if part in factors[slot]:
                first, *up = factors[slot][part]
                made = x[rows] @ first
                if up:
                    added, own = made @ up[0], y[rows, columns]
                    made = xp.where(added == 0, own, own + added)
                made_of[rows, columns] = made
    return made_of
