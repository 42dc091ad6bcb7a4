"""Stages: layers tile over them by construction, and a model in stages gives what it gives in one piece."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.models.cutting.profile import profile
from motley.daemon.models.cutting.share import Share, ShareError
from motley.daemon.models.cutting.stages import stages_of
from motley.daemon.models.cutting.units import units
from motley.daemon.models.graph.rank_graph import build_rank_graph
from motley.daemon.models.keys import ConfigError
from motley.orchestrator.planning.choosing.stages import stage_profile
from motley.orchestrator.planning.cutting.shares import Candidate, cached_bytes, plan_shares
from motley.plugins.engine import EngineOptions
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from motley.plugins.reference.engine import ReferenceEngine
from tests.models.cases import Case, LocalSession, golden_case, golden_cases, others_soak, staged_shares, whole_share

CASES = [case for case in golden_cases() if not case.model.whole]
NOTHING = Share(1, range(0), range(0), range(0))
TOLERANCE = 1e-4


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=5))
def test_ranks_of_equal_layers_are_a_stage(cuts: list[tuple[int, int]]) -> None:
    bounds = [range(*own) for own in pairwise(accumulate((layers for layers, _ in cuts), initial=0))]
    shares = [
        replace(NOTHING, layers=layers) for layers, (_, ranks) in zip(bounds, cuts, strict=True) for _ in range(ranks)
    ]
    found = stages_of(shares, bounds[-1].stop)
    assert [(stage.layers, len(stage.ranks)) for stage in found] == [
        (layers, ranks) for layers, (_, ranks) in zip(bounds, cuts, strict=True)
    ]
    assert [rank for stage in found for rank in stage.ranks] == [*range(len(shares))]
    assert [stage.first for stage in found] == [True] + [False] * (len(found) - 1)
    assert [stage.last for stage in found] == [False] * (len(found) - 1) + [True]


def test_without_layers_everybody_is_in_one_stage() -> None:
    (stage,) = stages_of([NOTHING, NOTHING], 7)
    assert (stage.ranks, stage.layers, stage.first, stage.last) == (range(2), range(7), True, True)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([range(1, 4)], "layers of rank 0 start at 1"),
        ([range(2), range(2), range(3, 4)], "layers of rank 2 start at 3, those before it stop at 2"),
        ([range(2), range(1, 4)], "layers of rank 1 start at 1"),
        ([range(2), range(2, 3)], "the last rank stop at 3; the model has 4"),
        ([range(2), range(2, 4), range(2)], "layers of rank 2 start at 0"),
        ([range(0, 4, 2)], "no range of layers"),
        ([], "at least one rank"),
    ],
    ids=repr,
)
def test_layers_that_do_not_tile_are_refused(layers: list[range], message: str) -> None:
    with pytest.raises(ShareError, match=message):
        stages_of([replace(NOTHING, layers=own) for own in layers], 4)


def test_a_stage_is_cut_like_a_model_but_for_the_head() -> None:
    case = golden_case("llama-biases-odd-sizes")
    cut = units(case.model, "fp32", 32)
    count = len(case.model.layers)
    first, last = staged_shares(cut, [(range(1), 1), (range(1, count), 1)])
    wrong = replace(first, vocabulary=whole_share(cut).vocabulary)
    with pytest.raises(ShareError, match="whose stage does not have the head"):
        build_rank_graph(case.model, [wrong, last], 0, "fp32", 32, 64)
    with pytest.raises(ShareError, match=r"mlp units of the last rank stop at 1; .*layers 0 to 0 are counted"):
        build_rank_graph(case.model, [replace(first, mlp=range(1)), last], 0, "fp32", 32, 64)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_a_stage_costs_is_what_its_graph_holds(case: Case) -> None:
    """As of a model of the stage's layers, and without the head where another stage has that."""
    model = case.changed(vocab_size=64, output_vocab_size=None)  # so that no vocabulary unit is shorter than the others
    quantisation = "int8" if model.hidden % 16 == 0 else "fp32"
    told, cut, count = profile(model, quantisation, 32), units(model, quantisation, 32), len(model.layers)
    assert sum(costs.layers for costs in told.layer_costs) == count
    sizes = []
    for rank, layers in enumerate((range(1), range(1, count))):
        shares = staged_shares(cut, [(range(1), 1), (range(1, count), 1)])
        declared = build_rank_graph(model, shares, rank, quantisation, 32, 64)
        own = stage_profile(told, layers)
        a_token = sum(4 * spec.heads * spec.head_dim * len(spec.names) for spec in declared.caches)
        assert cached_bytes(own, range(own.kv_groups), 1) == a_token
        (plan,) = plan_shares([own], [Candidate("a", 1.0, 1 << 40)], 0)
        held = sum(place.weight.all_bytes for place in declared.weights)
        assert plan.weight_bytes <= held + sum(w.weight.all_bytes for w in declared.weights if len(w.weight.shape) == 1)
        assert held <= plan.weight_bytes + own.fixed_bytes - told.host_fixed_bytes
        sizes.append(held)
    whole = build_rank_graph(model, [whole_share(cut)], 0, quantisation, 32, 64)
    assert sum(sizes) == sum(place.weight.all_bytes for place in whole.weights)


