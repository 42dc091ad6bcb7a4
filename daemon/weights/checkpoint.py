"""Reading a checkpoint (a folder in Hugging Face's layout): headers at once, weights in the byte ranges asked for.

A safetensors file is ``u64 n | n bytes of JSON | data``; the JSON gives every tensor's dtype, shape and its range
of ``data``, and the ranges tile ``data`` without gap or overlap
(https://github.com/huggingface/safetensors#format). All of that is checked before the first tensor is read.

Files are read, not mapped: pages of a mapping count as this process's memory once they are touched (and their
neighbours with them), and a file that shrinks under a mapping kills the process, where a read raises an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from io import FileIO
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import ml_dtypes
import numpy as np
import numpy.typing as npt

from motley.daemon.weights.expert_names import expert_name, split_experts
from motley.daemon.weights.spec import Encoding, Piece
from motley.daemon.weights.stored import Codes, Format

F32 = npt.NDArray[np.float32]
U32 = npt.NDArray[np.uint32]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

READABLE: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The dtypes a weight may have. Tensors of others may stand in a file as long as nobody asks for them."""

_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
_LONGEST_HEADER = 100_000_000
"""Bytes, as in the reference implementation."""
_SCRATCH = 1 << 20
"""Bytes read at a time (or one row, if that is longer)."""
_GAP = 1 << 14
"""Bytes between two wanted ones that cost no more to read than another call does."""
_SAMPLE = 64
"""Bytes of each tensor that enter the fingerprint."""

MAX_PROBLEMS = 8
"""Of a checkpoint that does not fit its config, as many are named."""


class CheckpointError(Exception):
    """A checkpoint is not what it should be; the message names the file, the tensor and the difference."""


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies.

    Attributes:
        dtype: as the format spells it, ``"F16"``.
        offset: of the first byte, from the start of the file.
        size: in bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    size: int


