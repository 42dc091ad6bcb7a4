"""Checkpoints of compressed-tensors (vLLM's llm-compressor) in which matrices are integers.

A matrix f32[N, K] that a plain checkpoint calls ``X.weight`` is, with b bits and w = 32 / b values to a word:

========================  ==================================  =======================================
tensor                    ``pack-quantized``, b = 4 or 8      ``int-quantized``, b = 8
========================  ==================================  =======================================
``X.weight_packed``       i32[N, K/w]                         ``X.weight`` i8[N, K]
``X.weight_scale``        [N, K/group]; [N, 1] where a row    alike
                          is a group
``X.weight_zero_point``   i32[N/w, K/group], packed by rows;  i8[N, K/group]; absent where all are 0
                          absent where all are 0
``X.weight_shape``        i64[2]: N, K                        --
``X.weight_g_idx``        i32[K]: a column's group, where     --
                          they are out of order
========================  ==================================  =======================================

In words the lowest bits come first, and 2 ** (b - 1) is added to what are signed numbers: these are codes of ours, and
so are bytes with their highest bit turned. A weight is ``(code - zero point) * scale``.

Where columns are grouped out of order (``"actorder": "group"``), groups are no blocks: such a matrix is read as floats.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from motley.daemon.weights.checkpoints.act_order import I32, in_order, of_groups
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.coded_checkpoint import CodedCheckpoint
from motley.daemon.weights.checkpoints.safetensors_checkpoint import READABLE
from motley.daemon.weights.checkpoints.tensor_files import Bring
from motley.daemon.weights.quantise import unpack
from motley.daemon.weights.spec import Encoding
from motley.daemon.weights.stored import F32, U8, Codes, Format, whole_blocks, within


@dataclass(frozen=True)
class CompressedInts:
    """How a checkpoint's matrices are integers, from its ``quantization_config``.

    Attributes:
        bits: 4 or 8.
        group: columns that share a scale; 0: all of a row.
        words: several values are packed in a word; else each is a byte.
        symmetric: all zero points are 0.
        reordered: columns are in groups out of order, which a ``weight_g_idx`` tells.
    """

    bits: int
    group: int
    words: bool = True
    symmetric: bool = True
    reordered: bool = False

    endings: ClassVar[tuple[str, ...]] = (".weight_packed", ".weight_scale")

    @property
    def encoding(self) -> Encoding:
        return Encoding.INT4 if self.bits == 4 else Encoding.INT8

    @property
    def called(self) -> str:
        return f"compressed-tensors int{self.bits}"

    def open(self, path: Path, bring: Bring | None = None) -> CompressedCheckpoint:
        """Open a checkpoint of such matrices."""
        return CompressedCheckpoint(path, self, bring)


class CompressedCheckpoint(CodedCheckpoint):
    """A checkpoint in which some matrices are integers: those that have a ``weight_scale``.

    Not thread-safe.

    Raises:
        CheckpointError: as `SafetensorsCheckpoint`.
    """

    def __init__(self, path: Path, packing: CompressedInts, bring: Bring | None = None) -> None:
        super().__init__(path, bring)
        self._packing = packing
        self._orders: dict[str, I32 | None] = {}

    def _is_coded(self, name: str) -> bool:
        data = name + "_packed" if self._packing.words else name + "_scale"
        return name.endswith(".weight") and self._find(data) is not None

    def parts(self, name: str) -> Collection[str]:
        if not self._is_coded(name):
            return super().parts(name)
        endings = ("_packed", "_shape") if self._packing.words else ("",)
        return [name + ending for ending in (*endings, "_scale", "_zero_point", "_g_idx")]

    def _coded_shape(self, name: str) -> tuple[int, ...]:
        packing = self._packing
        info = self.tensor(*((name + "_packed", ("I32",)) if packing.words else (name, ("I8",))))
        per_word = 32 // packing.bits if packing.words else 1
        shape = info.shape
        if packing.words:
            told = self.tensor(name + "_shape", ("I64", "I32"))
            item = np.dtype("<i8" if told.dtype == "I64" else "<i4")
            if told.shape == (2,):
                shape = tuple(self._items(told, item, range(1), range(2))[0].tolist())
        if len(shape) != 2 or len(info.shape) != 2 or info.shape != (shape[0], -(-shape[1] // per_word)):
            raise CheckpointError(
                f"{info.file}: tensor {name!r} is {info.dtype}{list(info.shape)}, which is not a matrix {list(shape)}"
            )
        rows, columns = shape
        group = packing.group or columns
        if rows < 1 or columns < 1 or columns % group or group % 16:
            raise CheckpointError(
                f"{self.path}: tensor {name!r}, {list(shape)}, cannot be in groups of {group} columns"
            )
        groups = columns // group
        self._expect_part(name, "_scale", {(rows, groups), *([(rows,)] if groups == 1 else [])}, tuple(READABLE))
        if not packing.symmetric:
            packed_rows = -(-rows // per_word)
            self._expect_part(name, "_zero_point", {(packed_rows if packing.words else rows, groups)}, self._zero_type)
        if packing.reordered:
            self._expect_part(name, "_g_idx", {(columns,)}, ("I32",))
        return shape

    @property
    def _zero_type(self) -> tuple[str]:
        return ("I32",) if self._packing.words else ("I8",)

    def _expect_part(self, name: str, part: str, shapes: set[tuple[int, ...]], dtypes: tuple[str, ...]) -> None:
        info = self.tensor(name + part, dtypes)
        if info.shape not in shapes:
            raise CheckpointError(
                f"{info.file}: tensor {name + part!r} has shape {list(info.shape)}; config.json makes it "
                f"{' or '.join(str(list(shape)) for shape in sorted(shapes, key=len, reverse=True))}"
            )

    def _coded_format(self, name: str) -> Format:
        packing = self._packing
        if self._order(name) is not None:
            return Format.floats(f"{packing.called} in act-order")
        columns = self.shape(name)[1]
        return Format(packing.encoding, packing.group or columns, zeros=not packing.symmetric, called=packing.called)

    def _order(self, name: str) -> I32 | None:
        """The group of every column where they are out of order."""
        if name not in self._orders:
            columns, part = self.shape(name)[1], name + "_g_idx"
            self._orders[name] = None
            if self._packing.reordered:
                order = self._items(self.tensor(part, ("I32",)), np.dtype("<i4"), range(1), range(columns))[0]
                if not in_order(self.path, part, order, self._packing.group):
                    self._orders[name] = order
        return self._orders[name]

    def _values(self, name: str, rows: Sequence[int], columns: range) -> F32:
        if not self._is_coded(name) or (order := self._order(name)) is None:
            return super()._values(name, rows, columns)
        whole = whole_blocks(columns, 32 // self._packing.bits)
        count = self.shape(name)[1] // self._packing.group
        matrix = self._codes_of(name, rows, whole, range(count))
        if self._packing.encoding is Encoding.INT4:
            matrix = replace(matrix, codes=unpack(matrix.codes))
        values = of_groups(matrix, order[whole.start : whole.stop], self._packing.encoding)
        return np.ascontiguousarray(values[:, within(columns, whole)])

    def _codes(self, name: str, rows: Sequence[int], columns: range) -> Codes:
        group = self._packing.group or self.shape(name)[1]
        return self._codes_of(name, rows, columns, range(columns.start // group, columns.stop // group))

    def _codes_of(self, name: str, rows: Sequence[int], columns: range, groups: range) -> Codes:
        packing = self._packing
        byte = np.dtype(np.uint8)
        if packing.words:
            info = self.tensor(name + "_packed", ("I32",))
            wanted = range(columns.start * packing.bits // 8, columns.stop * packing.bits // 8)
            codes = self._items(info, byte, rows, wanted)
        else:
            codes = self._items(self.tensor(name, ("I8",)), byte, rows, columns) ^ np.uint8(128)
        scales = self._scales(name, rows, groups)
        return Codes(codes, scales, None if packing.symmetric else self._zeros(name, rows, groups))

    def _scales(self, name: str, rows: Sequence[int], groups: range) -> F32:
        part = name + "_scale"
        if len(self.tensor(part).shape) == 1:
            return super()._values(part, range(1), range(self.shape(name)[0]))[0, list(rows), None]
        return super()._values(part, rows, groups)

    def _zeros(self, name: str, rows: Sequence[int], groups: range) -> U8:
        """The zero points of codes: u8[N, groups]."""
        part = self.tensor(name + "_zero_point", self._zero_type)
        if not self._packing.words:
            return self._items(part, np.dtype(np.uint8), rows, groups) ^ np.uint8(128)
        bits = self._packing.bits
        per_word = 32 // bits
        wanted = np.asarray(rows, np.int64)
        own = sorted(set((wanted // per_word).tolist()))
        words = self._items(part, np.dtype("<u4"), own, groups)[np.searchsorted(own, wanted // per_word)]
        shifts = (wanted % per_word * bits).astype(np.uint32)
        return (words >> shifts[:, None] & np.uint32((1 << bits) - 1)).astype(np.uint8)
