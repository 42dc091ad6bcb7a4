"""Engines on GPUs refuse what they do not know, by name: over all golden models, and one thing at a time."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import pytest
from onnx import helper

from motley.daemon.models.cutting.units import units
from motley.daemon.models.graph.rank_graph import build_rank_graph
from motley.plugins.cuda.known import submitted_nodes
from motley.plugins.engine import EngineError
from motley.plugins.known_nodes import check_known, rotary_tables
from tests.models.cases import Case, golden_case, golden_cases, uneven_shares, whole_share
from tests.plugins.known_cases import REFUSED, known_cases

every_case = pytest.mark.parametrize("case", golden_cases(), ids=str)


def graph_of(case: Case, rank: int = 0, ranks: int = 1, exact: bool = False) -> onnx.GraphProto:
    cut = units(case.model, "fp32", 32, None, exact)
    shares = uneven_shares(cut, ranks) if ranks > 1 else [whole_share(cut)]
    return build_rank_graph(case.model, shares, rank, "fp32", 32, case.model.context, exact=exact).proto.graph


@pytest.mark.parametrize("ranks", [1, 3])
@every_case
def test_engine_cuda_knows_every_model_and_engine_tensorrt_some(case: Case, ranks: int) -> None:
    refused = []
    for rank in range(ranks):
        graph = graph_of(case, rank, ranks)
        submitted_nodes(graph)
        try:
            check_known("tensorrt", graph)
        except EngineError as error:
            refused.append(str(error))
    assert bool(refused) == (case.folder.name in REFUSED)


def first(graph: onnx.GraphProto, operator: str) -> onnx.NodeProto:
    return next(node for node in graph.node if node.op_type == operator)


def set_attribute(operator: str, **attributes: object) -> Callable[[onnx.GraphProto], None]:
    """A change of a graph: the first node of an operator has these attributes."""

    def change(graph: onnx.GraphProto) -> None:
        node = first(graph, operator)
        kept = [attribute for attribute in node.attribute if attribute.name not in attributes]
        del node.attribute[:]
        node.attribute.extend([*kept, *(helper.make_attribute(name, value) for name, value in attributes.items())])

    return change


def rename(operator: str, name: str) -> Callable[[onnx.GraphProto], None]:
    """A change of a graph: the first node of an operator is of another."""

    def change(graph: onnx.GraphProto) -> None:
        first(graph, operator).op_type = name

    return change


def set_operand(operator: str, index: int, name: str) -> Callable[[onnx.GraphProto], None]:
    """A change of a graph: the first node of an operator reads another value."""

    def change(graph: onnx.GraphProto) -> None:
        first(graph, operator).input[index] = name

    return change


def swish_read_twice(graph: onnx.GraphProto) -> None:
    first(graph, "Add").input[1] = first(graph, "Swish").output[0]


def cast_of_rows(graph: onnx.GraphProto) -> None:
    add = first(graph, "Add")
    graph.node.append(helper.make_node("Cast", [add.input[0]], ["cast"], to=onnx.TensorProto.FLOAT))
    add.input[0] = "cast"


def concat_of_rows(graph: onnx.GraphProto) -> None:
    add = first(graph, "Add")
    graph.node.append(helper.make_node("Concat", [add.input[0]], ["joined"], axis=0))
    add.input[0] = "joined"


def narrow_sum(graph: onnx.GraphProto) -> None:
    summed = first(graph, "DistCollective").input[0]
    (value,) = (value for value in graph.value_info if value.name == summed)
    value.type.tensor_type.shape.dim[1].dim_value = 2


CONSTANT = "i64.3"

CHANGES = {
    "Gelu": rename("Swish", "Gelu"),
    "motley.CachedAttentionWithSinks": rename("CachedAttention", "CachedAttentionWithSinks"),
    "motley.CachedAttention with soft_cap=50.0": set_attribute("CachedAttention", soft_cap=50.0),
    "motley.CachedAttention with rotary_dim=8 of head_dim=": set_attribute("CachedAttention", rotary_dim=8),
    "motley.CachedAttention with sinks=1": set_attribute("CachedAttention", sinks=1),
    "motley.CachedAttention with 2 rotary tables": set_operand("CachedAttention", 6, "cos_cache.other"),
    "motley.DistCollective with collective_operation=all_gather": set_attribute(
        "DistCollective", collective_operation="all_gather"
    ),
    "motley.DistCollective with reduce_op=max": set_attribute("DistCollective", reduce_op="max"),
    "motley.DistCollective of rows that are not as wide as the residual": narrow_sum,
    "Swish with alpha=1.5": set_attribute("Swish", alpha=1.5),
    "Cast of what is no weight": cast_of_rows,
    "Concat of what is no shape": concat_of_rows,
    "Add of a Swish": swish_read_twice,
    "Add of a constant": set_operand("Add", 1, CONSTANT),
    "Mul without a Swish": set_operand("Mul", 1, CONSTANT),
    "RMSNormalization with axis=1": set_attribute("RMSNormalization", axis=1),
    "RMSNormalization without a gain": set_operand("RMSNormalization", 1, CONSTANT),
    "Gemm with alpha=2.0": set_attribute("Gemm", alpha=2.0),
    "Gemm with transB=0": set_attribute("Gemm", transB=0),
    "Gemm by a matrix that is no weight": set_operand("Gemm", 1, CONSTANT),
    "Split with axis=0": set_attribute("Split", axis=0),
    "Gather with axis=1": set_attribute("Gather", axis=1),
}
"""Changes of a known graph, by what they are refused for."""


@pytest.mark.parametrize("unknown", CHANGES)
def test_one_thing_that_is_not_known_is_enough(unknown: str) -> None:
    graph = graph_of(next(case for case in known_cases() if case.folder.name == "qwen2"))
    check_known("tensorrt", graph)
    graph.initializer.append(helper.make_tensor(CONSTANT, onnx.TensorProto.INT64, [1], [3]))
    CHANGES[unknown](graph)
    with pytest.raises(EngineError) as caught:
        check_known("tensorrt", graph)
    assert f"engine 'tensorrt' does not know {unknown}" in str(caught.value)
    assert "use engine 'onnxruntime'" in str(caught.value)


def set_part(graph: onnx.GraphProto) -> None:
    """A product is made of parts of heads as they lie."""
    (part,) = (node.output[0] for node in graph.node if node.op_type == "Slice" and "layers.0" in node.output[0])
    first(graph, "Gemm").input[0] = part


def experts_elsewhere(graph: onnx.GraphProto) -> None:
    experts = first(graph, "Experts")
    del experts.attribute[:]
    experts.attribute.append(helper.make_attribute("layer", 1))


def relu_of_others(graph: onnx.GraphProto) -> None:
    """Experts open their gates by something else, of which there is no kernel with limits."""
    for body in first(graph, "Experts").attribute[0].graphs:
        first(body, "Swish").op_type = "Tanh"


CHANGES_FOR_CUDA = {
    "qwen2": {
        "Erf": rename("Swish", "Erf"),
        "motley.CachedAttention with sinks=1": set_attribute("CachedAttention", sinks=1),
        "motley.DistCollective with collective_operation=all_gather": set_attribute(
            "DistCollective", collective_operation="all_gather"
        ),
        "Min of what is no number": rename("Swish", "Min"),
        "Cast of what is no weight": cast_of_rows,
        "Concat of what is no shape": concat_of_rows,
        "Add of a Swish": swish_read_twice,
        "Add of a constant": set_operand("Add", 1, CONSTANT),
        "RMSNormalization without a gain": set_operand("RMSNormalization", 1, "hidden"),
        "Gemm by a matrix that is no weight": set_operand("Gemm", 1, "hidden"),
        "Split with axis=0": set_attribute("Split", axis=0),
        "Gather of other rows than those that get logits": set_operand("Gather", 1, CONSTANT),
    },
    "qwen3": {"Reshape to what is neither rows nor heads": set_operand("Reshape", 1, CONSTANT)},
    "gemma2": {"Gelu with approximate=none": set_attribute("Gelu", approximate="none")},
    "deepseek-v3": {
        "Slice of what are no heads": set_operand("Slice", 3, CONSTANT),
        "Gemm of a part of heads": set_part,
        "Where of what are no groups of experts": set_operand("Where", 2, CONSTANT),
        "ReduceMin": set_operand("ReduceMin", 1, CONSTANT),
        "TopK with largest=0": set_attribute("TopK", largest=0),
    },
    "olmoe-clipped-normalised": {
        "Clip without bounds": set_operand("Clip", 1, CONSTANT),
        "motley.Experts that are on other machines": experts_elsewhere,
        "motley.Experts of Gemm and Split and Tanh and Mul": relu_of_others,
    },
}
"""Changes of graphs that engine cuda knows, by what they are refused for."""


@pytest.mark.parametrize(
    ("name", "unknown"), [(name, unknown) for name, changes in CHANGES_FOR_CUDA.items() for unknown in changes]
)
def test_one_thing_that_engine_cuda_does_not_know_is_enough(name: str, unknown: str) -> None:
    graph = graph_of(golden_case(name))
    graph.initializer.append(helper.make_tensor(CONSTANT, onnx.TensorProto.INT64, [1], [3]))
    CHANGES_FOR_CUDA[name][unknown](graph)
    with pytest.raises(EngineError) as caught:
        submitted_nodes(graph)
    assert unknown in str(caught.value).removeprefix("engine 'cuda' does not know ").split("; use")[0].split(", ")


def test_exact_sums_are_refused() -> None:
    graph = graph_of(known_cases()[0], exact=True)
    with pytest.raises(EngineError, match=r"motley\.DistCollective with collective_operation=all_gather"):
        submitted_nodes(graph)


def test_tables_are_those_that_the_nodes_name() -> None:
    known = graph_of(known_cases()[0])
    assert rotary_tables(known) == [("cos_cache.main", "sin_cache.main")]
    first(known, "CachedAttention").input[6:8] = ["cos_cache.none", "sin_cache.none"]
    assert rotary_tables(known) == [
        ("cos_cache.none", "sin_cache.none"),
        ("cos_cache.main", "sin_cache.main"),
    ]
