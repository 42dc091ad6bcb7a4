"""Exact mode: the same bits for any number of ranks, any split, and whatever else is in a step or an engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import motley.cli
from motley.bench.random_models.writing import synthesise
from motley.daemon.models.cutting.share import Share
from motley.daemon.models.cutting.units import units
from motley.daemon.models.description.model import expected_shapes
from motley.daemon.models.graph.rank_graph import Declared, build_rank_graph
from motley.daemon.models.keys import ConfigError
from motley.daemon.models.reading import read_model
from motley.orchestrator.known_models.shapes import SHAPES
from motley.plugins.engine import F32, EngineError, EngineFactory, EngineOptions, RankGraph
from motley.plugins.expert_engine import Expert
from motley.plugins.mixture import Compute, Sent
from motley.plugins.native.adapted import StepRows
from motley.plugins.native.attention import Spans, bind_attention
from motley.plugins.native.rows import Action
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from motley.plugins.onnxruntime.experts import Chain
from motley.plugins.onnxruntime.hosted_experts import OnnxRuntimeExpert, OnnxRuntimeExperts
from motley.plugins.onnxruntime.sessions import Store
from motley.plugins.reference.engine import ReferenceEngine, ReferenceExperts
from tests.models.cases import (
    GOLDEN,
    Case,
    LocalSession,
    expert_cases,
    golden_cases,
    others_soak,
    uneven_shares,
    whole_share,
)
from tests.models.graph.test_whole_experts import all_experts, joined, share
from tests.models.local_group import LocalMember
from tests.pairs import pairwise as all_pairs

BUNDLED = Path(motley.cli.__path__[0]) / "models" / "shakespeare-2.6m"
EXACT = EngineOptions(exact=True)
CASES = golden_cases()


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
    declare: Callable[..., Declared] = build_rank_graph,
) -> LocalSession:
    return LocalSession(
        model, factory, shares, folder, quantisation, block, options, context, exact=True, declare=declare
    )


def run(ranks: LocalSession, tokens: list[int], chunks: Sequence[int]) -> F32:
    """The logits of every token, computed so many at a time; the last number goes on to the end."""
    sizes = [*chunks, *[chunks[-1]] * len(tokens)]
    rows, position = [], 0
    while position < len(tokens):
        chunk = tokens[position : position + sizes[len(rows)]]
        rows.append(ranks.step(chunk, position))
        position += len(chunk)
    ranks.sequences.close(0)
    return np.concatenate(rows)


def decoded(ranks: LocalSession, sequences: Sequence[list[int]]) -> list[F32]:
    """The logits of every token of some sequences, which are decoded beside each other."""
    rows: list[list[F32]] = [[] for _ in sequences]
    for position in range(max(map(len, sequences))):
        company = [number for number, tokens in enumerate(sequences) if position < len(tokens)]
        got = ranks.decode(company, [sequences[number][position] for number in company], [position] * len(company))
        for number, row in zip(company, got, strict=True):
            rows[number].append(row)
    for number in range(len(sequences)):
        ranks.sequences.close(number)
    return [np.stack(own) for own in rows]


def same(got: F32, expected: F32) -> bool:
    """Bit for bit: 0.0 is not -0.0."""
    return np.array_equal(got.view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize(
    ("case", "quantisation", "count"),
    others_soak(all_pairs(CASES, ["fp32", "int8", "int4"], [2, 3, 5])),
    ids=str,
)
def test_every_split_and_chunking_gives_the_same_bits(
    case: Case, quantisation: str, count: int, tmp_path: Path
) -> None:
    try:
        cut = units(case.model, quantisation, 32, exact=True)
    except ConfigError:
        pytest.skip("this case's widths cannot be quantised")
    tokens = case.tokens[:-1]
    with session(case.folder, tmp_path / "1", [whole_share(cut)], quantisation) as alone:
        expected = run(alone, tokens, [128])
        for chunks in ([1], [2], [3], [7, 1, 16, 33]):
            assert same(run(alone, tokens, chunks), expected)
    if quantisation == "fp32":
        assert np.abs(expected - case.logits).max() < 1e-4 * np.abs(case.logits).max()
    with session(case.folder, tmp_path / str(count), uneven_shares(cut, count), quantisation) as ranks:
        for chunks in ([17, 1, 1, 20], [1]):
            assert same(run(ranks, tokens, chunks), expected)


def test_splits_include_empty_shares_and_several_subtrees() -> None:
    """The splits above are as odd as they claim to be."""
    shares = [share for case in CASES for share in uneven_shares(units(case.model, "fp32", 32, exact=True), 5)]
    assert any(not share.attention for share in shares)
    assert any(not share.mlp for share in shares)
    assert any(not share.vocabulary for share in shares)
    assert any(share.mlp.start % 2 and len(share.mlp) > 1 for share in shares)
    assert any(share.attention_split > 1 and share.attention.start % share.attention_split for share in shares)


@pytest.mark.parametrize("case", others_soak(case for case in CASES if case.heads.keys > 1), ids=str)
def test_ranks_without_anything_add_nothing(case: Case, tmp_path: Path) -> None:
    """First (where the biases are), in between and last; also at an attention split coarser than the leaves."""
    whole = whole_share(units(case.model, "fp32", 32, exact=True))
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
    cut = units(read_model(BUNDLED), quantisation, 32, exact=True)
    with session(BUNDLED, tmp_path / "1", [whole_share(cut)], quantisation, context=context) as alone:
        expected = run(alone, mine, [128])
    with session(BUNDLED, tmp_path / "3", uneven_shares(cut, 3), quantisation, context=context) as ranks:
        position = beside = 0
        for size in (100, 1, 1, 1, 64, 33, 1, 99, 1):
            if position == 103:
                ranks.step(other[:20], position, sequence=0)  # a wrong guess, taken back
            got = ranks.step(mine[position : position + size], position, sequence=0)
            assert same(got, expected[position : position + size])
            position += size
            ranks.step(other[beside : beside + 31], beside, sequence=1)
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
def test_every_block_size_is_exact(quantisation: str, block: int, wide: Path, tmp_path: Path) -> None:
    cut = units(read_model(wide), quantisation, block, exact=True)
    assert {form.block for form in cut.held.values()} == {block}
    tokens = np.random.default_rng(6).integers(0, 512, 50).tolist()
    with session(wide, tmp_path / "1", [whole_share(cut)], quantisation, block=block) as alone:
        expected = run(alone, tokens, [50])
        for chunks in ([1], [3], [5], [13, 1]):
            assert same(run(alone, tokens, chunks), expected)
    with session(wide, tmp_path / "2", uneven_shares(cut, 2), quantisation, block=block) as ranks:
        for chunks in ([1], [5], [13, 1]):
            assert same(run(ranks, tokens, chunks), expected)


def test_kernels_that_mix_rows_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = units(read_model(BUNDLED), "fp32", 32, exact=True)

    def mixing(qkv: F32, keys: F32, values: F32, y: F32, spans: Spans, rope: int, **attributes: Any) -> Action:
        """An attention after which the first of several rows has another bit."""
        attend = bind_attention(qkv, keys, values, y, spans, rope, **attributes)

        def mix() -> None:
            attend()
            if len(y) > 2:  # there is an even number
                y[0, 0] = np.nextafter(y[0, 0], np.float32(np.inf))

        return mix

    monkeypatch.setattr("motley.plugins.onnxruntime.kernels.bind_attention", mixing)
    with pytest.raises(EngineError, match="cannot keep exact=true on this machine"):
        session(BUNDLED, tmp_path, [whole_share(cut)])


def test_the_reference_engine_refuses_but_computes_the_same_graph(tmp_path: Path) -> None:
    case = golden_cases()[0]
    cut = units(case.model, "fp32", 32, exact=True)
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
    for case in golden_cases():
        for quantisation in ("int8", "int4"):
            try:
                plain = units(case.model, quantisation, 32)
            except ConfigError:
                continue
            exact = units(case.model, quantisation, 32, exact=True)
            assert plain.held == exact.held


# ---------------------------------------------------------------- experts

EXPERT_CASES = expert_cases()
QUANTISATIONS = ["fp32", "int8", "int4"]


class AskingHosts(LocalMember):
    """A rank of a local group that has whole experts elsewhere."""

    def __init__(self, member: LocalMember, hosted: dict[tuple[int, int], Expert]) -> None:
        super().__init__(member._group, member.rank)
        self._hosted = hosted

    def experts(self, layer: int) -> Compute:
        def compute(x: F32, sent: Sequence[Sent]) -> list[F32]:
            return [self._hosted[layer, own.expert](x[own.rows]).copy() for own in sent]

        return compute


@contextmanager
def trunk(case: Case, folder: Path, quantisation: str, ranks: int) -> Iterator[LocalSession]:
    """A session whose experts are whole on hosts; every rank has hosts of its own, which makes no difference."""
    experts = OnnxRuntimeExperts(EXACT)
    opened: list[Expert] = []

    def factory(graph: RankGraph, member: LocalMember, options: EngineOptions) -> OnnxRuntimeEngine:
        hosted: dict[tuple[int, int], Expert] = {}
        for layer, index in all_experts(case.model):
            at = folder / f"experts of {member.rank}" / f"{layer}.{index}"
            at.mkdir(parents=True)
            hosted[layer, index] = experts.open(share(case, quantisation, at, layer, index))
            opened.append(hosted[layer, index])
        return OnnxRuntimeEngine(graph, AskingHosts(member, hosted), options)

    cut = units(case.model, quantisation, 32, exact=True)
    with session(
        case.folder,
        folder,
        uneven_shares(cut, ranks),
        quantisation,
        factory=factory,  # type: ignore[arg-type] # a group's members are what it is given
        declare=partial(build_rank_graph, experts_elsewhere=True),
    ) as opened_session:
        yield opened_session
    for expert in opened:
        expert.close()
    experts.close()


@pytest.mark.parametrize(
    ("case", "quantisation", "count"), others_soak(all_pairs(EXPERT_CASES, QUANTISATIONS, [1, 2, 3])), ids=str
)
def test_whole_experts_give_the_same_bits_to_any_trunk(
    case: Case, quantisation: str, count: int, tmp_path: Path
) -> None:
    cut = units(case.model, quantisation, 32, exact=True)
    tokens = case.tokens[:-1]
    with session(case.folder, tmp_path / "0", [whole_share(cut)], quantisation, declare=joined) as alone:
        expected = run(alone, tokens, [128])
    if quantisation == "fp32":
        assert np.abs(expected - case.logits).max() < 1e-4 * np.abs(case.logits).max()
    with trunk(case, tmp_path / str(count), quantisation, count) as ranks:
        for chunks in ([128], [17, 1, 1, 20], [3]):
            assert same(run(ranks, tokens, chunks), expected)


@pytest.mark.parametrize(
    ("layout", "case", "quantisation"),
    others_soak(all_pairs(["sliced", "whole"], EXPERT_CASES, QUANTISATIONS)),
    ids=str,
)
def test_decoded_company_does_not_show(layout: str, case: Case, quantisation: str, tmp_path: Path) -> None:
    """Sequences that begin and end together with others, and alone; the same as in a prompt of all tokens."""
    cut = units(case.model, quantisation, 32, exact=True)
    random = np.random.default_rng(3)
    sequences = [random.integers(0, case.model.vocabulary, length).tolist() for length in (9, 14, 5, 11, 9)]
    sliced = session(case.folder, tmp_path, uneven_shares(cut, 3), quantisation) if layout == "sliced" else None
    with sliced or trunk(case, tmp_path, quantisation, 2) as ranks:
        together = decoded(ranks, sequences)
        alone = [decoded(ranks, [tokens])[0] for tokens in sequences]
        prompts = [run(ranks, tokens, [64]) for tokens in sequences]
    assert all(map(same, together, alone))
    assert all(map(same, together, prompts))


def test_layouts_differ_by_rounding_only(tmp_path: Path) -> None:
    """Leaves of all experts are summed before leaves are; of whole experts it is the other way round."""
    case = next(case for case in EXPERT_CASES if str(case) == "mixtral")
    cut = units(case.model, "fp32", 32, exact=True)
    with session(case.folder, tmp_path / "sliced", [whole_share(cut)]) as sliced:
        one = run(sliced, case.tokens[:-1], [128])
    with session(case.folder, tmp_path / "whole", [whole_share(cut)], declare=joined) as whole:
        other = run(whole, case.tokens[:-1], [128])
    assert not same(one, other)
    assert np.abs(one - other).max() < 1e-5 * np.abs(one).max()


WIDER = {
    "hidden_size": 256,
    "head_dim": 64,
    "num_attention_heads": 4,
    "intermediate_size": 640,
    "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 512,
}


def widened(name: str, folder: Path) -> Case:
    """A golden model's shape with sizes that fill kernels, and random weights."""
    settings = json.loads((GOLDEN / name / "config.json").read_text())
    settings |= {key: size for key, size in WIDER.items() if key in settings}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    config = read_model(folder)
    random = np.random.default_rng(0)
    weights = {
        name: random.normal(len(shape) == 1, shape[-1] ** -0.5, shape).astype(np.float32)
        for name, shape in expected_shapes(config).items()
    }
    save_file(weights, folder / "model.safetensors")
    tokens = random.integers(0, config.vocabulary, 42).tolist()
    return Case(folder, config, tokens, 10, np.empty((0, config.vocabulary), np.float32))


