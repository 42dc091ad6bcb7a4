"""The GPU engine without a GPU: its kernels compile, and compute transformers' logits when compiled for the host.

The file is long: every test opens the engine on the host's stand-in for a GPU, by the functions at the top.
"""

from __future__ import annotations

import ctypes
import inspect
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from motley.daemon.models.cutting.units import units
from motley.daemon.models.files import open_model
from motley.daemon.models.keys import ConfigError
from motley.daemon.rank.gate import Gate, reference_answers
from motley.daemon.worker.failures import failure_of
from motley.plugins.cuda import device_graph, kernels, step, trial
from motley.plugins.cuda import engine as cuda
from motley.plugins.cuda.cublas import Cublas, load_cublas
from motley.plugins.cuda.device_graph import DeviceGraph
from motley.plugins.cuda.engine import CudaEngine
from motley.plugins.cuda.kernels import TOKENS, Coded
from motley.plugins.cuda.modules import ATTENTION, CODES, FLOATS, MODULES, NODES, TILES, Module, module_of
from motley.plugins.cuda.nodes import attention
from motley.plugins.cuda.rotary import RotaryTables
from motley.plugins.engine import (
    CACHE_FORMATS,
    F32,
    CacheBlocks,
    Collectives,
    EngineError,
    EngineMemoryError,
    EngineOptions,
    RankGraph,
    Span,
    transport,
)
from motley.plugins.known_nodes import rotary_tables
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from motley.plugins.reference.engine import ReferenceEngine
from motley.transport import Communicator, PeerLost
from motley.transport.cuda.compiler import Capability, compile_kernels
from motley.transport.cuda.driver import CudaDriver
from motley.transport.cuda.errors import CudaError
from motley.transport.cuda.host_step import HostStep
from motley.transport.cuda.library import driver_library
from motley.transport.cuda.stream import CudaStream
from tests.models.cases import (
    BLOCKS,
    KINDS,
    TELLING,
    Case,
    LocalSession,
    golden_case,
    golden_cases,
    others_soak,
    staged_shares,
    uneven_shares,
)
from tests.models.local_group import LocalGroup
from tests.models.long_text import regret, write_texts
from tests.models.nearness import TOLERANCE, error, is_near
from tests.pairs import pairwise as every_pair
from tests.plugins.cuda.host_blas import HostBlas, HostGemms
from tests.plugins.cuda.launching import launch_kernel
from tests.plugins.known_cases import known_cases
from tests.plugins.sequences import Sequences
from tests.transport.conftest import run_ranks as run_ranks
from tests.transport.cuda.host_driver import HostDriver
from tests.transport.cuda.test_kernels import CAPABILITIES

NARROW = [*known_cases()[1::4], *map(golden_case, ("ernie4-5-moe", "gemma4-experts", "glm4-moe-lite", "qwen3-next"))]
"""Those that are computed by narrow weights: of all kinds of products, norms and attention."""
OFTEN = (NODES, FLOATS, CODES["int4"], TILES["int4"], ATTENTION["fp16"])
COMPILED = [
    pytest.param(*each, marks=() if each in product(OFTEN, CAPABILITIES[:1]) else pytest.mark.soak)
    for each in product(MODULES, CAPABILITIES)
]
"""All kernels take a minute to compile: for every commit, one of each kind for the oldest architecture."""


def on_host(graph: RankGraph, collectives: Collectives, options: EngineOptions) -> CudaEngine:
    return CudaEngine(graph, collectives, options, HostDriver(), None)


def session(case: Case, folder: Path, ranks: int, quantisation: str = "fp32") -> LocalSession:
    shares = uneven_shares(units(case.model, quantisation, 32), ranks)
    options = EngineOptions(extra={"host_step": "function"})
    return LocalSession(case.folder, on_host, shares, folder, quantisation, options=options)


@pytest.mark.parametrize(
    ("module", "capability"), COMPILED, ids=lambda each: each[-1].stem if isinstance(each[-1], Path) else str(each)
)
def test_every_architecture_is_compiled_for(module: Module, capability: Capability) -> None:
    pytest.importorskip("cuda.bindings")
    cubin = compile_kernels(module, capability)
    floats = ("matmul_odd_fp32", "matmul_fp16", "matmul_odd_fp16")
    names = {f"{kind}_{tokens}" for kind, tokens in product(floats, TOKENS)}
    for coded, tokens, zeros in product(map(Coded, (4, 4, 8), (32, 32, 32), (4, 5, 5)), range(1, 40), (False, True)):
        names |= {coded.product(32, tokens, zeros)[0], coded.quantise(tokens), coded.expert_product(32, 1, zeros)[0]}
        names.add(coded.product(1 << 15, tokens, zeros)[0])
    assert len(names) == 12 + 12 + 19 + 4 + 6
    names |= {"norm_groups", "make_rows", "copy_heads", "keep_best_groups", "adapt_up", "convolve", "keep_rows", "add"}
    names |= {"scan_delta", "scan_delta_by_rows", "decay", "scan_space", "mix", "widen_fp16", "expert_matmul_fp16_1"}
    names |= {f"{each}_{kind}" for each in ("rotate", "attend_64", "attend_row", "combine") for kind in CACHE_FORMATS}
    names |= {
        "choose_positions",
        *(f"{each}_index_{kind}" for each in ("score", "pool", "average") for kind in CACHE_FORMATS),
    }
    own = {each for each in names if module_of(each) == module}
    assert own, "it has what is looked for in it"
    assert all(f".text.{each}\0".encode() in cubin for each in own)


