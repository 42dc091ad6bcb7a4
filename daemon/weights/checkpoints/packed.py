"""GPTQ and AWQ checkpoints: int4 (or int8) codes packed in 32-bit words, transposed, beside plain tensors.

A matrix f32[N, K] that a plain checkpoint calls ``X.weight`` is, in groups of g columns, with b bits and w = 32 / b:

============  ==========================  ============================================================
tensor        GPTQ                        AWQ (``gemm``, b = 4)
============  ==========================  ============================================================
``X.qweight`` i32[K/w, N], a word has     i32[K, N/8], a word has eight outputs' codes in the order
              w columns' codes            0 2 4 6 1 3 5 7
``X.qzeros``  i32[K/g, N/w], less 1 in    i32[K/g, N/8], in the same order
              the format's version 1
``X.scales``  f16[K/g, N]                 f16[K/g, N]
``X.g_idx``   i32[K]: a column's group    --
============  ==========================  ============================================================

A word's first value is in its lowest bits; a weight is ``(code - zero point) * scale``. Papers: Frantar et al. 2022
(https://arxiv.org/abs/2210.17323), Lin et al. 2023 (https://arxiv.org/abs/2306.00978); the layouts are AutoGPTQ's and
AutoAWQ's. A matrix whose columns are grouped out of order ("act-order") is read as floats: its groups are no blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from motley.daemon.weights.checkpoints.act_order import I32, in_order, of_groups
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.safetensors_checkpoint import READABLE, SafetensorsCheckpoint
from motley.daemon.weights.checkpoints.tensor_files import Bring
from motley.daemon.weights.quantise import ZERO_POINT, unpack
from motley.daemon.weights.spec import Encoding, Piece
from motley.daemon.weights.stored import F32, U8, Codes, Format, converted, dequantised, whole_blocks, within

U32 = npt.NDArray[np.uint32]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight outputs the i-th nibble of an AWQ word is, lowest first."""


@dataclass(frozen=True)
class Packing:
    """How a checkpoint's matrices are packed, from its ``quantization_config``.

    Attributes:
        method: who packed it, hence in which of the layouts above.
        bits: 4, or 8 (GPTQ).
        group: columns that share a scale; 0: all of a row.
        zero_offset: what the stored zero points lack: 1 in GPTQ's first version.
        reordered: whether columns may be in groups out of order, which a ``g_idx`` tells.
    """

    endings: ClassVar[tuple[str, ...]] = (".qweight",)

    method: Literal["gptq", "awq"]
    bits: int
    group: int
    zero_offset: int = 0
    reordered: bool = False

    @property
    def encoding(self) -> Encoding:
        return Encoding.INT4 if self.bits == 4 else Encoding.INT8

    @property
    def called(self) -> str:
        return f"{self.method.upper()} int{self.bits}"

    def open(self, path: Path, bring: Bring | None = None) -> PackedCheckpoint:
        """Open a checkpoint of such matrices."""
        return PackedCheckpoint(path, self, bring)


