"""The GPU engine without a GPU: its kernels compile, and compute transformers' logits when compiled for the host.

The file is long: every test opens the engine on the host's stand-in for a GPU, by the functions at the top.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from onnx import TensorProto

from motley.daemon.models.cutting.units import units
from motley.daemon.models.keys import ConfigError
from motley.daemon.rank.gate import Gate, reference_answers
from motley.daemon.worker.failures import failure_of
from motley.plugins.cuda import device_graph, kernels, step
from motley.plugins.cuda import engine as cuda
from motley.plugins.cuda.cublas import Cublas, load_cublas
from motley.plugins.cuda.engine import CudaEngine
from motley.plugins.cuda.kernels import SOURCES, TOKENS
from motley.plugins.engine import (
    F32,
    Collectives,
    EngineError,
    EngineMemoryError,
    EngineOptions,
    RankGraph,
    transport,
)
from motley.plugins.reference.engine import ReferenceEngine
from motley.transport import Communicator, PeerLost
from motley.transport.cuda.compiler import Capability, compile_kernels
from motley.transport.cuda.driver import CudaDriver
from motley.transport.cuda.errors import CudaError
from motley.transport.cuda.host_step import HostStep
from motley.transport.cuda.stream import CudaStream
from tests.models.cases import Case, LocalSession, others_soak, uneven_shares
from tests.models.local_group import LocalGroup
from tests.models.long_text import regret, write_texts
from tests.pairs import pairwise
from tests.plugins.cuda.host_blas import NOT_INITIALIZED, HostBlas, HostGemms
from tests.plugins.known_cases import REFUSED, known_cases, refused_cases
from tests.transport.conftest import run_ranks as run_ranks
from tests.transport.cuda.host_driver import DEVICE as DEVICE_ADDRESSES
from tests.transport.cuda.host_driver import HostDriver
from tests.transport.cuda.host_kernels import launch
from tests.transport.cuda.test_kernels import CAPABILITIES

SOAKED = [pytest.param(between, marks=pytest.mark.soak) for between in CAPABILITIES[1:-1]]
"""All kernels of an engine take seconds to compile: for every commit, the oldest architecture and the newest."""

TOLERANCE = 1e-4
"""Of the largest logit, between ours and transformers' in float64."""


def on_host(graph: RankGraph, collectives: Collectives, options: EngineOptions) -> CudaEngine:
    return CudaEngine(graph, collectives, options, HostDriver(), None)


def session(case: Case, folder: Path, ranks: int, quantisation: str = "fp32") -> LocalSession:
    shares = uneven_shares(units(case.model, quantisation, 32), ranks)
    options = EngineOptions(extra={"host_step": "function"})
    return LocalSession(case.folder, on_host, shares, folder, quantisation, options=options)