class Checkpoint:
    """The weights in a folder: ``model.safetensors``, or shards listed in ``model.safetensors.index.json``.

    Not thread-safe: reads share a scratch buffer and the files' positions.

    Raises:
        CheckpointError: no weights, a shard is missing, or a file is not what its header says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[Path, FileIO] = {}
        self._sizes: dict[Path, int] = {}
        self._tensors: dict[str, TensorInfo] = {}
        self._scratch = bytearray(_SCRATCH)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        self._open_files()
        found, self._tensors = self._tensors, {}
        for name, info in _by_expert(found):
            if name in self._tensors:
                raise CheckpointError(f"{info.file}: tensor {name!r} of an expert is there twice, under two names")
            self._tensors[name] = info

    def _open_files(self) -> None:
        if (self.folder / SINGLE).is_file():
            self._add(self.folder / SINGLE)
            return
        weight_map = self._weight_map()
        names = sorted(set(weight_map.values()))
        missing = [name for name in names if not (self.folder / name).is_file()]
        if missing:
            raise CheckpointError(f"{self.folder}: missing weight files that {INDEX} lists: {', '.join(missing)}")
        for name in names:
            self._add(self.folder / name)
        for tensor, name in weight_map.items():
            if tensor not in self._tensors or self._tensors[tensor].file.name != name:
                raise CheckpointError(f"{self.folder / name}: tensor {tensor!r} is absent, although {INDEX} lists it")

    def _weight_map(self) -> dict[str, str]:
        file = self.folder / INDEX
        if not file.is_file():
            raise CheckpointError(f"{self.folder}: no weights: neither {SINGLE} nor {INDEX} is there")
        try:
            index = json.loads(file.read_bytes())
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{file}: not JSON: {error}") from error
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{file}: no 'weight_map' from tensors to files")
        for tensor, name in weight_map.items():
            if not isinstance(name, str) or not name or name in (".", "..") or set(name) & set("/\\:\0"):
                raise CheckpointError(f"{file}: tensor {tensor!r}: {name!r} is not the name of a file in this folder")
        return weight_map

    def _add(self, file: Path) -> None:
        try:
            self._files[file] = FileIO(file)
            size = self._sizes[file] = file.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be opened: {error.strerror or error}") from error
        if size < 8:
            raise CheckpointError(f"{file}: truncated: {size} bytes, not even the length of a header")
        prefix = bytearray(8)
        self._read_at(file, 0, memoryview(prefix))
        length = int.from_bytes(prefix, "little")
        if length > _LONGEST_HEADER:
            raise CheckpointError(f"{file}: not a safetensors file: its header would be {length} bytes long")
        if 8 + length > size:
            raise CheckpointError(f"{file}: truncated: {size} bytes, but its header alone ends at {8 + length}")
        header = bytearray(length)
        self._read_at(file, 8, memoryview(header))
        for name, info in parse_header(file, bytes(header), size).items():
            if name in self._tensors:
                raise CheckpointError(f"{file}: tensor {name!r} is in {self._tensors[name].file.name} too")
            self._tensors[name] = info

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> list[str]:
        """The tensors there are."""
        return list(self._tensors)

    def tensor(self, name: str, dtypes: Iterable[str] = READABLE) -> TensorInfo:
        """Find a tensor.

        Raises:
            CheckpointError: it is absent or of none of these dtypes, by default those that weights can have.
        """
        info = self._tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self.folder}: tensor {name!r} is absent")
        if info.dtype not in dtypes:
            raise CheckpointError(
                f"{info.file}: tensor {name!r} has dtype {info.dtype}; expected one of {', '.join(dtypes)}"
            )
        return info

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Make sure that these tensors are there, readable, and of these shapes.

        Raises:
            CheckpointError: all that is wrong, a line each, at most `MAX_PROBLEMS`.
        """
        problems = []
        for name, shape in shapes.items():
            try:
                info = self.tensor(name)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            if info.shape != shape:
                problems.append(
                    f"{info.file}: tensor {name!r} has shape {list(info.shape)}; the config makes it {list(shape)}"
                )
        refuse_all(problems)

    def format(self, name: str) -> Format:
        """How a weight is stored: as floats."""
        return Format(Encoding.FP32, called=self.tensor(name).dtype)

    def codes(self, piece: Piece) -> Codes:
        raise AssertionError(f"{piece.tensor} is stored as floats")

    def check(self, piece: Piece) -> TensorInfo:
        """Find a piece's tensor and make sure that the piece lies within it.

        Raises:
            CheckpointError: as `tensor`, or the tensor's shape does not hold the piece.
        """
        info = self.tensor(piece.tensor)
        needed = [piece.rows] if piece.columns is None else [piece.rows, piece.columns]
        if len(info.shape) != len(needed) or any(
            not 0 <= part.start <= part.stop <= extent or part.step != 1
            for part, extent in zip(needed, info.shape, strict=True)
        ):
            wanted = ", ".join(f"{part.start}:{part.stop}" for part in needed)
            raise CheckpointError(
                f"{info.file}: tensor {piece.tensor!r} has shape {list(info.shape)}; expected to hold [{wanted}]"
            )
        return info

    def read(self, piece: Piece) -> F32:
        """Read a piece as ``f32[rows, columns]`` (or ``f32[rows]``); errors as `read_into`."""
        shape = (len(piece.rows),) if piece.columns is None else (len(piece.rows), len(piece.columns))
        values = np.empty(shape, np.float32)
        self.read_into(piece, values)
        return values

    def read_into(self, piece: Piece, out: F32) -> None:
        """Read a piece into `out`, which is C-contiguous and has as many elements.

        Reads exactly the piece's bytes, through a buffer of bounded size.

        Raises:
            CheckpointError: as `check`, or the file cannot be read (any more).
        """
        info = self.check(piece)
        dtype = READABLE[info.dtype]
        stride = dtype.itemsize * prod(info.shape[1:])  # bytes from row to row
        left, width = (0, 1) if piece.columns is None else (piece.columns.start, len(piece.columns))
        line = dtype.itemsize * width  # bytes wanted of each row
        if not line or not piece.rows:
            return
        lines = out.reshape(len(piece.rows), width)
        at_once = max(1, _SCRATCH // line)
        for done in range(0, len(piece.rows), at_once):
            part = piece.rows[done : done + at_once]
            raw = self._buffer(line * len(part))
            if line == stride:
                self._read_at(info.file, info.offset + part.start * stride, raw)
            else:
                for index, row in enumerate(part):
                    offset = info.offset + row * stride + left * dtype.itemsize
                    self._read_at(info.file, offset, raw[index * line : (index + 1) * line])
            lines[done : done + len(part)] = np.frombuffer(raw, dtype).reshape(len(part), width)

    def words(self, name: str, rows: range, columns: range) -> U32:
        """Read a rectangle of an I32 matrix (or of a vector, which is one row) as unsigned words.

        Short stretches between the wanted parts of rows are read over.

        Raises:
            CheckpointError: as `tensor`, or its file cannot be read (any more).
        """
        info = self.tensor(name, ("I32",))
        stride = 4 * info.shape[-1]
        words = np.empty((len(rows), len(columns)), "<u4")
        if stride - words.itemsize * len(columns) > _GAP:
            for index, row in enumerate(rows):
                offset = info.offset + row * stride + words.itemsize * columns.start
                self._read_at(info.file, offset, memoryview(words[index]).cast("B"))
            return words
        at_once = max(1, _SCRATCH // max(1, stride))
        for done in range(0, len(rows), at_once):
            part = rows[done : done + at_once]
            raw = self._buffer(stride * len(part))
            self._read_at(info.file, info.offset + part.start * stride, raw)
            whole = np.frombuffer(raw, words.dtype).reshape(len(part), info.shape[-1])
            words[done : done + len(part)] = whole[:, columns.start : columns.stop]
        return words

    def rows(self, name: str, ids: Sequence[int]) -> F32:
        """Look rows up in a matrix, such as embeddings of tokens.

        Returns:
            f32[len(ids), D]: one row for each of `ids`, in their order.

        Raises:
            CheckpointError: as `tensor`, the tensor is not a matrix, or its file cannot be read (any more).
            IndexError: an id is not a row of it.
        """
        info = self.tensor(name)
        if len(info.shape) != 2:
            raise CheckpointError(f"{info.file}: tensor {name!r} has shape {list(info.shape)}; expected a matrix")
        count, width = info.shape
        dtype = READABLE[info.dtype]
        line = dtype.itemsize * width
        raw = bytearray(line * len(ids))
        view = memoryview(raw)
        for index, row in enumerate(ids):
            if not 0 <= row < count:
                raise IndexError(f"{row} is not a row of {name!r}, which has {count}")
            self._read_at(info.file, info.offset + row * line, view[index * line : (index + 1) * line])
        return np.frombuffer(raw, dtype).reshape(len(ids), width).astype(np.float32)

    def fingerprint(self) -> str:
        """Identify the model: equal on two machines whose files are equal.

        Hex SHA-256 over ``config.json``, the files' sizes, every tensor's name, dtype and shape, and a few bytes
        from the middle of every tensor (two fine-tunes of one model differ in nothing else).

        Raises:
            CheckpointError: a file cannot be read.
        """
        config = self.folder / "config.json"
        try:
            digest = sha256(config.read_bytes())
        except OSError as error:
            raise CheckpointError(f"{config}: cannot be read: {error.strerror or error}") from error
        digest.update(json.dumps(sorted((file.name, size) for file, size in self._sizes.items())).encode())
        for name, info in sorted(self._tensors.items()):
            digest.update(json.dumps([name, info.dtype, info.shape]).encode())
            sample = bytearray(min(_SAMPLE, info.size))
            middle = info.offset + (info.size - len(sample)) // 2
            self._read_at(info.file, middle, memoryview(sample))
            digest.update(sample)
        return digest.hexdigest()

    def stamp(self) -> str:
        """Changes whenever a file that is read here does: sizes and times of modification.

        Raises:
            CheckpointError: a file cannot be looked at (any more).
        """
        try:
            stats = [(path.name, os.fstat(file.fileno())) for path, file in self._files.items()]
        except OSError as error:
            raise CheckpointError(f"{self.folder}: cannot be read: {error.strerror or error}") from error
        return json.dumps(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))

    def _buffer(self, size: int) -> memoryview:
        """The scratch buffer, at least as large as this, as much of it."""
        if len(self._scratch) < size:
            self._scratch = bytearray(size)
        return memoryview(self._scratch)[:size]

    def _read_at(self, path: Path, offset: int, view: memoryview) -> None:
        file = self._files[path]
        try:
            file.seek(offset)
            while view:
                count = file.readinto(view)
                if not count:
                    raise CheckpointError(f"{path}: it has become shorter since it was opened")
                view = view[count:]
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error

    def close(self) -> None:
        """Close the files; nothing can be read any more."""
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _by_expert(tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, TensorInfo]]:
    """The same tensors, those of experts apart and by their usual names."""
    for own_name, info in tensors.items():
        matrices = list(split_experts(own_name, info.shape))
        if not matrices:
            yield expert_name(own_name), info
        for number, (name, shape) in enumerate(matrices):
            # All of a tensor's matrices are of the same size.
            size = info.size // len(matrices)
            yield name, replace(info, shape=shape, offset=info.offset + number * size, size=size)


