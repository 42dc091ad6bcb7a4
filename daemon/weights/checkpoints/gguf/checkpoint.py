"""A GGUF file as a checkpoint: the same tensors by the same names, rows in the same order.

llama.cpp names tensors differently (`motley.daemon.weights.checkpoints.gguf.names`), and puts some rows and columns
elsewhere (`motley.daemon.weights.checkpoints.gguf.order`). Both are undone here while reading; rows move as they are,
so no value changes. Of a recurrent state's decay it has ``-exp(A_log)``, or that without its sign, of which the
logarithm is taken here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.gguf.blocks import READABLE, block_size, dequantise, exact_format, unpack
from motley.daemon.weights.checkpoints.gguf.header import read_header
from motley.daemon.weights.checkpoints.gguf.names import by_hugging_face_name
from motley.daemon.weights.checkpoints.gguf.order import Interleaving, Tiling, order_of
from motley.daemon.weights.checkpoints.tensor_files import Bring, TensorFiles, TensorInfo
from motley.daemon.weights.places import FLAT, WHOLE
from motley.daemon.weights.spec import Piece
from motley.daemon.weights.stored import F32, U8, Codes, Format, converted, whole_blocks, within

ROPE_FACTORS = "rope_freqs.weight"
"""What each rotary frequency is divided by, f32[head_dim / 2]; it keeps this name."""

_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII)


def gguf_parts(file: Path) -> list[Path]:
    """The files of a model that is split (``name-00001-of-00003.gguf``), given the first; else the file alone.

    Raises:
        CheckpointError: it is another than the first.
    """
    part = _PART.fullmatch(file.name)
    if part is None:
        return [file]
    first, *others = (
        file.with_name(f"{part['stem']}-{number:05}-of-{part['count']}.gguf")
        for number in range(1, max(1, int(part["count"])) + 1)
    )
    if file != first:
        raise CheckpointError(f"{file}: a later part of a split model; give the first, {first.name}")
    return [first, *others]


class GgufCheckpoint(TensorFiles):
    """The weights in a GGUF file or in the parts of one.

    Attributes:
        file: the one it was opened by.
        metadata: without the lists that are the tokenizer's vocabulary, which nobody but the tokenizer needs.

    Raises:
        CheckpointError: a file cannot be read, is not GGUF, or is not what its header says; a part is missing.
    """

    readable = READABLE
    naming = " (by its Hugging Face name)"

    def __init__(self, file: Path, bring: Bring | None = None) -> None:
        self.file = file
        self.metadata: dict[str, Any] = {}
        self._data: dict[Path, int] = {}
        super().__init__(file, bring)

    def _open(self) -> None:
        parts = gguf_parts(self.file)
        missing = [part.name for part in parts if not part.is_file()]
        if missing:
            raise CheckpointError(f"{self.file.parent}: missing parts of a split model: {', '.join(missing)}")
        for part in parts:
            self._add(part)
        count = self.metadata.get("split.count", 1)
        if count != len(parts):
            raise CheckpointError(
                f"{self.file}: one of {count} parts of a split model by its metadata, one of {len(parts)} by its name; "
                "give the parts the names they were made with"
            )

    def _add(self, file: Path) -> None:
        header = read_header(file)
        self._add_file(file)
        self._data[file] = header.data
        if file == self.file:
            self.metadata = {
                key: value
                for key, value in header.metadata.items()
                if not (key.startswith("tokenizer.") and isinstance(value, list))
            }
        architecture = str(self.metadata.get("general.architecture"))
        for own_name, whole in header.tensors.items():
            for name, info in by_hugging_face_name(own_name, whole, architecture):
                self._add_tensor(name, info, own_name)

    def format(self, name: str) -> Format:
        type_ = self.tensor(name).dtype
        exact = exact_format(type_)
        return exact if exact and not self._order.columns(name) % exact.block else Format.floats(type_)

    def codes(self, piece: Piece) -> Codes:
        self.check(piece)
        info, held = self.tensor(piece.tensor), self.format(piece.tensor)
        assert piece.columns is not None
        assert piece.columns == whole_blocks(piece.columns, held.block)
        if self._order.columns(piece.tensor):
            whole = unpack(self._raw(info, piece.rows, range(info.shape[1])), info.dtype)
            return self._in_order(whole, piece.tensor, held, piece.columns)
        columns = whole_blocks(piece.columns, block_size(info.dtype)[0])
        codes = unpack(self._raw(info, self._places(piece.tensor, piece.rows), columns), info.dtype)
        left = piece.columns.start - columns.start
        return converted(codes, held, range(left, left + len(piece.columns)), held)

    def fingerprint(self) -> str:
        """Identify the model: equal on two machines whose files are equal.

        Hex SHA-256 over everything before the tensors' data and a few bytes from the middle of every tensor.

        Raises:
            CheckpointError: a file cannot be read.
        """
        digest = sha256()
        for file, end in self._data.items():
            header = bytearray(min(end, self._sizes[file]))
            self._read_at(file, 0, memoryview(header))
            digest.update(header)
        for _, _, sample in self._samples():
            digest.update(sample)
        return digest.hexdigest()

    def _values(self, name: str, rows: Sequence[int], columns: range) -> F32:
        info = self.tensor(name)
        if len(info.shape) == 1:
            line = dequantise(self._raw(info, rows, range(info.shape[0])), info.dtype)
            values: F32 = line[:, self._places(name, columns)]
            return np.log(np.abs(values)) if name.removesuffix(WHOLE).endswith(".A_log") else values
        if (size := self._order.columns(name)) and isinstance(self._order, Tiling):
            whole = dequantise(self._raw(info, rows, range(info.shape[1])), info.dtype)
            return np.ascontiguousarray(whole[:, self._order.places(columns, size)])
        covered = whole_blocks(columns, block_size(info.dtype)[0])
        values = dequantise(self._raw(info, self._places(name, rows), covered), info.dtype)
        return np.ascontiguousarray(values[:, within(columns, covered)])

    @cached_property
    def _order(self) -> Interleaving | Tiling:
        return order_of(self.file, self.metadata)

    def _places(self, name: str, rows: Sequence[int]) -> Sequence[int]:
        """Where rows of a tensor (or elements of a vector) lie in the file's."""
        return self._order.rows(name.removesuffix(FLAT).removesuffix(WHOLE), rows, self.tensor(name).shape[0])

    def _in_order(self, codes: Codes, name: str, held: Format, columns: range) -> Codes:
        """Some columns of whole rows of codes whose columns stand elsewhere."""
        order, size = self._order, self._order.columns(name)
        assert isinstance(order, Tiling)
        blocks = order.places(range(columns.start // held.block, columns.stop // held.block), size // held.block)
        count, width = codes.scales.shape
        chosen = codes.codes.reshape(count, width, -1)[:, blocks].reshape(count, -1)
        return Codes(chosen, codes.scales[:, blocks])

    def _raw(self, info: TensorInfo, rows: Sequence[int], columns: range) -> U8:
        """The bytes of some rows and columns, whole blocks: u8[rows, bytes]."""
        elements, size = block_size(info.dtype)
        wanted = range(columns.start // elements * size, columns.stop // elements * size)
        return self._items(info, np.dtype(np.uint8), rows, wanted)