def error(got: F32, expected: F32) -> float:
    assert got.shape == expected.shape
    return float(np.abs(got - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("capability", [*CAPABILITIES[:1], *SOAKED, *CAPABILITIES[-1:]], ids=str)
def test_every_architecture_is_compiled_for(capability: Capability) -> None:
    pytest.importorskip("cuda.bindings")
    cubin = compile_kernels(SOURCES, capability)
    for kind in ("fp32", "fp16", "odd_fp16", "int8", "int4"):
        assert all(f".text.matmul_{kind}_{tokens}\0".encode() in cubin for tokens in TOKENS)


@pytest.mark.parametrize(("case", "ranks"), [(known_cases()[0], 1), *((case, 3) for case in known_cases())], ids=str)
def test_transformers_logits_at_any_split(case: Case, ranks: int, tmp_path: Path) -> None:
    """A prompt in chunks and a token on its own; every allocation is given back."""
    with session(case, tmp_path, ranks) as group:
        group.open_slot()
        for start, stop in ((0, 5), (5, 6), (6, 8)):
            got = group.step(case.tokens[start:stop], start)
            assert error(got, case.logits[start:stop]) < TOLERANCE
        group.step(case.tokens[:2], 0, rows=[])
        group.close_slot()
        drivers = [engine._driver for engine in group.engines if isinstance(engine, CudaEngine)]
    assert [driver.live for driver in drivers if isinstance(driver, HostDriver)] == [0] * ranks


@pytest.mark.parametrize("case", refused_cases(), ids=str)
def test_other_models_are_refused_by_name(case: Case, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=f"engine 'cuda' does not know .*{REFUSED[case.folder.name]}"):
        session(case, tmp_path, 1)


@pytest.mark.parametrize("quantisation", ["fp16", "int8", "int4"])
@pytest.mark.parametrize("case", known_cases()[1::4], ids=str)
def test_narrow_weights_against_float64(case: Case, quantisation: str, tmp_path: Path) -> None:
    try:
        shares = uneven_shares(units(case.model, quantisation, 32), 2)
    except ConfigError:
        pytest.skip("this case's widths cannot be quantised")
    float64 = EngineOptions(extra={"dtype": "float64"})
    alone = uneven_shares(units(case.model, quantisation, 32), 1)
    with LocalSession(case.folder, ReferenceEngine, alone, tmp_path / "64", quantisation, options=float64) as group:
        group.open_slot()
        expected = group.step(case.tokens[:6], 0)
    options = EngineOptions(extra={"host_step": "memory"})
    with LocalSession(case.folder, on_host, shares, tmp_path / "gpu", quantisation, options=options) as group:
        group.open_slot()
        assert error(group.step(case.tokens[:5], 0), expected[:5]) < TOLERANCE
        assert error(group.step(case.tokens[5:6], 5), expected[5:]) < TOLERANCE


def test_the_cache_grows_and_skips_without_losing_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motley.plugins.cuda.engine.FIRST_CAPACITY", 4)
    case = known_cases()[0]
    with session(case, tmp_path, 1) as group:
        for slot in (0, 1):
            group.open_slot(slot)
            group.step(case.tokens[:3], 0, slot=slot)
            group.engines[0].skip(slot, 7)
        parts = [group.step(case.tokens[3 + i : 4 + i], 7 + i) for i in range(3)]  # beyond 8 it grows again
        whole = group.step(case.tokens[3:6], 7, slot=1)
        assert error(np.concatenate(parts), whole) < TOLERANCE


@pytest.mark.parametrize(
    ("form", "captures"), [("function", True), ("spinning", True), ("memory", True), ("function", False)]
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_captured_step_is_the_same_step(
    ranks: int, form: str, captures: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every position, as caches grow, with slots that take turns; where nothing can be captured, without a word."""
    monkeypatch.setattr("motley.plugins.cuda.engine.FIRST_CAPACITY", 4)
    case = known_cases()[0]
    shares = uneven_shares(units(case.model, "fp32", 32), ranks)
    drivers = []

    def engine(graph: RankGraph, collectives: Collectives, options: EngineOptions) -> CudaEngine:
        drivers.append(HostDriver(captures=captures))
        return CudaEngine(graph, collectives, options, drivers[-1], None)

    options = EngineOptions(extra={"host_step": form})
    with LocalSession(case.folder, engine, shares, tmp_path, options=options) as group:
        for slot in (0, 1):
            group.open_slot(slot)
            group.step(case.tokens[:2], 0, slot=slot)
        for position in range(2, 11):
            token = case.tokens[position : position + 1]
            for slot in (0, 1):
                assert error(group.step(token, position, slot=slot), case.logits[position : position + 1]) < TOLERANCE
        group.step(case.tokens[11:12], 11, rows=[])
        group.step(case.tokens[12:15], 12)
        assert error(group.step(case.tokens[15:16], 15), case.logits[15:16]) < TOLERANCE
        for each in group.engines:
            assert isinstance(each, CudaEngine)
            assert len(each._graphs) == (captures and form != "memory")
        group.close_slot(1)
    assert [driver.live for driver in drivers] == [0] * ranks


# -- several sequences ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantisation", ["fp32", "int4"])
@pytest.mark.parametrize("captures", [True, False])
def test_company_does_not_show(
    quantisation: str, captures: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waves of all sizes, of sequences that come and go and whose caches grow: the same bits as alone."""
    monkeypatch.setattr(cuda, "FIRST_CAPACITY", 4)
    for module in (cuda, step):
        monkeypatch.setattr(module, "MOST_SEQUENCES", 11)
    case = next(each for each in known_cases() if each.folder.name == "mistral-window")
    shares = uneven_shares(units(case.model, quantisation, 32), 2)

    def engine(graph: RankGraph, collectives: Collectives, options: EngineOptions) -> CudaEngine:
        return CudaEngine(graph, collectives, options, HostDriver(captures=captures), None)

    options = EngineOptions(extra={"host_step": "function"})
    with LocalSession(case.folder, engine, shares, tmp_path, quantisation, options=options) as group:
        assert {engine.most_sequences for engine in group.engines} == {11}
        group.open_slot(99)
        group.step(case.tokens[:1], 0, slot=99, rows=[])
        alone = [group.decode([99], [case.tokens[at]], [at]) for at in range(1, 14)]
        lengths: dict[int, int] = {}
        for round_, wave in enumerate(
            [[0], [1, 0], [2, 1, 0], [0, 2], [3, 0, 1], range(11), range(11), [5, 8], [1, 0]]
        ):
            if round_ == 5:
                group.close_slot(2)
                del lengths[2]
            for slot in set(wave) - set(lengths):
                group.open_slot(slot)
                group.step(case.tokens[:1], 0, slot=slot, rows=[])
                lengths[slot] = 1
            positions = [lengths[slot] for slot in wave]
            got = group.decode(list(wave), [case.tokens[at] for at in positions], positions)
            assert np.array_equal(got, np.concatenate([alone[at - 1] for at in positions]))
            lengths |= {slot: at + 1 for slot, at in zip(wave, positions, strict=True)}
        for each in group.engines:
            assert isinstance(each, CudaEngine)
            counts = {count for _, count, _ in each._graphs}
            assert counts == ({1, 2, 3, 11} if captures else set())
    if quantisation == "fp32":
        assert error(np.concatenate(alone), case.logits[1:14]) < TOLERANCE


def test_graphs_are_not_hoarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "GRAPHS_KEPT", 2)
    case = known_cases()[0]
    with session(case, tmp_path, 1) as group:
        for slot in range(3):
            group.open_slot(slot)
        for position in range(4):
            for count in (1, 2, 3):
                tokens = [case.tokens[position]] * count
                got = group.decode(range(count), tokens, [position] * count)
                assert error(got[:1], case.logits[position : position + 1]) < TOLERANCE
        (engine,) = group.engines
        assert isinstance(engine, CudaEngine)
        assert 1 <= len(engine._graphs) <= 2


@given(
    st.sampled_from(["fp32", "fp16", "odd_fp16", "int8", "int4"]),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 90),
    st.booleans(),
    st.integers(0, 1000),
)
@example("int4", 9, 5, 33, True, 0)  # several words per lane, and a last one that few lanes have
def test_a_product_has_the_same_bits_in_any_company(
    kind: str, tokens: int, outputs: int, runs: int, zeros: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    columns = {"fp16": 2, "odd_fp16": 1, "fp32": 1}.get(kind, 32) * runs
    x = rng.standard_normal((tokens, columns)).astype(np.float32)
    matrix, arguments = weights(rng, kind, outputs, columns, zeros)
    expected = x.astype(np.float64) @ matrix.T.astype(np.float64)
    results = []
    for together in TOKENS:
        y = np.full((tokens, outputs), np.nan, np.float32)
        numbers = [ctypes.c_int(number) for number in (tokens, outputs, columns, 5)]
        warps = -(-outputs // kernels.ROWS) * -(-tokens // together)
        launch(
            SOURCES,
            f"matmul_{kind}_{together}",
            -(-warps * kernels.WARP // kernels.THREADS),
            kernels.THREADS,
            [pointer(x), ctypes.c_int(columns), *arguments, pointer(None), pointer(y), ctypes.c_int(outputs), *numbers],
        )
        results.append(y)
    assert all(result.tobytes() == results[0].tobytes() for result in results)
    scale = np.abs(x).astype(np.float64) @ np.abs(matrix.T).astype(np.float64)
    assert (np.abs(results[0] - expected) <= 1e-6 * scale).all()
    if kind != "fp32":
        widened = np.full((outputs, columns), np.nan, np.float32)
        numbers = [ctypes.c_int(number) for number in (0, outputs, columns, 5)]
        threads = widened.size // kernels.KINDS[CODES[kind]][1] if kind != "odd_fp16" else widened.size
        launch(SOURCES, f"widen_{kind}", -(-threads // 128), 128, [*arguments, pointer(widened), *numbers])
        assert np.array_equal(widened, matrix)


CODES = {"fp16": TensorProto.FLOAT16, "int8": TensorProto.UINT8, "int4": TensorProto.UINT4}


def weights(
    rng: np.random.Generator, kind: str, outputs: int, columns: int, zeros: bool
) -> tuple[F32, list[ctypes.c_void_p]]:
    """A matrix and how a kernel is given it, in blocks of 32 columns."""
    shape = outputs, columns
    if kind.endswith(("fp32", "fp16")):
        floats = rng.standard_normal(shape).astype(np.float32 if kind == "fp32" else np.float16)
        return floats.astype(np.float32), [pointer(floats), pointer(None), pointer(None)]
    most = 255 if kind == "int8" else 15
    blocks = outputs, columns // 32
    codes, scales = rng.integers(0, most + 1, shape), rng.standard_normal(blocks).astype(np.float32)
    points = rng.integers(0, most + 1, blocks) if zeros else np.full(blocks, (most + 1) // 2)
    matrix = (codes - points.repeat(32, 1)) * scales.repeat(32, 1)
    stored, stored_points = (values.astype(np.uint8) for values in (codes, points))
    if kind == "int4":
        stored = stored[:, 0::2] | stored[:, 1::2] << 4
        flat = np.append(stored_points.ravel(), np.zeros(points.size % 2, np.uint8))
        stored_points = flat[0::2] | flat[1::2] << 4
    return matrix.astype(np.float32), [
        pointer(np.ascontiguousarray(stored)),
        pointer(scales),
        pointer(stored_points if zeros else None),
    ]


def pointer(array: np.ndarray[Any, Any] | None) -> ctypes.c_void_p:
    """An argument that keeps its array."""
    argument = ctypes.c_void_p(None if array is None else array.ctypes.data)
    argument.array = array  # type: ignore[attr-defined]
    return argument


@pytest.mark.parametrize("width", [22, 64, 96, 128, 256])
@pytest.mark.parametrize("window", [0, 150])
def test_attention_is_exact_in_parts_and_for_rows_of_any_sequences(width: int, window: int) -> None:
    rng = np.random.default_rng(width)
    heads, kv_heads, scale, positions = 4, 2, 0.2, [0, 127, 128, 400, 699]
    rows, keys, values = len(positions), 3, 3 + kv_heads * width  # what lies before them
    capacities = [512 if at < 500 else 700 for at in positions]
    caches = [rng.standard_normal((values + kv_heads * width) * capacity).astype(np.float32) for capacity in capacities]
    q, y = rng.standard_normal((rows, heads * width)).astype(np.float32), np.zeros((rows, heads * width), np.float32)
    places = np.zeros(rows, kernels.PLACE)
    for row, (at, capacity, cache) in enumerate(zip(positions, capacities, caches, strict=True)):
        places[row] = DEVICE_ADDRESSES + cache.ctypes.data, 0, 0, at, capacity
    results = []
    for most in (6, 64):
        partials = np.full(rows * heads * most * (2 + width), np.nan, np.float32)
        stride, numbers = ctypes.c_int(heads * width), [rows, heads, kv_heads, width]
        before = [ctypes.c_int(keys), ctypes.c_int(values)]
        kernel = f"attend_{next(each for each in kernels.HEADS if width <= each)}"
        given = [pointer(q), stride, pointer(places), *before, pointer(partials), *map(ctypes.c_int, numbers)]
        given += [ctypes.c_float(scale), ctypes.c_int(window), ctypes.c_int(most)]
        launch(SOURCES, kernel, -(-rows * heads * most * kernels.WARP // kernels.THREADS), kernels.THREADS, given)
        sizes = map(ctypes.c_int, (rows, heads, width, window, most))
        given = [pointer(partials), pointer(y), stride, pointer(places), *sizes]
        launch(SOURCES, "combine", -(-rows * heads * width // kernels.THREADS), kernels.THREADS, given)
        results.append(y.copy())
    assert results[0].tobytes() == results[1].tobytes()  # how much room there is for parts does not show
    for row, (at, capacity, cache) in enumerate(zip(positions, capacities, caches, strict=True)):
        key, value = (
            cache[before * capacity :][: kv_heads * capacity * width].reshape(kv_heads, capacity, width).astype(float)
            for before in (keys, values)
        )
        seen = slice(max(0, at + 1 - window) if window else 0, at + 1)
        for head in range(heads):
            part, kv = slice(head * width, (head + 1) * width), head // (heads // kv_heads)
            scores = key[kv, seen] @ q[row, part].astype(float) * scale
            weight = np.exp(scores - scores.max())
            expected = weight @ value[kv, seen] / weight.sum()
            assert np.abs(results[0][row, part] - expected).max() < 2e-5 * np.abs(value[kv, seen]).max()


def test_texts_are_the_same_whatever_the_host_step(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Over sockets, from captured graphs where there can be; and they are what the reference would have written."""
    case = known_cases()[0]
    texts = []
    for form in HostStep:
        options = EngineOptions(extra={"host_step": form})
        write = partial(
            write_texts,
            model=case.folder,
            folder=tmp_path / form,
            factory=on_host,
            options=options,
            sequences=3,
            tokens=12,
        )
        first, second = run_ranks(2, write)
        assert np.array_equal(first, second)
        texts.append(first)
    assert all(np.array_equal(text, texts[0]) for text in texts)
    assert len(np.unique(texts[0])) > 12
    assert regret(case.folder, tmp_path / "reference", texts[0]) < TOLERANCE
    texts[0][-1, -1] ^= 1
    assert regret(case.folder, tmp_path / "wrong", texts[0]) > TOLERANCE


# -- prompts by cuBLAS ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "quantisation", "scratch"),
    others_soak(pairwise(known_cases(), ["fp32", "fp16", "int8", "int4"], [4096, device_graph.SCRATCH_BYTES])),
    ids=str,
)
def test_prompts_by_cublas(
    case: Case, quantisation: str, scratch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices of many parts, or of one; the tokens after the prompt are never its business."""
    try:
        shares = uneven_shares(units(case.model, quantisation, 32), 2)
    except ConfigError:
        pytest.skip("this case's widths cannot be quantised")
    length = min(40, len(case.tokens) - 4)
    float64 = EngineOptions(extra={"dtype": "float64"})
    alone = uneven_shares(units(case.model, quantisation, 32), 1)
    with LocalSession(case.folder, ReferenceEngine, alone, tmp_path / "64", quantisation, options=float64) as group:
        group.open_slot()
        expected = group.step(case.tokens[: length + 2], 0)
    options = EngineOptions(extra={"host_step": "function"})
    monkeypatch.setattr(device_graph, "SCRATCH_BYTES", scratch)
    gemms = HostGemms()
    engine = partial(engine_with, gemms)
    with LocalSession(case.folder, engine, shares, tmp_path / "gpu", quantisation, options=options) as group:
        group.open_slot()
        assert error(group.step(case.tokens[:length], 0), expected[:length]) < TOLERANCE
        products = sum(len(blas.shapes) for blas in gemms)
        assert products
        assert {n for blas in gemms for _, n, _ in blas.shapes} == {length}
        got = [group.step(case.tokens[at : at + 1], at) for at in (length, length + 1)]
        assert error(np.concatenate(got), expected[length:]) < TOLERANCE
        assert sum(len(blas.shapes) for blas in gemms) == products
        drivers = [blas.driver for blas in gemms]
    assert [blas.handles for blas in gemms] == [driver.live for driver in drivers] == [0, 0]


def engine_with(gemms: HostGemms, graph: RankGraph, collectives: Collectives, options: EngineOptions) -> CudaEngine:
    return CudaEngine(graph, collectives, options, HostDriver(), gemms)


def test_without_cublas_prompts_are_computed_all_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = known_cases()[0]

    class Broken(HostGemms):
        def __call__(self, stream: CudaStream) -> Cublas:
            assert isinstance(stream.driver, HostDriver)
            return Cublas(HostBlas(stream.driver, stream.handle, status=NOT_INITIALIZED), 0)

    shares = uneven_shares(units(case.model, "fp32", 32), 1)
    with LocalSession(case.folder, partial(engine_with, Broken()), shares, tmp_path) as group:
        group.open_slot()
        assert error(group.step(case.tokens[:30], 0), case.logits[:30]) < TOLERANCE
    assert "slower than cuBLAS: cublasCreate_v2 failed: the library was not initialized" in caplog.text


def test_cublas_has_the_functions_that_are_called() -> None:
    """If it is installed; that it is not is told. Without a GPU it loads, but gives no handle."""
    try:
        library = load_cublas()
    except CudaError as missing:
        said = str(missing)
    else:
        assert len(library.cublasGemmEx.argtypes) == 19
        assert library.cublasGetStatusString(NOT_INITIALIZED) == b"the library was not initialized"
        try:
            Cublas(library, 0).close()
        except CudaError as error:
            said = str(error)
        else:
            return
    assert re.match(r"cuBLAS is missing \(|cublasCreate_v2 failed: the library was not initialized", said)


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_what_it_cannot_do_is_refused(tmp_path: Path) -> None:
    case = known_cases()[0]
    shares = uneven_shares(units(case.model, "fp32", 32), 1)
    for index, (options, said) in enumerate(
        [
            (EngineOptions(exact=True), "does not know exact=true"),
            (EngineOptions(extra={"tf32": "1"}), "has no option tf32; it has: host_step"),
            (EngineOptions(extra={"host_step": "magic"}), "has no host step 'magic'; it has: function, spinning, mem"),
        ]
    ):
        with pytest.raises(EngineError, match=said):
            LocalSession(case.folder, on_host, shares, tmp_path / str(index), options=options)
    with session(case, tmp_path / "open", 1) as group:
        group.open_slot()
        with pytest.raises(EngineError, match="slot 0 is open already"):
            group.open_slot()
        with pytest.raises(EngineError, match="slot 7 is not open"):
            group.close_slot(7)
        with pytest.raises(EngineError, match="positions 4 to 5 do not fit slot 0: it holds 0 tokens"):
            group.step(case.tokens[:1], 4)
        with pytest.raises(EngineError, match=r"decodes 1 to 16 sequences, each once, not slots \[0, 0\]"):
            group.decode([0, 0], case.tokens[:2], [0, 0])
        with pytest.raises(EngineError, match="slot 3 is not open"):
            group.decode([0, 3], case.tokens[:2], [0, 0])


def test_too_little_memory_says_how_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While loading, and in a step that makes a cache grow; nothing is left, and the rank tells which kind it was."""
    monkeypatch.setattr(cuda, "FIRST_CAPACITY", 8)
    case = known_cases()[0]
    shares = uneven_shares(units(case.model, "fp32", 32), 1)
    drivers: list[HostDriver] = []

    def with_memory(memory: int, graph: RankGraph, collectives: Collectives, options: EngineOptions) -> CudaEngine:
        drivers.append(HostDriver(memory=memory))
        return CudaEngine(graph, collectives, options, drivers[-1], None)

    with pytest.raises(EngineMemoryError, match=r"'cuda': out of memory: \d+ bytes are needed, 1000 of 1000 are free"):
        LocalSession(case.folder, partial(with_memory, 1000), shares, tmp_path / "loading")
    with LocalSession(case.folder, partial(with_memory, 1 << 40), shares, tmp_path / "step") as group:
        group.open_slot()
        group.step(case.tokens[:4], 0)
        group.engines[0].reserve(0, 7)
        drivers[-1].memory = 0
        group.step(case.tokens[:4], 0)
        with pytest.raises(EngineMemoryError, match="failed to make room for 9 tokens of a sequence: out of memory"):
            group.engines[0].reserve(0, 9)
        with pytest.raises(EngineMemoryError, match=r"'cuda' failed in a step: out of memory: \d+ bytes") as caught:
            group.step(case.tokens[4:9], 4)
    assert failure_of(caught.value).code == "out_of_memory"
    assert [driver.live for driver in drivers] == [0, 0]


@pytest.mark.parametrize("form", HostStep)
@pytest.mark.parametrize("captured", [False, True])
def test_a_device_lost_in_a_step_ends_the_rank_and_nobody_hangs(
    run_ranks: Callable[..., list[Any]], form: HostStep, captured: bool, tmp_path: Path
) -> None:
    """Rank 1's device goes while a sum is exchanged. It says so, leaves and frees what it had; rank 0 blames it."""
    case = known_cases()[0]
    shares = uneven_shares(units(case.model, "fp32", 32), 2)
    with LocalSession(case.folder, on_host, shares, tmp_path) as group:
        graphs = group.graphs

    def work(communicator: Communicator) -> Any:
        driver, rank = HostDriver(), communicator.rank
        options = EngineOptions(extra={"host_step": form})
        with closing(CudaEngine(graphs[rank], Losing(communicator, driver), options, driver, None)) as engine:
            engine.open_slot(0)
            row = np.ones((1, graphs[rank].hidden), np.float32)
            try:
                for position in range(2 * captured + 1):
                    if position == 2 * captured and rank == 1:
                        engine._collectives.doomed = True  # type: ignore[attr-defined]
                    engine.step(0, row, position, [0])
            except (EngineError, PeerLost) as error:
                failed = error
            if rank == 1:
                communicator.close()
        return failure_of(failed), driver.live

    (bereaved, left), (told, nothing) = run_ranks(2, work)
    assert (left, nothing) == (0, 0)
    assert (bereaved.code, bereaved.lost_rank) == ("peer_lost", 2)
    assert told.code == "engine_error"
    assert told.message == "engine 'cuda' failed in a step: the device is lost"


class Losing:
    """A communicator with a stand-in's `all_reduce` alone, in which a device can get lost."""

    def __init__(self, communicator: Communicator, driver: HostDriver) -> None:
        self.rank, self.size = communicator.rank, communicator.size
        self._communicator = communicator
        self._driver = driver
        self.doomed = False

    def all_reduce(self, buffer: F32) -> None:
        if self.doomed:
            self._driver.lost = True
            return
        self._communicator.all_reduce(buffer)


def test_without_a_driver_it_says_what_to_do(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.driver")
    try:
        CudaDriver().close()
    except CudaError as error:
        said = str(error)
    else:
        pytest.skip("there is a GPU here")
    case = known_cases()[0]
    shares = uneven_shares(units(case.model, "fp32", 32), 1)
    with pytest.raises(EngineError, match="engine 'cuda': ") as caught:
        LocalSession(case.folder, CudaEngine, shares, tmp_path)
    assert said in str(caught.value)
    assert "use engine 'onnxruntime'" in said


def test_halves_give_what_the_whole_gives(tmp_path: Path) -> None:
    case = known_cases()[0]
    with session(case, tmp_path, 2) as group:
        group.open_slot()
        whole = group.step(case.tokens[:40], 0)
        assert np.array_equal(group.step(case.tokens[:40], 0, halved=True), whole)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_gate_lets_it_through_to_the_transport(ranks: int, tmp_path: Path) -> None:
    with session(known_cases()[0], tmp_path, ranks) as group:
        graph = group.graphs[0]
    expected = reference_answers(graph, 0, ranks, ReferenceEngine)
    gate = Gate(graph, LocalGroup(ranks).member(0))
    with closing(on_host(graph, gate, EngineOptions(extra={"host_step": "function"}))) as engine:
        gate.open(engine, expected)
        assert transport(gate) is not gate
        if ranks == 1:  # of two, the other would have to come
            engine.open_slot(0)
            assert engine.step(0, np.ones((1, graph.hidden), np.float32), 0, [0]).shape == (1, graph.vocabulary)