@pytest.mark.parametrize(("name", "quantisation"), [("olmoe", "int4"), ("qwen2-moe", "fp32")])
def test_wide_experts_are_exact_in_both_layouts(name: str, quantisation: str, tmp_path: Path) -> None:
    case = widened(name, tmp_path / "model")
    cut = units(case.model, quantisation, 32, exact=True)
    assert cut.mlp == 5
    tokens = case.tokens
    with session(case.folder, tmp_path / "1", [whole_share(cut)], quantisation) as alone:
        expected = run(alone, tokens, [128])
    with session(case.folder, tmp_path / "3", uneven_shares(cut, 3), quantisation) as ranks:
        for chunks in ([1], [7, 1, 16, 33]):
            assert same(run(ranks, tokens, chunks), expected)
        assert same(decoded(ranks, [tokens[::-1], tokens])[1], expected)
    with session(case.folder, tmp_path / "0", [whole_share(cut)], quantisation, declare=joined) as whole:
        expected = run(whole, tokens, [128])
    with trunk(case, tmp_path / "2", quantisation, 2) as ranks:
        for chunks in ([1], [7, 1, 16, 33]):
            assert same(run(ranks, tokens, chunks), expected)
        assert same(decoded(ranks, [tokens[::-1], tokens])[1], expected)


