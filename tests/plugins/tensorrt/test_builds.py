"""Engines really built by TensorRT for RTX, which needs no GPU for it: their layers, borders and sizes; kept plans.

For every commit, one rank of every golden model is built in one form, and one model in all of them; ``make soak``
builds every rank of every model in every form at 1, 2 and 3 ranks, in minutes.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto
from safetensors.numpy import save_file

from motley.daemon.models.cutting.units import units
from motley.daemon.models.description.model import expected_shapes
from motley.daemon.models.keys import ConfigError
from motley.daemon.models.reading import read_model
from motley.plugins.engine import EngineError, RankGraph
from motley.plugins.mapped_share import MappedShare
from motley.plugins.reference.engine import ReferenceEngine
from motley.plugins.tensorrt.builds import Capability, Library, PlanFolder, build, open_library
from motley.plugins.tensorrt.lowering import Part, lower, segments, whole
from tests.models.cases import Case, LocalSession, uneven_shares, whole_share
from tests.plugins.known_cases import known_cases
from tests.plugins.tensorrt.test_lowering import FORMS

pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed: pip install motley-mesh[tensorrt]")

ADA: Capability = (8, 9)
ROWS = 8
CASES = known_cases()
CODES = {"fp32": "Float", "fp16": "Half", "int8": "Int4", "int4": "Int4"}
TYPES = {TensorProto.FLOAT: "Float", TensorProto.INT64: "Int64"}
BYTES = {TensorProto.INT4: 0.5, TensorProto.FLOAT16: 2, TensorProto.FLOAT: 4, TensorProto.INT64: 8}
REST = 30_000
"""Bytes of weights beside the declared ones: alignment, and literals of its own."""

EVERY_BUILD = [(case, form, ranks) for case in CASES for form in FORMS for ranks in (1, 2, 3)]
BUILDS = [(case, FORMS[index % 4], 1 + index % 3, index // 3 % (1 + index % 3)) for index, case in enumerate(CASES)]
BUILDS += [(CASES[-2], form, 3, index % 3) for index, form in enumerate(FORMS)]
"""With the rank that is built."""


@dataclass(frozen=True)
class Layer:
    name: str
    kind: str
    constants: list[str]
    """Types of the constants that it reads."""
    profile: int


@dataclass(frozen=True)
class Built:
    plan: bytes
    layers: list[Layer]
    bindings: dict[str, tuple[str, str, list[tuple[str, str]]]]
    """Input or output, type, and the smallest and largest shape in each profile, by name."""
    weights: int
    """Bytes."""


@pytest.fixture(scope="module")
def library() -> Library:
    return open_library()


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What the library says while it builds; among it, the layers."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    log, keep = logging.getLogger("motley.plugins.tensorrt.builds"), Keep()
    level = log.level
    log.addHandler(keep)
    log.propagate = False
    log.setLevel(logging.DEBUG)
    yield lines
    log.removeHandler(keep)
    log.propagate = True
    log.setLevel(level)


def graphs(case: Case, form: str, ranks: int, folder: Path) -> list[RankGraph]:
    try:
        cut = units(case.model, form, 32)
    except ConfigError:
        pytest.skip("this case's widths cannot be quantised")
    shares = uneven_shares(cut, ranks)
    with LocalSession(case.folder, ReferenceEngine, shares, folder, form) as session:
        return session.graphs


def built(library: Library, part: Part, graph: RankGraph, said: list[str]) -> Built:
    """Build it for two profiles, and read what was said of it; to inspect a plan itself would take a GPU."""
    said.clear()
    share = MappedShare(graph.share_file)
    plan = build(library, part, share, (1, ROWS), ADA)
    share.close()
    (described,) = (line for line in said if line.startswith("Layers:"))
    layers: list[Layer] = []
    bindings: dict[str, tuple[str, str, list[tuple[str, str]]]] = {}
    for line in described.splitlines():
        name = re.search(r"Name: ([^,]+),", line)
        if name and (kind := re.search(r"LayerType: (\w+)", line)):
            constants = re.search(r"Constants: \[(.*?)\], Outputs:", line)
            types = re.findall(r"Datatype: (\w+)", constants[1]) if constants else []
            layers.append(Layer(name[1], kind[1], types, int("_myl1_" in line or name[1].endswith("[profile 1]"))))
        elif name and (mode := re.search(r"IOMode: (\w+), DataType: (\w+)", line)):
            bindings[name[1]] = (mode[1], mode[2], re.findall(r"MinShape: (\[.*?\]), .*?MaxShape: (\[.*?\])", line))
    (weights,) = (int(line.split()[3]) for line in said if line.startswith("Total Weights Memory"))
    return Built(plan, layers, bindings, weights)


def declared(part: Part) -> dict[str, tuple[str, str, list[tuple[str, str]]]]:
    """The bindings that a part is to have; outputs are told without profiles."""
    bindings = {}
    for mode, values in (("Input", part.proto.graph.input), ("Output", part.proto.graph.output)):
        for value in values:
            sizes = value.type.tensor_type.shape.dim
            shapes = [",".join(str(size.dim_value or most) for size in sizes) for most in (1, ROWS)]
            least = ",".join(str(size.dim_value or 1) for size in sizes)
            pairs = [(f"[{least}]", f"[{shape}]") for shape in shapes] if mode == "Input" else []
            bindings[value.name] = (mode, TYPES[value.type.tensor_type.elem_type], pairs)
    return bindings


def size(part: Part) -> float:
    """Bytes of its constants."""
    return sum(prod(constant.shape) * BYTES[constant.kind] for constant in part.constants.values())


def check_whole_build(case: Case, graph: RankGraph, library: Library, said: list[str]) -> None:
    part = whole(lower(graph))
    got = built(library, part, graph, said)
    assert got.bindings == declared(part)
    for profile in (0, 1):
        layers = [layer for layer in got.layers if layer.profile == profile]
        reduced = [layer for layer in layers if layer.kind == "comm_allreduce"]
        assert len(reduced) == 2 * len(case.model.layers)
    assert got.weights < 2 * size(part) + REST  # matrices as small as these may have a layout for each profile
    assert len(got.plan) > got.weights


@pytest.mark.parametrize(
    ("case", "form", "ranks", "rank"),
    [pytest.param(*each, marks=pytest.mark.soak if index % 3 else ()) for index, each in enumerate(BUILDS)],
    ids=str,
)
def test_the_whole_graph_builds(
    case: Case, form: str, ranks: int, rank: int, library: Library, said: list[str], tmp_path: Path
) -> None:
    check_whole_build(case, graphs(case, form, ranks, tmp_path)[rank], library, said)


@pytest.mark.soak
@pytest.mark.parametrize(("case", "form", "ranks"), EVERY_BUILD, ids=str)
def test_the_whole_graph_of_every_rank_builds(
    case: Case, form: str, ranks: int, library: Library, said: list[str], tmp_path: Path
) -> None:
    for graph in graphs(case, form, ranks, tmp_path):
        check_whole_build(case, graph, library, said)


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=pytest.mark.soak if form in ("fp32", "int8") else ()) for form in FORMS]
)
def test_segments_build(form: str, library: Library, said: list[str], tmp_path: Path) -> None:
    for graph in graphs(CASES[-2], form, 2, tmp_path):
        parts = segments(lower(graph))
        assert len(parts) == 2 * len(CASES[-2].model.layers) + 1 + (graph.vocabulary > 0)
        for part in parts:
            if part.proto.graph.output:
                got = built(library, part, graph, said)
                assert got.bindings == declared(part)
                assert not any(layer.kind.startswith("comm_") for layer in got.layers)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer as wide as real ones: its forms are those of real models."""
    settings = {
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 1024,
        "max_position_embeddings": 512,
    }
    folder = tmp_path_factory.mktemp("wide")
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    random = np.random.default_rng(0)
    shapes = expected_shapes(read_model(folder))
    weights = {name: random.normal(0, 0.02, shape).astype(np.float16) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_weights_stay_narrow_up_to_the_multiplication(
    form: str, wide: Path, library: Library, said: list[str], tmp_path: Path
) -> None:
    """No matrix is unpacked to memory: each is a constant, in its narrow type, of the kernel that multiplies."""
    shares = [whole_share(units(read_model(wide), form, 32))]
    with LocalSession(wide, ReferenceEngine, shares, tmp_path, form) as session:
        (graph,) = session.graphs
    part = whole(lower(graph))
    got = built(library, part, graph, said)
    for profile in (0, 1):
        layers = [layer for layer in got.layers if layer.profile == profile]
        multiplied = [layer for layer in layers if CODES[form] in layer.constants and "Fc" in layer.name]
        if form != "fp32":
            assert [layer.kind for layer in multiplied] == ["runtime_fusion"] * 5
    assert any(layer.name.startswith("_gemv_mha") for layer in got.layers)  # decode reads the cache where it lies
    assert got.weights == pytest.approx(size(part), rel=0.01)
    assert len(got.plan) < size(part) + 6_000_000


def test_kept_plans(library: Library, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A plan is built once; one of another version, one that is damaged and one of another graph are not taken."""
    (graph,) = graphs(CASES[0], "fp32", 1, tmp_path)
    share = MappedShare(graph.share_file)
    parts = segments(lower(graph))
    part = parts[0]

    def folder(rows: int = ROWS, target: Capability = ADA) -> PlanFolder:
        return PlanFolder(graph.share_file, library, parts, (1, rows), target)

    first = folder().plan(part, share)
    (file,) = folder().folder.iterdir()
    kept = file.read_bytes()
    assert kept.endswith(first)
    written = file.stat().st_mtime_ns
    assert folder().plan(part, share) == first
    assert file.stat().st_mtime_ns == written

    line, _, plan = kept.partition(b"\n")
    other = json.dumps(json.loads(line) | {"version": "0.9"}).encode()
    for damaged, words in (
        (other + b"\n" + plan, "0.9"),
        (kept[:-100], "crc32"),
        (b"nonsense", "cannot be read"),
        (b"", "cannot be read"),
    ):
        file.write_bytes(damaged)
        caplog.clear()
        again = folder().plan(part, share)
        assert "is built again" in caplog.text
        assert words in caplog.text
        assert file.read_bytes().endswith(again)
        assert list(folder().folder.iterdir()) == [file]
    assert len({folder().folder, folder(rows=4).folder, folder(target=(12, 0)).folder}) == 3
    share.close()


@pytest.mark.skipif(sys.platform == "win32", reason="the limit on a file's size is POSIX's")
def test_a_full_disk_costs_only_the_next_start(
    library: Library, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import resource

    (graph,) = graphs(CASES[0], "fp32", 1, tmp_path)
    share = MappedShare(graph.share_file)
    parts = segments(lower(graph))
    folder = PlanFolder(graph.share_file, library, parts, (1, ROWS), ADA)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # a write beyond it fails, as it does on a full disk
    try:
        plan = folder.plan(parts[0], share)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(plan) > 1000
    assert "cannot be kept, and takes as long to build at the next start" in caplog.text
    assert list(folder.folder.iterdir()) == []
    assert folder.plan(parts[0], share)
    assert len(list(folder.folder.iterdir())) == 1
    share.close()


def test_every_capability_that_is_told_to_work(library: Library, tmp_path: Path) -> None:
    (graph,) = graphs(CASES[-2], "int4", 1, tmp_path)
    share = MappedShare(graph.share_file)
    part = segments(lower(graph))[0]
    for target in ((8, 0), (8, 6), (8, 9), (12, 0), (12, 1)):
        assert build(library, part, share, (1, ROWS), target)
    with pytest.raises(EngineError, match=r"has no int4 for GPUs of compute capability 7\.5"):
        build(library, part, share, (1, ROWS), (7, 5))
    for unknown in ((9, 0), (6, 1)):
        with pytest.raises(EngineError, match=r"capability 7\.5, 8\.0, 8\.6, 8\.9, 12\.0, 12\.1, not \d\.\d; install"):
            build(library, part, share, (1, ROWS), unknown)
    share.close()


def test_turing_takes_fp16(library: Library, tmp_path: Path) -> None:
    (graph,) = graphs(CASES[-2], "fp16", 1, tmp_path)
    share = MappedShare(graph.share_file)
    assert build(library, segments(lower(graph))[0], share, (1, ROWS), (7, 5))
    share.close()


def test_a_refusal_says_what_and_where(library: Library, tmp_path: Path) -> None:
    (graph,) = graphs(CASES[0], "fp32", 1, tmp_path)
    part = segments(lower(graph))[0]
    part.proto.graph.node[0].op_type = "Abacus"
    share = MappedShare(graph.share_file)
    with pytest.raises(EngineError, match=r"tensorrt_rtx .* does not take segment-000: Abacus"):
        build(library, part, share, (1,), ADA)
    share.close()
