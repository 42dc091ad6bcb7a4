"""Checkpoints of gpt-oss as they are published: safetensors in which the experts' matrices are MXFP4.

A tensor X [E, N, K] is two: ``X_blocks`` u8[E, N, K/32, 16], whose bytes have two neighbouring elements each, the first
in the low nibble; and ``X_scales`` u8[E, N, K/32], the exponents. Here it is one, and called ``X_mxfp4``, because its
rows are outputs, and those of a float tensor X are inputs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from motley.daemon.weights.checkpoints import mxfp4
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.safetensors_checkpoint import SafetensorsCheckpoint
from motley.daemon.weights.quantise import unpack
from motley.daemon.weights.spec import Piece
from motley.daemon.weights.stored import F32, Codes, Format, dequantised, whole_blocks, within

BLOCKS = "_blocks"
"""What the names of the tensors with the codes end in."""
_NAME = re.compile(r"(?P<stem>.+)_mxfp4(?P<number>\[\d+\])?", re.ASCII)
_BLOCK_BYTES = 16


class Mxfp4Checkpoint(SafetensorsCheckpoint):
    """A checkpoint in which some tensors are MXFP4.

    Not thread-safe.

    Raises:
        CheckpointError: as `SafetensorsCheckpoint`.
    """

    def __contains__(self, name: str) -> bool:
        return super().__contains__(name) or self._is_mxfp4(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a readable tensor.

        Raises:
            CheckpointError: it is absent or of a type that weights do not have; or its codes and exponents do not
                belong together.
        """
        if not self._is_mxfp4(name):
            return super().shape(name)
        blocks, scales = (self.tensor(_part(name, part), ("U8",)) for part in (BLOCKS, "_scales"))
        if len(scales.shape) < 2 or blocks.shape != (*scales.shape, _BLOCK_BYTES):
            raise CheckpointError(
                f"{blocks.file}: tensor {_part(name, BLOCKS)!r} has shape {list(blocks.shape)}; its exponents "
                f"{list(scales.shape)} make it {[*scales.shape, _BLOCK_BYTES]}"
            )
        return *scales.shape[:-1], scales.shape[-1] * mxfp4.FORMAT.block

    def format(self, name: str) -> Format:
        return mxfp4.FORMAT if self._is_mxfp4(name) else super().format(name)

    def codes(self, piece: Piece) -> Codes:
        self.check(piece)
        assert piece.columns is not None
        return self._codes(piece.tensor, piece.rows, piece.columns)

    def _values(self, name: str, rows: Sequence[int], columns: range) -> F32:
        if not self._is_mxfp4(name):
            return super()._values(name, rows, columns)
        whole = whole_blocks(columns, mxfp4.FORMAT.block)
        values = dequantised(self._codes(name, rows, whole), mxfp4.FORMAT)
        return np.ascontiguousarray(values[:, within(columns, whole)])

    def _codes(self, name: str, rows: Sequence[int], columns: range) -> Codes:
        blocks, scales = (self.tensor(_part(name, part), ("U8",)) for part in (BLOCKS, "_scales"))
        byte, block = np.dtype(np.uint8), mxfp4.FORMAT.block
        pairs = self._items(blocks, byte, rows, range(columns.start // 2, columns.stop // 2))
        exponents = self._items(scales, byte, rows, range(columns.start // block, columns.stop // block))
        return Codes(*mxfp4.decoded(unpack(pairs), exponents))

    def _is_mxfp4(self, name: str) -> bool:
        return _NAME.fullmatch(name) is not None and super().__contains__(_part(name, BLOCKS))


def _part(name: str, part: str) -> str:
    """``X_mxfp4[3]`` -> ``X_blocks[3]``."""
    return _NAME.sub(rf"\g<stem>{part}\g<number>", name)
