"""GGUF headers: what the ``gguf`` package writes and reads, and every kind of damage as one kind of error."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.gguf.header import read_header
from tests.weights.pointers import LFS_POINTER

METADATA: dict[str, Any] = {
    "text": "größer",
    "yes": True,
    "words": ["a", "", "▁c"],
    "counts": [1, 2, 3],
    "scores": [0.5, -1.0],
    "number": 7,
    "ratio": 0.25,
}


def write(file: Path, adapt: Callable[[gguf.GGUFWriter], None] | None = None) -> Path:
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_string("x.text", METADATA["text"])
    writer.add_bool("x.yes", True)
    for name in ("words", "counts", "scores"):
        writer.add_array(f"x.{name}", METADATA[name])
    writer.add_uint64("x.number", 7)
    writer.add_float64("x.ratio", 0.25)
    writer.add_tensor("vector", random.standard_normal(5).astype(np.float32))
    writer.add_tensor("matrix", random.standard_normal((3, 4)).astype(np.float16))
    packed = gguf.quants.quantize(random.standard_normal((2, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    if adapt:
        adapt(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("alignment", [32, 256])
def test_all_that_the_package_writes(alignment: int, tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", lambda writer: writer.add_custom_alignment(alignment))
    header = read_header(file)
    for name, value in METADATA.items():
        found = header.metadata[f"x.{name}"]
        assert found == pytest.approx(value) if isinstance(value, float) else found == value, name
    reader = gguf.GGUFReader(file)
    for tensor in reader.tensors:
        info = header.tensors[tensor.name]
        assert info.dtype == tensor.tensor_type.name
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.offset, info.size) == (tensor.data_offset, tensor.n_bytes)
    assert header.data == reader.data_offset
    assert header.size == file.stat().st_size


HEADER = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
ENTRY = b"GGUF" + struct.pack("<IQQ", 3, 1, 0)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


DAMAGE: dict[str, tuple[bytes, str]] = {
    "an empty file": (b"", "does not begin with 'GGUF'"),
    "another format": (b"PK\3\4" + bytes(100), "not a GGUF file"),
    "the first version": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version 1 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian is not supported"),
    "no counts": (b"GGUF" + struct.pack("<I", 3), "its header would end beyond them"),
    "an endless key": (HEADER + struct.pack("<Q", 1 << 62), "metadata key 1 of 1 would end beyond"),
    "an endless list": (HEADER + text(b"k") + struct.pack("<IIQ", 9, 4, 1 << 61), "value of 'k' would end beyond"),
    "an endless list of texts": (HEADER + text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 61), "would end beyond"),
    "no text": (HEADER + text(b"\xff"), "text that is not UTF-8"),
    "a type of value": (HEADER + text(b"k") + struct.pack("<I", 77), "value of 'k': there is no value type 77"),
    "lists of lists": (HEADER + text(b"k") + struct.pack("<IIQ", 9, 9, 1), "array of arrays is not supported"),
    "alignment": (HEADER + text(b"general.alignment") + struct.pack("<II", 4, 24), "should be a power of two"),
    "dimensions": (ENTRY + text(b"t") + struct.pack("<I", 1 << 30), "tensor 't' has 1073741824 dimensions"),
    "a part of a block": (ENTRY + text(b"t") + struct.pack("<IQIQ", 1, 33, 8, 0), "no multiple of Q8_0's block of 32"),
    "no data": (ENTRY + text(b"t") + struct.pack("<IQIQ", 1, 8, 0, 0), "truncated: .*tensor 't' at bytes 64 to 96"),
    "a newer type beyond all": (ENTRY + text(b"t") + struct.pack("<IQIQ", 1, 8, 250, 1 << 63), "truncated"),
    "a shape beyond all": (ENTRY + text(b"t") + struct.pack("<IQQIQ", 2, 1 << 63, 1 << 63, 0, 0), "truncated"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(kind: str, tmp_path: Path) -> None:
    raw, complaint = DAMAGE[kind]
    (tmp_path / "m.gguf").write_bytes(raw)
    with pytest.raises(CheckpointError, match=f"m.gguf: .*{complaint}"):
        read_header(tmp_path / "m.gguf")


def test_tensors_and_keys_that_are_there_twice_or_overlap(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    key = text(b"k") + struct.pack("<IB", 0, 1)
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + key + key)
    with pytest.raises(CheckpointError, match="metadata key 'k' is there twice"):
        read_header(file)
    one = struct.pack("<IQI", 1, 8, 0)
    two_tensors = b"GGUF" + struct.pack("<IQQ", 3, 2, 0)
    file.write_bytes(two_tensors + (text(b"t") + one + bytes(8)) * 2 + bytes(200))
    with pytest.raises(CheckpointError, match="tensor 't' is there twice"):
        read_header(file)
    file.write_bytes(two_tensors + text(b"t") + one + bytes(8) + text(b"u") + one + struct.pack("<Q", 16) + bytes(200))
    with pytest.raises(CheckpointError, match="tensor 'u' overlaps 't'"):
        read_header(file)
    with pytest.raises(CheckpointError, match=r"absent\.gguf: cannot be read: No such file"):
        read_header(tmp_path / "absent.gguf")


def test_a_type_that_is_newer_than_the_library_stands_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(ENTRY + text(b"t") + struct.pack("<IQIQ", 1, 8, 250, 0) + bytes(64))
    assert read_header(tmp_path / "m.gguf").tensors["t"].dtype == "GGML type 250"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "whole.gguf")


@given(data=st.data())
def test_any_damage_is_an_error_of_this_kind_or_none(data: st.DataObject, whole: Path) -> None:
    raw = bytearray(whole.read_bytes())
    damaged = whole.with_name("damaged.gguf")
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    damaged.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    with contextlib.suppress(CheckpointError):
        header = read_header(damaged)
        assert all(info.offset + info.size <= header.size for info in header.tensors.values())


@given(left=st.integers(0, 10_000))
def test_a_file_that_is_cut_short_is_refused(left: int, whole: Path) -> None:
    raw = whole.read_bytes()
    info = read_header(whole).tensors["packed"]  # the last; padding follows
    short = whole.with_name("short.gguf")
    short.write_bytes(raw[: left % (info.offset + info.size)])
    with pytest.raises(CheckpointError, match=r"truncated|not a GGUF file"):
        read_header(short)


def test_a_file_that_git_has_not_fetched_says_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(LFS_POINTER)
    with pytest.raises(CheckpointError, match=rf"m\.gguf: a Git-LFS pointer.*run `git lfs pull` in {tmp_path}"):
        read_header(file)