@pytest.mark.parametrize(
    "name", ["deepseek-v32", "glm-moe-dsa-shared", "hy-v4", "minimax-m3", "glm5-next", "qwen4-exp"]
)
def test_rows_see_what_is_chosen(name: str, tmp_path: Path) -> None:
    """A prompt that ends beyond what all rows see, tokens one by one, and the rest."""
    case = golden_case(name)
    with session(case, tmp_path, 2) as group:
        for start, stop in ((0, 40), *((at, at + 1) for at in range(40, 44)), (44, len(case.tokens) - 1)):
            got = group.step(case.tokens[start:stop], start)
            assert error(got, case.logits[start:stop]) < TOLERANCE


def test_scores_of_positions_are_no_more_than_there_are_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of captured steps, which are for rows that might see more: there is no room for others."""
    case, rooms = golden_case("deepseek-v32"), []
    launch = DeviceGraph.launch

    def launched(graph: DeviceGraph, name: str, threads: int, *arguments: Any, **options: Any) -> None:
        if name.startswith("score_index"):
            rooms.append(arguments[-2].value)
        launch(graph, name, threads, *arguments, **options)

    monkeypatch.setattr(DeviceGraph, "launch", launched)
    with session(case, tmp_path, 1) as group:
        engine = group.engines[0]
        assert isinstance(engine, CudaEngine)
        for number in range(4):
            group.step(case.tokens[:40], 0, sequence=number)
        for at in range(40, 44):
            spans = [group.sequences.span(number, at, 1, 1) for number in range(4)]
            got = group.run(spans, [case.tokens[at]] * 4)
            assert error(got, np.repeat(case.logits[at : at + 1], 4, axis=0)) < TOLERANCE
        assert engine._graphs
    assert max(rooms) == case.model.context


@pytest.mark.parametrize(
    ("case", "ranks"),
    [*others_soak(product(golden_cases(), [3]), TELLING | KINDS), *others_soak(product(golden_cases(), [1]))],
    ids=str,
)
def test_transformers_logits_at_any_split(case: Case, ranks: int, tmp_path: Path) -> None:
    """A prompt in chunks and a token on its own; every allocation is given back."""
    with session(case, tmp_path, ranks) as group:
        for start, stop in ((0, 5), (5, 6), (6, 8)):
            got = group.step(case.tokens[start:stop], start)
            assert error(got, case.logits[start:stop]) < TOLERANCE
        assert group.step(case.tokens[:2], 0, wanted=0).shape == (0, case.model.vocabulary)
        drivers = [engine._driver for engine in group.engines if isinstance(engine, CudaEngine)]
    assert [driver.live for driver in drivers if isinstance(driver, HostDriver)] == [0] * ranks


def test_a_sum_in_the_place_of_a_term_is_not_left_to_the_norm_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of threads of one row would read what others have overwritten: the host, where they take turns, does not
    see it."""
    launched, real = Counter[str](), DeviceGraph.launch

    def launch(self: DeviceGraph, kernel: str, threads: int, *arguments: Any, **of_a_block: int) -> None:
        launched[kernel] += 1
        if kernel == "make_rows":
            (source,) = arguments
            assert not source.sum or source.sum not in (source.x, source.other)
        real(self, kernel, threads, *arguments, **of_a_block)

    monkeypatch.setattr(DeviceGraph, "launch", launch)
    for name in ("nemotron-h", "llama-mqa"):  # the residuals of the first have one place
        with session(golden_case(name), tmp_path / name, 1) as group:
            group.step([1, 2], 0)
        assert launched.pop("add", 0) == {"nemotron-h": 3, "llama-mqa": 1}[name]


@pytest.mark.parametrize("case", known_cases()[:2], ids=str)
def test_stages_hand_on_residuals_of_all_rows(case: Case, tmp_path: Path) -> None:
    count = len(case.model.layers)
    shares = staged_shares(units(case.model, "fp32", 32), [(range(1), 2), (range(1, count), 1)])
    options = EngineOptions(extra={"host_step": "function"})
    with LocalSession(case.folder, on_host, shares, tmp_path, options=options) as group:
        for start, stop in ((0, 5), (5, 6), (6, 8)):
            got = group.step(case.tokens[start:stop], start, wanted=1)
            assert error(got, case.logits[stop - 1 : stop]) < TOLERANCE


@pytest.mark.parametrize("quantisation", ["fp16", "int8", "int4"])
@pytest.mark.parametrize("case", NARROW, ids=str)
def test_narrow_weights_against_float64(case: Case, quantisation: str, tmp_path: Path) -> None:
    try:
        shares = uneven_shares(units(case.model, quantisation, 32), 2)
    except ConfigError:
        pytest.skip("this case's widths cannot be quantised")
    float64 = EngineOptions(extra={"dtype": "float64"})
    alone = uneven_shares(units(case.model, quantisation, 32), 1)
    with LocalSession(case.folder, ReferenceEngine, alone, tmp_path / "64", quantisation, options=float64) as group:
        expected = group.step(case.tokens[:6], 0)
    options = EngineOptions(extra={"host_step": "memory"})
    with LocalSession(case.folder, on_host, shares, tmp_path / "gpu", quantisation, options=options) as group:
        assert is_near(group.step(case.tokens[:5], 0), expected[:5], quantisation)
        assert is_near(group.step(case.tokens[5:6], 5), expected[5:], quantisation)


