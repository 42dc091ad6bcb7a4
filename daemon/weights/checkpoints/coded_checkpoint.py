"""What checkpoints in Hugging Face's layout share in which some matrices are codes beside their scales.

A format says which matrices these are, of what shape and form, and gives their codes; here they become tensors that
are read like others.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from motley.daemon.weights.checkpoints.safetensors_checkpoint import SafetensorsCheckpoint
from motley.daemon.weights.checkpoints.tensor_files import Bring
from motley.daemon.weights.spec import Piece
from motley.daemon.weights.stored import F32, Codes, Format, dequantised, whole_blocks, within


class CodedCheckpoint(SafetensorsCheckpoint):
    """A checkpoint in which some matrices are codes in blocks of columns.

    Not thread-safe.

    Raises:
        CheckpointError: as `SafetensorsCheckpoint`.
    """

    def __init__(self, path: Path, bring: Bring | None = None) -> None:
        super().__init__(path, bring)
        self._coded_shapes: dict[str, tuple[int, ...]] = {}
        """By name, as the parts of a matrix are compared, and some read, to know it."""

    @abstractmethod
    def _is_coded(self, name: str) -> bool:
        """Whether a matrix is codes."""

    @abstractmethod
    def _coded_shape(self, name: str) -> tuple[int, ...]:
        """The shape of such a matrix.

        Raises:
            CheckpointError: its parts are absent or do not belong together.
        """

    @abstractmethod
    def _coded_format(self, name: str) -> Format:
        """The format of its codes."""

    @abstractmethod
    def _codes(self, name: str, rows: Sequence[int], columns: range) -> Codes:
        """The codes of some rows and of columns that are whole blocks, as `_coded_format` says."""

    def __contains__(self, name: str) -> bool:
        return super().__contains__(name) or self._is_coded(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a readable tensor.

        Raises:
            CheckpointError: it is absent or of a type that weights do not have; or its parts do not belong together.
        """
        if not self._is_coded(name):
            return super().shape(name)
        if name not in self._coded_shapes:
            self._coded_shapes[name] = self._coded_shape(name)
        return self._coded_shapes[name]

    def format(self, name: str) -> Format:
        return self._coded_format(name) if self._is_coded(name) else super().format(name)

    def codes(self, piece: Piece) -> Codes:
        self.check(piece)
        assert piece.columns is not None
        return self._codes(piece.tensor, piece.rows, piece.columns)

    def _values(self, name: str, rows: Sequence[int], columns: range) -> F32:
        if not self._is_coded(name):
            return super()._values(name, rows, columns)
        form = self._coded_format(name)
        whole = whole_blocks(columns, form.block)
        values = dequantised(self._codes(name, rows, whole), form)
        return np.ascontiguousarray(values[:, within(columns, whole)])
