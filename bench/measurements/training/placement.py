"""What the best assignment of parts to nodes is worth beside a greedy and a random one, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from motley.training.placement import F64, I64, assign, assign_greedily, assign_randomly

DRAWS = 5
"""Meshes that are drawn for each number of nodes."""


@dataclass(frozen=True)
class Placed:
    """Means over `DRAWS` drawn meshes.

    Attributes:
        best, greedy, random: the sum of affinities over the parts, per part.
        best_ms: how long finding the best assignment took, at most.
    """

    nodes: int
    parts: int
    best: float
    greedy: float
    random: float
    best_ms: float


def measure_placement(parts: int, nodes: Sequence[int]) -> list[Placed]:
    """Draw meshes of as many nodes, whose affinities are even chances and whose memory always suffices for any part.

    Args:
        parts: of the model; not more than nodes.

    Raises:
        TrainingError: scipy is missing.
    """
    rows = []
    for count in nodes:
        worth: dict[str, list[float]] = {"best": [], "greedy": [], "random": []}
        slowest = 0.0
        for draw in range(DRAWS):
            rng = np.random.default_rng([draw, count])
            affinity = rng.random((parts, count))
            need, free = rng.uniform(1, 2, parts), rng.uniform(2, 4, count)
            if draw == 0:
                assign(affinity, need, free)  # which imports scipy
            began = time.perf_counter()
            best = assign(affinity, need, free)
            slowest = max(slowest, time.perf_counter() - began)
            worth["best"].append(_worth(affinity, best))
            worth["greedy"].append(_worth(affinity, assign_greedily(affinity, need, free)))
            worth["random"].append(_worth(affinity, assign_randomly(affinity, need, free, rng)))
        means = {name: round(float(np.mean(values)), 4) for name, values in worth.items()}
        rows.append(Placed(count, parts, **means, best_ms=round(1e3 * slowest, 3)))
    return rows


def _worth(affinity: F64, nodes: I64) -> float:
    return float(affinity[np.arange(len(nodes)), nodes].mean())
