"""Every operation, over uneven shares and in exact mode, against what it is in NumPy (`tests.models.by_the_book`)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import pytest
from safetensors.numpy import save_file

from motley.daemon.models.cutting.profile import profile
from motley.daemon.models.cutting.units import units
from motley.daemon.models.description.model import expected_shapes
from motley.daemon.models.files import OpenModel
from motley.daemon.models.graph.rank_graph import build_rank_graph
from motley.daemon.weights.checkpoints.safetensors_checkpoint import SafetensorsCheckpoint
from motley.daemon.weights.share_file import write_share
from motley.daemon.weights.spec import SHARE_FILE, Piece
from motley.plugins.engine import F32, CacheBlocks, EngineOptions
from motley.plugins.reference.engine import ReferenceEngine
from tests.models.by_the_book import logits_by_the_book
from tests.models.cases import KINDS, TELLING, Case, LocalSession, golden_cases, others_soak, uneven_shares
from tests.models.graph.test_rank_graph import replicated
from tests.models.graph.test_whole_experts import joined
from tests.models.hand_made import MODELS

TOLERANCE = 2e-6
"""Of the largest logit, between two computations in float64 with a few constants in float32."""
TOKENS = [5, 9, 40, 2, 60, 33, 17, 8, 50, 21, 0, 13]
STEPS = [slice(0, 7), slice(7, 8), slice(8, 12)]
FLOAT64 = EngineOptions(extra={"dtype": "float64"})
MIXTURES = [name for name, make in MODELS.items() if make().experts]

every_model = pytest.mark.parametrize("name", MODELS)


@cache
def weights(name: str) -> dict[str, F32]:
    """Random ones; gains are about 1, so that 1 + gain is not."""
    random = np.random.default_rng(0)
    return {
        tensor: random.normal(len(shape) == 1, 1.5 * shape[-1] ** -0.5 if len(shape) > 1 else 0.3, shape).astype(
            np.float32
        )
        for tensor, shape in expected_shapes(MODELS[name]()).items()
    }


@pytest.fixture
def opened(name: str, tmp_path: Path) -> Iterator[OpenModel]:
    save_file(weights(name), tmp_path / "model.safetensors")
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        yield OpenModel(MODELS[name](), checkpoint, {})


def error(session: LocalSession, expected: F32) -> float:
    """The largest difference, relative to the largest logit."""
    got = np.concatenate([session.step(TOKENS[step], step.start) for step in STEPS])
    return float(np.abs(got - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("case", others_soak(golden_cases(), TELLING | KINDS), ids=str)
def test_the_book_says_what_transformers_does(case: Case) -> None:
    shapes = expected_shapes(case.opened.model)
    weights = {name: case.opened.source.read(Piece(name, *map(range, shape))) for name, shape in shapes.items()}
    got = logits_by_the_book(case.model, weights, case.tokens[:-1])
    rounded = 3e-5 if case.recurrent else 5e-6  # transformers computes recurrences in float32
    assert np.abs(got - case.logits).max() < rounded * np.abs(case.logits).max()


@every_model
def test_any_split_computes_it(name: str, opened: OpenModel, tmp_path: Path) -> None:
    expected = logits_by_the_book(opened.model, weights(name), TOKENS)
    cut = units(opened.model, "fp32", 32)
    for ranks in (1, 5):
        shares = uneven_shares(cut, ranks)
        with LocalSession(opened, ReferenceEngine, shares, tmp_path / str(ranks), options=FLOAT64) as session:
            assert error(session, expected) < TOLERANCE, ranks


@every_model
def test_any_split_computes_it_in_exact_mode(name: str, opened: OpenModel, tmp_path: Path) -> None:
    expected = logits_by_the_book(opened.model, weights(name), TOKENS)
    cut = units(opened.model, "fp32", 32, exact=True)
    for ranks in (1, 5):
        shares = uneven_shares(cut, ranks)
        with LocalSession(
            opened, ReferenceEngine, shares, tmp_path / str(ranks), options=FLOAT64, exact=True
        ) as session:
            assert error(session, expected) < TOLERANCE, ranks


@pytest.mark.parametrize("name", MIXTURES)
def test_a_trunk_and_whole_experts_compute_it(name: str, opened: OpenModel, tmp_path: Path) -> None:
    expected = logits_by_the_book(opened.model, weights(name), TOKENS)
    for ranks in (1, 3):
        shares = uneven_shares(units(opened.model, "fp32", 32), ranks)
        with LocalSession(
            opened, ReferenceEngine, shares, tmp_path / str(ranks), options=FLOAT64, declare=joined
        ) as session:
            assert error(session, expected) < TOLERANCE, ranks


@every_model
def test_quantised_values_do_not_depend_on_the_split(name: str, opened: OpenModel, tmp_path: Path) -> None:
    cut = units(opened.model, "int8", 16)
    got = []
    for ranks in (1, 5):
        shares, folder = uneven_shares(cut, ranks), tmp_path / str(ranks)
        with LocalSession(opened, ReferenceEngine, shares, folder, "int8", 16, options=FLOAT64) as session:
            got.append(session.step(TOKENS, 0))
    for other in got[1:]:
        assert np.abs(other - got[0]).max() < TOLERANCE * np.abs(got[0]).max()


@pytest.mark.parametrize("exact", [False, True])
@every_model
def test_graphs_are_valid(name: str, exact: bool, opened: OpenModel, tmp_path: Path) -> None:
    """Of a rank that has something of everything, and of one that may have nothing."""
    cut = units(opened.model, "fp32", 32, exact=exact)
    for rank in range(3):
        declared = build_rank_graph(opened.model, uneven_shares(cut, 3), rank, "fp32", 32, 64, exact=exact)
        folder = tmp_path / str(rank)
        folder.mkdir()
        write_share(opened.source, declared.weights, declared.share_bytes, folder / SHARE_FILE)
        for proto in (declared.proto, onnx.inliner.inline_local_functions(declared.proto)):
            (folder / "model.onnx").write_bytes(proto.SerializeToString())
            onnx.checker.check_model(folder / "model.onnx", full_check=True)
            shapes = onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True).graph
            known = {value.name for value in [*shapes.value_info, *shapes.output]}
            assert {output for node in shapes.node for output in node.output} <= known


@every_model
def test_the_profile_counts_what_shares_hold(name: str) -> None:
    """A whole model is no larger than its units and what is replicated; of its caches, the same."""
    model = MODELS[name]()
    told = profile(model, "fp32", 32)
    declared = build_rank_graph(model, uneven_shares(units(model, "fp32", 32), 1), 0, "fp32", 32, 64)
    everywhere = replicated(model)
    cut = norms = 0
    for place in declared.weights:
        if {piece.tensor for piece in place.weight.pieces} <= everywhere:
            norms += place.weight.all_bytes
        else:
            cut += place.weight.all_bytes
    assert norms <= told.trunk_fixed_bytes
    assert cut <= (
        told.kv_groups * (told.attention_query_bytes + told.attention_kv_bytes + told.shared_kv_bytes)
        + told.mlp_units * told.mlp_unit_bytes
        + told.vocabulary_units * told.vocabulary_unit_bytes
    )
    assert told.parameters == sum(map(np.size, weights(name).values()))
    held = CacheBlocks(1, 1).bytes_of(declared.caches)
    assert held <= told.kv_groups * (told.cache_bytes_per_token + told.shared_cache_bytes_per_token)
