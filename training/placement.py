"""Which node trains which part of a model: the assignment of the greatest affinity that memory allows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from motley.training.errors import TrainingError, require_extra

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


def assign(affinity: F64, need: F64, free: F64) -> I64:
    """Assign parts to nodes so that the sum of affinities is greatest: one part to a node at most; or, where there are
    more parts than nodes that could have them so, as an integer program with memory as its constraint.

    Args:
        affinity: f64[P, N]: how good it is for part p to be on node n; finite.
        need: f64[P]: bytes that each part takes.
        free: f64[N]: bytes that each node has.

    Returns:
        i64[P]: the node of each part.

    Raises:
        TrainingError: the extra is missing, or memory does not suffice.
    """
    require_extra("scipy")
    from scipy.optimize import linear_sum_assignment

    fits = need[:, None] <= free[None, :]
    if not fits.any(axis=1).all():
        part = int(np.argmin(fits.any(axis=1)))
        raise TrainingError(
            f"part {part} takes {need[part]:.0f} bytes, and no node has more than {free.max():.0f} free"
        )
    if len(need) <= len(free):
        nodes: I64
        try:
            _, nodes = linear_sum_assignment(np.where(fits, affinity, -np.inf), maximize=True)
        except ValueError:  # parts that fit compete for too few nodes: some node must take several
            return _shared(affinity, need, free)
        return nodes
    return _shared(affinity, need, free)


def _shared(affinity: F64, need: F64, free: F64) -> I64:
    """Assign parts to nodes, several to one where its memory allows it."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array, eye_array, kron

    parts, nodes = affinity.shape
    once = kron(eye_array(parts), np.ones((1, nodes)))
    fitting = kron(csr_array(need[None, :] / free.max()), eye_array(nodes))
    limits = [LinearConstraint(once, 1, 1), LinearConstraint(fitting, -np.inf, free / free.max())]
    found = milp(-affinity.ravel(), constraints=limits, integrality=np.ones(parts * nodes), bounds=Bounds(0, 1))
    if found.x is None:
        raise TrainingError(
            f"{len(need)} parts of {need.sum():.0f} bytes do not fit {len(free)} nodes with {free.sum():.0f} bytes free"
        )
    chosen: I64 = found.x.reshape(parts, nodes).argmax(axis=1)
    return chosen


def assign_greedily(affinity: F64, need: F64, free: F64) -> I64:
    """Assign part after part to the best node that is free and has the memory, to compare with.

    Raises:
        TrainingError: none is left for a part.
    """
    left = np.array(free)
    nodes = np.empty(len(need), np.int64)
    for part, row in enumerate(affinity):
        able = np.where(left >= need[part], row, -np.inf)
        nodes[part] = able.argmax()
        if able[nodes[part]] == -np.inf:
            raise TrainingError(f"no node is left with {need[part]:.0f} bytes for part {part}")
        left[nodes[part]] = -np.inf
    return nodes


def assign_randomly(affinity: F64, need: F64, free: F64, rng: np.random.Generator) -> I64:
    """Assign part after part to any node that is free and has the memory, to compare with; see `assign_greedily`."""
    return assign_greedily(rng.random(affinity.shape), need, free)
