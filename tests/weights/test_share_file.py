"""Share files: what is in them, and that they appear whole or not at all."""

import errno
import json
import os
import shutil
import tracemalloc
from collections import namedtuple
from collections.abc import Mapping
from contextlib import nullcontext
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from motley.daemon.weights import share_file as module
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.safetensors_checkpoint import SafetensorsCheckpoint
from motley.daemon.weights.quantise import quantise
from motley.daemon.weights.share_file import ShareFileError, write_share
from motley.daemon.weights.spec import Encoding, Piece, Placed, Weight, lay_out

F16 = npt.NDArray[np.float16]
DTYPES = {"float16": "F16", "float32": "F32"}


def save(folder: Path, tensors: Mapping[str, npt.NDArray[Any]]) -> SafetensorsCheckpoint:
    header: dict[str, Any] = {}
    end = 0
    for name, values in tensors.items():
        header[name] = {
            "dtype": DTYPES[values.dtype.name],
            "shape": values.shape,
            "data_offsets": [end, end + values.nbytes],
        }
        end += values.nbytes
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in tensors.values():
            file.write(values.tobytes())
    return SafetensorsCheckpoint(folder)


@pytest.fixture
def tensors() -> dict[str, F16]:
    random = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"q": (48, 64), "k": (16, 64), "down": (40, 96), "norm": (64,)}
    return {name: random.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}


@pytest.fixture
def checkpoint(tmp_path: Path, tensors: dict[str, F16]) -> Any:
    with save(tmp_path, tensors) as opened:
        yield opened


def weights(encoding: Encoding) -> list[Weight]:
    block = 0 if encoding.float_bytes else 32
    stacked = (Piece("q", range(16, 48), range(64)), Piece("k", range(8, 16), range(64)))
    return [
        Weight("qk", stacked, encoding, block),
        Weight("down", (Piece("down", range(40), range(32, 96)),), encoding, block),
        Weight("none", (Piece("down", range(40, 40), range(32, 96)),), encoding, block),
        Weight("norm", (Piece("norm", range(64)),)),
    ]


def stored(path: Path, item: Placed) -> tuple[bytes, bytes]:
    content = path.read_bytes()
    data, scales = item.data_offset, item.scale_offset
    weight = item.weight
    return content[data : data + weight.data_bytes], content[scales : scales + weight.scale_bytes]