def refuse_all(problems: Sequence[str]) -> None:
    """Raise one error for all problems, a line each, at most `MAX_PROBLEMS`.

    Raises:
        CheckpointError: there are any.
    """
    if problems:
        more = len(problems) - MAX_PROBLEMS
        raise CheckpointError("\n".join([*problems[:MAX_PROBLEMS], *([f"... and {more} more"] if more > 0 else [])]))


def parse_header(file: Path, header: bytes, file_size: int) -> dict[str, TensorInfo]:
    """Read a safetensors header, given its bytes and the size of the whole file; `file` is for messages.

    Raises:
        CheckpointError: it is not a valid header, or the tensors do not tile the data.
    """
    try:
        entries = json.loads(header, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not a safetensors file: its header is not valid JSON: {error}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{file}: not a safetensors file: its header is not a JSON object")
    entries.pop("__metadata__", None)
    start = 8 + len(header)
    tensors = {name: _tensor_info(file, name, entry, start) for name, entry in entries.items()}
    _check_tiling(file, tensors, start, file_size)
    return tensors


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"twice the same name: {sorted({name for name in names if names.count(name) > 1})}")
    return entries


def _tensor_info(file: Path, name: str, entry: Any, data: int) -> TensorInfo:
    def refuse(reason: str) -> NoReturn:
        raise CheckpointError(f"{file}: tensor {name!r}: {reason}")

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        refuse(f"its header entry should have dtype, shape and data_offsets, and is {str(entry)[:200]}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        refuse(f"dtype should be a string, and is {dtype!r}")
    if not _are_counts(shape):
        refuse(f"shape should be a list of non-negative integers, and is {str(shape)[:200]}")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        refuse(f"data_offsets should be [begin, end], and is {str(offsets)[:200]}")
    begin, end = offsets
    if dtype in _ITEM_BYTES and end - begin != (size := prod(shape) * _ITEM_BYTES[dtype]):
        refuse(f"{dtype}{shape} takes {size} bytes, but data_offsets {offsets} give it {end - begin}")
    return TensorInfo(dtype, tuple(shape), file, data + begin, end - begin)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_tiling(file: Path, tensors: dict[str, TensorInfo], start: int, file_size: int) -> None:
    in_order = sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].size))
    ends = [("the header", start), *((repr(name), info.offset + info.size) for name, info in in_order)]
    for (before, end), (name, info) in zip(ends, in_order, strict=False):
        if info.offset != end:
            kind = "overlaps" if info.offset < end else "leaves a gap after"
            raise CheckpointError(f"{file}: tensor {name!r} {kind} {before}: it begins at {info.offset}, not at {end}")
    end = ends[-1][1]
    if file_size < end:
        name = next(name for name, info in in_order if info.offset + info.size > file_size)
        raise CheckpointError(
            f"{file}: truncated: {file_size} bytes, but its header describes {end}; tensor {name!r} is incomplete"
        )
    if file_size > end:
        raise CheckpointError(f"{file}: {file_size} bytes, but its header describes only {end}")
