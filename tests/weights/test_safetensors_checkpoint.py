"""Reading checkpoints: right values, right byte ranges, and every kind of damage named."""

import contextlib
import json
import os
import shutil
from io import FileIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.weights.checkpoints import tensor_files as module
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.safetensors_checkpoint import SafetensorsCheckpoint, parse_header
from motley.daemon.weights.spec import Piece
from tests.weights.pointers import LFS_POINTER

DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}


def save(file: Path, tensors: dict[str, np.ndarray[Any, Any]], edit: Any = None, trailing: bytes = b"") -> None:
    """Write a safetensors file; `edit` may change the header's entries, `trailing` follows the data."""
    names = {dtype: name for name, dtype in DTYPES.items()} | {np.dtype(np.int64): "I64"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, values in tensors.items():
        offsets = [end, end := end + values.nbytes]
        header[name] = {"dtype": names[values.dtype], "shape": list(values.shape), "data_offsets": offsets}
    if edit:
        edit(header)
    text = json.dumps(header).encode()
    data = b"".join(values.tobytes() for values in tensors.values())
    file.write_bytes(len(text).to_bytes(8, "little") + text + data + trailing)


@pytest.fixture
def tensors() -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(0)
    return {
        "a": random.standard_normal((6, 8)).astype(np.float16),
        "b": random.standard_normal((5, 4)).astype(ml_dtypes.bfloat16),
        "c": random.standard_normal(7).astype(np.float32),
        "ids": np.arange(3),
    }


@pytest.fixture
def folder(tmp_path: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> Path:
    save(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_a_stamp_is_of_the_files_that_are_read(
    folder: Path, tmp_path: Path, tensors: dict[str, np.ndarray[Any, Any]]
) -> None:
    file = folder / "model.safetensors"
    with SafetensorsCheckpoint(folder) as checkpoint:
        stamp = checkpoint.stamp()
        os.utime(file, (1e9, 1e9))
        edited = checkpoint.stamp()
        assert edited != stamp
        with contextlib.suppress(PermissionError):  # Windows: it cannot be replaced at all
            save(tmp_path / "other", {"a": tensors["a"]})
            (tmp_path / "other").replace(file)
        assert checkpoint.stamp() == edited


def shard(folder: Path, shards: dict[str, dict[str, np.ndarray[Any, Any]]]) -> None:
    (folder / "model.safetensors").unlink(missing_ok=True)
    for name, tensors in shards.items():
        save(folder / name, tensors)
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_agrees_with_the_reference_implementation(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    values = np.arange(12, dtype=np.float16).reshape(3, 4)
    safetensors.save_file({"x": values, "y": values[0]}, tmp_path / "model.safetensors")
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read(Piece("x", range(3), range(4))), values)
        np.testing.assert_array_equal(checkpoint.read(Piece("y", range(1, 4))), values[0, 1:])


@given(data=st.data(), dtype=st.sampled_from(sorted(DTYPES)), scratch=st.sampled_from([1, 24, 1 << 20]))
def test_any_piece_of_any_dtype(
    data: st.DataObject, dtype: str, scratch: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("piece")
    whole = np.random.default_rng(1).standard_normal((9, 6)).astype(DTYPES[dtype])
    save(folder / "model.safetensors", {"before": whole, "x": whole})
    top, left = data.draw(st.integers(0, 9)), data.draw(st.integers(0, 6))
    rows = range(top, data.draw(st.integers(top, 9)))
    columns = range(left, data.draw(st.integers(left, 6)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SCRATCH", scratch)  # so that small pieces, too, are read in several goes
        with SafetensorsCheckpoint(folder) as checkpoint:
            values = checkpoint.read(Piece("x", rows, columns))
    assert values.dtype == np.float32
    expected = whole[rows.start : rows.stop, columns.start : columns.stop].astype(np.float32)
    np.testing.assert_array_equal(values, expected)
    shutil.rmtree(folder)


def test_reads_the_bytes_of_the_piece_and_short_gaps_between_them(
    folder: Path, tensors: dict[str, np.ndarray[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges: list[tuple[int, int]] = []

    class Recording(FileIO):
        def readinto(self, buffer: Any) -> int:
            start = self.tell()
            count = super().readinto(buffer)
            assert count is not None
            ranges.append((start, start + count))
            return count

    monkeypatch.setattr(module, "FileIO", Recording)
    with SafetensorsCheckpoint(folder) as checkpoint:
        data = checkpoint.tensor("a").offset
        assert ranges == [(0, 8), (8, data)], "opening reads the header and nothing else"
        ranges.clear()
        checkpoint.read(Piece("a", range(2, 5), range(8)))
        assert ranges == [(data + 2 * 16, data + 5 * 16)]
        ranges.clear()
        checkpoint.read(Piece("a", range(2, 4), range(3, 5)))
        assert ranges == [(data + 2 * 16 + 6, data + 3 * 16 + 10)], "a short gap costs less than another call"
        ranges.clear()
        monkeypatch.setattr(module, "_GAP", 11)
        checkpoint.read(Piece("a", range(2, 4), range(3, 5)))
        assert ranges == [(data + 2 * 16 + 6, data + 2 * 16 + 10), (data + 3 * 16 + 6, data + 3 * 16 + 10)]
        ranges.clear()
        checkpoint.rows("a", [4])
        assert ranges == [(data + 4 * 16, data + 5 * 16)]


def test_rows_are_looked_up_in_order(folder: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    with SafetensorsCheckpoint(folder) as checkpoint:
        for name in ("a", "b"):
            rows = checkpoint.rows(name, [3, 0, 3])
            assert rows.dtype == np.float32
            assert rows.flags.writeable
            np.testing.assert_array_equal(rows, tensors[name][[3, 0, 3]].astype(np.float32))
        assert checkpoint.rows("a", []).shape == (0, 8)
        for outside in (6, -1):
            with pytest.raises(IndexError, match=f"{outside} is not a row of 'a', which has 6"):
                checkpoint.rows("a", [0, outside])
        with pytest.raises(CheckpointError, match=r"'c' has shape \[7\]; expected a matrix"):
            checkpoint.rows("c", [0])


def test_shards_read_as_one(folder: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    shard(folder, {"model-1.safetensors": {"a": tensors["a"]}, "model-2.safetensors": {"b": tensors["b"]}})
    with SafetensorsCheckpoint(folder) as checkpoint:
        assert "a" in checkpoint
        assert "c" not in checkpoint
        for name in ("a", "b"):
            rows, columns = tensors[name].shape
            values = checkpoint.read(Piece(name, range(rows), range(columns)))
            np.testing.assert_array_equal(values, tensors[name].astype(np.float32))


@pytest.mark.parametrize(
    ("piece", "complaint"),
    [
        (Piece("absent", range(1), range(1)), "'absent' is absent"),
        (Piece("ids", range(1)), "'ids' has dtype I64; expected one of F32, F16, BF16"),
        (Piece("a", range(7), range(8)), r"'a' has shape \[6, 8\]; expected to hold \[0:7, 0:8\]"),
        (Piece("a", range(6), range(1, 9)), r"'a' has shape \[6, 8\]; expected to hold \[0:6, 1:9\]"),
        (Piece("a", range(6)), r"'a' has shape \[6, 8\]; expected to hold \[0:6\]"),
        (Piece("c", range(7), range(1)), r"'c' has shape \[7\]; expected to hold \[0:7, 0:1\]"),
    ],
)
def test_pieces_that_are_not_there(folder: Path, piece: Piece, complaint: str) -> None:
    with SafetensorsCheckpoint(folder) as checkpoint, pytest.raises(CheckpointError, match=complaint):
        checkpoint.read(piece)


def set_entry(name: str, **values: Any) -> Any:
    return lambda header: header[name].update(values)


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (set_entry("b", data_offsets=[94, 134]), "'b' overlaps 'a'"),
        (set_entry("b", data_offsets=[98, 138]), "'b' leaves a gap after 'a'"),
        (set_entry("a", data_offsets=[96, 0]), "'a': data_offsets should be"),
        (set_entry("a", data_offsets=[-2, 94]), "'a': data_offsets should be"),
        (set_entry("a", data_offsets=[0, 96, 1]), "'a': data_offsets should be"),
        (set_entry("a", shape=[6, 9]), r"'a': F16\[6, 9\] takes 108 bytes, but data_offsets \[0, 96\] give it 96"),
        (set_entry("a", shape=[6, True]), "'a': shape should be"),
        (set_entry("a", shape="6x8"), "'a': shape should be"),
        (set_entry("a", dtype=16), "'a': dtype should be"),
        (set_entry("a", strides=[8, 1]), "'a': its header entry should have"),
        (lambda header: header.update(a=None), "'a': its header entry should have"),
    ],
)
def test_wrong_headers(folder: Path, tensors: dict[str, np.ndarray[Any, Any]], edit: Any, complaint: str) -> None:
    save(folder / "model.safetensors", tensors, edit)
    with pytest.raises(CheckpointError, match=f"model.safetensors: tensor {complaint}"):
        SafetensorsCheckpoint(folder)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "truncated: 0 bytes"),
        (b"1234567", "truncated: 7 bytes"),
        (b"\xff" * 64, "not a safetensors file: its header would be"),
        ((100).to_bytes(8, "little") + b"{}", "truncated: 10 bytes, but its header alone ends at 108"),
        ((4).to_bytes(8, "little") + b"\x00\xffab", "not valid JSON"),
        ((2).to_bytes(8, "little") + b"[]", "not a JSON object"),
        ((17).to_bytes(8, "little") + b'{"a": {}, "a":{}}', r"twice the same name: \['a'\]"),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, "not valid JSON"),
    ],
)
def test_files_that_are_not_safetensors(tmp_path: Path, content: bytes, complaint: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=complaint):
        SafetensorsCheckpoint(tmp_path)


def test_a_file_that_git_has_not_fetched_says_what_to_do(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(LFS_POINTER)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsCheckpoint(folder)
    what = f"{file}: a Git-LFS pointer, not the file itself (4.98 GB): run `git lfs pull` in {folder}"
    assert str(caught.value).startswith(what)


def test_truncated_and_overlong_files(folder: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    file = folder / "model.safetensors"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(CheckpointError, match=rf"truncated: {size - 30} bytes.* describes {size}; tensor 'c'"):
        SafetensorsCheckpoint(folder)
    save(file, tensors, trailing=b"more")
    with pytest.raises(CheckpointError, match=f"{size + 4} bytes, but its header describes only {size}"):
        SafetensorsCheckpoint(folder)


def test_a_file_cut_short_after_opening_is_an_error(folder: Path) -> None:
    with SafetensorsCheckpoint(folder) as checkpoint:
        with (folder / "model.safetensors").open("r+b") as file:
            file.truncate(checkpoint.tensor("a").offset + 40)
        assert checkpoint.rows("a", [1]).shape == (1, 8)
        with pytest.raises(CheckpointError, match="shorter since it was opened"):
            checkpoint.rows("a", [3])


def test_damaged_sets_of_shards(folder: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    shards = {"1.safetensors": {"a": tensors["a"]}, "2.safetensors": {"b": tensors["b"]}}
    shard(folder, shards)
    (folder / "2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"missing weight files .*: 2\.safetensors"):
        SafetensorsCheckpoint(folder)
    save(folder / "2.safetensors", {"x": tensors["b"]})
    with pytest.raises(CheckpointError, match=r"2\.safetensors: tensor 'b' is absent, although"):
        SafetensorsCheckpoint(folder)
    save(folder / "2.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"2\.safetensors: tensor 'a' is in 1\.safetensors too"):
        SafetensorsCheckpoint(folder)


@pytest.mark.parametrize(
    ("index", "complaint"),
    [
        ("{", "not JSON"),
        ("[]", "no 'weight_map'"),
        ('{"weight_map": {}}', "no 'weight_map'"),
        ('{"weight_map": {"a": "../other/model.safetensors"}}', "not the name of a file in this folder"),
        ('{"weight_map": {"a": 3}}', "not the name of a file in this folder"),
    ],
)
def test_wrong_indices(tmp_path: Path, index: str, complaint: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=complaint):
        SafetensorsCheckpoint(tmp_path)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no weights: neither model\.safetensors nor"):
        SafetensorsCheckpoint(tmp_path)


@given(st.binary(max_size=80))
def test_any_header_is_read_or_refused(header: bytes) -> None:
    try:
        tensors = parse_header(Path("f"), header, 8 + len(header))
    except CheckpointError:
        return
    assert all(info.size == 0 for info in tensors.values()), "no data, so only empty tensors can be described"


def test_fingerprint_tells_models_apart(
    folder: Path, tensors: dict[str, np.ndarray[Any, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    def fingerprint(folder: Path) -> str:
        with SafetensorsCheckpoint(folder) as checkpoint:
            return checkpoint.fingerprint()

    original = fingerprint(folder)
    copy = tmp_path_factory.mktemp("copy")
    for file in folder.iterdir():
        shutil.copy(file, copy)
    assert fingerprint(copy) == original

    (copy / "config.json").write_text('{"rope_theta": 1}')
    assert fingerprint(copy) != original

    (copy / "config.json").write_text("{}")
    save(copy / "model.safetensors", tensors | {"a": tensors["a"] + np.float16(1)})
    assert fingerprint(copy) != original, "same shapes, other weights"
    save(copy / "model.safetensors", tensors | {"a": tensors["a"].reshape(8, 6)})
    assert fingerprint(copy) != original

    (copy / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        fingerprint(copy)