@pytest.mark.parametrize("case", others_soak(CASES), ids=str)
def test_stages_give_the_same_logits(case: Case, tmp_path: Path) -> None:
    count = len(case.model.layers)
    shares = staged_shares(units(case.model, "fp32", 32), [(range(1), 2), (range(1, count), 3)])
    steps = ((0, case.prompt), (case.prompt, case.prompt + 1), (case.prompt + 1, len(case.tokens) - 1))
    with LocalSession(case.folder, ReferenceEngine, shares, tmp_path) as ranks:
        logits = np.concatenate([ranks.step(case.tokens[start:stop], start) for start, stop in steps])
    assert float(np.abs(logits - case.logits).max()) < TOLERANCE * float(np.abs(case.logits).max())
    assert logits[case.prompt - 1 :].argmax(axis=1).tolist() == case.tokens[case.prompt :]


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "olmoe", "hy-v4", "glm5-next", "qwen4-exp"])
def test_stages_of_one_rank_each_give_the_bits_of_one_rank(name: str, tmp_path: Path) -> None:
    case = golden_case(name)
    cut = units(case.model, "int8", 32)
    count = len(case.model.layers)
    found = []
    for at, shares in enumerate(([whole_share(cut)], staged_shares(cut, [(range(1), 1), (range(1, count), 1)]))):
        with LocalSession(
            case.folder, OnnxRuntimeEngine, shares, tmp_path / str(at), "int8", options=EngineOptions()
        ) as ranks:
            prompt = ranks.step(case.tokens[: case.prompt], 0, wanted=1)
            halved = ranks.step(case.tokens[case.prompt : -1], case.prompt, halved=True)
            found.append(np.concatenate([prompt, halved]))
    assert np.array_equal(*found)


def test_layers_that_read_more_than_a_residual_stay_together() -> None:
    model = golden_case("gemma4-given-rows").model
    shares = staged_shares(units(model, "fp32", 32), [(range(2), 1), (range(2, 4), 1)])
    with pytest.raises(ConfigError, match="gemma4 like this one cannot be cut in stages"):
        build_rank_graph(model, shares, 0, "fp32", 32, 64)
    assert not profile(model, "fp32", 32).layer_costs, "so that nobody plans any"


def test_no_stage_begins_with_a_layer_whose_rows_see_what_another_chooses() -> None:
    """But where all positions are seen."""
    model = golden_case("glm-moe-dsa-shared").model
    shares = staged_shares(units(model, "fp32", 32), [(range(2), 1), (range(2, 3), 1)])
    with pytest.raises(ConfigError, match="layer 2 cannot be the first of a stage in a context of 64 tokens"):
        build_rank_graph(model, shares, 1, "fp32", 32, 64)
    assert len(build_rank_graph(model, shares, 1, "fp32", 32, 28).caches) == 1
    assert [costs.follows for costs in profile(model, "fp32", 32).layer_costs] == [False, False, True]