@pytest.mark.parametrize("encoding", list(Encoding))
@pytest.mark.parametrize("chunk", [1, 200, 1 << 17])
def test_every_weight_is_in_its_place(
    checkpoint: SafetensorsCheckpoint,
    tensors: dict[str, F16],
    tmp_path: Path,
    encoding: Encoding,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_CHUNK", chunk)
    placed, total = lay_out(weights(encoding))
    path = tmp_path / "share"
    write_share(checkpoint, placed, total, path)
    assert path.stat().st_size == total
    matrices = {
        "qk": np.concatenate([tensors["q"][16:48], tensors["k"][8:16]]).astype(np.float32),
        "down": np.ascontiguousarray(tensors["down"][:, 32:96]).astype(np.float32),
        "none": np.empty((0, 64), np.float32),
    }
    for item in placed:
        name = item.weight.name
        if name == "norm":
            assert stored(path, item)[0] == tensors["norm"].astype(np.float32).tobytes()
        elif encoding.float_bytes:
            assert stored(path, item)[0] == matrices[name].astype(f"<f{encoding.float_bytes}").tobytes()
        else:
            codes, scales = quantise(matrices[name], 32, encoding)
            assert stored(path, item) == (codes.tobytes(), scales.tobytes())


def test_progress_counts_up_to_all_bytes(
    checkpoint: SafetensorsCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK", 256)
    monkeypatch.setattr(module, "_REPORT", 500)
    placed, total = lay_out(weights(Encoding.INT4))
    seen: list[tuple[int, int]] = []
    write_share(checkpoint, placed, total, tmp_path / "share", lambda done, whole: seen.append((done, whole)))
    whole = sum(item.weight.data_bytes + item.weight.scale_bytes for item in placed)
    assert len(seen) > 3
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (whole, whole)
    assert {of for _, of in seen} == {whole}


def test_all_problems_are_named_before_anything_is_written(checkpoint: SafetensorsCheckpoint, tmp_path: Path) -> None:
    wrong = [
        Weight("x", (Piece("absent", range(8), range(64)), Piece("also_absent", range(8), range(64)))),
        Weight("y", (Piece("q", range(64), range(64)),)),
    ]
    placed, total = lay_out(weights(Encoding.FP32) + wrong)
    before = set(tmp_path.iterdir())
    with pytest.raises(CheckpointError) as caught:
        write_share(checkpoint, placed, total, tmp_path / "share")
    message = str(caught.value)
    assert "'absent' is absent" in message
    assert "'also_absent' is absent" in message
    assert "'q' has shape [48, 64]; expected to hold [0:64, 0:64]" in message
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("encoding", list(Encoding))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers(tmp_path: Path, tensors: dict[str, F16], encoding: Encoding, bad: float) -> None:
    tensors["down"][7, 50] = bad
    before = set(tmp_path.iterdir())
    with save(tmp_path, tensors) as checkpoint:
        placed, total = lay_out(weights(encoding))
        with pytest.raises(CheckpointError, match="tensor 'down' holds a NaN or an infinity"):
            write_share(checkpoint, placed, total, tmp_path / "share")
    assert {file.name for file in set(tmp_path.iterdir()) - before} == {"model.safetensors"}


def test_weights_that_are_too_large_for_fp16(tmp_path: Path) -> None:
    values = np.array([[1, -65504], [65504, -7e4]], np.float32)
    with save(tmp_path, {"down": values}) as checkpoint:
        for columns, fits in ((range(1), True), (range(1, 2), False)):
            placed, total = lay_out([Weight("w", (Piece("down", range(2), columns),), Encoding.FP16)])
            with (
                nullcontext()
                if fits
                else pytest.raises(CheckpointError, match="'down' holds 70000, and fp16 ends at 65504")
            ):
                write_share(checkpoint, placed, total, tmp_path / "share")


def test_too_little_space_is_noticed_first(
    checkpoint: SafetensorsCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**9, 10**9 - 10**7, 10**7))
    placed, _ = lay_out(weights(Encoding.INT4))
    before = set(tmp_path.iterdir())
    with pytest.raises(
        ShareFileError,
        match=r"need 30\.00 MB of disk, of which 10\.00 MB is free; make room for 20\.00 MB there, or give",
    ) as caught:
        write_share(checkpoint, placed, 3 * 10**7, tmp_path / "share")
    assert str(tmp_path) in str(caught.value)
    assert set(tmp_path.iterdir()) == before


def test_a_disk_that_fills_up_leaves_the_old_file(
    checkpoint: SafetensorsCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Filling(FileIO):
        def write(self, data: Any) -> int:
            if self.tell() > 5000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(data)

    path = tmp_path / "share"
    path.write_bytes(b"old")
    before = set(tmp_path.iterdir())
    monkeypatch.setattr(module, "FileIO", Filling)
    placed, total = lay_out(weights(Encoding.FP32))
    with pytest.raises(ShareFileError, match=os.strerror(errno.ENOSPC)):
        write_share(checkpoint, placed, total, path)
    assert path.read_bytes() == b"old"
    assert set(tmp_path.iterdir()) == before


def test_an_interruption_leaves_nothing(
    checkpoint: SafetensorsCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_REPORT", 1)
    placed, total = lay_out(weights(Encoding.INT8))
    before = set(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        write_share(checkpoint, placed, total, tmp_path / "share", interrupt)
    assert set(tmp_path.iterdir()) == before


def test_a_folder_that_is_not_there(checkpoint: SafetensorsCheckpoint, tmp_path: Path) -> None:
    placed, total = lay_out(weights(Encoding.INT8))
    with pytest.raises(ShareFileError, match="cannot write this rank's weights"):
        write_share(checkpoint, placed, total, tmp_path / "absent" / "share")


@pytest.mark.parametrize("encoding", [Encoding.FP32, Encoding.INT4])
def test_memory_does_not_grow_with_the_weight(tmp_path: Path, encoding: Encoding) -> None:
    shape = (16384, 1024)  # 67 MB in float32
    with save(tmp_path, {"head": np.ones(shape, np.float16)}) as checkpoint:
        block = 0 if encoding is Encoding.FP32 else 32
        placed, total = lay_out([Weight("head", (Piece("head", range(16384), range(1024)),), encoding, block)])
        tracemalloc.start()
        write_share(checkpoint, placed, total, tmp_path / "share")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 8 << 20
