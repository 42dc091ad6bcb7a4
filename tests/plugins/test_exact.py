"""Exact mode: the same bits for any number of ranks, any split, and whatever else is in a step or an engine."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import motley.cli
from motley.bench.synth import SHAPES, synthesise
from motley.daemon.models.config import ConfigError, read_config
from motley.daemon.models.share import Share
from motley.daemon.models.units import units
from motley.plugins.cupy import ReferenceEngine
from motley.plugins.engine import F32, EngineError, EngineFactory, EngineOptions
from motley.plugins.onnxruntime import OnnxRuntimeEngine
from tests.models.cases import Case, LocalSession, golden_cases, uneven_shares, whole_share

BUNDLED = Path(motley.cli.__path__[0]) / "models" / "shakespeare-2.6m"
EXACT = EngineOptions(exact=True)
DENSE = [case for case in golden_cases() if not case.config.experts]
CASES = [case for case in DENSE if case.config.head_dim % 16 == 0]


def session(
    model: Path,
    folder: Path,
    shares: Sequence[Share],
    quantisation: str = "fp32",
    *,
    block: int = 32,
    factory: EngineFactory = OnnxRuntimeEngine,
    options: EngineOptions = EXACT,
    context: int | None = None,
) -> LocalSession:
    return LocalSession(model, factory, shares, folder, quantisation, block, options, context, exact=True)


def run(ranks: LocalSession, tokens: list[int], chunks: Sequence[int], slot: int = 0) -> F32:
    """The logits of every token, computed so many at a time; the last number goes on to the end."""
    ranks.open_slot(slot)
    sizes = [*chunks, *[chunks[-1]] * len(tokens)]
    rows, position = [], 0
    while position < len(tokens):
        chunk = tokens[position : position + sizes[len(rows)]]
        rows.append(ranks.step(chunk, position, slot=slot))
        position += len(chunk)
    ranks.close_slot(slot)
    return np.concatenate(rows)


def same(got: F32, expected: F32) -> bool:
    """Bit for bit: 0.0 is not -0.0."""
    return np.array_equal(got.view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("quantisation", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_split_and_chunking_gives_the_same_bits(case: Case, quantisation: str, tmp_path: Path) -> None:
    cut = units(case.config, quantisation, 32, exact=True)
    tokens = case.tokens[:-1]
    with session(case.folder, tmp_path / "1", [whole_share(cut)], quantisation) as alone:
        expected = run(alone, tokens, [128])
        for chunks in ([1], [2], [3], [7, 1, 16, 33]):
            assert same(run(alone, tokens, chunks), expected)
    if quantisation == "fp32":
        assert np.abs(expected - case.logits).max() < 1e-4 * np.abs(case.logits).max()
    for count in (2, 3, 5):
        with session(case.folder, tmp_path / str(count), uneven_shares(cut, count), quantisation) as ranks:
            for chunks in ([17, 1, 1, 20], [1]):
                assert same(run(ranks, tokens, chunks), expected)


def test_splits_include_empty_shares_and_several_subtrees() -> None:
    """The splits above are as odd as they claim to be."""
    shares = [share for case in CASES for share in uneven_shares(units(case.config, "fp32", 32, exact=True), 5)]
    assert any(not share.attention for share in shares)
    assert any(not share.mlp for share in shares)
    assert any(not share.vocabulary for share in shares)
    assert any(share.mlp.start % 2 and len(share.mlp) > 1 for share in shares)
    assert any(share.attention_split > 1 and share.attention.start % share.attention_split for share in shares)


@pytest.mark.parametrize("case", [case for case in CASES if case.config.kv_heads > 1], ids=str)
def test_ranks_without_anything_add_nothing(case: Case, tmp_path: Path) -> None:
    """First (where the biases are), in between and last; also at an attention split coarser than the leaves."""
    whole = whole_share(units(case.config, "fp32", 32, exact=True))
    tokens = case.tokens[:20]

    def part(numerator: int, denominator: int) -> list[int]:
        return [len(own) * numerator // denominator for own in (whole.attention, whole.mlp, whole.vocabulary)]

    bounds = [part(*at) for at in ((0, 1), (0, 1), (1, 2), (1, 2), (1, 1), (1, 1))]
    shares = [
        Share(1, *(range(start, stop) for start, stop in zip(low, high, strict=True))) for low, high in pairwise(bounds)
    ]
    with session(case.folder, tmp_path / "1", [whole]) as alone:
        expected = run(alone, tokens, [9])
    with session(case.folder, tmp_path / "5", shares) as ranks:
        assert same(run(ranks, tokens, [9]), expected)


@pytest.mark.parametrize("quantisation", ["fp32", "int8", "int4"])
def test_a_trained_model_beside_others_and_computed_again(quantisation: str, tmp_path: Path) -> None:
    """Alone on one rank; on three, taking turns with another sequence, going back, and up to a full context."""
    random = np.random.default_rng(5)
    context = 301
    mine, other = (random.integers(0, 1024, context).tolist() for _ in range(2))
    cut = units(read_config(BUNDLED), quantisation, 32, exact=True)
    with session(BUNDLED, tmp_path / "1", [whole_share(cut)], quantisation, context=context) as alone:
        expected = run(alone, mine, [128])
    with session(BUNDLED, tmp_path / "3", uneven_shares(cut, 3), quantisation, context=context) as ranks:
        ranks.open_slot(0)
        ranks.open_slot(1)
        position = beside = 0
        for size in (100, 1, 1, 1, 64, 33, 1, 99, 1):
            if position == 103:
                ranks.step(other[:20], position, slot=0)  # a wrong guess, taken back
            got = ranks.step(mine[position : position + size], position, slot=0)
            assert same(got, expected[position : position + size])
            position += size
            ranks.step(other[beside : beside + 31], beside, slot=1)
            beside += 31
        assert position == context


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights whose widths leave blocks of 128 whole."""
    folder = tmp_path_factory.mktemp("wide")
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 4096,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 64,
    }
    synthesise(SHAPES["tinyllama-1.1b"] | sizes, folder)
    return folder


