"""Checkpoints in which matrices are NVFP4: blocks of 16 four-bit floats with a scale in FP8, and one for the matrix.

A matrix X [N, K] is

=================  ==========================  ===========================================
what               ModelOpt                    compressed-tensors (``nvfp4-pack-quantized``)
=================  ==========================  ===========================================
codes u8[N, K/2]   ``X``                       ``X_packed``
scales, E4M3       ``X_scale`` [N, K/16]       ``X_scale`` [N, K/16]
the matrix's, f32  ``X_scale_2``, multiplies   ``X_global_scale``, divides
=================  ==========================  ===========================================

A byte has two neighbours, the first in the low nibble. Products of the two scales are float32, as in both libraries;
int8 codes in blocks of 16 hold every value (`motley.daemon.weights.checkpoints.fp4`). What inputs are multiplied by
where they are four-bit floats too (``input_scale``) is not read: ours are not.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import ml_dtypes
import numpy as np

from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.coded_checkpoint import CodedCheckpoint
from motley.daemon.weights.checkpoints.fp4 import CODES
from motley.daemon.weights.checkpoints.tensor_files import Bring, TensorInfo
from motley.daemon.weights.quantise import unpack
from motley.daemon.weights.spec import Encoding
from motley.daemon.weights.stored import Codes, Format

FORMAT = Format(Encoding.INT8, 16, called="NVFP4")
_MULTIPLIES, _DIVIDES = "_scale_2", "_global_scale"


@dataclass(frozen=True)
class Nvfp4Blocks:
    """Matrices are NVFP4."""

    called: ClassVar[str] = FORMAT.called
    endings: ClassVar[tuple[str, ...]] = (_MULTIPLIES, _DIVIDES)

    def open(self, path: Path, bring: Bring | None = None) -> Nvfp4Checkpoint:
        """Open a checkpoint of them."""
        return Nvfp4Checkpoint(path, bring)


class Nvfp4Checkpoint(CodedCheckpoint):
    """A checkpoint in which some matrices are NVFP4: those that have codes of bytes.

    Not thread-safe.

    Raises:
        CheckpointError: as `SafetensorsCheckpoint`.
    """

    def _is_coded(self, name: str) -> bool:
        return self._data(name) is not None

    def parts(self, name: str) -> Collection[str]:
        endings = ("", "_packed", "_scale", _MULTIPLIES, _DIVIDES)
        return [name + ending for ending in endings] if self._is_coded(name) else super().parts(name)

    def _data(self, name: str) -> TensorInfo | None:
        """The tensor of a matrix's codes."""
        info = self._find(name) or self._find(name + "_packed")
        return info if info is not None and info.dtype == "U8" else None

    def _coded_shape(self, name: str) -> tuple[int, ...]:
        codes, scales = self._data(name), self.tensor(name + "_scale", ("F8_E4M3",))
        assert codes is not None
        if len(codes.shape) != 2 or scales.shape != (codes.shape[0], codes.shape[1] // 8) or codes.shape[1] % 8:
            raise CheckpointError(
                f"{codes.file}: tensor {name!r} of NVFP4 has bytes {list(codes.shape)} and scales "
                f"{list(scales.shape)}; two values to a byte and 16 to a scale was expected"
            )
        self._whole_scale(name)
        return codes.shape[0], 2 * codes.shape[1]

    def _coded_format(self, name: str) -> Format:
        return FORMAT

    def _codes(self, name: str, rows: Sequence[int], columns: range) -> Codes:
        data = self._data(name)
        assert data is not None
        pairs = self._items(data, np.dtype(np.uint8), rows, range(columns.start // 2, columns.stop // 2))
        fine = self.tensor(name + "_scale", ("F8_E4M3",))
        blocks = range(columns.start // FORMAT.block, columns.stop // FORMAT.block)
        scales = self._items(fine, np.dtype(ml_dtypes.float8_e4m3fn), rows, blocks, np.float32)
        whole = self._whole_scale(name)
        products = np.multiply(scales, whole) if name + _MULTIPLIES in self else np.divide(scales, whole)
        products *= np.float32(0.5)
        return Codes(CODES[unpack(pairs)], products)

    def _whole_scale(self, name: str) -> np.float32:
        """What all scales of a matrix are multiplied with, or divided by.

        Raises:
            CheckpointError: there is none, or more than one.
        """
        part = next((name + each for each in (_MULTIPLIES, _DIVIDES) if name + each in self), name + _MULTIPLIES)
        info = self.tensor(part, ("F32",))
        if info.size != 4:
            raise CheckpointError(f"{info.file}: tensor {part!r} has shape {list(info.shape)}; one number was expected")
        scale: np.float32 = self._items(info, np.dtype("<f4"), [0], range(1))[0, 0]
        return scale