@pytest.mark.parametrize("layout", ["sliced", "whole"])
def test_the_runtime_is_given_even_numbers_of_rows(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it makes of odd ones on another processor."""
    case = next(case for case in EXPERT_CASES if str(case) == "mixtral")
    given: set[int] = set()
    bind = Chain.bind

    def spy(self: Chain, x: F32, store: Store, adapted: StepRows | None = None) -> tuple[list[Action], list[F32]]:
        given.add(len(x))
        return bind(self, x, store, adapted)

    monkeypatch.setattr(Chain, "bind", spy)
    cut = units(case.model, "fp32", 32, exact=True)
    sliced = session(case.folder, tmp_path, uneven_shares(cut, 2)) if layout == "sliced" else None
    with sliced or trunk(case, tmp_path, "fp32", 2) as ranks:
        run(ranks, case.tokens, [19, 1, 5])
        decoded(ranks, [case.tokens[:7], case.tokens[7:12]])
    assert len(given) > 3
    assert all(count % 2 == 0 for count in given)


def test_hosted_experts_that_mix_rows_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in EXPERT_CASES if str(case) == "mixtral")
    computed = OnnxRuntimeExpert.__call__

    def mixing(self: OnnxRuntimeExpert, x: F32) -> F32:
        return computed(self, x) * np.float32(1 + 1e-6 * (len(x) == 1))

    monkeypatch.setattr(OnnxRuntimeExpert, "__call__", mixing)
    graph = share(case, "fp32", tmp_path, 0, 0)
    with pytest.raises(EngineError, match="cannot keep exact=true on this machine"):
        OnnxRuntimeExperts(EXACT).open(graph)
    OnnxRuntimeExperts(EngineOptions()).open(graph).close()


def test_the_reference_has_no_exact_experts() -> None:
    with pytest.raises(EngineError, match="the reference engine cannot keep exact=true"):
        ReferenceExperts(EXACT)
