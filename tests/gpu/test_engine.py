"""The engines that compute on a GPU, on a real one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import motley.cli
from motley.daemon.models.cutting.units import units
from motley.daemon.models.files import open_model
from motley.daemon.models.keys import ConfigError
from motley.plugins.cuda.cublas import load_cublas
from motley.plugins.cuda.engine import CudaEngine
from motley.plugins.engine import F32, CacheBlocks, Collectives, EngineError, EngineFactory, EngineOptions, RankGraph
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from motley.plugins.reference.engine import ReferenceEngine
from motley.plugins.tensorrt.engine import TensorRTEngine, WholeTensorRTEngine
from motley.transport import Communicator
from motley.transport.cuda.driver import CudaDriver
from motley.transport.cuda.errors import CudaError
from motley.transport.cuda.host_step import HostStep
from tests.models.cases import BLOCKS, Case, LocalSession, golden_cases, uneven_shares
from tests.models.long_text import regret, write_texts
from tests.models.nearness import error, is_near
from tests.plugins.cuda.recurring import NAMES, Recurring
from tests.plugins.known_cases import known_cases
from tests.transport.conftest import run_ranks as run_ranks

BUNDLED = Path(motley.cli.__path__[0]) / "models" / "shakespeare-2.6m"

SPLIT = EngineOptions(extra={"host_step": HostStep.SPLIT})
"""With which several ranks of one process can have the GPU: see ``conftest.py``."""

NOT_HERE = re.compile(
    r"needs TensorRT for RTX|does not load|builds for GPUs of compute capability|has no int4 for GPUs"
)
"""What the TensorRT engine says where its library is not installed, or not for this device."""

narrow = pytest.mark.parametrize("quantisation", ["fp16", "int8", "int4"])
some_cases = pytest.mark.parametrize("case", known_cases()[1::4], ids=str)


def one_on_the_gpu(form: HostStep, ranks: int, others: EngineFactory = ReferenceEngine) -> list[EngineFactory]:
    """The engines of so many ranks: of the first on the GPU, of the others on the host."""

    def open_engine(graph: RankGraph, collectives: Collectives, options: EngineOptions) -> CudaEngine:
        return CudaEngine(graph, collectives, replace(options, extra={"host_step": form}))

    return [open_engine, *[others] * (ranks - 1)]


def logits(
    case: Case,
    folder: Path,
    factory: EngineFactory | Sequence[EngineFactory],
    ranks: int,
    quantisation: str,
    options: EngineOptions,
) -> F32:
    """Of a prompt, of tokens one by one (from the second on they can be a captured graph), and of a last chunk."""
    try:
        shares = uneven_shares(units(case.model, quantisation, 32), ranks)
    except ConfigError:
        pytest.skip("this case's widths cannot be quantised")
    blocks = CacheBlocks(1, case.model.context) if getattr(factory, "has_whole_caches", False) else BLOCKS
    given: dict[str, Any] = {"options": options, "blocks": blocks, "prompt": case.prompt}
    with LocalSession(case.folder, factory, shares, folder, quantisation, **given) as group:
        steps = [(0, 5), *((at, at + 1) for at in range(5, 11)), (11, len(case.tokens) - 1)]
        return np.concatenate([group.step(case.tokens[start:stop], start) for start, stop in steps])


def ways() -> list[tuple[Case, HostStep, int]]:
    """Golden models, how their steps call the host, and ranks: plain models in every way, all others in two."""
    others = [case for case in golden_cases() if case not in known_cases()]
    ways = [*product(known_cases(), (HostStep.MEMORY, HostStep.SPLIT), (1, 3))]
    return [*ways, *product(others, [HostStep.MEMORY], [1]), *product(others, [HostStep.SPLIT], [3])]


@pytest.mark.parametrize(("case", "form", "ranks"), ways(), ids=str)
def test_transformers_logits_at_any_split(
    gpu: CudaDriver, case: Case, form: HostStep, ranks: int, tmp_path: Path
) -> None:
    if form is HostStep.SPLIT:
        got = logits(case, tmp_path, CudaEngine, ranks, "fp32", SPLIT)
    else:
        got = logits(case, tmp_path, one_on_the_gpu(form, ranks), ranks, "fp32", EngineOptions())
    assert error(got, case.logits[: len(got)]) < 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_waves_of_recurrent_layers(gpu: CudaDriver, name: str, tmp_path: Path) -> None:
    """With guesses, in company, and from a snapshot: a row has the bits that it has in a prompt."""
    checks = (Recurring.check_guesses, Recurring.check_company, Recurring.check_snapshots)
    for number, check in enumerate(checks):
        with Recurring(name, CudaEngine, SPLIT, tmp_path / str(number)) as ranks:
            check(ranks)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("case", golden_cases(), ids=str)
def test_the_reference_on_a_gpu(gpu: CudaDriver, case: Case, ranks: int, tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    got = logits(case, tmp_path, ReferenceEngine, ranks, "fp32", EngineOptions(extra={"device": "cuda"}))
    assert error(got, case.logits[: len(got)]) < 1e-4


@narrow
@some_cases
def test_the_reference_widens_weights_on_a_gpu(gpu: CudaDriver, case: Case, quantisation: str, tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    on_host = logits(case, tmp_path / "host", ReferenceEngine, 1, quantisation, EngineOptions())
    on_gpu = EngineOptions(extra={"device": "cuda"})
    assert error(logits(case, tmp_path / "gpu", ReferenceEngine, 1, quantisation, on_gpu), on_host) < 1e-5


@narrow
@some_cases
def test_narrow_weights(gpu: CudaDriver, case: Case, quantisation: str, tmp_path: Path) -> None:
    float64 = EngineOptions(extra={"dtype": "float64"})
    expected = logits(case, tmp_path / "64", ReferenceEngine, 1, quantisation, float64)
    got = logits(case, tmp_path / "gpu", CudaEngine, 2, quantisation, SPLIT)
    assert is_near(got, expected, quantisation)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("quantisation", ["fp32", "fp16", "int8", "int4"])
def test_waves_are_captured_and_company_does_not_show(
    gpu: CudaDriver, quantisation: str, ranks: int, tmp_path: Path
) -> None:
    case = next(each for each in known_cases() if each.folder.name == "mistral-window")
    shares = uneven_shares(units(case.model, quantisation, 32), ranks)
    with LocalSession(case.folder, CudaEngine, shares, tmp_path, quantisation, options=SPLIT) as group:
        alone = [group.decode([99], [case.tokens[at]], [at]) for at in range(8)]
        lengths = [0] * 16
        for wave in ([0], range(16), range(2, 10), [3, 0], range(16), range(2, 10), [1, 2, 3, 4], [3, 0], [1, 2, 3, 4]):
            positions = [lengths[sequence] for sequence in wave]
            got = group.decode(list(wave), [case.tokens[at] for at in positions], positions)
            assert np.array_equal(got, np.concatenate([alone[at] for at in positions]))
            for sequence in wave:
                lengths[sequence] += 1
        for engine in group.engines:
            assert isinstance(engine, CudaEngine)
            assert {kind.rows for kind, _ in engine._graphs} == {1, 2, 4, 8, 16}


@pytest.mark.parametrize("cache_format", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize(
    ("name", "quantisation"), [("mistral-window", "int4"), ("qwen3-moe", "int4"), ("qwen3", "fp16")]
)
def test_waves_of_32_rows_whole_and_in_halves(
    gpu: CudaDriver, name: str, quantisation: str, cache_format: str, tmp_path: Path
) -> None:
    """Whatever caches keep: a row has the bits that it has alone, step by step and from a graph."""
    case = next(each for each in golden_cases() if each.folder.name == name)
    shares = uneven_shares(units(case.model, quantisation, 32), 1)
    blocks = CacheBlocks(80, 16, format=cache_format)
    with LocalSession(case.folder, CudaEngine, shares, tmp_path, quantisation, blocks=blocks) as group:
        alone = [group.decode([99], [case.tokens[at]], [at]) for at in range(8)]
        for at in range(8):
            spans = [group.sequences.span(sequence, at, 1, 1) for sequence in range(32)]
            got = group.run(spans, [case.tokens[at]] * 32, halved=at % 2 > 0)
            assert np.array_equal(got, alone[at].repeat(32, axis=0))
        (engine,) = group.engines
        assert isinstance(engine, CudaEngine)
        assert {(kind.rows, kind.halved) for kind, _ in engine._graphs} >= {(32, False), (32, True)}


@pytest.mark.parametrize("name", ["llama-mqa", "mistral-window"])
def test_spans_of_one_step_are_computed_as_alone(gpu: CudaDriver, name: str, tmp_path: Path) -> None:
    """Chunks and decoded rows that see unlike numbers of positions, wherever their blocks lie."""
    case = next(each for each in known_cases() if each.folder.name == name)
    places, tokens = [(700, 1, 1), (500, 7, 3), (0, 5, 1), (130, 2, 1)], case.tokens
    results = []
    with open_model(case.folder) as opened:
        model = replace(opened, model=case.changed(max_position_embeddings=1024))
        shares = uneven_shares(units(model.model, "fp32", 32), 2)
        for factory in (CudaEngine, ReferenceEngine):
            options = SPLIT if factory is CudaEngine else EngineOptions()
            folder, blocks = tmp_path / factory.__name__, CacheBlocks(400, 8)
            with LocalSession(model, factory, shares, folder, options=options, blocks=blocks) as group:
                spans = [group.sequences.span(sequence, *place) for sequence, place in enumerate(places)]
                results.append(group.run(spans, tokens[:15]))
                spans = [group.sequences.span(10 + sequence, *place) for sequence, place in enumerate(places)]
                rows = [tokens[:1], tokens[1:8], tokens[8:13], tokens[13:15]]
                results.append(np.concatenate([*map(group.run, ([span] for span in spans), rows)]))
    together, alone, expected, _ = results
    assert np.array_equal(together, alone)
    assert error(together, expected) < 1e-4


@pytest.mark.parametrize("quantisation", ["fp32", "fp16"])
@some_cases
def test_prompts_by_cublas(gpu: CudaDriver, case: Case, quantisation: str, tmp_path: Path) -> None:
    try:
        shares = uneven_shares(units(case.model, quantisation, 32), 2)
        load_cublas()
    except (ConfigError, CudaError) as missing:
        pytest.skip(str(missing))
    length = min(40, len(case.tokens))
    alone = uneven_shares(units(case.model, quantisation, 32), 1)
    float64 = EngineOptions(extra={"dtype": "float64"})
    with LocalSession(case.folder, ReferenceEngine, alone, tmp_path / "64", quantisation, options=float64) as group:
        expected = group.step(case.tokens[:length], 0)
    with LocalSession(case.folder, CudaEngine, shares, tmp_path / "gpu", quantisation, options=SPLIT) as group:
        assert all(isinstance(engine, CudaEngine) and engine._on_device.gemm is not None for engine in group.engines)
        assert is_near(group.step(case.tokens[:length], 0), expected, quantisation)


@pytest.mark.timeout(200)
def test_10_000_tokens_are_the_same_whatever_the_host_step(
    gpu: CudaDriver, forms: set[HostStep], run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """An order that is wrong now and then fails nowhere: it makes another text, or not the reference's."""
    texts = {}
    for form in sorted(forms):

        def write(communicator: Communicator, form: HostStep = form) -> Any:
            factory = one_on_the_gpu(form, 2, OnnxRuntimeEngine)[communicator.rank]
            given: dict[str, Any] = {"options": EngineOptions(), "sequences": 10, "tokens": 1001}
            return write_texts(communicator, model=BUNDLED, folder=tmp_path / form, factory=factory, **given)

        first, second = run_ranks(2, write)
        assert np.array_equal(first, second), form
        texts[form] = first
    first = next(iter(texts.values()))
    assert all(np.array_equal(text, first) for text in texts.values()), list(texts)
    assert regret(BUNDLED, tmp_path / "reference", first) < 1e-4


@pytest.mark.parametrize("factory", [TensorRTEngine, WholeTensorRTEngine])
@pytest.mark.parametrize("quantisation", ["fp32", "fp16", "int8", "int4"])
@some_cases
def test_tensorrt(gpu: CudaDriver, case: Case, quantisation: str, factory: EngineFactory, tmp_path: Path) -> None:
    float64 = EngineOptions(extra={"dtype": "float64"})
    expected = logits(case, tmp_path / "64", ReferenceEngine, 1, quantisation, float64)
    try:
        got = logits(case, tmp_path / "gpu", factory, 2, quantisation, EngineOptions(max_rows=8))
    except EngineError as refusal:
        if NOT_HERE.search(str(refusal)):
            pytest.skip(str(refusal))
        raise
    assert error(got, expected) < (0.01 if quantisation == "fp16" else 1e-4)
