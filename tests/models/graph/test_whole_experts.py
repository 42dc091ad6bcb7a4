"""A trunk without experts and every expert on its own are the same model as ranks with slices of all experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner
import pytest

from motley.daemon.models.cutting.holding import Formats
from motley.daemon.models.cutting.share import Share
from motley.daemon.models.cutting.units import units
from motley.daemon.models.description.model import EMBEDDING, Model, expected_shapes
from motley.daemon.models.description.operations import weights_of
from motley.daemon.models.graph.expert_graph import DeclaredExpert, build_expert_graph
from motley.daemon.models.graph.rank_graph import Declared, build_rank_graph
from motley.daemon.models.keys import ConfigError
from motley.daemon.weights.share_file import write_share
from motley.daemon.weights.spec import SHARE_FILE, Placed
from motley.plugins.engine import DOMAIN, F32, EngineError, EngineFactory, EngineOptions
from motley.plugins.expert_engine import Expert, ExpertEngineFactory, ExpertGraph
from motley.plugins.native import reach
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from motley.plugins.onnxruntime.hosted_experts import OnnxRuntimeExperts
from motley.plugins.reference.engine import ReferenceEngine, ReferenceExperts
from tests.models.cases import (
    Case,
    LocalSession,
    dense_cases,
    expert_cases,
    golden_case,
    others_soak,
    uneven_shares,
)
from tests.pairs import pairwise as all_pairs

TOLERANCE = 1e-4
"""Of the largest logit, between ours in float32 and transformers' in float64."""
QUANTISATIONS = ["fp32", "int8", "int4"]
ENGINES = [ReferenceEngine, OnnxRuntimeEngine]
EXPERT_ENGINES = [ReferenceExperts, OnnxRuntimeExperts]

every_case = pytest.mark.parametrize("case", expert_cases(), ids=str)
every_quantisation = pytest.mark.parametrize("quantisation", QUANTISATIONS)


def all_experts(model: Model) -> Iterator[tuple[int, int]]:
    """Layer and number of each."""
    assert model.experts
    return product(model.expert_layers, range(model.experts.count))


def joined(
    model: Model,
    shares: Sequence[Share],
    rank: int,
    quantisation: str,
    block: int,
    context: int,
    stored: Formats | None,
    exact: bool,
) -> Declared:
    """A rank's trunk with every whole expert put in where its `Experts` nodes ask for it: for engines as they are."""
    trunk = build_rank_graph(model, shares, rank, quantisation, block, context, stored, exact, experts_elsewhere=True)
    cut = units(model, quantisation, block, stored)
    proto = onnx.ModelProto()
    proto.CopyFrom(trunk.proto)
    nodes = {_layer(node): node for node in proto.graph.node if node.op_type == "Experts"}
    for node in nodes.values():
        node.attribute[0].CopyFrom(onnx.AttributeProto(name="experts", type=onnx.AttributeProto.GRAPHS))
    weights, end = list(trunk.weights), trunk.share_bytes
    constants = {tensor.name for tensor in proto.graph.initializer}
    for layer, index in all_experts(model):
        expert = build_expert_graph(model, cut, layer, index)
        whole = expert.proto.graph
        weights += [_moved(place, end) for place in expert.weights]
        for tensor in whole.initializer:
            if tensor.name not in constants:
                constants.add(tensor.name)
                _move(proto.graph.initializer.add(), tensor, end)
        nodes[layer].attribute[0].graphs.append(
            onnx.helper.make_graph(whole.node, whole.name, whole.input, whole.output)
        )
        end += expert.share_bytes
    return replace(trunk, proto=proto, weights=weights, share_bytes=end)


def _layer(node: onnx.NodeProto) -> int:
    (layer,) = node.attribute
    assert (node.domain, layer.name) == (DOMAIN, "layer")
    return int(layer.i)


def _moved(place: Placed, by: int) -> Placed:
    return Placed(place.weight, place.data_offset + by, place.scale_offset + by, place.zero_offset + by)


def _move(to: onnx.TensorProto, tensor: onnx.TensorProto, by: int) -> None:
    to.CopyFrom(tensor)
    for entry in to.external_data:
        if entry.key == "offset":
            entry.value = str(int(entry.value) + by)


