"""Caches in every format, on the CPU engines: what they compute, what they take, and who refuses them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import motley.cli
from motley.bench.random_models.writing import synthesise
from motley.daemon.models.cutting.profile import profile
from motley.daemon.models.cutting.units import units
from motley.plugins.cuda.engine import CudaEngine
from motley.plugins.engine import CACHE_FORMATS, F32, CacheBlocks, EngineError, EngineFactory, EngineOptions, Span
from motley.plugins.installed import abilities
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from motley.plugins.reference.caches import int8_codes
from motley.plugins.reference.engine import ReferenceEngine
from motley.plugins.tensorrt.engine import TensorRTEngine
from tests.models.cases import BLOCKS, Case, LocalSession, golden_case, golden_cases, others_soak, uneven_shares
from tests.plugins.cuda.test_engine import on_host
from tests.plugins.reference.strict_arrays import STRICT
from tests.transport.cuda.host_driver import HostDriver

BUNDLED = Path(motley.cli.__path__[0]) / "models" / "shakespeare-2.6m"
NARROW = ("fp16", "int8")
BOUNDS = {"fp16": 2e-3, "int8": 0.1}
"""How far logits may be from transformers', as a part of their norm: tiny models have few numbers in a head."""
ALIKE = 1e-3
"""How far two engines may be apart: where one rounds another way than the other, it is in single codes."""
CHOOSING = 0.25
"""Where rounding may let rows see other positions, both hold for all rows but this part of them: up to 0.16 do."""


def session(
    case: Case,
    folder: Path,
    cache_format: str,
    ranks: int = 1,
    *,
    factory: EngineFactory = OnnxRuntimeEngine,
    blocks: CacheBlocks = BLOCKS,
    quantisation: str = "fp32",
    exact: bool = False,
) -> LocalSession:
    shares = uneven_shares(units(case.model, quantisation, 32, exact=exact), ranks)
    blocks = replace(blocks, format=cache_format)
    options = EngineOptions(exact=exact)
    return LocalSession(case.folder, factory, shares, folder, quantisation, blocks=blocks, options=options, exact=exact)


def apart(got: F32, expected: F32) -> float:
    assert got.shape == expected.shape
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def most_apart(got: F32, expected: F32) -> float:
    """How far a row is apart, but for the worst, as `CHOOSING` says."""
    return float(np.quantile([apart(*rows) for rows in zip(got, expected, strict=True)], 1 - CHOOSING))


@pytest.mark.parametrize(("case", "cache_format"), others_soak(product(golden_cases(), NARROW)), ids=str)
def test_logits_are_near_transformers_and_the_engines_agree(case: Case, cache_format: str, tmp_path: Path) -> None:
    """At another split for each, with a prompt in chunks that end within blocks, and then single tokens."""
    found, measured = [], most_apart if case.chooses else apart
    for ranks, factory in ((1, ReferenceEngine), (3, OnnxRuntimeEngine)):
        with session(case, tmp_path / str(ranks), cache_format, ranks, factory=factory) as own:
            count = len(case.tokens) - 1
            cuts = [0, 13, case.prompt, *range(case.prompt + 1, count + 1)]
            steps = [own.step(case.tokens[a:b], a) for a, b in pairwise(cuts) if a < b]
            found.append(np.concatenate(steps))
        assert ALIKE / 100 < measured(found[-1], case.logits) < BOUNDS[cache_format]
    assert measured(found[1], found[0]) < ALIKE


@pytest.mark.parametrize("cache_format", NARROW)
@pytest.mark.parametrize("name", ["llama-biases-odd-sizes", "mistral-window", "gemma2", "glm4-moe-lite"])
def test_cuda_s_kernels_agree(name: str, cache_format: str, tmp_path: Path) -> None:
    """At any split, of a prompt and of single tokens."""
    case, found = golden_case(name), []
    for ranks, factory in ((1, ReferenceEngine), (1, on_host), (3, on_host)):
        with session(case, tmp_path / str(len(found)), cache_format, ranks, factory=factory) as own:
            steps = [own.step(case.tokens[a:b], a) for a, b in ((0, 13), (13, 14), (14, 16))]
            found.append(np.concatenate(steps))
    assert ALIKE / 100 < apart(found[1], case.logits[:16]) < BOUNDS[cache_format]
    assert apart(found[1], found[0]) < ALIKE
    assert apart(found[2], found[1]) < ALIKE


@pytest.mark.parametrize("cache_format", NARROW)
@pytest.mark.parametrize("name", ["minimax-m3", "glm5-next", "qwen4-exp"])
def test_cuda_s_kernels_see_what_is_chosen(name: str, cache_format: str, tmp_path: Path) -> None:
    """At any split: the rows that see fewer positions than there are."""
    case, found = golden_case(name), []
    for ranks, factory in ((1, ReferenceEngine), (3, on_host)):
        with session(case, tmp_path / str(ranks), cache_format, ranks, factory=factory) as own:
            steps = [own.step(case.tokens[a:b], a) for a, b in ((0, 36), (36, 37), (37, 40))]
            found.append(np.concatenate(steps))
    assert most_apart(found[1], found[0]) < ALIKE


