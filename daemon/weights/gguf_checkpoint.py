"""A GGUF file as a checkpoint: the same tensors by the same names, rows in the same order.

llama.cpp names tensors differently, and in files of the architecture ``llama`` it interleaves the rows of every query
and key head, because its rotation pairs neighbours where Hugging Face's pairs halves. Both are undone here while
reading; rows move as they are, so no value changes.

The experts of a layer lie in one tensor per projection, one after another (in the first files of Mixtrals in a tensor
each): an expert is its bytes of it. As in checkpoints, they are apart here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from motley.daemon.weights.checkpoint import Checkpoint, CheckpointError, TensorInfo
from motley.daemon.weights.gguf_blocks import EXACT, READABLE, block_size, dequantise, unpack
from motley.daemon.weights.gguf_header import read_header
from motley.daemon.weights.quantise import pack
from motley.daemon.weights.spec import Encoding, Piece
from motley.daemon.weights.stored import Codes, Format, whole_blocks

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

ROPE_FACTORS = "rope_freqs.weight"
"""What each rotary frequency is divided by, f32[head_dim / 2]; it keeps this name."""

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_OF_EXPERT = {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
_OF_EXPERTS = {
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
    "ffn_down_exps": ("down_proj",),
}
"""The parts that each expert has in such a tensor, by rows."""
_NAME = re.compile(
    r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)(?(layer)(?:\.(?P<expert>\d+))?)\.(?P<kind>weight|bias)", re.ASCII
)
_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII)
_SAMPLE = 64
"""Bytes of each tensor that enter the fingerprint."""


def hugging_face_name(name: str) -> str:
    """What Hugging Face calls a tensor of a GGUF file; one that has no such name keeps its own."""
    parts = _NAME.fullmatch(name)
    if parts is None:
        return name
    known = _WHOLE if parts["layer"] is None else _OF_LAYER
    at = "" if parts["layer"] is None else f"model.layers.{parts['layer']}."
    if parts["expert"] is not None:
        known, at = _OF_EXPERT, f"{at}mlp.experts.{parts['expert']}."
    if parts["part"] not in known:
        return name
    return f"{at}{known[parts['part']]}.{parts['kind']}"


def by_hugging_face_name(name: str, info: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
    """A tensor of a GGUF file by its Hugging Face name; every matrix in it, if it holds the experts of a layer."""
    found = _NAME.fullmatch(name)
    part = found["part"] if found and found["layer"] and found["kind"] == "weight" else ""
    parts = _OF_EXPERTS.get(part, ())
    if found is None or not parts or len(info.shape) != 3 or info.shape[1] % len(parts):
        vector = part == "ffn_gate_inp_shexp" and len(info.shape) == 1
        yield hugging_face_name(name), replace(info, shape=(1, *info.shape)) if vector else info
        return
    count, rows, columns = info.shape
    size = info.size // max(1, count * len(parts))
    for number in range(count * len(parts)):
        expert, part = divmod(number, len(parts))
        yield (
            f"model.layers.{found['layer']}.mlp.experts.{expert}.{parts[part]}.weight",
            replace(info, shape=(rows // len(parts), columns), offset=info.offset + number * size, size=size),
        )


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


class GgufCheckpoint(Checkpoint):
    """The weights in a GGUF file or in the parts of one (`motley.daemon.weights.stored.Source`).

    Attributes:
        file: the one it was opened by.
        metadata: without the lists that are the tokenizer's vocabulary, which nobody but the tokenizer needs.

    Raises:
        CheckpointError: a file cannot be read, is not GGUF, or is not what its header says; a part is missing.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.metadata: dict[str, Any] = {}
        self._data: dict[Path, int] = {}
        super().__init__(file.parent)

    def _open(self) -> None:
        parts = gguf_parts(self.file)
        missing = [part.name for part in parts if not part.is_file()]
        if missing:
            raise CheckpointError(f"{self.folder}: missing parts of a split model: {', '.join(missing)}")
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
        try:
            self._files[file] = FileIO(file)
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be opened: {error.strerror or error}") from error
        self._sizes[file], self._data[file] = header.size, header.data
        if file == self.file:
            self.metadata = {
                key: value
                for key, value in header.metadata.items()
                if not (key.startswith("tokenizer.") and isinstance(value, list))
            }
        for own_name, whole in header.tensors.items():
            for name, info in by_hugging_face_name(own_name, whole):
                if name in self._tensors:
                    raise CheckpointError(f"{file}: tensor {own_name!r} is in {self._tensors[name].file.name} too")
                self._tensors[name] = info

    def tensor(self, name: str, dtypes: Iterable[str] = READABLE) -> TensorInfo:
        """Find a weight.

        Raises:
            CheckpointError: it is absent or of none of these types.
        """
        info = self._tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.file}: tensor {name!r} is absent (by its Hugging Face name)")
        if info.dtype not in dtypes:
            supported = ", ".join(dtypes)
            raise CheckpointError(f"{info.file}: tensor {name!r} is of type {info.dtype}; supported: {supported}")
        return info

    def format(self, name: str) -> Format:
        """How a matrix is stored.

        Raises:
            CheckpointError: as `tensor`.
        """
        type_ = self.tensor(name).dtype
        exact = EXACT.get(type_)
        return Format(exact.encoding, exact.block, called=type_) if exact else Format(Encoding.FP32, called=type_)

    def read(self, piece: Piece) -> F32:
        """Read a piece, dequantised: f32[rows, columns] or f32[rows], C-contiguous.

        Raises:
            CheckpointError: as `check`, or the file cannot be read (any more).
        """
        info = self.check(piece)
        if piece.columns is None:
            line = self._lines(info, range(1), range(info.shape[0]))
            values: F32 = dequantise(line, info.dtype)[0, self._places(piece.tensor, piece.rows)]
            return values
        columns = whole_blocks(piece.columns, block_size(info.dtype)[0])
        lines = self._lines(info, self._places(piece.tensor, piece.rows), columns)
        left = piece.columns.start - columns.start
        return np.ascontiguousarray(dequantise(lines, info.dtype)[:, left : left + len(piece.columns)])

    def read_into(self, piece: Piece, out: F32) -> None:
        """Read a piece into `out`, which has as many elements; errors as `read`."""
        values = self.read(piece)
        out[...] = values.reshape(out.shape)

    def codes(self, piece: Piece) -> Codes:
        """Read a piece of a matrix of an exact format, whose columns are whole blocks.

        Raises:
            CheckpointError: as `read`.
        """
        info = self.check(piece)
        block = EXACT[info.dtype].block
        assert piece.columns is not None
        assert piece.columns == whole_blocks(piece.columns, block)
        columns = whole_blocks(piece.columns, block_size(info.dtype)[0])
        codes, scales = unpack(self._lines(info, self._places(piece.tensor, piece.rows), columns), info.dtype)
        left, right = piece.columns.start - columns.start, piece.columns.stop - columns.start
        codes = np.ascontiguousarray(codes[:, left:right])
        return Codes(
            pack(codes) if EXACT[info.dtype].encoding is Encoding.INT4 else codes,
            np.ascontiguousarray(scales[:, left // block : right // block]),
        )

    def rows(self, name: str, ids: Sequence[int]) -> F32:
        """Look rows up in a matrix, such as embeddings of tokens; as `Checkpoint.rows`."""
        info = self.tensor(name)
        if len(info.shape) != 2:
            raise CheckpointError(f"{info.file}: tensor {name!r} has shape {list(info.shape)}; expected a matrix")
        count, width = info.shape
        for row in ids:
            if not 0 <= row < count:
                raise IndexError(f"{row} is not a row of {name!r}, which has {count}")
        return dequantise(self._lines(info, self._places(name, ids), range(width)), info.dtype)

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
        for _, info in sorted(self._tensors.items()):
            sample = bytearray(min(_SAMPLE, info.size))
            self._read_at(info.file, info.offset + (info.size - len(sample)) // 2, memoryview(sample))
            digest.update(sample)
        return digest.hexdigest()

    @cached_property
    def _heads(self) -> dict[str, int]:
        """The heads of the projections whose rows are interleaved."""
        if self.metadata.get("general.architecture") != "llama":
            return {}
        queries = self.metadata.get("llama.attention.head_count")
        keys = self.metadata.get("llama.attention.head_count_kv", queries)
        if not (isinstance(queries, int) and isinstance(keys, int) and queries > 0 and keys > 0):
            raise CheckpointError(f"{self.file}: llama.attention.head_count and head_count_kv should count heads")
        return {"q_proj": queries, "k_proj": keys}

    def _places(self, name: str, rows: Sequence[int]) -> Sequence[int]:
        """Where rows of a tensor (or elements of a vector) lie in the file's."""
        heads = self._heads.get(name.split(".")[-2]) if "." in name else None
        if heads is None:
            return rows
        width = self._tensors[name].shape[0] // heads
        wanted = np.asarray(rows)
        head, half, pair = wanted // width, wanted % width // (width // 2), wanted % (width // 2)
        places: list[int] = (head * width + 2 * pair + half).tolist()
        return places

    def _lines(self, info: TensorInfo, rows: Sequence[int], columns: range) -> U8:
        """The bytes of some rows and columns, whole blocks: u8[rows, bytes]."""
        elements, size = block_size(info.dtype)
        stride = info.shape[-1] // elements * size
        left, line = columns.start // elements * size, len(columns) // elements * size
        lines = np.empty((len(rows), line), np.uint8)
        if not lines.size:
            return lines
        if line == stride and isinstance(rows, range):
            self._read_at(info.file, info.offset + rows.start * stride, lines.data.cast("B"))
        else:
            for place, row in zip(lines, rows, strict=True):
                self._read_at(info.file, info.offset + row * stride + left, place.data)
        return lines
