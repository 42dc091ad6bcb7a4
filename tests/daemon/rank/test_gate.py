"""The start-up gate: engines that are right pass at any split, and whatever is wrong is found and named."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors.numpy import save_file

from motley.bench.random_models.writing import synthesise
from motley.daemon.loading.answers import LIMIT, LOGITS, GateError
from motley.daemon.models.cutting.share import Share
from motley.daemon.models.cutting.units import units
from motley.daemon.models.description.model import expected_shapes
from motley.daemon.models.graph.rank_graph import Declared, build_rank_graph
from motley.daemon.models.reading import read_model
from motley.daemon.rank import gate
from motley.daemon.rank.gate import Gate, _examined, reference_answers
from motley.daemon.weights.share_file import write_share
from motley.daemon.weights.spec import SHARE_FILE
from motley.plugins.adapters import is_adapted
from motley.plugins.engine import CACHE_FORMATS, F32, Engine, EngineError, EngineOptions, RankGraph, Span
from motley.plugins.native.choosing import bind_choice
from motley.plugins.native.rows import Action
from motley.plugins.nodes import is_choice, is_collective
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from motley.plugins.reference.engine import ReferenceEngine
from tests.models.cases import (
    GOLDEN,
    KINDS,
    TELLING,
    Case,
    golden_cases,
    opening,
    others_soak,
    shaped,
    staged_shares,
    uneven_shares,
)
from tests.models.cuts import apportion, cut
from tests.models.local_group import LocalGroup
from tests.pairs import pairwise

BUNDLED = Path(__file__).parents[3] / "cli" / "models" / "shakespeare-2.6m"


def share(
    model: Path,
    quantisation: str,
    ranks: int,
    rank: int,
    folder: Path,
    *,
    exact: bool = False,
    trunk: bool = False,
    adapters: int = 0,
) -> RankGraph:
    with opening(model) as opened:
        config = opened.model
    shares = uneven_shares(units(config, quantisation, 32, exact=exact), ranks)
    declared = build_rank_graph(
        config,
        shares,
        rank,
        quantisation,
        32,
        config.context,
        exact=exact,
        experts_elsewhere=trunk,
        adapters=adapters,
    )
    return written(model, declared, folder)


def written(model: Path, declared: Declared, folder: Path) -> RankGraph:
    folder.mkdir()
    with opening(model) as opened:
        write_share(opened.source, declared.weights, declared.share_bytes, folder / SHARE_FILE)
    return declared.bind(folder / SHARE_FILE)


def examine(graph: RankGraph, rank: int, ranks: int, faulty: RankGraph | None = None, *, exact: bool = False) -> Gate:
    """Examine the CPU engine; on `faulty` if that is given, where the reference has `graph`."""
    expected = reference_answers(graph, rank, ranks, ReferenceEngine)
    gate = Gate(graph, LocalGroup(ranks).member(rank))  # of which no other member ever comes
    with closing(OnnxRuntimeEngine(faulty or graph, gate, EngineOptions(exact=exact))) as engine:
        gate.open(engine, expected)
    return gate


@pytest.mark.parametrize(("case", "ranks"), others_soak(product(golden_cases(), [1, 3, 8])), ids=str)
def test_the_cpu_engine_passes_with_any_share(case: object, ranks: int, tmp_path: Path) -> None:
    for rank in range(ranks):
        examine(share(GOLDEN / str(case), "fp32", ranks, rank, tmp_path / str(rank)), rank, ranks)


@pytest.mark.parametrize("stages", [[(range(2), 2), (range(2, 3), 1), (range(3, 6), 2)]])
def test_a_stage_is_examined_alone(stages: list[tuple[range, int]], tmp_path: Path) -> None:
    """What it gives to the next one is an answer, like logits."""
    config = read_model(BUNDLED)
    shares = staged_shares(units(config, "int4", 128), stages)
    for rank in range(5):
        declared = build_rank_graph(config, shares, rank, "int4", 128, config.context)
        among = declared.stage.ranks
        graph = written(BUNDLED, declared, tmp_path / str(rank))
        own = rank - among.start
        examine(graph, own, len(among))
        if not declared.stage.last:
            found = reference_answers(graph, own, len(among), ReferenceEngine)
            assert any(what.startswith(LOGITS) for what in found)


@pytest.mark.parametrize("quantisation", ["int8", "int4"])
@pytest.mark.parametrize("ranks", [4, 5, 8])
def test_quantised_shares_of_a_small_vocabulary_pass(ranks: int, quantisation: str, tmp_path: Path) -> None:
    """Of even shares, a row's logits may nearly vanish where rounding does not."""
    config = read_model(BUNDLED)
    found = units(config, quantisation, 128)
    split = found.attention_splits[-1]
    ranges = (cut(apportion(whole, [1] * ranks)) for whole in (found.kv_groups * split, found.mlp, found.vocabulary))
    shares = [Share(split, *own) for own in zip(*ranges, strict=True)]
    for rank in range(ranks):
        declared = build_rank_graph(config, shares, rank, quantisation, 128, config.context)
        examine(written(BUNDLED, declared, tmp_path / str(rank)), rank, ranks)


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_exact_sums_are_examined_too(ranks: int, tmp_path: Path) -> None:
    for rank in range(ranks):
        examine(share(BUNDLED, "int4", ranks, rank, tmp_path / str(rank), exact=True), rank, ranks, exact=True)


