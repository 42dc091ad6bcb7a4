"""Embeddings: what a model makes of all tokens of a text becomes one vector, on the ranks that have the last layers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from motley.plugins.engine import F32

POOLINGS = ("mean", "last")


class Pool:
    """What has come of one text.

    Rows come in steps, so the mean is a sum that grows: in float64, where it is the same however the steps are cut. A
    rank therefore has to see each row once, from the first one on.
    """

    def __init__(self, how: str) -> None:
        """`how`: one of `POOLINGS`."""
        self._mean = how == "mean"
        self._total: npt.NDArray[np.float64] | None = None

    def add(self, rows: F32) -> None:
        """Take the next rows f32[T, D], at least one: hidden states behind the model's last norm."""
        last = rows[-1].astype(np.float64)
        if self._mean:
            last = rows.sum(axis=0, dtype=np.float64)
        self._total = last if self._total is None or not self._mean else self._total + last

    def encoded(self) -> bytes:
        """The vector of all rows so far, float32[D] in little endian, of length 1: so the number of rows, by which a
        mean divides, does not matter."""
        assert self._total is not None, "it has rows"
        length = np.linalg.norm(self._total)
        return (self._total / (length or 1.0)).astype("<f4").tobytes()