@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
@pytest.mark.parametrize("name", ["llama-mqa", "mistral-window", "minimax-m3"])
def test_bits_depend_neither_on_chunks_nor_blocks_nor_company_nor_prefixes(
    name: str, cache_format: str, tmp_path: Path
) -> None:
    case = golden_case(name)
    tokens = case.tokens[:24]
    with session(case, tmp_path / "whole", cache_format, quantisation="int8") as whole:
        expected = whole.step(tokens, 0)
    blocks = CacheBlocks(count=60, tokens=4)
    with session(case, tmp_path / "parts", cache_format, quantisation="int8", blocks=blocks) as ranks:
        steps = [ranks.step(tokens[a:b], a) for a, b in ((0, 1), (1, 10), (10, 24))]
        np.testing.assert_array_equal(np.concatenate(steps), expected)
        first = ranks.sequences.tables[0]
        ranks.sequences.tables[1] = first[:3]  # twelve tokens that were computed before
        ranks.step(tokens[::-1], 0, sequence=2)
        both = [ranks.sequences.span(1, 12, 12, 12), ranks.sequences.span(2, 24, 3, 3)]
        got = ranks.run(both, tokens[12:] + tokens[:3])
        np.testing.assert_array_equal(got[:12], expected[12:])


@pytest.mark.parametrize("cache_format", NARROW)
def test_exact_bits_do_not_depend_on_the_split(cache_format: str, tmp_path: Path) -> None:
    case = golden_case("llama-mha")
    found = []
    for ranks in (1, 2, 3):
        with session(case, tmp_path / str(ranks), cache_format, ranks, exact=True) as own:
            found.append(np.concatenate([own.step(case.tokens[:9], 0), own.step(case.tokens[9:10], 9)]))
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])


@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
def test_blocks_are_zeros_at_first_as_the_gate_expects(cache_format: str, tmp_path: Path) -> None:
    """Tokens far inside a sequence see zeros before them, whichever blocks these are."""
    case, found = golden_case("llama-mqa"), []
    for factory in (ReferenceEngine, OnnxRuntimeEngine):
        with session(case, tmp_path / factory.__name__, cache_format, factory=factory) as own:
            span = Span(np.arange(7, 0, -1, dtype=np.int32), 50, 3, wanted=3)
            found.append(own.run([span], case.tokens[:3]))
    assert apart(found[1], found[0]) < ALIKE


@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
@pytest.mark.parametrize("engine", ["onnxruntime", "reference"])
def test_a_rank_allocates_what_is_planned_and_does_it_when_it_is_opened(engine: str, cache_format: str) -> None:
    said = memory_of(engine, cache_format, BUNDLED)
    assert said["got"] == pytest.approx(said["planned"], rel=0.05)
    assert said["later"] < 0.05 * said["planned"]


@pytest.mark.parametrize("engine", ["onnxruntime", "reference"])
def test_layers_with_a_window_take_what_is_planned_and_much_less_than_others(engine: str, tmp_path: Path) -> None:
    """Five of six layers see 512 positions, as Gemma 3's do, in a long context."""
    config = json.loads((golden_case("qwen2-some-windows").folder / "config.json").read_text())
    config |= {
        "num_hidden_layers": 6,
        "layer_types": ["full_attention"] + ["sliding_attention"] * 5,
        "max_window_layers": 1,
        "sliding_window": 512,
        "max_position_embeddings": 131_072,
        "vocab_size": 512,
    }
    synthesise(config, tmp_path / "model")
    said = memory_of(engine, "fp32", tmp_path / "model")
    assert said["got"] == pytest.approx(said["planned"], rel=0.05)
    assert said["later"] < 0.05 * said["planned"]
    assert said["got"] < 0.4 * said["whole"]


@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
@pytest.mark.parametrize("name", ["llama-mha", "mistral-window"])
def test_cuda_takes_of_its_device_what_is_planned(name: str, cache_format: str, tmp_path: Path) -> None:
    """For more blocks as much more, and nothing when they are written to."""
    case, drivers = golden_case(name), list[HostDriver]()

    def opened(*of: Any) -> CudaEngine:
        drivers.append(HostDriver())
        return CudaEngine(*of, drivers[-1], None)

    planned, taken = [], []
    for blocks in (CacheBlocks(8, 4), CacheBlocks(3000, 4, windowed=500, window=7)):
        with session(case, tmp_path / str(blocks.count), cache_format, factory=opened, blocks=blocks) as own:
            place = np.array([blocks.count - 1, 0], np.int32)
            spans = [Span(place, at, 4, wanted=1, windowed=np.array([1, 0], np.int32)) for at in (0, 4)]
            own.run(spans[:1], case.tokens[:4])
            before = in_use(drivers[-1])
            own.run(spans[1:], case.tokens[4:8])
            assert in_use(drivers[-1]) == before
            (graph,) = own.graphs
            planned.append(graph.blocks.bytes_of(graph.caches))
            taken.append(before)
    assert taken[1] - taken[0] == pytest.approx(planned[1] - planned[0], rel=0.05)


