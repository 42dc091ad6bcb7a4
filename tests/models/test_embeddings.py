"""Embeddings: hidden states and pools of them are what transformers computes, however ranks and steps are cut."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from motley.daemon.models.cutting.units import units
from motley.daemon.models.graph.rank_graph import build_rank_graph
from motley.daemon.rank.pooling import POOLINGS, Pool
from motley.plugins.engine import F32, EngineFactory
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from motley.plugins.reference.engine import ReferenceEngine
from tests.models.cases import LocalSession, golden_case, staged_shares, uneven_shares

STATES: dict[str, F32] = dict(np.load(Path(__file__).parent / "golden_states.npz"))
declare = partial(build_rank_graph, embeds=True)


def pooled(steps: list[F32], how: str) -> F32:
    pool = Pool(how)
    for rows in steps:
        pool.add(rows)
    return np.frombuffer(pool.encoded(), "<f4")


@pytest.mark.parametrize("engine", [ReferenceEngine, OnnxRuntimeEngine])
@pytest.mark.parametrize("name", sorted(STATES))
def test_embeddings_are_those_of_transformers_on_one_rank_and_on_two(
    name: str, engine: EngineFactory, tmp_path: Path
) -> None:
    case, states = golden_case(name), STATES[name]
    cut = units(case.model, "fp32", 32)
    splits = {"whole": uneven_shares(cut, 1), "uneven": uneven_shares(cut, 2)}
    if len(case.model.layers) > 1:
        splits["stages"] = staged_shares(cut, [(range(1), 1), (range(1, len(case.model.layers)), 2)])
    for split, shares in splits.items():
        with LocalSession(case.folder, engine, shares, tmp_path / split, declare=declare) as ranks:
            width, middle = case.model.hidden, len(case.tokens) // 3
            steps = [ranks.step(case.tokens[:middle], 0), ranks.step(case.tokens[middle:], middle)]
            between = (1 + case.model.further_streams) * width  # of stages, and of ranks of one
            assert {graph.vocabulary for graph in ranks.graphs} == {width, between if split == "stages" else width}
        for rank in range(steps[0].shape[1] // width):
            own = [rows[:, rank * width : (rank + 1) * width] for rows in steps]
            assert all(np.array_equal(part, rows[:, :width]) for part, rows in zip(own, steps, strict=True))
            assert np.abs(np.concatenate(own) - states).max() < 1e-4 * np.abs(states).max()
            for how, expected in (("mean", states.mean(axis=0)), ("last", states[-1])):
                assert np.abs(pooled(own, how) - expected / np.linalg.norm(expected)).max() < 1e-5


def test_no_rank_has_weights_of_the_head() -> None:
    case = golden_case("llama-mha")
    cut = units(case.model, "fp32", 32)
    both = [build_rank_graph(case.model, uneven_shares(cut, 1), 0, "fp32", 32, 64, embeds=own) for own in (False, True)]
    answers, embeds = ({placed.weight.name for placed in declared.weights} for declared in both)
    assert answers - embeds == {"head.weight", "head.norm.weight"}
    assert embeds - answers == {"logits.weight"}, "the norm is called as its result"


@pytest.mark.parametrize("how", POOLINGS)
def test_a_pool_does_not_depend_on_steps_and_has_length_1(how: str) -> None:
    rows = np.random.default_rng(3).normal(size=(40, 16)).astype(np.float32)
    vectors = [pooled([rows[at : at + step] for at in range(0, 40, step)], how) for step in (1, 7, 40)]
    for vector in vectors:
        assert np.array_equal(vector, vectors[0])
        assert abs(np.linalg.norm(vector) - 1) < 1e-6
    assert pooled([np.zeros((2, 4), np.float32)], how).tolist() == [0, 0, 0, 0]