@pytest.mark.parametrize(
    ("ranks", "name", "trunk", "quantisation"),
    pairwise([1, 3, 8], ["olmoe", "qwen2-moe"], [False, True], ["fp32", "int4"]),
)
def test_exact_sums_of_experts_are_examined_too(
    ranks: int, name: str, trunk: bool, quantisation: str, tmp_path: Path
) -> None:
    for rank in range(ranks):
        graph = share(GOLDEN / name, quantisation, ranks, rank, tmp_path / str(rank), exact=True, trunk=trunk)
        examine(graph, rank, ranks, exact=True)


@pytest.mark.parametrize(
    ("ranks", "name", "quantisation"),
    pairwise([1, 3, 8], ["olmoe", "mixtral", "qwen2-moe", "qwen3-moe"], ["int8", "int4"]),
)
def test_quantised_experts_pass(ranks: int, name: str, quantisation: str, tmp_path: Path) -> None:
    for rank in range(ranks):
        examine(share(GOLDEN / name, quantisation, ranks, rank, tmp_path / str(rank)), rank, ranks)


def examine_trunk(graph: RankGraph, rank: int, ranks: int, faulty: RankGraph | None = None) -> None:
    """Examine the reference in float64, as any other engine."""
    gate = Gate(graph, LocalGroup(ranks).member(rank))
    with closing(ReferenceEngine(faulty or graph, gate, EngineOptions(extra={"dtype": "float64"}))) as engine:
        gate.open(engine, reference_answers(graph, rank, ranks, ReferenceEngine))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", ["olmoe", "mixtral", "qwen2-moe", "qwen3-moe"])
def test_a_trunk_is_examined_without_its_experts(name: str, ranks: int, tmp_path: Path) -> None:
    for rank in range(ranks):
        examine_trunk(share(GOLDEN / name, "fp32", ranks, rank, tmp_path / str(rank), trunk=True), rank, ranks)


def test_rows_that_go_to_other_experts_than_they_should_are_found(tmp_path: Path) -> None:
    """The first layer's router is upside down, which the second meets as a wrong residual."""
    graph = share(GOLDEN / "mixtral", "fp32", 1, 0, tmp_path / "right", trunk=True)
    (tensor,) = (each for each in graph.proto.graph.initializer if each.name == "layers.0.mlp.router.weight")
    place = {entry.key: int(entry.value) for entry in tensor.external_data if entry.key != "location"}
    (tmp_path / "wrong").mkdir()
    content = np.fromfile(graph.share_file, np.uint8)
    content[place["offset"] : place["offset"] + place["length"]].view(np.float32)[:] *= -1
    content.tofile(tmp_path / "wrong" / SHARE_FILE)
    with pytest.raises(GateError, match="computes wrongly: layer 1 attention of"):
        examine_trunk(graph, 0, 1, replace(graph, share_file=tmp_path / "wrong" / SHARE_FILE))


