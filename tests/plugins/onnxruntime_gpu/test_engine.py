"""The engine for any GPU computes what the reference does, alone and beside other engines, whatever shares a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from motley.daemon.models.cutting.units import units
from motley.daemon.models.description.operations.experts import Route
from motley.daemon.models.keys import ConfigError
from motley.daemon.rank.blocks.window_blocks import WindowBlocks
from motley.plugins.engine import F32, CacheBlocks, EngineError, EngineFactory, EngineOptions
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from motley.plugins.onnxruntime_gpu.device import Mirror, carry_out, upload
from motley.plugins.onnxruntime_gpu.engine import WebGpuEngine
from motley.plugins.reference.engine import ReferenceEngine
from tests.models.cases import (
    BLOCKS,
    KINDS,
    Case,
    LocalSession,
    golden_case,
    golden_cases,
    staged_shares,
    uneven_shares,
)
from tests.plugins.windows import TOKENS, texts

CLOSE = 1e-4
"""Between logits of this engine and of the reference, with the same weights in FP32: at most so much."""
AS_CLOSE = 1e-5
"""The same in parts of the largest logit, where these are large."""
CODED = {"qwen3", "seed-oss"}
"""Cases with products of 128 columns: what is multiplied with their quantised weights is made codes of 8 bits, so many
at once."""
CLOSE_BY_CODES = 0.05
"""What `AS_CLOSE` is there."""


def logits_of(
    case: Case,
    engines: EngineFactory | Sequence[EngineFactory],
    ranks: int,
    quantisation: str,
    folder: Path,
    cache_format: str = "fp32",
) -> F32:
    """Of every token of a case but the last: a prompt, two tokens alone (the second repeats commands), then many."""
    shares = uneven_shares(units(case.model, quantisation, 32), ranks)
    blocks = replace(BLOCKS, format=cache_format)
    with LocalSession(case.folder, engines, shares, folder, quantisation, blocks=blocks) as session:
        tokens = case.tokens[:-1]
        cuts = [0, 7, 8, 9, len(tokens)]
        pieces = [tokens[begin:end] for begin, end in pairwise(cuts)]
        return np.concatenate(
            [session.step(piece, at, wanted=len(piece)) for piece, at in zip(pieces, cuts, strict=False)]
        )


def assert_close(got: F32, expected: F32, by_codes: bool = False) -> None:
    part = CLOSE_BY_CODES if by_codes else AS_CLOSE
    assert np.abs(got - expected).max() < max(CLOSE, part * np.abs(expected).max())


def is_unknown(case: Case) -> bool:
    """Whether this engine refuses a model: for its attention, its recurrent states, its routers, or rows beside its
    residual."""
    routes = (each.routing.scores for each in case.model.operations if isinstance(each, Route))
    if "sparse mixer" in routes:
        return True
    unknown = (attend.v is None or attend.chunked or attend.warmth or attend.gains for attend in case.attentions)
    return (
        any(unknown)
        or case.chooses
        or any(layer.recurrences for layer in case.model.layers)
        or case.model.beside is not None
    )


def ways() -> list[Any]:
    """Every golden case that is not refused at 1, 2 and 3 uneven shares, each with weights of another kind. At every
    commit every case in `KINDS` has one of these ways, as a GPU in software is slow."""
    parameters = []
    known = [case for case in golden_cases() if not is_unknown(case)]
    for number, (case, ranks) in enumerate(product(known, (1, 2, 3))):
        waits = str(case) not in KINDS or (number // 3 + ranks) % 3
        parameters.append(pytest.param(case, ranks, marks=pytest.mark.soak if waits else (), id=f"{case}-{ranks}"))
    return parameters


@pytest.mark.parametrize(("case", "ranks"), ways())
def test_golden_models(case: Case, ranks: int, tmp_path: Path) -> None:
    """What transformers computes; where weights are quantised, what the reference computes with the same ones."""
    quantisation = ["fp32", "int8", "int4"][ranks - 1]
    try:
        units(case.model, quantisation, 32)
    except ConfigError:
        quantisation = "fp32"
    got = logits_of(case, WebGpuEngine, ranks, quantisation, tmp_path / "gpu")
    exact = quantisation == "fp32"
    expected = case.logits if exact else logits_of(case, ReferenceEngine, 1, quantisation, tmp_path / "reference")
    assert_close(got, expected, not exact and str(case) in CODED)


def test_stages_of_other_engines(tmp_path: Path) -> None:
    """A GPU has a stage, and shares one with a processor."""
    case = golden_case("qwen2-some-windows")
    count = len(case.model.layers)
    shares = staged_shares(units(case.model, "fp32", 32), [(range(1), 1), (range(1, count), 2)])
    with LocalSession(case.folder, [WebGpuEngine, WebGpuEngine, OnnxRuntimeEngine], shares, tmp_path) as session:
        got = np.concatenate([session.step(case.tokens[:7], 0), session.step(case.tokens[7:8], 7)])
    assert_close(got, case.logits[:8])


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("deepseek-v3", "motley.CachedAttentionToKeys"),
        ("gemma4-given-rows", "rows beside the residual"),
        ("hunyuan-dense", "motley.CachedAttentionWithGains"),
        ("llama4", "motley.CachedAttentionInChunks, motley.CachedAttentionWarmed"),
        ("minimax-m3", "motley.CachedAttentionToChosen, motley.ChosenBlocks"),
        ("ministral3", "motley.CachedAttentionWarmed"),
        ("phimoe", "motley.SparseMixer"),
        ("qwen3-5", "motley.GatedDelta"),
    ],
)
def test_what_it_does_not_know_is_refused_by_name(name: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=rf"'webgpu' does not know {what}; use engine"):
        logits_of(golden_case(name), WebGpuEngine, 2, "int8", tmp_path)


@pytest.mark.parametrize("name", ["qwen2-some-windows", "gpt-oss", "gemma3"])
def test_beside_other_engines(name: str, tmp_path: Path) -> None:
    """A GPU, a processor and the reference share a model."""
    case = golden_case(name)
    got = logits_of(case, [OnnxRuntimeEngine, WebGpuEngine, ReferenceEngine], 3, "fp32", tmp_path)
    assert_close(got, case.logits)


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss"])
def test_a_window_has_the_same_bits_in_fewer_blocks(name: str, tmp_path: Path) -> None:
    case, found = golden_case(name), []
    shares = uneven_shares(units(case.model, "fp32", 32), 2)
    all_blocks, window = CacheBlocks(8, TOKENS), max(case.windows)
    fewer = replace(all_blocks, windowed=WindowBlocks.needed(window, TOKENS) + 1, window=window)
    assert fewer.windowed < all_blocks.count, "it goes round and round"
    for number, blocks in enumerate((all_blocks, fewer)):
        folder = tmp_path / str(number)
        folder.mkdir()
        with LocalSession(case.folder, WebGpuEngine, shares, folder, "fp32", blocks=blocks) as ranks:
            found.append(texts(ranks, blocks, [*case.tokens]))
    np.testing.assert_array_equal(found[1], found[0])


SEQUENCES, LONGEST, MOST_ROWS = 4, 90, 80
Parts = list[tuple[int, int, int]]
"""Of a step: sequences, how many of their next rows it has, and how many logits of these are wanted."""


class Ranks:
    """Two ranks on a GPU, and what the reference computes of some texts: f32[SEQUENCES][LONGEST, V]."""

    def __init__(self, folder: Path) -> None:
        case = golden_case("qwen2-some-windows")
        random = np.random.default_rng(0)
        self.texts = random.integers(0, case.model.vocabulary, (SEQUENCES, LONGEST)).tolist()
        shares = uneven_shares(units(case.model, "int4", 32), 2)
        options = EngineOptions(max_rows=MOST_ROWS)
        self.expected = []
        there = folder / "reference"
        with LocalSession(case.folder, ReferenceEngine, shares, there, "int4", options=options) as session:
            for number, text in enumerate(self.texts):
                first = session.step(text[:40], 0, wanted=40, sequence=number)
                rest = session.step(text[40:], 40, wanted=LONGEST - 40, sequence=number)
                self.expected.append(np.concatenate([first, rest]))
        self.session = LocalSession(case.folder, WebGpuEngine, shares, folder / "gpu", "int4", options=options)

    def check(self, parts: Parts, at: list[int], halved: bool) -> None:
        """Run a step, and see that its logits are the expected ones; `at` says where each sequence is."""
        span = self.session.sequences.span
        spans = [span(number, at[number], rows, wanted) for number, rows, wanted in parts]
        tokens = [token for number, rows, _ in parts for token in self.texts[number][at[number] : at[number] + rows]]
        got = self.session.run(spans, tokens, halved)
        for number, rows, _ in parts:
            at[number] += rows
        right = [self.expected[number][at[number] - wanted : at[number]] for number, _, wanted in parts]
        assert_close(got, np.concatenate(right))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    made = Ranks(tmp_path_factory.mktemp("ranks"))
    yield made
    made.session.close()


@settings(
    max_examples=settings().max_examples // 8, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)  # a step in software takes long
@given(data=st.data())
def test_any_steps_of_any_sequences(ranks: Ranks, data: st.DataObject) -> None:
    """Tokens alone, guesses and pieces of prompts, of sequences in scattered blocks, whole or in halves."""
    for number in range(SEQUENCES):
        ranks.session.sequences.close(number)
    at = [0] * SEQUENCES
    for _ in range(4):
        left = [number for number in range(SEQUENCES) if at[number] < LONGEST]
        chosen = data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True)) if left else []
        parts = []
        room = MOST_ROWS
        for number in chosen:
            rows = data.draw(st.integers(1, min(LONGEST - at[number], room, data.draw(st.sampled_from([1, 3, 70])))))
            parts.append((number, rows, data.draw(st.integers(0, rows))))
            room -= rows
            if not room:
                break
        if parts and any(wanted for _, _, wanted in parts):
            ranks.check(parts, at, data.draw(st.booleans()))


def test_what_blocks_held_before_is_not_seen(tmp_path: Path) -> None:
    """Even if it is not a number."""
    case = golden_case("mistral-window")
    shares = uneven_shares(units(case.model, "fp32", 32), 1)
    with LocalSession(case.folder, WebGpuEngine, shares, tmp_path) as session:
        engine = session.engines[0]
        assert isinstance(engine, WebGpuEngine)
        for cache in engine._attending.caches.values():
            values = np.full(cache.shape(), np.nan, np.float32)
            values[-1] = 0  # no block's
            carry_out([[upload([Mirror(values, cache)])]])
        tokens = case.tokens[:-1]
        got = [session.step(tokens[:5], 0, wanted=5), session.step(tokens[5:], 5, wanted=len(tokens) - 5)]
    assert_close(np.concatenate(got), case.logits)


def test_what_it_cannot_do_is_refused(tmp_path: Path) -> None:
    case = golden_case("llama-mqa")
    shares = uneven_shares(units(case.model, "fp32", 32), 1)

    def refusal(folder: str, options: EngineOptions, blocks: CacheBlocks) -> str:
        with pytest.raises(EngineError) as refused:
            LocalSession(case.folder, WebGpuEngine, shares, tmp_path / folder, options=options, blocks=blocks)
        return str(refused.value)

    blocks = CacheBlocks(8, 8)
    assert "exact" in refusal("exact", EngineOptions(exact=True), blocks)
    assert "fp16" in refusal("format", EngineOptions(), CacheBlocks(8, 8, "fp16"))
    assert "no option speed" in refusal("option", EngineOptions(extra={"speed": "high"}), blocks)
