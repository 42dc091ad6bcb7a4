"""A mapped share file: weights in place, and none of them in memory twice."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto
from safetensors.numpy import save_file

from motley.daemon.models.cutting.units import units
from motley.daemon.models.description.model import expected_shapes
from motley.daemon.models.reading import read_model
from motley.plugins.engine import CacheBlocks, EngineOptions
from motley.plugins.huge_pages import HUGE_PAGE
from motley.plugins.mapped_share import MappedShare
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from tests.models.cases import LocalSession, whole_share

PAGES = 65536
RUNTIME = 16 << 20
"""Bytes that the runtime may take beside the weights: less than any share that is loaded here."""


def initializer(kind: int, offset: int, *shape: int, size: int) -> TensorProto:
    tensor = TensorProto(name="weight", data_type=kind, dims=shape, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "share.bin"), ("offset", str(offset)), ("length", str(size))):
        tensor.external_data.add(key=key, value=value)
    return tensor


def resident(file: Path) -> int:
    """Bytes of this process's mappings of a file that are in memory."""
    total = 0
    ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            ours = bool(rest) and rest[-1] == str(file)
        elif ours and name == "Rss:":
            total += int(rest[0]) * 1024
    return total


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "share.bin"
    made.write_bytes(np.random.default_rng(0).bytes(4 * PAGES))
    return made


def test_views_are_the_file_s_bytes(file: Path) -> None:
    content = file.read_bytes()
    share = MappedShare(file)
    floats = share.view(initializer(TensorProto.FLOAT, PAGES, 3, 5, size=60))
    assert (floats.dtype, floats.shape) == (np.dtype(np.float32), (3, 5))
    assert floats.tobytes() == content[PAGES : PAGES + 60]
    codes = share.view(initializer(TensorProto.UINT8, 2 * PAGES, 2, 4, 16, size=128))
    assert codes.tobytes() == content[2 * PAGES : 2 * PAGES + 128]
    assert share.view(initializer(TensorProto.FLOAT, 0, 0, 8, size=0)).shape == (0, 8)
    share.close()
    assert floats.tobytes() == content[PAGES : PAGES + 60]  # a view keeps the mapping


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "share.bin").touch()
    share = MappedShare(tmp_path / "share.bin")
    share.forget(initializer(TensorProto.FLOAT, 0, 0, 8, size=0))
    share.close()


def test_what_is_moved_is_where_the_file_s_pages_are_not(file: Path) -> None:
    content = np.random.default_rng(1).bytes(8 * PAGES)
    file.write_bytes(content)
    share = MappedShare(file)
    codes = initializer(TensorProto.UINT8, PAGES, 4, PAGES, size=4 * PAGES)
    scales = initializer(TensorProto.FLOAT, 6 * PAGES, 3, 5, size=60)
    nothing = initializer(TensorProto.FLOAT, 0, 0, 8, size=0)
    share.make_room([codes, scales, nothing])
    moved = share.move(codes)
    assert moved.tobytes() == content[PAGES : 5 * PAGES]
    if sys.platform == "linux":
        assert resident(file) <= 2 * PAGES  # the neighbours of what was read
    scale = share.move(scales)
    assert scale.tobytes() == content[6 * PAGES : 6 * PAGES + 60]
    assert moved.tobytes() == content[PAGES : 5 * PAGES]
    assert share.move(nothing).shape == (0, 8)
    share.close()
    assert moved.tobytes() == content[PAGES : 5 * PAGES]  # a view keeps the memory


def test_what_is_forgotten_comes_back_from_the_file(file: Path) -> None:
    share = MappedShare(file)
    whole = initializer(TensorProto.UINT8, 0, 4 * PAGES, size=4 * PAGES)
    view = share.view(whole)
    assert view.tobytes() == file.read_bytes()
    if sys.platform == "linux":
        assert resident(file) == 4 * PAGES
    share.forget(whole)
    if sys.platform == "linux":
        assert resident(file) == 0
    assert view.tobytes() == file.read_bytes()


def anonymous() -> int:
    """Bytes of this process that are no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_moved_takes_no_more_than_its_size(tmp_path: Path) -> None:
    """An expert of 2.85 MB is no two huge pages."""
    size, count = 2_850_816, 12
    file = tmp_path / "share.bin"
    file.write_bytes(bytes(size))
    codes = initializer(TensorProto.UINT8, 0, size, size=size)
    shares = [MappedShare(file) for _ in range(count)]
    before = anonymous()
    for share in shares:
        share.make_room([codes])
        share.move(codes)
    assert anonymous() - before < count * (size + PAGES)
    for share in shares:
        share.close()


def huge_pages_are_to_be_had() -> bool:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return enabled.exists() and "[never]" not in enabled.read_text()


@pytest.mark.skipif(not huge_pages_are_to_be_had(), reason="the system gives none")
def test_what_is_moved_may_have_huge_pages(tmp_path: Path) -> None:
    """Most systems give none to shared memory."""
    file = tmp_path / "share.bin"
    file.write_bytes(bytes(4 * HUGE_PAGE))
    codes = initializer(TensorProto.UINT8, 0, 4 * HUGE_PAGE, size=4 * HUGE_PAGE)
    share = MappedShare(file)
    share.make_room([codes])
    address = share.move(codes).ctypes.data
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]
    for mapping in mappings:
        first, end = (int(bound, 16) for bound in mapping.split(maxsplit=1)[0].split("-"))
        if first <= address < end:
            assert re.search(r"^THPeligible:\s+1$", mapping, re.MULTILINE), mapping
            break
    else:
        pytest.fail("it lies nowhere")
    share.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("quantisation", ["fp32", "int8", "int4"])
def test_an_engine_holds_its_weights_once(quantisation: str, tmp_path: Path) -> None:
    """Of the share file nothing stays in memory but the vectors, which are read where they are."""
    settings = {
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 8192,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "vocab_size": 512,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    config = read_model(tmp_path)
    random = np.random.default_rng(0)
    weights = {name: random.random(shape, np.float32) for name, shape in expected_shapes(config).items()}
    save_file(weights, tmp_path / "model.safetensors")
    del weights
    share = whole_share(units(config, quantisation, 32))
    few = EngineOptions(max_rows=8)  # buffers of many rows would count or not, by what memory they get
    blocks = CacheBlocks(2, 8)  # those of a usual session would be half of the smallest share
    with LocalSession(
        tmp_path, OnnxRuntimeEngine, [share], tmp_path / "first", quantisation, options=few, blocks=blocks
    ) as first:
        first.step([1, 2, 3], 0)
        before = anonymous()
        with LocalSession(
            tmp_path, OnnxRuntimeEngine, [share], tmp_path / "second", quantisation, options=few, blocks=blocks
        ) as second:
            second.step([1, 2, 3], 0)
            second.step([4], 3)
            (graph,) = second.graphs
            size = graph.share_file.stat().st_size
            stored = [tensor for tensor in graph.proto.graph.initializer if tensor.external_data]
            vectors = [tensor for tensor in stored if len(tensor.dims) == 1]
            # Around a page that is read, the system maps up to 64 KiB of neighbours.
            assert resident(graph.share_file) <= len(vectors) * 2 * PAGES < size / 5
            assert anonymous() - before < size + RUNTIME