@pytest.mark.parametrize("quantisation", ["int8", "int4"])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("odd_rows", [False, True], ids=["even rows", "rows as they come"])
def test_a_block_size_is_exact_or_refused(
    quantisation: str, block: int, odd_rows: bool, wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which ones are depends on the processor; what is refused would not be exact. Odd rows provoke refusals."""
    if odd_rows:
        monkeypatch.setattr(OnnxRuntimeEngine, "_even", lambda self, rows: rows)
    cut = units(read_config(wide), quantisation, block, exact=True)
    assert {form.block for form in cut.held.values()} == {block}
    tokens = np.random.default_rng(6).integers(0, 512, 50).tolist()
    refused = ""
    try:
        alone = session(wide, tmp_path / "tested", [whole_share(cut)], quantisation, block=block)
    except EngineError as error:
        refused = str(error)
        monkeypatch.setattr(OnnxRuntimeEngine, "_test_rows", lambda self, kinds: None)
        alone = session(wide, tmp_path / "untested", [whole_share(cut)], quantisation, block=block)
    with alone:
        expected = run(alone, tokens, [50])
        alike = [same(run(alone, tokens, chunks), expected) for chunks in ([1], [3], [5], [13, 1])]
    if refused:
        assert f"exact=true with {quantisation} in blocks of {block} on this machine" in refused
        assert not all(alike)
    else:
        assert all(alike)
        with session(wide, tmp_path / "2", uneven_shares(cut, 2), quantisation, block=block) as ranks:
            for chunks in ([1], [5], [13, 1]):
                assert same(run(ranks, tokens, chunks), expected)
    if not odd_rows and block in (32, 128) and platform.machine() in ("x86_64", "AMD64"):
        assert not refused  # 128 is the default


def test_kernels_that_mix_rows_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are, if odd numbers of rows are run as they come."""
    cut = units(read_config(BUNDLED), "fp32", 32, exact=True)
    monkeypatch.setattr(OnnxRuntimeEngine, "_even", lambda self, rows: rows)
    with pytest.raises(EngineError, match="cannot keep exact=true with fp32 on this machine"):
        session(BUNDLED, tmp_path, [whole_share(cut)])


@pytest.mark.parametrize("case", [case for case in DENSE if case not in CASES], ids=str)
def test_heads_that_the_kernel_does_not_take_are_refused(case: Case, tmp_path: Path) -> None:
    cut = units(case.config, "fp32", 32, exact=True)
    with pytest.raises(EngineError, match=f"exact=true with attention heads of {case.config.head_dim}: a multiple"):
        session(case.folder, tmp_path, [whole_share(cut)])


def test_the_reference_engine_refuses_but_computes_the_same_graph(tmp_path: Path) -> None:
    case = golden_cases()[0]
    cut = units(case.config, "fp32", 32, exact=True)
    with pytest.raises(EngineError, match="the reference engine cannot keep exact=true"):
        session(case.folder, tmp_path / "exact", [whole_share(cut)], factory=ReferenceEngine)
    for count in (1, 3, 8):
        shares = uneven_shares(cut, count)
        with session(
            case.folder, tmp_path / str(count), shares, factory=ReferenceEngine, options=EngineOptions()
        ) as ranks:
            got = run(ranks, case.tokens[:-1], [128])
            assert np.abs(got - case.logits).max() < 1e-4 * np.abs(case.logits).max()


def test_exact_units_do_not_change_what_can_be_encoded() -> None:
    for case in DENSE:
        for quantisation in ("int8", "int4"):
            try:
                plain = units(case.config, quantisation, 32)
            except ConfigError:
                continue
            exact = units(case.config, quantisation, 32, exact=True)
            assert plain.held == exact.held
