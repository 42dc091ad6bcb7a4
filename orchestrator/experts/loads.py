"""How often each expert of a session is chosen, counted by the ranks of its trunk. Pure: the clock is given."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from motley.protocol.mesh_pb2 import ExpertReport

HALF_LIFE_S = 300.0
"""Rows count half as much after this."""
PRIOR_ROWS = 256.0
"""Rows per layer that all experts are taken to have shared evenly before any were counted: a few say little."""
MAX_ROWS = 1 << 40
"""No expert has been sent as many: sums of them stay within 64 bits."""

KeptLoads = Mapping[int, list[int]]
"""By layer: the rows that each of its experts was sent lately."""


class ExpertLoads:
    """The rows that every expert of a session was sent.

    Attributes:
        rows: since the session began, i64[layers, experts].
        fresh: rows since `fresh` was last set to 0.
        counted_at: when rows were counted last, in seconds of the clock.
    """

    def __init__(self, layers: list[int], experts: int, chosen: int) -> None:
        """
        Args:
            layers: the numbers of the layers that have experts.
            experts: in each of them.
            chosen: how many of a layer's experts each row chooses.
        """
        self._places = {layer: place for place, layer in enumerate(layers)}
        self._chosen = chosen
        self._counted: dict[int, NDArray[np.int64]] = {}
        """By rank of the trunk: the rows that it says it has sent, i64[layers, experts]."""
        self.rows = np.zeros((len(layers), experts), dtype=np.int64)
        self._lately = np.zeros((len(layers), experts))
        self.counted_at = 0.0
        self.fresh = 0

    def count(self, rank: int, report: ExpertReport, now: float) -> None:
        """Take in what a rank has sent since the session began; counts that make no sense are left out."""
        told = self._counted.setdefault(rank, np.zeros_like(self.rows)).copy()
        for load in report.loads:
            place = self._places.get(load.layer)
            if place is not None and len(load.rows) <= told.shape[1] and max(load.rows, default=0) < MAX_ROWS:
                own = told[place, : len(load.rows)]
                own[:] = np.maximum(own, np.array(load.rows, dtype=np.int64))
        more = told - self._counted[rank]
        self._counted[rank] = told
        self._lately *= 0.5 ** (max(0.0, now - self.counted_at) / HALF_LIFE_S)
        self.counted_at = now
        self._lately += more
        self.rows += more
        self.fresh += int(more.sum())

    def lately(self) -> KeptLoads:
        """What is worth keeping for the same experts when they are placed anew, also after a restart."""
        rows = np.rint(self._lately).astype(np.int64).tolist()
        return {layer: rows[place] for layer, place in self._places.items()}

    def resume(self, kept: KeptLoads, now: float) -> None:
        """Begin with what was kept, as if it had been counted now; what is not of these experts is left out."""
        for layer, rows in kept.items():
            place = self._places.get(layer)
            if place is not None and len(rows) == self.rows.shape[1] and 0 <= min(rows) <= max(rows) < MAX_ROWS:
                self._lately[place] = rows
        self.counted_at = now

    def per_token(self) -> NDArray[np.float64]:
        """The rows per token that every expert gets lately, f64[layers, experts].

        Those of a layer add up to `chosen`.
        """
        evenly = PRIOR_ROWS / self.rows.shape[1]
        weights: NDArray[np.float64] = self._lately + evenly
        weights *= self._chosen / weights.sum(axis=1, keepdims=True)
        return weights
