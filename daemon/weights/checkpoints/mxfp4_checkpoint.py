"""Checkpoints of gpt-oss as they are published: safetensors in which the experts' matrices are MXFP4.

A tensor X [E, N, K] is two: ``X_blocks`` u8[E, N, K/32, 16], whose bytes have two neighbouring elements each, the first
in the low nibble; and ``X_scales`` u8[E, N, K/32], the exponents. Here it is one, and called ``X_mxfp4``, because its
rows are outputs, and those of a float tensor X are inputs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from motley.daemon.weights.checkpoints import mxfp4
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.coded_checkpoint import CodedCheckpoint
from motley.daemon.weights.checkpoints.tensor_files import Bring
from motley.daemon.weights.quantise import unpack
from motley.daemon.weights.stored import Codes, Format

BLOCKS, _SCALES = "_blocks", "_scales"
_NAME = re.compile(r"(?P<stem>.+)_mxfp4(?P<number>\[\d+\])?", re.ASCII)
_BLOCK_BYTES = 16


@dataclass(frozen=True)
class Mxfp4Blocks:
    """Experts are MXFP4."""

    called: ClassVar[str] = mxfp4.FORMAT.called
    endings: ClassVar[tuple[str, ...]] = (BLOCKS,)

    def open(self, path: Path, bring: Bring | None = None) -> Mxfp4Checkpoint:
        """Open a checkpoint of them."""
        return Mxfp4Checkpoint(path, bring)


class Mxfp4Checkpoint(CodedCheckpoint):
    """A checkpoint in which some tensors are MXFP4.

    Not thread-safe.

    Raises:
        CheckpointError: as `SafetensorsCheckpoint`.
    """

    def _is_coded(self, name: str) -> bool:
        return _NAME.fullmatch(name) is not None and self._find(_part(name, BLOCKS)) is not None

    def parts(self, name: str) -> Collection[str]:
        return (_part(name, BLOCKS), _part(name, _SCALES)) if self._is_coded(name) else super().parts(name)

    def _coded_shape(self, name: str) -> tuple[int, ...]:
        blocks, scales = (self.tensor(_part(name, part), ("U8",)) for part in (BLOCKS, _SCALES))
        if len(scales.shape) < 2 or blocks.shape != (*scales.shape, _BLOCK_BYTES):
            raise CheckpointError(
                f"{blocks.file}: tensor {_part(name, BLOCKS)!r} has shape {list(blocks.shape)}; its exponents "
                f"{list(scales.shape)} make it {[*scales.shape, _BLOCK_BYTES]}"
            )
        return *scales.shape[:-1], scales.shape[-1] * mxfp4.FORMAT.block

    def _coded_format(self, name: str) -> Format:
        return mxfp4.FORMAT

    def _codes(self, name: str, rows: Sequence[int], columns: range) -> Codes:
        blocks, scales = (self.tensor(_part(name, part), ("U8",)) for part in (BLOCKS, _SCALES))
        byte, block = np.dtype(np.uint8), mxfp4.FORMAT.block
        pairs = self._items(blocks, byte, rows, range(columns.start // 2, columns.stop // 2))
        exponents = self._items(scales, byte, rows, range(columns.start // block, columns.stop // block))
        return Codes(*mxfp4.decoded(unpack(pairs), exponents))


def _part(name: str, part: str) -> str:
    """``X_mxfp4[3]`` -> ``X_blocks[3]``."""
    return _NAME.sub(rf"\g<stem>{part}\g<number>", name)
