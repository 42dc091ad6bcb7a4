"""Checkpoints in which matrices are 8-bit floats: DeepSeek V3's, compressed-tensors', ModelOpt's, Mistral's.

A matrix X [N, K] is of floats with four bits of exponent (E4M3). Beside it is ``X_scale_inv`` or ``X_scale``, by which
its values are multiplied:

=====================  ==================================================
scales of              shape
=====================  ==================================================
the whole matrix       [], [1] or [1, 1]
each row               [N] or [N, 1]
blocks of rows and     [N / rows, K / columns], both rounded up
columns
=====================  ==================================================

Here X is a matrix of floats. Held in int8, in blocks of 32, values that were Gaussian before they became FP8 differ
from what FP8 made of them by 0.5 % of their RMS; FP8 itself lost 2.6 %.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import ml_dtypes
import numpy as np

from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.safetensors_checkpoint import READABLE, SafetensorsCheckpoint
from motley.daemon.weights.checkpoints.tensor_files import Bring
from motley.daemon.weights.stored import F32

_FP8 = "F8_E4M3"
_TYPES = {**READABLE, _FP8: np.dtype(ml_dtypes.float8_e4m3fn)}


@dataclass(frozen=True)
class Fp8Blocks:
    """How many rows and columns share a scale; 0 and 0: those of the whole matrix, or each row's, as the scales are."""

    rows: int = 0
    columns: int = 0

    called: ClassVar[str] = "FP8"
    endings: ClassVar[tuple[str, ...]] = ("_scale_inv", "weight_scale")

    def open(self, path: Path, bring: Bring | None = None) -> Fp8Checkpoint:
        """Open a checkpoint of such matrices."""
        return Fp8Checkpoint(path, self, bring)


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
        if info.dtype == _FP8:
            self._check_scales(name)
        return info.shape

    def parts(self, name: str) -> Collection[str]:
        info = self._find(name)
        return (name, self._scales_of(name)) if info is not None and info.dtype == _FP8 else super().parts(name)

    def _check_scales(self, name: str) -> None:
        info, scales = self.tensor(name), self.tensor(self._scales_of(name), READABLE)
        if not self._blocks.rows:
            rows = info.shape[0] if info.shape else 0
            if len(info.shape) != 2 or scales.shape not in ((), (1,), (1, 1), (rows,), (rows, 1)):
                raise CheckpointError(
                    f"{info.file}: tensor {name!r} {list(info.shape)} of FP8 has scales {list(scales.shape)}; one for "
                    f"the matrix, or one for each of its rows, was expected"
                )
            return
        sizes = self._blocks.rows, self._blocks.columns
        blocks = tuple(-(-extent // size) for extent, size in zip(info.shape[-2:], sizes, strict=False))
        if scales.shape != (*info.shape[:-2], *blocks) or len(blocks) < 2:
            raise CheckpointError(
                f"{info.file}: tensor {name!r} {list(info.shape)} of FP8 has scales {list(scales.shape)}; blocks of "
                f"{self._blocks.rows} rows and {self._blocks.columns} columns make them {list(blocks)}"
            )

    def _values(self, name: str, rows: Sequence[int], columns: range) -> F32:
        info = self.tensor(name)
        if info.dtype != _FP8:
            return super()._values(name, rows, columns)
        values: F32 = self._items(info, _TYPES[_FP8], rows, columns, np.float32)
        if values.size:
            values *= self._scales(name, rows, columns)
        return values

    def _scales(self, name: str, rows: Sequence[int], columns: range) -> F32:
        """What some values are multiplied by: f32[rows, columns], or columns that are 1 where all have the same."""
        scales = self._scales_of(name)
        if not self._blocks.rows:
            info = self.tensor(scales)
            if info.size == _TYPES[info.dtype].itemsize:
                return super()._values(scales, [0], range(1))
            if len(info.shape) == 2:
                return super()._values(scales, rows, range(1))
            return super()._values(scales, [0], range(info.shape[0]))[0, list(rows), None]
        blocks = [row // self._blocks.rows for row in rows]
        first, last = columns[0] // self._blocks.columns, columns[-1] // self._blocks.columns
        own = sorted(set(blocks))
        found = super()._values(scales, own, range(first, last + 1))
        of_rows = found[[own.index(block) for block in blocks]]
        of_all: F32 = of_rows[:, [column // self._blocks.columns - first for column in columns]]
        return of_all

    def _scales_of(self, name: str) -> str:
        """``X[3]`` -> ``X_scale_inv[3]``, or ``X_scale[3]`` where there is no other."""
        stem, bracket, number = name.partition("[")
        inverse, plain = (f"{stem}{ending}{bracket}{number}" for ending in ("_scale_inv", "_scale"))
        return plain if inverse not in self and plain in self else inverse