def needs(case: Case, quantisation: str) -> None:
    try:
        units(case.model, quantisation, 32)
    except ConfigError:
        pytest.skip("this case's widths cannot be quantised")


def logits(case: Case, folder: Path, factory: EngineFactory, quantisation: str, ranks: int, whole: bool) -> F32:
    """Of a prefill, some decoded tokens and the rest at once."""
    shares = uneven_shares(units(case.model, quantisation, 32), ranks)
    declare = joined if whole else build_rank_graph
    steps = [0, case.prompt, case.prompt + 1, case.prompt + 2, len(case.tokens) - 1]
    with LocalSession(case.folder, factory, shares, folder, quantisation, declare=declare) as session:
        pieces = [session.step(case.tokens[start:stop], start) for start, stop in pairwise(steps)]
    return np.concatenate(pieces)


@pytest.mark.parametrize(
    ("case", "quantisation", "factory"), others_soak(product(expert_cases(), QUANTISATIONS, ENGINES)), ids=str
)
def test_one_rank_computes_the_same_bits(factory: EngineFactory, case: Case, quantisation: str, tmp_path: Path) -> None:
    needs(case, quantisation)
    sliced = logits(case, tmp_path / "sliced", factory, quantisation, 1, whole=False)
    np.testing.assert_array_equal(logits(case, tmp_path / "whole", factory, quantisation, 1, whole=True), sliced)


@pytest.mark.parametrize(("ranks", "case", "factory"), all_pairs([1, 2, 3, 5], expert_cases(), ENGINES), ids=str)
def test_any_trunk_writes_what_transformers_does(
    factory: EngineFactory, case: Case, ranks: int, tmp_path: Path
) -> None:
    got = logits(case, tmp_path, factory, "fp32", ranks, whole=True)
    assert np.abs(got - case.logits).max() < TOLERANCE * np.abs(case.logits).max()
    assert got[case.prompt - 1 :].argmax(axis=1).tolist() == case.tokens[case.prompt :]


@pytest.mark.parametrize(("case", "quantisation"), others_soak(product(expert_cases(), QUANTISATIONS)), ids=str)
def test_quantised_values_are_those_of_slices(case: Case, quantisation: str, tmp_path: Path) -> None:
    """At any number of trunk ranks, so at least the reference differs by rounding only."""
    needs(case, quantisation)
    one, three = (
        logits(case, tmp_path / str(ranks), ReferenceEngine, quantisation, ranks, whole=ranks > 1) for ranks in (1, 3)
    )
    assert np.abs(one - three).max() < TOLERANCE * np.abs(one).max()


@every_quantisation
@every_case
def test_graphs_are_valid(case: Case, quantisation: str, tmp_path: Path) -> None:
    needs(case, quantisation)
    cut = units(case.model, quantisation, 32)
    declared: list[Declared | DeclaredExpert] = [
        build_rank_graph(case.model, uneven_shares(cut, 3), rank, quantisation, 32, 64, experts_elsewhere=True)
        for rank in range(3)
    ]
    declared += [build_expert_graph(case.model, cut, *expert) for expert in all_experts(case.model)]
    for number, each in enumerate(declared):
        proto = onnx.inliner.inline_local_functions(each.proto)
        folder = tmp_path / str(number)
        folder.mkdir()
        with (folder / SHARE_FILE).open("wb") as file:
            file.truncate(each.share_bytes)
        (folder / "model.onnx").write_bytes(proto.SerializeToString())
        onnx.checker.check_model(folder / "model.onnx", full_check=True)
        shapes = onnx.shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True).graph
        known = {value.name for value in [*shapes.value_info, *shapes.output]}
        assert {output for node in shapes.node for output in node.output} <= known


@every_case
def test_a_trunk_rank_sums_only_what_ranks_have_parts_of(case: Case) -> None:
    """A collective for attention (two with norms of whole rows), and one for an MLP that is not beside it, or a shared
    expert, if there is one; every rank routes."""
    for rank in range(3):
        shares = uneven_shares(units(case.model, "fp32", 32), 3)
        nodes = build_rank_graph(case.model, shares, rank, "fp32", 32, 64, experts_elsewhere=True).proto.graph.node
        asked = [_layer(node) for node in nodes if node.op_type == "Experts"]
        assert asked == case.model.expert_layers
        collectives = [node for node in nodes if node.op_type == "DistCollective"]
        assert len(collectives) == case.collectives(elsewhere=True)


