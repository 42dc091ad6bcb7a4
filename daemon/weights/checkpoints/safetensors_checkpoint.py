"""Safetensors files, one or shards, in a folder in Hugging Face's layout: headers at once, weights when asked for.

A safetensors file is ``u64 n | n bytes of JSON | data``; the JSON gives every tensor's dtype, shape and its range
of ``data``, and the ranges tile ``data`` without gap or overlap
(https://github.com/huggingface/safetensors#format). All of that is checked before the first tensor is read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.tensor_files import TensorFiles, TensorInfo
from motley.daemon.weights.stored import F32

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

READABLE: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The dtypes a weight may have."""

_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
_LONGEST_HEADER = 100_000_000
"""Bytes, as in the reference implementation."""


class SafetensorsCheckpoint(TensorFiles):
    """The weights in a folder: ``model.safetensors``, or shards listed in ``model.safetensors.index.json``.

    Not thread-safe.

    Raises:
        CheckpointError: no weights, a shard is missing, or a file is not what its header says.
    """

    readable = READABLE

    def _open(self) -> None:
        if (self.path / SINGLE).is_file():
            self._add(self.path / SINGLE)
            return
        weight_map = self._weight_map()
        names = sorted(set(weight_map.values()))
        missing = [name for name in names if not (self.path / name).is_file()]
        if missing:
            raise CheckpointError(f"{self.path}: missing weight files that {INDEX} lists: {', '.join(missing)}")
        for name in names:
            self._add(self.path / name)
        for tensor, name in weight_map.items():
            if tensor not in self._tensors or self._tensors[tensor].file.name != name:
                raise CheckpointError(f"{self.path / name}: tensor {tensor!r} is absent, although {INDEX} lists it")

    def _weight_map(self) -> dict[str, str]:
        file = self.path / INDEX
        if not file.is_file():
            raise CheckpointError(f"{self.path}: no weights: neither {SINGLE} nor {INDEX} is there")
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
        size = self._add_file(file)
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
            self._add_tensor(name, info)

    def _values(self, name: str, rows: Sequence[int], columns: range) -> F32:
        info = self.tensor(name)
        return self._items(info, READABLE[info.dtype], rows, columns, np.float32)

    def fingerprint(self) -> str:
        """Identify the model: equal on two machines whose files are equal.

        Hex SHA-256 over ``config.json``, the files' sizes, every tensor's name, dtype and shape, and a few bytes
        from the middle of every tensor.

        Raises:
            CheckpointError: a file cannot be read.
        """
        config = self.path / "config.json"
        try:
            digest = sha256(config.read_bytes())
        except OSError as error:
            raise CheckpointError(f"{config}: cannot be read: {error.strerror or error}") from error
        digest.update(json.dumps(sorted((file.name, size) for file, size in self._sizes.items())).encode())
        for name, info, sample in self._samples():
            digest.update(json.dumps([name, info.dtype, info.shape]).encode())
            digest.update(sample)
        return digest.hexdigest()


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