def test_a_layer_with_experts_is_among_the_examined(tmp_path: Path) -> None:
    """Of six layers only the fourth has any; one of them is wrong."""
    source = GOLDEN / "qwen2-moe"
    settings = json.loads((source / "config.json").read_text())
    settings |= {"num_hidden_layers": 6, "mlp_only_layers": [0, 1, 2, 4, 5]}
    settings["layer_types"] = ["full_attention"] * 6
    (tmp_path / "config.json").write_text(json.dumps(settings))
    random = np.random.default_rng(0)
    shapes = expected_shapes(read_model(tmp_path))
    weights = {name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(weights, tmp_path / "model.safetensors")
    graph = share(tmp_path, "fp32", 2, 0, tmp_path / "right")
    tensor = next(each for each in graph.proto.graph.initializer if "experts.2.down" in each.name)
    assert tensor.name.startswith("layers.3.")
    place = {entry.key: int(entry.value) for entry in tensor.external_data if entry.key != "location"}
    (tmp_path / "wrong").mkdir()
    content = np.fromfile(graph.share_file, np.uint8)
    content[place["offset"] : place["offset"] + place["length"]].view(np.float32)[:] *= -1
    content.tofile(tmp_path / "wrong" / SHARE_FILE)
    with pytest.raises(GateError, match="computes wrongly: layer 3 mlp of"):
        examine(graph, 0, 2, replace(graph, share_file=tmp_path / "wrong" / SHARE_FILE))


@pytest.mark.parametrize("quantisation", ["int8", "int4"])
def test_quantised_shares_pass_with_room_to_spare(
    quantisation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motley.daemon.loading.answers.LIMIT", LIMIT / 2)
    for rank in range(3):
        examine(share(BUNDLED, quantisation, 3, rank, tmp_path / str(rank)), rank, 3)


@pytest.mark.parametrize(
    ("weight", "where"),
    [
        ("layers.0.attention.qkv.weight", "layer 0 attention of 5 tokens from position 0"),
        ("layers.5.mlp.down.weight", "layer 5 mlp of 5 tokens from position 0"),
        ("head.weight", "logits of 5 tokens from position 0"),
    ],
)
def test_a_misread_weight_is_found_where_it_is(weight: str, where: str, tmp_path: Path) -> None:
    """Pairs of int4 values are swapped, the classic mistake."""
    graph = share(BUNDLED, "int4", 3, 0, tmp_path / "right")
    tensor = next(tensor for tensor in graph.proto.graph.initializer if tensor.name == weight)
    place = {entry.key: int(entry.value) for entry in tensor.external_data if entry.key != "location"}
    (tmp_path / "wrong").mkdir()
    content = np.fromfile(graph.share_file, np.uint8)
    codes = content[place["offset"] : place["offset"] + place["length"]]
    codes[:] = codes >> 4 | codes << 4
    content.tofile(tmp_path / "wrong" / SHARE_FILE)
    with pytest.raises(GateError, match=f"computes wrongly: {where} differs from the reference by"):
        examine(graph, 0, 3, replace(graph, share_file=tmp_path / "wrong" / SHARE_FILE))


def test_positions_that_go_wrong_far_inside_a_sequence_are_found(tmp_path: Path) -> None:
    graph = share(BUNDLED, "fp32", 1, 0, tmp_path / "share")

    def wrong(prompt: int) -> dict[str, F32]:
        """Rotations repeat after 512 positions."""
        return {name: np.concatenate([table[:512]] * 2) for name, table in graph.constants(prompt).items()}

    assert graph.context == 1024
    with pytest.raises(GateError, match="layer 0 attention of 3 tokens from position 1020"):
        examine(graph, 0, 1, replace(graph, constants=wrong))


class _TakingOthersBlocks(OnnxRuntimeEngine):
    """Every sequence has the blocks of the first."""

    def step(self, hidden: F32, spans: Sequence[Span], halved: bool = False) -> F32:
        return super().step(hidden, [span._replace(blocks=spans[0].blocks) for span in spans], halved)


def test_sequences_that_meet_in_a_step_are_found(tmp_path: Path) -> None:
    graph = share(BUNDLED, "fp32", 1, 0, tmp_path / "share")
    gate = Gate(graph, LocalGroup(1).member(0))
    with (
        closing(_TakingOthersBlocks(graph, gate, EngineOptions())) as engine,
        pytest.raises(GateError, match="of 1 tokens from position 2 and 3 tokens from position 0 differs"),
    ):
        gate.open(engine, reference_answers(graph, 0, 1, ReferenceEngine))


def test_nonsense_is_no_small_difference(tmp_path: Path) -> None:
    graph = share(BUNDLED, "fp32", 1, 0, tmp_path / "share")

    def broken(prompt: int) -> dict[str, F32]:
        return {name: table * np.float32("nan") for name, table in graph.constants(prompt).items()}

    with pytest.raises(GateError, match="by nan of its norm"):
        examine(graph, 0, 1, replace(graph, constants=broken))


def test_the_session_gets_what_is_summed_after_the_exam(tmp_path: Path) -> None:
    gate = examine(share(BUNDLED, "fp32", 1, 0, tmp_path / "share"), 0, 1)
    values = np.ones((2, 3), np.float32)
    gate.all_reduce(values)
    assert (values == 1).all()


@pytest.mark.parametrize("name", ["sum", "head.norm.reduced", "layers.x.mlp.reduced"])
def test_a_collective_that_belongs_to_no_layer_is_not_passed_over(name: str, tmp_path: Path) -> None:
    graph = share(BUNDLED, "fp32", 2, 1, tmp_path / "share")
    next(filter(is_collective, graph.proto.graph.node)).name = name
    with pytest.raises(GateError, match=f"a collective that belongs to no part of a layer: {name!r}"):
        examine(graph, 1, 2)


@pytest.mark.parametrize(("more", "said"), [(1, "calls more collectives"), (-1, "is missing")])
def test_an_engine_that_calls_other_collectives_than_the_graph_has_is_found(
    more: int, said: str, tmp_path: Path
) -> None:
    graph = share(BUNDLED, "fp32", 2, 1, tmp_path / "share")
    expected = reference_answers(graph, 1, 2, ReferenceEngine)
    gate = Gate(graph, LocalGroup(2).member(1))
    calls = gate._proctor._calls
    gate._proctor._calls = calls[:-1] if more > 0 else [*calls, calls[-1]]
    with (
        closing(OnnxRuntimeEngine(graph, gate, EngineOptions())) as engine,
        pytest.raises((GateError, EngineError), match=said),
    ):
        gate.open(engine, expected)


def test_answers_are_kept_with_the_share(tmp_path: Path) -> None:
    graph = share(BUNDLED, "int8", 2, 1, tmp_path / "share")
    first = reference_answers(graph, 1, 2, ReferenceEngine, tmp_path)

    def busy(*_: object) -> Engine:
        raise AssertionError("the reference was asked again")

    again = reference_answers(graph, 1, 2, busy, tmp_path)
    assert first.keys() == again.keys()
    assert all((first[what] == again[what]).all() for what in first)
    (kept,) = tmp_path.glob("*.npz")
    for damaged in (b"", b"PK not really", kept.read_bytes()[:200]):
        kept.write_bytes(damaged)
        assert reference_answers(graph, 1, 2, ReferenceEngine, tmp_path).keys() == first.keys()


def test_kept_answers_that_are_wrong_are_no_accusation(tmp_path: Path) -> None:
    """They may be another version's: the reference is asked again before a rank is refused."""
    graph = share(BUNDLED, "int8", 1, 0, tmp_path / "share")
    right = reference_answers(graph, 0, 1, ReferenceEngine)
    for stale in ({what: -answer for what, answer in right.items()}, {"layer 9 of another question": np.ones(1)}):
        for anew in (None, lambda: right):
            gate = Gate(graph, LocalGroup(1).member(0))
            outcome = nullcontext() if anew else pytest.raises(GateError)
            with closing(OnnxRuntimeEngine(graph, gate, EngineOptions())) as engine, outcome:
                gate.open(engine, stale, anew)


@pytest.mark.parametrize("context", [1, 2, 5, 6, 7])
def test_the_shortest_contexts(context: int, tmp_path: Path) -> None:
    model = GOLDEN / "llama-mha"
    declared = build_rank_graph(
        read_model(model), uneven_shares(units(read_model(model), "fp32", 32), 1), 0, "fp32", 32, context
    )
    with opening(model) as opened:
        write_share(opened.source, declared.weights, declared.share_bytes, tmp_path / SHARE_FILE)
    examine(declared.bind(tmp_path / SHARE_FILE), 0, 1)


def test_the_first_and_last_layer_of_each_kind_are_examined(tmp_path: Path) -> None:
    """The second layer of two has a window."""
    graph = share(GOLDEN / "qwen2-some-windows", "fp32", 1, 0, tmp_path / "share")
    examined = {what.split()[1] for what in reference_answers(graph, 0, 1, ReferenceEngine) if what.startswith("layer")}
    assert examined == {"0", "1", "2"}  # one without, two with


@pytest.mark.parametrize("case", others_soak(golden_cases(), TELLING | KINDS), ids=str)
def test_what_the_reference_leaves_out_changes_no_answer(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever layers do with the residual beside what they sum: few layers are computed, or all, to the same bits."""
    graph = share(case.folder, "fp32", 1, 0, tmp_path / "share")
    last = len(case.model.layers) - 1
    monkeypatch.setattr(gate, "_examined", lambda graph: sorted({last, *gate._read_by(graph, last)}))
    few = reference_answers(graph, 0, 1, ReferenceEngine)
    monkeypatch.setattr(gate, "_only", lambda graph, _: graph)
    whole = reference_answers(graph, 0, 1, ReferenceEngine)
    assert few.keys() == whole.keys()
    assert all(np.array_equal(few[what], whole[what]) for what in few)


def test_layers_whose_experts_are_elsewhere_are_of_one_kind(tmp_path: Path) -> None:
    """Although each names itself in its graph: a few are examined, not all."""
    config = json.loads((GOLDEN / "olmoe" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 12}))
    model = read_model(tmp_path)
    shares = uneven_shares(units(model, "fp32", 32), 2)
    for rank in range(2):
        graph = build_rank_graph(model, shares, rank, "fp32", 32, 64, experts_elsewhere=True).bind(
            tmp_path / SHARE_FILE
        )
        assert _examined(graph) == [0, 6, 11]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", ["llama-mqa", "hy-v4", "glm5-next"])
def test_a_rank_with_slots_for_adapters_passes(name: str, exact: bool, tmp_path: Path) -> None:
    """It is examined without any."""
    for rank in range(3):
        folder = tmp_path / str(rank)
        graph = share(GOLDEN / name, "fp32", 3, rank, folder, exact=exact, adapters=2)
        assert any(map(is_adapted, graph.proto.graph.node))
        examine(graph, rank, 3, exact=exact)


def test_layers_with_slots_for_adapters_are_of_one_kind(tmp_path: Path) -> None:
    """Although the parts of each are named after it."""
    model = shaped(num_hidden_layers=12)
    shares = uneven_shares(units(model, "fp32", 32), 1)
    graph = build_rank_graph(model, shares, 0, "fp32", 32, 64, adapters=2).bind(tmp_path / SHARE_FILE)
    assert _examined(graph) == [0, 6, 11]


def kept_as(graph: RankGraph, cache_format: str) -> RankGraph:
    return replace(graph, blocks=replace(graph.blocks, format=cache_format))


@pytest.mark.parametrize("quantisation", ["fp32", "int4"])
@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
def test_caches_of_every_format_pass_with_room_to_spare(
    cache_format: str, quantisation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motley.daemon.loading.answers.LIMIT", LIMIT / 2)
    for rank in range(3):
        graph = kept_as(share(BUNDLED, quantisation, 3, rank, tmp_path / str(rank)), cache_format)
        examine(graph, rank, 3)


@pytest.mark.parametrize(("case", "cache_format"), others_soak(product(golden_cases(), CACHE_FORMATS)), ids=str)
def test_caches_of_every_format_pass_for_any_family(case: object, cache_format: str, tmp_path: Path) -> None:
    examine(kept_as(share(GOLDEN / str(case), "fp32", 2, 0, tmp_path / "share"), cache_format), 0, 2)


class Forgetful(OnnxRuntimeEngine):
    """After every step the signs change of what one of its caches keeps."""

    broken: str

    def step(self, hidden: F32, spans: Sequence[Span], halved: bool = False) -> F32:
        logits = super().step(hidden, spans, halved).copy()
        self._blocks[self.broken] *= -1
        return logits


@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
@pytest.mark.parametrize("cache", ["key_cache.0", "value_cache.0"])
def test_caches_that_keep_something_else_are_found(
    cache: str, cache_format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = kept_as(share(BUNDLED, "fp32", 1, 0, tmp_path / "share"), cache_format)
    expected = reference_answers(graph, 0, 1, ReferenceEngine)
    monkeypatch.setattr(Forgetful, "broken", f"{cache}.scales" if cache_format == "int8" else cache, raising=False)
    gate = Gate(graph, LocalGroup(1).member(0))
    with (
        closing(Forgetful(graph, gate, EngineOptions())) as engine,
        pytest.raises(GateError, match="computes wrongly: layer 0 attention of 1 tokens from position 5"),
    ):
        gate.open(engine, expected)


@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
def test_rotations_that_go_the_wrong_way_are_found_in_every_format(cache_format: str, tmp_path: Path) -> None:
    graph = kept_as(share(BUNDLED, "fp32", 1, 0, tmp_path / "share"), cache_format)

    def wrong(prompt: int) -> dict[str, F32]:
        return {name: -table if "sin" in name else table for name, table in graph.constants(prompt).items()}

    with pytest.raises(GateError, match="computes wrongly: layer"):
        examine(graph, 0, 1, replace(graph, constants=wrong))


def test_answers_are_kept_for_each_format(tmp_path: Path) -> None:
    """Whoever asks for another format is not held against answers of the first."""
    graph = share(BUNDLED, "fp32", 1, 0, tmp_path / "share")
    first, narrow = (
        reference_answers(kept_as(graph, each), 0, 1, ReferenceEngine, tmp_path) for each in ("fp32", "int8")
    )
    assert first.keys() == narrow.keys()
    assert any((first[what] != narrow[what]).any() for what in first)
    assert len([*tmp_path.glob("*.npz")]) == 2


SEEN, FAR_CONTEXT = 64, 256
"""How many positions indexers choose, and of how many."""


def choosing(
    folder: Path, quantisation: str, *, blocks: bool = False, seed: int = 0, ranks: int = 1, rank: int = 0
) -> RankGraph:
    """A rank of a model whose layers choose what rows see, perhaps in blocks for each KV head, with random weights."""
    config = json.loads((GOLDEN / ("minimax-m3" if blocks else "glm-moe-dsa-shared") / "config.json").read_text())
    config |= {"index_topk": SEEN, "index_n_heads": 32, "index_head_dim": 32, "indexer_types": ["full"] * 4}
    config |= {"max_position_embeddings": FAR_CONTEXT, "hidden_size": 256, "num_hidden_layers": 4, "q_lora_rank": 64}
    if blocks:
        config |= {
            "index_n_heads": 4,
            "num_key_value_heads": 4,
            "num_attention_heads": 8,
            "head_dim": 32,
            "rotary_dim": 16,
        }
        config |= {"index_block_size": 8, "index_topk_blocks": SEEN // 8, "layer_types": ["minimax_m3_sparse"] * 4}
        config |= {"mlp_layer_types": ["dense"] + ["sparse"] * 3, "bos_token_id": 1}
    synthesise({**config, "vocab_size": 512}, folder / "model", seed=seed)
    return share(folder / "model", quantisation, ranks, rank, folder / "share")


@pytest.mark.parametrize("quantisation", ["int8", "int4"])
@pytest.mark.parametrize(("seed", "blocks"), [*((seed, False) for seed in range(6)), (0, True), (1, True), (2, True)])
def test_quantised_ranks_that_choose_what_rows_see_pass_with_room_to_spare(
    seed: int, blocks: bool, quantisation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although rounding lets rows choose otherwise here and there."""
    monkeypatch.setattr("motley.daemon.loading.answers.LIMIT", LIMIT / 2)
    examine(choosing(tmp_path, quantisation, blocks=blocks, seed=seed), 0, 1)


@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
def test_each_of_several_ranks_that_choose_passes(cache_format: str, tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
        examine(kept_as(choosing(tmp_path / str(rank), "int4", ranks=3, rank=rank), cache_format), rank, 3)


def sees_all(graph: RankGraph, _: Path) -> RankGraph:
    for node in filter(is_choice, graph.proto.graph.node):
        next(each for each in node.attribute if each.name == "count").i = FAR_CONTEXT
    return graph


def sees_the_worst(graph: RankGraph, folder: Path) -> RankGraph:
    """What heads find is weighed with the other sign."""
    content = np.fromfile(graph.share_file, np.uint8)
    for tensor in graph.proto.graph.initializer:
        if "index.weights" in tensor.name:
            place = {entry.key: int(entry.value) for entry in tensor.external_data if entry.key != "location"}
            content[place["offset"] : place["offset"] + place["length"]].view(np.float32)[:] *= -1
    content.tofile(folder / SHARE_FILE)
    return replace(graph, share_file=folder / SHARE_FILE)


def sees_the_latest(graph: RankGraph, _: Path) -> RankGraph:
    """All that a head sees are the latest ones."""
    for node in filter(is_choice, graph.proto.graph.node):
        next(each for each in node.attribute if each.name == "latest").i = SEEN // 8
    return graph


def sees_what_another_layer_chose(graph: RankGraph, _: Path) -> RankGraph:
    for node in graph.proto.graph.node:
        if not is_choice(node):
            own = {"layers.1.attention.chosen": "layers.0.attention.chosen"}
            node.input[:] = [own.get(name, name) for name in node.input]
    return graph


@pytest.mark.parametrize("quantisation", ["fp32", "int4"])
@pytest.mark.parametrize(
    ("wrong", "blocks"),
    [
        *((wrong, False) for wrong in (sees_all, sees_the_worst, sees_what_another_layer_chose)),
        *((wrong, True) for wrong in (sees_the_latest, sees_what_another_layer_chose)),
    ],
)
def test_a_rank_that_chooses_wrongly_is_found(
    wrong: Callable[[RankGraph, Path], RankGraph], blocks: bool, quantisation: str, tmp_path: Path
) -> None:
    graph = choosing(tmp_path, quantisation, blocks=blocks)
    proto = onnx.ModelProto()
    proto.CopyFrom(graph.proto)
    with pytest.raises(GateError, match=r"computes wrongly: choices of layer \d attention of"):
        examine(graph, 0, 1, wrong(replace(graph, proto=proto), tmp_path))


def test_a_rank_that_sees_the_positions_beside_those_it_chose_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = FAR_CONTEXT - gate.CHOOSING - gate.CHOOSING_ALONE  # of the far tokens

    def beside(*of: Any, **more: Any) -> Action:
        choose, chosen = bind_choice(*of, **more), of[4]

        def act(*given: Any) -> Any:
            done = choose(*given)
            before = (chosen >= 0) & (chosen < first)
            chosen[before] = (chosen[before] + 1) % first  # as many, and none twice
            whole = chosen.min(axis=1) >= 0
            chosen[whole] = np.sort(chosen[whole])
            return done

        return act

    monkeypatch.setattr("motley.plugins.onnxruntime.kernels.bind_choice", beside)
    with pytest.raises(GateError, match="computes wrongly: choices of layer 0 attention of single tokens far inside"):
        examine(choosing(tmp_path, "int8"), 0, 1)
