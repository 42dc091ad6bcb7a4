"""Checkpoints of DeepSeek V3 and others as they are published: safetensors in which matrices are FP8, scaled by blocks.

A matrix X [N, K] is of 8-bit floats with four bits of exponent. Beside it is ``X_scale_inv`` [N / rows, K / columns],
both rounded up: the values of each block of so many rows and columns are multiplied by a number of it. Here X is a
matrix of floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.safetensors_checkpoint import READABLE, SafetensorsCheckpoint
from motley.daemon.weights.checkpoints.tensor_files import Bring
from motley.daemon.weights.stored import F32

SCALES = "_scale_inv"
"""What the names of the tensors with the scales end in."""
_FP8 = "F8_E4M3"
_TYPES = {**READABLE, _FP8: np.dtype(ml_dtypes.float8_e4m3fn)}


@dataclass(frozen=True)
class Fp8Blocks:
    """How many rows and columns share a scale."""

    rows: int
    columns: int

    called = "FP8"


class Fp8Checkpoint(SafetensorsCheckpoint):
    """A checkpoint in which some matrices are FP8.

    Not thread-safe.

    Raises:
        CheckpointError: as `SafetensorsCheckpoint`.
    """

    readable = _TYPES

    def __init__(self, path: Path, blocks: Fp8Blocks, bring: Bring | None = None) -> None:
        self._blocks = blocks
        super().__init__(path, bring)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a readable tensor.

        Raises:
            CheckpointError: it is absent or of a type that weights do not have; or its scales are not those of its
                blocks.
        """
        info = self.tensor(name)
        if info.dtype != _FP8:
            return info.shape
        scales = self.tensor(_scales_of(name), READABLE)
        sizes = self._blocks.rows, self._blocks.columns
        blocks = tuple(-(-extent // size) for extent, size in zip(info.shape[-2:], sizes, strict=False))
        if scales.shape != (*info.shape[:-2], *blocks) or len(blocks) < 2:
            raise CheckpointError(
                f"{info.file}: tensor {name!r} {list(info.shape)} of FP8 has scales {list(scales.shape)}; blocks of "
                f"{self._blocks.rows} rows and {self._blocks.columns} columns make them {list(blocks)}"
            )
        return info.shape

    def _values(self, name: str, rows: Sequence[int], columns: range) -> F32:
        info = self.tensor(name)
        if info.dtype != _FP8:
            return super()._values(name, rows, columns)
        values: F32 = self._items(info, _TYPES[_FP8], rows, columns, np.float32)
        if not values.size:
            return values
        blocks = [row // self._blocks.rows for row in rows]
        first, last = columns[0] // self._blocks.columns, columns[-1] // self._blocks.columns
        own = sorted(set(blocks))
        scales = super()._values(_scales_of(name), own, range(first, last + 1))
        of_rows = scales[[own.index(block) for block in blocks]]
        values *= of_rows[:, [column // self._blocks.columns - first for column in columns]]
        return values


def _scales_of(name: str) -> str:
    """``X[3]`` -> ``X_scale_inv[3]``."""
    stem, bracket, number = name.partition("[")
    return stem + SCALES + bracket + number