def in_use(driver: HostDriver) -> int:
    """Bytes of a device."""
    return sum(map(len, driver._memory.values()))


def memory_of(engine: str, cache_format: str, model: Path) -> dict[str, int]:
    """What `tests.plugins.cache_memory` says."""
    command = [sys.executable, "-m", "tests.plugins.cache_memory", engine, cache_format, str(model)]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert asked.returncode == 0, asked.stderr
    said: dict[str, int] = json.loads(asked.stdout)
    return said


def test_formats_take_a_half_and_a_quarter() -> None:
    case = golden_case("llama-mha")
    with_scales = 4 / case.heads.size  # a float for each head
    told = (profile(case.model, "fp32", 32, cache_format=each) for each in CACHE_FORMATS)
    fp32, fp16, int8 = (each.cache_bytes_per_token for each in told)
    assert (fp16 / fp32, int8 / fp32) == (1 / 2, (1 + with_scales) / 4)


def test_int8_is_as_stated() -> None:
    """To nearest, half to even, by the largest magnitude; zeros and tiny numbers; what is no number."""
    heads = np.array(
        [
            [127, 0.5, 1.5, -2.5, -126.6],
            [-254, 1, 3, 253, 0],
            [0, 0, 0, 0, 0],
            [1e-31, -1e-31, 0, 0, 0],
            [1, np.nan, 0, 0, 0],
            [1, 2, np.inf, 0, 0],
        ],
        np.float32,
    )
    codes, scales = int8_codes(np, heads)
    assert codes[:4].tolist() == [[127, 0, 2, -2, -127], [-127, 0, 2, 126, 0], [0] * 5, [0] * 5]
    np.testing.assert_array_equal(scales[:, 0], np.array([1, 2, 0, 0, np.nan, np.nan], np.float32))


def test_the_reference_keeps_what_our_kernels_keep(tmp_path: Path) -> None:
    """Of the first layer, whose operands have nearly the same bits, nearly all codes and scales are the same."""
    case, kept = golden_case("llama-mha"), []
    for factory in (ReferenceEngine, OnnxRuntimeEngine, on_host):
        with session(case, tmp_path / factory.__name__, "int8", factory=factory) as own:
            own.step(case.tokens, 0)
            (engine,), cache = own.engines, "key_cache.0"
            if isinstance(engine, ReferenceEngine):
                kept.append((engine._caches[cache]._numbers.copy(), engine._caches[cache]._scales[..., 0].copy()))
            elif isinstance(engine, OnnxRuntimeEngine):
                kept.append((engine._blocks[cache].copy(), engine._blocks[f"{cache}.scales"].copy()))
            elif isinstance(engine, CudaEngine):
                codes, scales = (
                    downloaded(engine, name, like)
                    for name, like in zip((cache, f"{cache}.scales"), kept[0], strict=True)
                )
                kept.append((codes, scales))
    assert len(kept) == 3
    for codes, scales in kept[1:]:
        assert codes.any()
        off = np.abs(codes.astype(int) - kept[0][0])
        assert off.max() <= 1
        assert off.mean() < 1e-3
        np.testing.assert_allclose(scales, kept[0][1], rtol=1e-5)


def downloaded(engine: CudaEngine, cache: str, like: NDArray[Any]) -> NDArray[Any]:
    """What is in a cache, which is an array like this."""
    device = engine._on_device
    pinned = device.pinned(like.nbytes)
    engine._driver.copy(pinned.ctypes.data, device.caches[cache], like.nbytes, engine._stream.handle)
    device.finish()
    return pinned.view(like.dtype).reshape(like.shape)


@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
def test_the_reference_computes_it_on_a_device_too(cache_format: str, tmp_path: Path) -> None:
    case, found = golden_case("llama-mqa"), []
    for name, device in (("host", None), ("device", STRICT)):

        def open_engine(*more: object, device: object = device) -> ReferenceEngine:
            return ReferenceEngine(*more, device=device)  # type: ignore[arg-type]

        with session(case, tmp_path / name, cache_format, factory=open_engine) as own:
            found.append(np.concatenate([own.step(case.tokens[:10], 0), own.step(case.tokens[10:12], 10)]))
    np.testing.assert_array_equal(found[1], found[0])


def test_an_engine_refuses_a_format_that_it_has_not(tmp_path: Path) -> None:
    assert [abilities(name).cache_formats for name in ("onnxruntime", "reference", "cuda")] == [CACHE_FORMATS] * 3
    assert abilities("tensorrt").cache_formats == ("fp32",)
    blocks = CacheBlocks(1, golden_case("llama-mqa").model.context)
    words = "engine 'tensorrt' cannot keep KV caches as 'int8'; it can as: fp32"
    with pytest.raises(EngineError, match=words):
        session(golden_case("llama-mqa"), tmp_path, "int8", factory=TensorRTEngine, blocks=blocks)