@every_case
def test_trunk_and_experts_partition_the_checkpoint(case: Case) -> None:
    """Each expert's tensors are whole in its own share, and in no trunk rank's."""
    cut = units(case.model, "fp32", 32)
    trunk = {
        piece.tensor
        for rank in range(3)
        for place in build_rank_graph(
            case.model, uneven_shares(cut, 3), rank, "fp32", 32, 64, experts_elsewhere=True
        ).weights
        for piece in place.weight.pieces
    }
    shapes = expected_shapes(case.model)
    seen: set[str] = set()
    for layer, index in all_experts(case.model):
        own = set()
        for place in build_expert_graph(case.model, cut, layer, index).weights:
            for piece in place.weight.pieces:
                columns = () if piece.columns is None else (piece.columns,)
                assert tuple(map(len, (piece.rows, *columns))) == shapes[piece.tensor]
                own.add(piece.tensor)
        experts = case.model.experts_of(layer)
        assert experts is not None
        module = weights_of(experts.body[0])[0].name.partition("{expert}")[0]
        assert own == {name for name in shapes if name.startswith(f"{module}{index}.")}
        assert not own & (seen | trunk)
        seen |= own
    tables = {table.name for table in case.model.tables if table.name != EMBEDDING or not case.model.tied}
    names = {name for name in shapes if name not in tables}
    assert trunk | seen == names


@pytest.mark.parametrize(("layer", "index"), [(0, 99), (99, 0), (-1, 0), (0, -1)])
def test_an_expert_that_the_model_does_not_have_is_named(layer: int, index: int) -> None:
    model = golden_case("mixtral").model
    with pytest.raises(ConfigError, match=f"no expert {index} in layer {layer}"):
        build_expert_graph(model, units(model, "fp32", 32), layer, index)


def test_a_dense_model_has_no_expert() -> None:
    model = dense_cases()[0].model
    with pytest.raises(ConfigError, match="no expert 0 in layer 0"):
        build_expert_graph(model, units(model, "fp32", 32), 0, 0)


# ---------------------------------------------------------------- expert engines


def share(
    case: Case, quantisation: str, folder: Path, layer: int, index: int, slice_: int = 0, slices: int = 1
) -> ExpertGraph:
    opened = case.opened
    cut = units(opened.model, quantisation, 32, opened.stored)
    declared: DeclaredExpert = build_expert_graph(opened.model, cut, layer, index, slice_, slices)
    folder.mkdir(exist_ok=True)
    write_share(opened.source, declared.weights, declared.share_bytes, folder / SHARE_FILE)
    return declared.bind(folder / SHARE_FILE)


def dequantised(graph: ExpertGraph, x: F32) -> F32:
    """The expert in float64, by ONNX's own evaluator."""
    from onnx.reference import ReferenceEvaluator

    proto = onnx.ModelProto()
    proto.CopyFrom(graph.proto)
    onnx.external_data_helper.load_external_data_for_model(proto, str(graph.share_file.parent))
    (y,) = ReferenceEvaluator(proto).run(None, {proto.graph.input[0].name: x})
    result: F32 = y
    return result


@every_quantisation
@every_case
@pytest.mark.parametrize("factory", EXPERT_ENGINES)
def test_an_expert_of_any_rows(factory: ExpertEngineFactory, case: Case, quantisation: str, tmp_path: Path) -> None:
    needs(case, quantisation)
    layer, index = list(all_experts(case.model))[-1]
    graph = share(case, quantisation, tmp_path, layer, index)
    engine = factory(EngineOptions())
    expert: Expert = engine.open(graph)
    random = np.random.default_rng(7)
    for rows in (1, 2, 1, 5, 64, 3):
        x = random.standard_normal((rows, case.model.expert_width), np.float32)
        given = x.copy()
        x.flags.writeable = False  # as rows in a message are
        y = expert(x)
        assert (y.shape, y.dtype, y.flags.c_contiguous) == (x.shape, np.float32, True)
        right = dequantised(graph, given)
        # ONNX Runtime quantises what goes into a narrow matmul to int8.
        limit = 0.04 if quantisation != "fp32" and factory is OnnxRuntimeExperts else 1e-5
        assert np.linalg.norm(y - right) < limit * np.linalg.norm(right)
    expert.close()
    engine.close()


