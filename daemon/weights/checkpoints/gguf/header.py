"""What a GGUF file says before its tensors' data: metadata, and where each tensor lies.

``"GGUF" | u32 version | u64 tensors | u64 keys | the keys and values | the tensors' names, shapes, types and offsets |
padding | data``, little-endian (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Read sequentially and
checked against the file's size at every step, so that no length in a broken file is believed. The ``gguf`` package
has a reader too; for a vocabulary of 150,000 tokens it takes 6.5 s and 500 MB, since every string becomes two arrays.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.tensor_files import TensorInfo
from motley.daemon.weights.git_lfs import pointer_told

VERSIONS = (2, 3)
_ALIGNMENT = 32
"""Of the data and of every tensor in it, unless ``general.alignment`` says otherwise."""
_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The value types besides strings and arrays, as `struct` calls them."""


@dataclass(frozen=True)
class GgufHeader:
    """What `read_header` found.

    Attributes:
        metadata: strings, numbers, booleans, and lists of them.
        tensors: by the names in the file; a shape is (rows, columns) as in a checkpoint, the file's reversed.
        data: where the tensors' data begins.
        size: of the file, in bytes.
    """

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data: int
    size: int


def read_header(file: Path) -> GgufHeader:
    """Read everything but the tensors' data.

    Raises:
        CheckpointError: the file cannot be read, is not GGUF in a version of `VERSIONS`, or is not as long as it says.
    """
    if told := pointer_told(file):
        raise CheckpointError(told)
    try:
        with file.open("rb") as stream:
            return _Reader(file, stream).header()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error


def header_end(file: Path, here: int) -> int | None:
    """Where the tensors' data begins in a file of which only the first bytes are here; None: the header goes on.

    Args:
        here: how many bytes are here; the others are not looked at.

    Raises:
        CheckpointError: as far as it is here, it is none that `read_header` reads.
        OSError: it cannot be read.
    """
    with file.open("rb") as stream:
        try:
            return _Reader(file, stream, here).header().data
        except _GoesOn:
            return None


class _GoesOn(Exception):
    """The header does not end within the bytes that are here."""


class _Reader:
    def __init__(self, file: Path, stream: io.BufferedReader, here: int | None = None) -> None:
        self._file = file
        self._stream = stream
        self._size = self._left = stream.seek(0, io.SEEK_END)
        self._absent = 0 if here is None else self._size - here
        self._where = "its header"
        stream.seek(0)

    def header(self) -> GgufHeader:
        if self._size < 4 or self._take(4) != b"GGUF":
            self._refuse("not a GGUF file: it does not begin with 'GGUF'")
        version = self._scalar("I")
        if version not in VERSIONS:
            big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            what = "big-endian" if big_endian else f"GGUF version {version}"
            self._refuse(f"{what} is not supported; supported: little-endian GGUF of version 2 or 3")
        tensor_count, key_count = self._scalar("Q"), self._scalar("Q")
        metadata: dict[str, Any] = {}
        for index in range(key_count):
            self._where = f"metadata key {index + 1} of {key_count}"
            key = self._string()
            self._where = f"the value of {key!r}"
            if key in metadata:
                self._refuse(f"metadata key {key!r} is there twice")
            metadata[key] = self._value(self._scalar("I"))
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            self._refuse(f"general.alignment should be a power of two, and is {alignment!r}")
        entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for index in range(tensor_count):
            self._where = f"the entry of tensor {index + 1} of {tensor_count}"
            name = self._string()
            if name in entries:
                self._refuse(f"tensor {name!r} is there twice")
            dimensions = self._scalar("I")
            if dimensions > _DIMENSIONS:
                self._refuse(f"tensor {name!r} has {dimensions} dimensions; there are at most {_DIMENSIONS}")
            shape = struct.unpack(f"<{dimensions}Q", self._take(8 * dimensions))[::-1]
            entries[name] = shape, self._scalar("I"), self._scalar("Q")
        position = self._size - self._left
        data = -(-position // alignment) * alignment
        tensors = {name: self._tensor(name, data, *entry) for name, entry in entries.items()}
        self._check_overlaps(tensors)
        return GgufHeader(metadata, tensors, data, self._size)

    def _tensor(self, name: str, data: int, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            type_ = GGMLQuantizationType(kind)
        except ValueError:  # newer than the library; an error only for who asks for it
            info = TensorInfo(f"GGML type {kind}", shape, self._file, data + offset, 0)
        else:
            elements, size = GGML_QUANT_SIZES[type_]
            if shape and shape[-1] % elements:
                what = f"a row of {shape[-1]} is no multiple of {type_.name}'s block of {elements}"
                self._refuse(f"tensor {name!r}: {what}")
            info = TensorInfo(type_.name, shape, self._file, data + offset, prod(shape) // elements * size)
        if info.offset + info.size > self._size:
            self._refuse(
                f"truncated: {self._size} bytes, but its header puts tensor {name!r} at bytes "
                f"{info.offset} to {info.offset + info.size}"
            )
        return info

    def _check_overlaps(self, tensors: dict[str, TensorInfo]) -> None:
        end, before = 0, ""
        for name, info in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].size)):
            if info.offset < end:
                self._refuse(f"tensor {name!r} overlaps {before!r}: it begins at {info.offset}, not at or after {end}")
            end, before = info.offset + info.size, name

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(self._scalar_format(kind))
        of, count = self._scalar("I"), self._scalar("Q")
        if of == _STRING:
            return [self._string() for _ in range(count)]
        if of == _ARRAY:
            self._refuse(f"{self._where}: an array of arrays is not supported")
        form = self._scalar_format(of)
        return list(struct.unpack(f"<{count}{form}", self._take(count * struct.calcsize(form))))

    def _scalar_format(self, kind: int) -> str:
        form = _SCALARS.get(kind)
        return form or self._refuse(f"{self._where}: there is no value type {kind}")

    def _scalar(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}")))[0]

    def _string(self) -> str:
        raw = self._take(self._scalar("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            self._refuse(f"{self._where}: text that is not UTF-8: {error}")

    def _take(self, count: int) -> bytes:
        if self._absent > self._left - count >= 0:
            raise _GoesOn
        raw = self._stream.read(count) if count <= self._left else b""
        if len(raw) < count:
            self._refuse(f"truncated or damaged: {self._size} bytes, and {self._where} would end beyond them")
        self._left -= count
        return raw

    def _refuse(self, reason: str) -> NoReturn:
        raise CheckpointError(f"{self._file}: {reason}")