@pytest.mark.parametrize(
    ("name", "quantisation"),
    [("glm-moe-dsa", "int8"), ("qwen3-next", "int8"), ("nemotron-h", "int4"), ("gemma4-experts", "int4")],
)
def test_codes_come_to_what_they_come_to_on_a_processor(name: str, quantisation: str, tmp_path: Path) -> None:
    """Where rounding sends rows to other experts, or stays in states, too: it is the same."""
    case, found = golden_case(name), []
    for factory in (on_host, OnnxRuntimeEngine):
        shares, folder = uneven_shares(units(case.model, quantisation, 32), 2), tmp_path / factory.__name__
        with LocalSession(case.folder, factory, shares, folder, quantisation) as group:
            found.append(np.concatenate([group.step(case.tokens[:9], 0), group.step(case.tokens[9:10], 9)]))
    assert error(*found) < 1e-5


def test_blocks_are_zero_at_first(tmp_path: Path) -> None:
    """A sequence may begin anywhere: what is before has keys and values of zero."""
    case = known_cases()[0]
    got = []
    for factory in (on_host, ReferenceEngine):
        alone = uneven_shares(units(case.model, "fp32", 32), 1)
        with LocalSession(case.folder, factory, alone, tmp_path / factory.__name__) as group:
            got.append(group.step(case.tokens[:3], 20))
    assert error(*got) < TOLERANCE


def test_blocks_in_any_order_give_the_same_bits(tmp_path: Path) -> None:
    case = next(each for each in known_cases() if each.folder.name == "mistral-window")
    with session(case, tmp_path, 2) as group:
        numbers = np.random.default_rng(0).permutation(BLOCKS.count).astype(np.int32)
        results = []
        for blocks in (np.sort(numbers[:6]), numbers[10:16], numbers[20:30]):
            steps = [Span(blocks, 0, 30, 30), *(Span(blocks, at, 1, 1) for at in range(30, 34)), Span(blocks, 34, 9, 2)]
            spans = [(each, case.tokens[each.position : each.position + each.rows]) for each in steps]
            results.append(np.concatenate([group.run([span], tokens) for span, tokens in spans]))
        assert all(np.array_equal(result, results[0]) for result in results)


