"""The GPU engine without a GPU: its kernels compile, and compute transformers' logits when compiled for the host."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from motley.daemon.gate import Gate, reference_answers
from motley.daemon.models.config import ConfigError
from motley.daemon.models.units import units
from motley.plugins.cuda import SOURCES, CudaEngine
from motley.plugins.cupy import ReferenceEngine
from motley.plugins.engine import F32, Collectives, EngineError, EngineOptions, RankGraph, transport
from motley.transport.cuda.compiler import Capability, compile_kernels
from motley.transport.cuda.driver import CudaDriver
from motley.transport.cuda.errors import CudaError
from tests.models.cases import Case, LocalSession, dense_cases, uneven_shares
from tests.models.local_group import LocalGroup
from tests.transport.cuda.host_driver import HostDriver
from tests.transport.cuda.test_kernels import CAPABILITIES

TOLERANCE = 1e-4
"""Of the largest logit, between ours and transformers' in float64."""


def on_host(graph: RankGraph, collectives: Collectives, options: EngineOptions) -> CudaEngine:
    return CudaEngine(graph, collectives, options, HostDriver())


def session(case: Case, folder: Path, ranks: int, quantisation: str = "fp32") -> LocalSession:
    shares = uneven_shares(units(case.config, quantisation, 32), ranks)
    options = EngineOptions(extra={"host_step": "function"})
    return LocalSession(case.folder, on_host, shares, folder, quantisation, options=options)


def error(got: F32, expected: F32) -> float:
    assert got.shape == expected.shape
    return float(np.abs(got - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_every_architecture_is_compiled_for(capability: Capability) -> None:
    pytest.importorskip("cuda.bindings")
    cubin = compile_kernels(SOURCES, capability)
    assert b".text.matmul_int4_wide_one\0" in cubin


@pytest.mark.parametrize(("case", "ranks"), [(dense_cases()[0], 1), *((case, 3) for case in dense_cases())], ids=str)
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


@pytest.mark.parametrize("quantisation", ["int8", "int4"])
@pytest.mark.parametrize("case", dense_cases()[1::4], ids=str)
def test_quantised_weights_against_float64(case: Case, quantisation: str, tmp_path: Path) -> None:
    try:
        shares = uneven_shares(units(case.config, quantisation, 32), 2)
    except ConfigError:
        pytest.skip("this case's widths cannot be quantised")
    float64 = EngineOptions(extra={"dtype": "float64"})
    alone = uneven_shares(units(case.config, quantisation, 32), 1)
    with LocalSession(case.folder, ReferenceEngine, alone, tmp_path / "64", quantisation, options=float64) as group:
        group.open_slot()
        expected = group.step(case.tokens[:6], 0)
    options = EngineOptions(extra={"host_step": "memory"})
    with LocalSession(case.folder, on_host, shares, tmp_path / "gpu", quantisation, options=options) as group:
        group.open_slot()
        assert error(group.step(case.tokens[:5], 0), expected[:5]) < TOLERANCE
        assert error(group.step(case.tokens[5:6], 5), expected[5:]) < TOLERANCE


def test_the_cache_grows_and_skips_without_losing_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motley.plugins.cuda.FIRST_CAPACITY", 4)
    case = dense_cases()[0]
    with session(case, tmp_path, 1) as group:
        for slot in (0, 1):
            group.open_slot(slot)
            group.step(case.tokens[:3], 0, slot=slot)
            group.engines[0].skip(slot, 7)
        parts = [group.step(case.tokens[3 + i : 4 + i], 7 + i) for i in range(3)]  # beyond 8 it grows again
        whole = group.step(case.tokens[3:6], 7, slot=1)
        assert error(np.concatenate(parts), whole) < TOLERANCE


def test_what_it_cannot_do_is_refused(tmp_path: Path) -> None:
    case = dense_cases()[0]
    shares = uneven_shares(units(case.config, "fp32", 32), 1)
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


def test_without_a_driver_it_says_what_to_do(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.driver")
    try:
        CudaDriver().close()
    except CudaError as error:
        said = str(error)
    else:
        pytest.skip("there is a GPU here")
    case = dense_cases()[0]
    shares = uneven_shares(units(case.config, "fp32", 32), 1)
    with pytest.raises(EngineError, match="engine 'cuda': ") as caught:
        LocalSession(case.folder, CudaEngine, shares, tmp_path)
    assert said in str(caught.value)
    assert "use engine 'onnxruntime'" in said


def test_halves_give_what_the_whole_gives(tmp_path: Path) -> None:
    case = dense_cases()[0]
    with session(case, tmp_path, 2) as group:
        group.open_slot()
        whole = group.step(case.tokens[:40], 0)
        assert np.array_equal(group.step(case.tokens[:40], 0, halved=True), whole)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_gate_lets_it_through_to_the_transport(ranks: int, tmp_path: Path) -> None:
    with session(dense_cases()[0], tmp_path, ranks) as group:
        graph = group.graphs[0]
    expected = reference_answers(graph, 0, ranks, ReferenceEngine)
    gate = Gate(graph, LocalGroup(ranks).member(0))
    with closing(on_host(graph, gate, EngineOptions(extra={"host_step": "function"}))) as engine:
        gate.open(engine, expected)
        assert transport(gate) is not gate
        if ranks == 1:  # of two, the other would have to come
            engine.open_slot(0)
            assert engine.step(0, np.ones((1, graph.hidden), np.float32), 0, [0]).shape == (1, graph.vocabulary)