@every_quantisation
@every_case
@pytest.mark.parametrize("factory", EXPERT_ENGINES)
def test_the_slices_of_an_expert_add_up_to_it(
    factory: ExpertEngineFactory, case: Case, quantisation: str, tmp_path: Path
) -> None:
    needs(case, quantisation)
    layer, index = next(all_experts(case.model))
    slices = min(5, units(case.model, quantisation, 32).mlp)
    engine = factory(EngineOptions())
    x = np.random.default_rng(7).standard_normal((3, case.model.expert_width), np.float32)
    total = np.zeros_like(x)
    for number in range(slices):
        expert = engine.open(share(case, quantisation, tmp_path / str(number), layer, index, number, slices))
        total += expert(x)
        expert.close()
    right = dequantised(share(case, quantisation, tmp_path / "whole", layer, index), x)
    limit = 0.04 if quantisation != "fp32" and factory is OnnxRuntimeExperts else 1e-5
    assert np.linalg.norm(total - right) < limit * np.linalg.norm(right)
    engine.close()


def test_an_expert_has_no_more_slices_than_units() -> None:
    model = golden_case("mixtral").model
    cut = units(model, "int4", 32)
    with pytest.raises(ConfigError, match=f"{cut.mlp} units cannot be cut in {cut.mlp + 1} slices"):
        build_expert_graph(model, cut, 0, 0, 0, cut.mlp + 1)


@pytest.mark.parametrize("factory", EXPERT_ENGINES)
def test_experts_are_apart_and_outlive_each_other(factory: ExpertEngineFactory, tmp_path: Path) -> None:
    case = golden_case("mixtral")
    engine = factory(EngineOptions())
    x = np.ones((1, case.model.expert_width), np.float32)
    experts = []
    for index in range(3):
        (tmp_path / str(index)).mkdir()
        experts.append(engine.open(share(case, "fp32", tmp_path / str(index), 0, index)))
    before = [expert(x).copy() for expert in experts]
    kept = experts[0](x)
    experts[1].close()
    experts[2](x)
    np.testing.assert_array_equal(kept, before[0])
    np.testing.assert_array_equal(experts[2](x), before[2])
    assert not np.array_equal(before[0], before[2])


@pytest.mark.parametrize("factory", EXPERT_ENGINES)
def test_unknown_settings_are_refused(factory: ExpertEngineFactory) -> None:
    with pytest.raises(EngineError, match="speed"):
        factory(EngineOptions(extra={"speed": "high"}))


def test_experts_that_are_too_small_alone_tell_how_far_ahead_to_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is closed meanwhile does not count; answers are the same before and after."""
    case = golden_case("mixtral")
    graphs = [share(case, "int4", tmp_path / str(index), 0, index) for index in range(4)]
    monkeypatch.setattr(reach, "_chosen", {})
    engine = OnnxRuntimeExperts(EngineOptions())
    x = np.random.default_rng(7).standard_normal((1, case.model.expert_width), np.float32)
    engine.open(graphs[0]).close()
    first = engine.open(graphs[0])
    before = first(x).copy()
    size = sum(size for workshop in engine._threads.workshops for size, _ in workshop.products[4])
    monkeypatch.setattr(reach, "LEAST", 2 * size + 1)
    opened = [engine.open(graphs[1])]
    assert not reach.is_chosen(4)
    opened.append(engine.open(graphs[2]))
    assert reach.is_chosen(4)
    assert not any(workshop.products for workshop in engine._threads.workshops)
    np.testing.assert_array_equal(first(x), before)
    opened.append(engine.open(graphs[3]))
    assert not any(workshop.products for workshop in engine._threads.workshops)
    engine.close()