class PackedCheckpoint(SafetensorsCheckpoint):
    """A checkpoint in which some matrices are packed: those that have a ``qweight`` in place of a ``weight``.

    Not thread-safe.

    Raises:
        CheckpointError: as `SafetensorsCheckpoint`.
    """

    def __init__(self, folder: Path, packing: Packing, bring: Bring | None = None) -> None:
        super().__init__(folder, bring)
        self._packing = packing
        self._per_word = 32 // packing.bits
        self._formats: dict[str, Format] = {}
        self._orders: dict[str, I32 | None] = {}

    def __contains__(self, name: str) -> bool:
        return super().__contains__(name) or self._is_packed(name)

    def shape(self, name: str) -> tuple[int, ...]:
        if not self._is_packed(name):
            return super().shape(name)
        first, second = self.tensor(_part(name, "qweight"), ("I32",)).shape
        return (second, first * self._per_word) if self._packing.method == "gptq" else (second * self._per_word, first)

    def parts(self, name: str) -> Collection[str]:
        packed = ("qweight", "qzeros", "scales", "g_idx")
        return [_part(name, part) for part in packed] if self._is_packed(name) else super().parts(name)

    def adds_nothing(self, name: str) -> bool:
        """A bias of zeros is what AutoGPTQ wrote beside every matrix, whatever the model had."""
        if not name.endswith(".bias") or not self._is_packed(f"{name.removesuffix('bias')}weight"):
            return False
        shape = self.shape(name)
        return len(shape) == 1 and not self.read(Piece(name, range(shape[0]))).any()

    def transposed(self, name: str) -> bool:
        return self._is_packed(name)

    def format(self, name: str) -> Format:
        if not self._is_packed(name):
            return super().format(name)
        if name not in self._formats:
            self._formats[name] = self._find_format(name)
        return self._formats[name]

    def codes(self, piece: Piece) -> Codes:
        self.check(piece)
        assert piece.columns is not None
        held, stored = self.format(piece.tensor), self._packed_format(piece.tensor)
        codes = self._codes(piece.tensor, piece.rows, piece.columns)
        if held.encoding is not stored.encoding:
            return converted(codes, stored, range(len(piece.columns)), held)
        return codes if held.zeros else replace(codes, zeros=None)

    def _expect(self, name: str, shape: tuple[int, ...]) -> None:
        if self._is_packed(name) and len(shape) == 2:
            self._expect_packed(name, *shape)
        else:
            super()._expect(name, shape)

    def _values(self, name: str, rows: Sequence[int], columns: range) -> F32:
        if not self._is_packed(name):
            return super()._values(name, rows, columns)
        if not isinstance(rows, range):
            lines = [self._values(name, range(row, row + 1), columns) for row in rows]
            return np.concatenate([np.empty((0, len(columns)), np.float32), *lines])
        stored = self._packed_format(name)
        if (order := self._order(name)) is not None:
            return self._reordered(name, rows, columns, order)
        whole = whole_blocks(columns, stored.block)
        values = dequantised(self._codes(name, rows, whole), stored)
        return np.ascontiguousarray(values[:, within(columns, whole)])

    def _reordered(self, name: str, rows: range, columns: range, order: I32) -> F32:
        """Values of a matrix whose columns are in groups out of order."""
        whole, groups = whole_blocks(columns, self._per_word), range(self.shape(name)[1] // self._packing.group)
        codes = self._gptq(name, rows, whole)
        if self._packing.encoding is Encoding.INT4:
            codes = unpack(codes)
        scales = self.read(Piece(_part(name, "scales"), groups, rows)).T
        matrix = Codes(codes, scales, self._zeros(name, rows, groups))
        values = of_groups(matrix, order[whole.start : whole.stop], self._packing.encoding)
        return np.ascontiguousarray(values[:, within(columns, whole)])

    def _order(self, name: str) -> I32 | None:
        """The group of every column where they are out of order."""
        if name not in self._orders:
            part, columns = _part(name, "g_idx"), self.shape(name)[1]
            self._orders[name] = None
            if super().__contains__(part) and self._packing.method == "gptq":
                info = self.tensor(part, ("I32",))
                order = self._items(info, np.dtype("<i4"), range(1), range(info.size // 4))[0]
                if not in_order(self.path, part, order, self._packing.group or columns):
                    self._orders[name] = order
        return self._orders[name]

    def _is_packed(self, name: str) -> bool:
        return not super().__contains__(name) and super().__contains__(_part(name, "qweight"))

    def _packed_format(self, name: str) -> Format:
        """What the words mean, whether or not a zero point is one too many for its bits."""
        packing = self._packing
        return Format(packing.encoding, packing.group or self.shape(name)[1], zeros=True, called=packing.called)

    def _find_format(self, name: str) -> Format:
        stored = self._packed_format(name)
        if self._order(name) is not None:
            return Format.floats(f"{stored.called} in act-order")
        rows, columns = self.shape(name)
        zeros = self._zeros(name, range(rows), range(columns // stored.block))
        if (zeros == ZERO_POINT[stored.encoding]).all():
            return Format(stored.encoding, stored.block, called=stored.called)
        if stored.encoding is Encoding.INT8 or zeros.max(initial=0) < 16:
            return stored
        return Format(Encoding.INT8, stored.block, called=stored.called)  # 16 is no uint4, but ``code - 16`` an int8

    def _expect_packed(self, name: str, rows: int, columns: int) -> None:
        """Check the parts of a matrix f32[N, K] before its values are taken for granted."""
        packing, per_word = self._packing, self._per_word
        group = packing.group or columns
        if columns % group or group % 16 or rows % per_word:
            raise CheckpointError(
                f"{self.path}: tensor {name!r}, [{rows}, {columns}], cannot be packed in groups of {group} columns "
                f"and words of {per_word} values"
            )
        groups, words = columns // group, rows // per_word
        parts: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
            "qweight": ((columns // per_word, rows) if packing.method == "gptq" else (columns, words), ("I32",)),
            "qzeros": ((groups, words), ("I32",)),
            "scales": ((groups, rows), tuple(READABLE)),
        }
        if packing.reordered or super().__contains__(_part(name, "g_idx")):
            parts["g_idx"] = ((columns,), ("I32",))
        for part, (shape, dtypes) in parts.items():
            info = self.tensor(_part(name, part), dtypes)
            if info.shape != shape:
                raise CheckpointError(
                    f"{info.file}: tensor {_part(name, part)!r} has shape {list(info.shape)}; "
                    f"config.json makes it {list(shape)}"
                )
        if "g_idx" in parts:
            self._order(name)

    def _codes(self, name: str, rows: range, columns: range) -> Codes:
        """Read codes as `Codes` of `_packed_format`; zero points may be one more than fits."""
        group = self._packed_format(name).block
        groups = range(columns.start // group, columns.stop // group)
        scales = self.read(Piece(_part(name, "scales"), groups, rows)).T
        unpack = self._gptq if self._packing.method == "gptq" else self._awq
        codes = unpack(name, rows, columns)
        return Codes(codes, np.ascontiguousarray(scales), self._zeros(name, rows, groups))

    def _gptq(self, name: str, rows: range, columns: range) -> U8:
        """A word has the codes of one output's neighbouring columns, in our order: rows of bytes once transposed."""
        per_word = self._per_word
        words = self._words(_part(name, "qweight"), range(columns.start // per_word, columns.stop // per_word), rows)
        return np.ascontiguousarray(words.T).view(np.uint8)

    def _awq(self, name: str, rows: range, columns: range) -> U8:
        """A word has one column's codes of eight outputs, two in a byte; ours has two columns' codes of one output."""
        octets = whole_blocks(rows, 8)
        words = self._words(_part(name, "qweight"), columns, range(octets.start // 8, octets.stop // 8))
        halves = np.ascontiguousarray(words.T).view(np.uint8).reshape(len(octets) // 8, len(columns), 4)
        codes = np.empty((len(octets) // 8, 8, len(columns) // 2), np.uint8)
        for place in range(4):
            even = np.ascontiguousarray(halves[:, 0::2, place])
            odd = np.ascontiguousarray(halves[:, 1::2, place])
            codes[:, AWQ_ORDER[2 * place]] = even & 15 | odd << 4
            codes[:, AWQ_ORDER[2 * place + 1]] = even >> 4 | odd & 240
        return np.ascontiguousarray(codes.reshape(len(octets), len(columns) // 2)[within(rows, octets)])

    def _zeros(self, name: str, rows: range, groups: range) -> U8:
        """The zero points u8[N, groups], as they are meant: 16 is possible in GPTQ's first version.

        Raises:
            CheckpointError: one is 256.
        """
        bits, offset = self._packing.bits, self._packing.zero_offset
        covered = whole_blocks(rows, self._per_word)
        words = self._words(
            _part(name, "qzeros"), groups, range(covered.start // self._per_word, covered.stop // self._per_word)
        )
        order = AWQ_ORDER if self._packing.method == "awq" else range(self._per_word)
        zeros = np.empty((*words.shape, self._per_word), np.uint8)
        for place, output in enumerate(order):
            zeros[:, :, output] = words >> np.uint32(bits * place) & np.uint32((1 << bits) - 1)
        if bits == 8 and offset and zeros.max(initial=0) == 255:
            raise CheckpointError(f"{self.path}: tensor {_part(name, 'qzeros')!r} has a zero point of 256")
        zeros += offset
        return np.ascontiguousarray(zeros.reshape(len(groups), len(covered)).T[within(rows, covered)])

    def _words(self, name: str, rows: range, columns: range) -> U32:
        """A rectangle of an I32 matrix, or of a vector, which is one row."""
        return self._items(self.tensor(name, ("I32",)), np.dtype("<u4"), rows, columns)


def _part(name: str, part: str) -> str:
    """``a.q_proj.weight`` -> ``a.q_proj.qweight``."""
    return f"{name.removesuffix('weight')}{part}"