@pytest.mark.parametrize(
    ("form", "captures"),
    [(None, True), ("function", True), ("spinning", True), ("memory", True), ("split", True), ("function", False)],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_captured_step_is_the_same_step(
    ranks: int, form: str | None, captures: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every position, with sequences that take turns; where nothing can be captured, without a word. Without a form,
    all have been tried before the last step."""
    monkeypatch.setattr(trial, "UNTOLD", 2)
    monkeypatch.setattr(trial, "COUNTED", 1)
    case = known_cases()[0]
    shares = uneven_shares(units(case.model, "fp32", 32), ranks)
    drivers = []

    def engine(graph: RankGraph, collectives: Collectives, options: EngineOptions) -> CudaEngine:
        drivers.append(HostDriver(captures=captures))
        return CudaEngine(graph, collectives, options, drivers[-1], None)

    options = EngineOptions(extra={"host_step": form} if form else {})
    with LocalSession(case.folder, engine, shares, tmp_path, options=options) as group:
        for sequence in (0, 1):
            group.step(case.tokens[:2], 0, sequence=sequence)
        for position in range(2, 11):
            token, expected = case.tokens[position : position + 1], case.logits[position : position + 1]
            for sequence in (0, 1):
                assert error(group.step(token, position, sequence=sequence), expected) < TOLERANCE
        group.step(case.tokens[11:12], 11, wanted=0)
        group.step(case.tokens[12:15], 12)
        assert error(group.step(case.tokens[15:16], 15), case.logits[15:16]) < TOLERANCE
        for each in group.engines:
            assert isinstance(each, CudaEngine)
            assert bool(each._graphs) == captures
            assert set(each._trial.least_s) == set(HostStep if form is None and ranks > 1 else ())
    assert [driver.live for driver in drivers] == [0] * ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_chunk_of_a_prompt_is_captured_once_it_has_come_often(ranks: int, tmp_path: Path) -> None:
    """At other positions then, and of another sequence: the same bits as at first."""
    case = known_cases()[0]
    shares = uneven_shares(units(case.model, "int4", 32), ranks)

    def engine(graph: RankGraph, collectives: Collectives, options: EngineOptions) -> CudaEngine:
        return CudaEngine(graph, collectives, options, HostDriver(captures=True), None)

    options = EngineOptions(extra={"host_step": "function"})
    with LocalSession(case.folder, engine, shares, tmp_path, "int4", options=options) as group:
        told = []
        for sequence in range(cuda.OFTEN + 2):
            rows = [group.step(case.tokens[at : at + 3], at, sequence=sequence, wanted=1) for at in (0, 3, 6)]
            told.append(np.concatenate(rows))
        assert all(np.array_equal(each, told[0]) for each in told)
        for each in group.engines:
            assert isinstance(each, CudaEngine)
            assert [(kind.rows, kind.wanted) for kind, _ in each._graphs] == [(3, (2,))]


# -- several sequences ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantisation", ["fp32", "int4"])
@pytest.mark.parametrize("captures", [True, False])
def test_company_does_not_show(
    quantisation: str, captures: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waves of all sizes, of sequences that come and go: the same bits as alone."""
    monkeypatch.setattr(cuda, "FEW_ROWS", 11)
    monkeypatch.setattr(step, "FEW_ROWS", 11)
    case = next(each for each in known_cases() if each.folder.name == "mistral-window")
    shares = uneven_shares(units(case.model, quantisation, 32), 2)

    def engine(graph: RankGraph, collectives: Collectives, options: EngineOptions) -> CudaEngine:
        return CudaEngine(graph, collectives, options, HostDriver(captures=captures), None)

    options = EngineOptions(extra={"host_step": "function"}, max_rows=20)
    with LocalSession(case.folder, engine, shares, tmp_path, quantisation, options=options) as group:
        assert {engine.most_spans for engine in group.engines} == {20}
        group.step(case.tokens[:1], 0, sequence=99, wanted=0)
        alone = [group.decode([99], [case.tokens[at]], [at]) for at in range(1, 14)]
        lengths: dict[int, int] = {}
        for round_, wave in enumerate(
            [[0], [1, 0], [2, 1, 0], [0, 2], [3, 0, 1], range(11), range(11), [5, 8], [1, 0], range(13)]
        ):
            if round_ == 5:
                group.sequences.close(2)
                del lengths[2]
            for sequence in set(wave) - set(lengths):
                group.step(case.tokens[:1], 0, sequence=sequence, wanted=0)
                lengths[sequence] = 1
            positions = [lengths[sequence] for sequence in wave]
            got = group.decode(list(wave), [case.tokens[at] for at in positions], positions)
            assert np.array_equal(got, np.concatenate([alone[at - 1] for at in positions]))
            lengths |= {sequence: at + 1 for sequence, at in zip(wave, positions, strict=True)}
            if round_ == 8:
                for each in group.engines:
                    assert isinstance(each, CudaEngine)
                    counts = {kind.rows for kind, _ in each._graphs}
                    assert counts == ({1, 2, 3, 11} if captures else set())
    if quantisation == "fp32":
        assert error(np.concatenate(alone), case.logits[1:14]) < TOLERANCE


@pytest.mark.parametrize("quantisation", ["fp16", "int4"])
def test_rows_choose_their_own_experts_in_any_company(quantisation: str, tmp_path: Path) -> None:
    """Step by step, and from a graph in which other experts were chosen when it was captured."""
    case = golden_case("qwen3-moe")
    with session(case, tmp_path, 2, quantisation) as group:
        alone = [group.step(case.tokens[at : at + 1], at, sequence=99) for at in range(9)]
        for sequence in range(3):
            if sequence:
                group.step(case.tokens[:sequence], 0, wanted=0, sequence=sequence)
        for turn in range(6):
            positions = [turn + sequence for sequence in range(3)]
            got = group.decode([0, 1, 2], [case.tokens[at] for at in positions], positions)
            assert np.array_equal(got, np.concatenate([alone[at] for at in positions]))
        assert all(len(engine._graphs) > 1 for engine in group.engines if isinstance(engine, CudaEngine))


def test_a_wave_is_taken_in_halves_as_by_a_rank_on_a_cpu(tmp_path: Path) -> None:
    """Which has a sum for each half, and so must one on a GPU, step by step and from a graph."""
    case = known_cases()[0]
    shares = uneven_shares(units(case.model, "fp32", 32), 2)
    with LocalSession(case.folder, [on_host, ReferenceEngine], shares, tmp_path) as group:
        for position in range(4):
            spans = [group.sequences.span(sequence, position, 1, 1) for sequence in range(5)]
            got = group.run(spans, [case.tokens[position]] * 5, halved=position > 0)
            assert error(got, case.logits[position : position + 1].repeat(5, axis=0)) < TOLERANCE
        (kind,) = [kind for engine in group.engines if isinstance(engine, CudaEngine) for kind, _ in engine._graphs]
        assert (kind.rows, kind.halved) == (5, True)


def test_a_chunk_of_a_prompt_and_decoded_rows_are_one_step(tmp_path: Path) -> None:
    """Each span has the same bits as alone, wherever it stands in the step, which may be taken in halves, and so has
    what follows it."""
    case = next(each for each in known_cases() if each.folder.name == "mistral-window")
    places = {0: (35, 1, 1), 1: (20, 30, 2), 2: (9, 1, 1), 3: (12, 1, 0), 4: (0, 17, 1)}
    """By sequence: the position, the rows of its span, and of how many the logits are wanted."""

    def rows(sequence: int) -> list[int]:
        position, count, _ = places[sequence]
        return case.tokens[position : position + count]

    with session(case, tmp_path, 2) as group:
        results = []
        alone, together = [[0], [1], [2], [3], [4]], [[0, 1, 2, 3, 4]]
        for first, steps, halved in ((0, alone, False), (10, together, False), (20, together, True)):
            for sequence, (position, _, _) in places.items():
                if position:
                    group.step(case.tokens[:position], 0, wanted=0, sequence=first + sequence)
            got = []
            for step_ in steps:
                spans = [group.sequences.span(first + sequence, *places[sequence]) for sequence in step_]
                got.append(group.run(spans, [token for sequence in step_ for token in rows(sequence)], halved))
            for sequence, (position, count, _) in places.items():
                got.append(group.step(case.tokens[:1], position + count, sequence=first + sequence))
            results.append(np.concatenate(got))
        assert results[0].shape == (10, case.model.vocabulary)
        assert np.array_equal(results[0], results[1])
        assert np.array_equal(results[0], results[2])


@pytest.mark.parametrize(("name", "enough"), [("llama-mqa", 512), ("mistral-window", 512), ("llama-mqa", 1)])
def test_rows_that_see_unlike_numbers_of_positions(
    name: str, enough: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So far apart that their attention is cut in unlike numbers of parts, for which there is little room; or blocks
    have all parts of their rows, as `enough` of them keep a GPU busy."""
    monkeypatch.setattr(attention, "DECODED_TOGETHER", 1)
    monkeypatch.setattr(attention, "ENOUGH_BLOCKS", enough)
    case = next(each for each in known_cases() if each.folder.name == name)
    options = EngineOptions(extra={"host_step": "function"}, max_rows=30)
    places = [(700, 1, 1), (500, 17, 3), (0, 5, 1), (130, 2, 1)]
    results = []
    with open_model(case.folder) as opened:
        model = replace(opened, model=case.changed(max_position_embeddings=1024))
        shares = uneven_shares(units(model.model, "fp32", 32), 2)
        for factory, given in ((on_host, options), (ReferenceEngine, EngineOptions())):
            folder, blocks = tmp_path / factory.__name__, CacheBlocks(400, 8)
            with LocalSession(model, factory, shares, folder, options=given, blocks=blocks) as group:
                spans = [group.sequences.span(sequence, *place) for sequence, place in enumerate(places)]
                results.append(group.run(spans, case.tokens[:25]))
                spans = [group.sequences.span(10 + sequence, *place) for sequence, place in enumerate(places)]
                tokens = [case.tokens[:1], case.tokens[1:18], case.tokens[18:23], case.tokens[23:25]]
                results.append(
                    np.concatenate([group.run([span], own) for span, own in zip(spans, tokens, strict=True)])
                )
    together, alone, expected, _ = results
    assert np.array_equal(together, alone)
    assert error(together, expected) < TOLERANCE


def test_a_step_is_captured_anew_where_positions_double(tmp_path: Path) -> None:
    case = known_cases()[0]
    options = EngineOptions(extra={"host_step": "function"}, max_rows=4)
    results = []
    with open_model(case.folder) as opened:
        model = replace(opened, model=case.changed(max_position_embeddings=1024))
        shares = uneven_shares(units(model.model, "fp32", 32), 1)
        for captures in (True, False):

            def engine(graph: RankGraph, collectives: Collectives, options: EngineOptions, can: bool) -> CudaEngine:
                return CudaEngine(graph, collectives, options, HostDriver(captures=can), None)

            folder, factory = tmp_path / str(captures), partial(engine, can=captures)
            with LocalSession(model, factory, shares, folder, options=options, blocks=CacheBlocks(200, 8)) as group:
                positions = [40, 41, 42, *range(253, 260), 510, 511, 512, 513, 1022]
                results.append([group.decode([0, 1], case.tokens[:2], [at, at // 2]) for at in positions])
                (each,) = group.engines
                assert isinstance(each, CudaEngine)
                assert [parts for _, parts in each._graphs] == ([1, 2, 4] if captures else [])
    assert np.array_equal(*results)


# -- rotary tables ----------------------------------------------------------------------------------------------------


def test_two_prompts_with_unlike_rotary_tables_are_one_step(tmp_path: Path) -> None:
    """LongRoPE has other factors for a prompt that is longer than the original context."""
    case = next(each for each in known_cases() if each.folder.name == "phi3")
    factors = {"short_factor": [1 + 0.1 * i for i in range(8)], "long_factor": [2 + 0.5 * i for i in range(8)]}
    stretched = case.changed(rope_scaling={"type": "longrope", **factors}, original_max_position_embeddings=32)
    shares = uneven_shares(units(stretched, "fp32", 32), 2)
    options = EngineOptions(extra={"host_step": "function"})
    results = []
    with open_model(case.folder) as opened:
        model = replace(opened, model=stretched)
        for factory, given in ((ReferenceEngine, EngineOptions()), (on_host, options)):
            with LocalSession(model, factory, shares, tmp_path / factory.__name__, options=given) as group:
                sequences = group.sequences
                long, short = (partial(sequences.span, number) for number in (0, 1))
                got = []
                for position, rows in ((0, 20), (20, 1), (21, 1), (22, 5)):
                    spans = [long(position, rows, 1), short(position, rows, 1)]
                    spans = [spans[0]._replace(prompt=40), spans[1]._replace(prompt=4)]
                    got.append(group.run(spans, case.tokens[position : position + rows] * 2))
                results.append(got)
    for got, expected in zip(*results, strict=True):
        assert error(got, expected) < TOLERANCE
        assert error(got[:1], expected[1:]) > TOLERANCE


def test_few_rotary_tables_are_kept(tmp_path: Path) -> None:
    """Those that were used last, and all that one step has; none is uploaded again meanwhile."""
    with session(known_cases()[0], tmp_path, 1) as group:
        (engine,), (graph,) = group.engines, group.graphs
        assert isinstance(engine, CudaEngine)
        driver = engine._driver
        assert isinstance(driver, HostDriver)
        ((cosines, sines),) = rotary_tables(graph.proto.graph)
        made = {
            prompt: {name: np.full((3, 4), each, np.float32) for name, each in ((cosines, prompt), (sines, -prompt))}
            for prompt in range(9)
        }
        before = driver.live
        tables = RotaryTables(replace(graph, constants=lambda prompt: made[min(prompt, 8)]), engine._on_device)

        def check(prompts: list[int], kept: int) -> list[int]:
            found = tables.of(prompts)
            for prompt, address in zip(prompts, found, strict=True):
                on_device = [driver.floats(address + 4 * tables.firsts[name], 12) for name in (cosines, sines)]
                assert np.array_equal(on_device, [[min(prompt, 8)] * 12, [-min(prompt, 8)] * 12])
            assert driver.live - before == kept
            return found

        first = check([1, 2, 1], 2)
        assert first[0] == first[2]
        check([3], 3)
        check([8, 9, 10], 4)  # the same object
        assert check([2, 1], 4) == [first[1], first[0]]
        check([4, 5], 4)
        assert check([1, 2, 3, 4, 5, 6, 7], 7)[:2] == first[:2]
        check([0], 4)
        tables.close()
        assert driver.live == before


def test_graphs_are_not_hoarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "GRAPHS_KEPT", 2)
    case = known_cases()[0]
    with session(case, tmp_path, 1) as group:
        for position in range(4):
            for count in (1, 2, 3):
                tokens = [case.tokens[position]] * count
                got = group.decode(range(count), tokens, [position] * count)
                assert error(got[:1], case.logits[position : position + 1]) < TOLERANCE
        (engine,) = group.engines
        assert isinstance(engine, CudaEngine)
        assert 1 <= len(engine._graphs) <= 2


@given(
    st.sampled_from(["fp32", "odd_fp32", "fp16", "odd_fp16"]),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 300),
    st.integers(0, 9),
)
@example("fp16", 9, 5, 290, 0)  # several runs per lane, and a last one that few lanes have
def test_a_product_by_floats_has_the_same_bits_in_any_company(
    kind: str, tokens: int, outputs: int, runs: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    columns = {"fp32": 4, "fp16": 8}.get(kind, 1) * runs
    x = rng.standard_normal((tokens, columns)).astype(np.float32)
    matrix, stored = weights(rng, kind, (outputs, columns))
    expected = x.astype(np.float64) @ matrix.T.astype(np.float64)
    results = []
    for together in TOKENS:
        y = np.full((tokens, outputs), np.nan, np.float32)
        numbers = [ctypes.c_int(number) for number in (outputs, tokens, outputs, columns)]
        warps = -(-outputs // kernels.ROWS[together]) * -(-tokens // together)
        given = [pointer(x), ctypes.c_int(columns), stored, pointer(None), pointer(y), *numbers]
        launch_kernel(f"matmul_{kind}_{together}", -(-warps * kernels.WARP // kernels.THREADS), given)
        results.append(y)
    assert all(result.tobytes() == results[0].tobytes() for result in results)
    scale = np.abs(x).astype(np.float64) @ np.abs(matrix.T).astype(np.float64)
    assert (np.abs(results[0] - expected) <= 1e-6 * scale).all()


@given(st.sampled_from([1, 8]), st.integers(1, 5), st.integers(1, 90), st.integers(0, 9))
def test_weights_are_widened_exactly(run: int, outputs: int, runs: int, seed: int) -> None:
    matrix, stored = weights(np.random.default_rng(seed), "fp16", (outputs, run * runs))
    widened = np.full(matrix.shape, np.nan, np.float32)
    numbers = [ctypes.c_int(number) for number in (0, *matrix.shape)]
    kernel, blocks = f"widen_{'odd_' if run == 1 else ''}fp16", -(-outputs * runs // 128)
    launch_kernel(kernel, blocks, [stored, pointer(widened), *numbers])
    assert np.array_equal(widened, matrix)


def weights(rng: np.random.Generator, kind: str, shape: tuple[int, int]) -> tuple[F32, ctypes.c_void_p]:
    """A random matrix, and how a kernel is given it."""
    floats = rng.standard_normal(shape).astype(np.float32 if kind.endswith("fp32") else np.float16)
    return floats.astype(np.float32), pointer(floats)


def pointer(array: np.ndarray[Any, Any] | None) -> ctypes.c_void_p:
    """An argument that keeps its array."""
    argument = ctypes.c_void_p(None if array is None else array.ctypes.data)
    argument.array = array  # type: ignore[attr-defined]
    return argument


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
    others_soak(every_pair(known_cases(), ["fp32", "fp16"], [4096, device_graph.SCRATCH_BYTES])),
    ids=str,
)
def test_prompts_by_cublas(
    case: Case, quantisation: str, scratch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices of many parts, or of one; the tokens after the prompt are never its business."""
    shares = uneven_shares(units(case.model, quantisation, 32), 2)
    length = min(40, len(case.tokens) - 4)
    float64 = EngineOptions(extra={"dtype": "float64"})
    alone = uneven_shares(units(case.model, quantisation, 32), 1)
    with LocalSession(case.folder, ReferenceEngine, alone, tmp_path / "64", quantisation, options=float64) as group:
        expected = group.step(case.tokens[: length + 2], 0)
    options = EngineOptions(extra={"host_step": "function"})
    monkeypatch.setattr(device_graph, "SCRATCH_BYTES", scratch)
    gemms = HostGemms()
    engine = partial(engine_with, gemms)
    with LocalSession(case.folder, engine, shares, tmp_path / "gpu", quantisation, options=options) as group:
        assert is_near(group.step(case.tokens[:length], 0), expected[:length], quantisation)
        products = sum(len(blas.shapes) for blas in gemms)
        assert products
        assert {n for blas in gemms for _, n, _ in blas.shapes} == {length}
        got = [group.step(case.tokens[at : at + 1], at) for at in (length, length + 1)]
        assert is_near(np.concatenate(got), expected[length:], quantisation)
        assert sum(len(blas.shapes) for blas in gemms) == products
        drivers = [blas.driver for blas in gemms]
    assert [blas.handles for blas in gemms] == [driver.live for driver in drivers] == [0, 0]


@pytest.mark.parametrize("quantisation", ["fp16", "int8", "int4"])
def test_a_decoded_row_beside_a_long_chunk_is_what_it_is_alone(quantisation: str, tmp_path: Path) -> None:
    """By codes it has the same bits; by floats, cuBLAS multiplies all rows of such a step."""
    case = next(each for each in known_cases() if each.folder.name == "qwen3")
    gemms = HostGemms()
    shares = uneven_shares(units(case.model, quantisation, 32), 1)
    with LocalSession(case.folder, partial(engine_with, gemms), shares, tmp_path, quantisation) as group:
        for sequence in (0, 1):
            group.step(case.tokens[:5], 0, sequence=sequence)
        alone = group.step(case.tokens[5:6], 5, sequence=0)
        spans = [group.sequences.span(1, 5, 1, 1), group.sequences.span(2, 0, 40, 1)]
        together = group.run(spans, [case.tokens[5], *(case.tokens * 2)[:40]])
    if quantisation == "fp16":
        assert error(together[:1], alone) < 1e-5
    else:
        assert np.array_equal(together[:1], alone)
    assert [bool(blas.shapes) for blas in gemms] == ([True] if quantisation == "fp16" else [])


def engine_with(gemms: HostGemms, graph: RankGraph, collectives: Collectives, options: EngineOptions) -> CudaEngine:
    return CudaEngine(graph, collectives, options, HostDriver(), gemms)


def test_without_cublas_prompts_are_computed_all_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = known_cases()[0]

    class Broken(HostGemms):
        def __call__(self, stream: CudaStream) -> Cublas:
            assert isinstance(stream.driver, HostDriver)
            return Cublas(HostBlas(stream.driver, stream.handle, starts=False), nullcontext())

    shares = uneven_shares(units(case.model, "fp32", 32), 1)
    with LocalSession(case.folder, partial(engine_with, Broken()), shares, tmp_path) as group:
        assert error(group.step(case.tokens[:30], 0), case.logits[:30]) < TOLERANCE
    assert "slower than cuBLAS: cuBLAS does not start: CUBLAS_STATUS_NOT_INITIALIZED" in caplog.text


def test_cublas_is_called_as_cupy_declares_it() -> None:
    library = cublas_or_skip()
    declared = re.match(r"gemmEx\((.*)\)", library.gemmEx.__doc__)
    assert declared
    kinds = [part.split()[0] for part in declared[1].split(", ")]
    matrix = ["size_t", "int", "int"]
    assert kinds == ["intptr_t", *["int"] * 5, "size_t", *matrix, *matrix, "size_t", *matrix, "int", "int"]
    assert len(kinds) == len(inspect.signature(HostBlas.gemmEx).parameters) - 1
    assert [library.create.__doc__, library.destroy.__doc__] == ["create() -> intptr_t", "destroy(intptr_t handle)"]
    for name in ("CUBLAS_OP_N", "CUBLAS_OP_T", "CUBLAS_GEMM_DEFAULT", "CUBLAS_COMPUTE_32F_PEDANTIC"):
        assert getattr(library, name) == getattr(HostBlas, name)


@pytest.mark.skipif(driver_library() is not None, reason="there is an NVIDIA driver here")
def test_cublas_that_does_not_start_is_told() -> None:
    with pytest.raises(CudaError, match="cuBLAS does not start: CUBLAS_STATUS_NOT_INITIALIZED"):
        Cublas(cublas_or_skip(), nullcontext())


def cublas_or_skip() -> Any:
    try:
        return load_cublas()
    except CudaError as missing:
        pytest.skip(str(missing))


def test_without_cublas_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(CudaError, match=r"cuBLAS is missing \(.*\): .*\[gpu\]"):
        load_cublas()


def test_cupy_takes_our_streams() -> None:
    cupy = pytest.importorskip("cupy")
    stream = CudaStream(HostDriver(), handle=0x5EED)
    assert cupy.cuda.Stream.from_external(stream).ptr == 0x5EED


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
        with pytest.raises(EngineError, match=r"positions 4 to 12 do not fit a sequence with 1 blocks of 8 tokens"):
            group.run([Span(np.zeros(1, np.int32), 4, 8)], case.tokens[:8])
        with pytest.raises(EngineError, match=r"a step takes f32\[1..256, \d+\], not f32\[257, "):
            group.step([case.tokens[0]] * 257, 0)


def test_too_little_memory_says_how_much(tmp_path: Path) -> None:
    """While loading weights or making blocks, and in a step; nothing is left, and the rank tells which kind it was."""
    case = known_cases()[0]
    shares = uneven_shares(units(case.model, "fp32", 32), 1)
    drivers: list[HostDriver] = []

    def with_memory(memory: int, graph: RankGraph, collectives: Collectives, options: EngineOptions) -> CudaEngine:
        drivers.append(HostDriver(memory=memory))
        return CudaEngine(graph, collectives, options, drivers[-1], None)

    with pytest.raises(EngineMemoryError, match=r"'cuda': out of memory: \d+ bytes are needed, 1000 of 1000 are free"):
        LocalSession(case.folder, partial(with_memory, 1000), shares, tmp_path / "loading")
    many = CacheBlocks(1 << 20, 32)
    with pytest.raises(
        EngineMemoryError, match=r"'cuda': out of memory: \d{10,} bytes are needed, \d+ of 10000000 are"
    ):
        LocalSession(case.folder, partial(with_memory, 10_000_000), shares, tmp_path / "blocks", blocks=many)
    with LocalSession(case.folder, partial(with_memory, 1 << 40), shares, tmp_path / "step") as group:
        group.step(case.tokens[:4], 0)
        drivers[-1].memory = 0
        group.step(case.tokens[:4], 4)
        with pytest.raises(EngineMemoryError, match=r"'cuda' failed in a step: out of memory: \d+ bytes") as caught:
            group.step([case.tokens[0]] * 33, 4)  # more than decoded rows have room for
    assert failure_of(caught.value).code == "out_of_memory"
    assert [driver.live for driver in drivers] == [0, 0, 0]


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
            sequences = Sequences(engine, graphs[rank])
            row = np.ones((1, graphs[rank].hidden), np.float32)
            try:
                for position in range(2 * captured + 1):
                    if position == 2 * captured and rank == 1:
                        engine._collectives.doomed = True  # type: ignore[attr-defined]
                    sequences.step(0, row, position)
            except (EngineError, PeerLost) as error:
                failed = error
            if rank == 1:
                communicator.close()
        return failure_of(failed), driver.live

    (bereaved, left), (told, nothing) = run_ranks(2, work)
    assert (left, nothing) == (0, 0)
    assert (bereaved.code, bereaved.lost_rank) == ("peer_lost", 2)
    assert told.code == "device_lost"
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


def test_prompts_of_other_lengths_take_no_more_memory(tmp_path: Path) -> None:
    case = known_cases()[0]

    def held(group: LocalSession) -> list[int]:
        drivers = [engine._driver for engine in group.engines]
        return [sum(map(len, [*driver._memory.values(), *driver._pinned.values()])) for driver in drivers]

    with session(case, tmp_path, 2) as group:
        whole = group.step(case.tokens[:40], 0)
        before = held(group)
        for length in (20, 29, 38):
            assert np.array_equal(group.step(case.tokens[:length], 0), whole[:length])
        assert held(group) == before


@pytest.mark.parametrize(("name", "rows"), [("ernie4-5", 40), ("olmo2", 6)])
def test_halves_give_what_the_whole_gives(name: str, rows: int, tmp_path: Path) -> None:
    """Also where sums are so narrow that the second half of one begins where the GPU's do not."""
    case = golden_case(name)
    with session(case, tmp_path, 2) as group:
        whole = group.step(case.tokens[:rows], 0)
        assert np.array_equal(group.step(case.tokens[:rows], 0, halved=True), whole)


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
            row = np.ones((1, graph.hidden), np.float32)
            assert Sequences(engine, graph).step(0, row, 0).shape == (1, graph.vocabulary)


def test_no_sum_is_made_while_another_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both use the communicator, on different threads."""
    case, made = known_cases()[0], threading.Event()
    busy: list[bool] = []

    class Slow:
        rank, size = 0, 2

        def all_reduce(self, buffer: F32) -> None:
            made.wait(0.2)  # as long as nobody makes the next one

    class Watched(device_graph.AllReduce):
        def __init__(self, stream: CudaStream, *given: Any) -> None:
            busy.append(bool(stream._pending) or stream._doing != "nothing")
            if len(busy) > 1:
                made.set()
            super().__init__(stream, *given)

    monkeypatch.setattr(device_graph, "AllReduce", Watched)
    with LocalSession(case.folder, on_host, uneven_shares(units(case.model, "fp32", 32), 2), tmp_path) as group:
        graph = group.graphs[0]
    options = EngineOptions(extra={"host_step": "function"})
    with closing(CudaEngine(graph, Slow(), options, HostDriver(), None)) as engine:
        Sequences(engine, graph).step(0, np.ones((1, graph.hidden), np.float32), 0)
    assert len(busy) > 1
    assert not any(busy)
