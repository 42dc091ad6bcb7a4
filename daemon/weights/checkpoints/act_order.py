"""Matrices whose columns are in groups out of order ("act-order"): columns that matter most were quantised first.

``g_idx`` tells each column's group. Groups are then no blocks of neighbouring columns, and what shares a scale here are
neighbours: to bring a group's columns together, the matrix's inputs would have to be brought into the same order, by
every rank, and rows of the matrix before it only where nothing between looks at the order (an MLP's; not heads). So
such a matrix is read as floats and held in int8: in blocks of 32, that differs by 0.5 % of the RMS of its weights from
what int4 made of them, which itself lost about 10 %.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.quantise import ZERO_POINT
from motley.daemon.weights.spec import Encoding
from motley.daemon.weights.stored import F32, Codes

I32 = npt.NDArray[np.int32]


def in_order(path: Path, name: str, groups: I32, size: int) -> bool:
    """Whether columns are in groups of neighbours.

    Args:
        path, name: of the checkpoint and the matrix, for the message.
        groups: i32[K], of every column; -1 everywhere says that they are in order.
        size: columns of a group.

    Raises:
        CheckpointError: a column is in a group that is not there.
    """
    if (groups == -1).all() or (groups == np.arange(len(groups)) // size).all():
        return True
    count = len(groups) // size
    if groups.min() < 0 or groups.max() >= count:
        raise CheckpointError(
            f"{path}: tensor {name!r} puts columns in groups {groups.min()} to {groups.max()}; there are {count}"
        )
    return False


def of_groups(matrix: Codes, groups: I32, encoding: Encoding) -> F32:
    """The weights of columns by each one's group: f32[N, K].

    Args:
        matrix: codes u8[N, K], one to a byte; scales and zero points of all groups.
        groups: i32[K].
        encoding: whose zero point there is where the matrix has none.
    """
    levels = matrix.codes.astype(np.float32)
    levels -= np.float32(ZERO_POINT[encoding]) if matrix.zeros is None else matrix.zeros[:, groups]
    with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale; whoever uses the values finds out
        levels *= matrix.scales[:, groups]
    return levels
