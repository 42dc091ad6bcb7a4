"""What the engines on GPUs know of a rank's graph; a graph with anything else is refused by name before it is loaded.

Their kernels and their lowering are for the nodes below, with these attributes and operands. A node that was taken for
one of these would be computed wrongly without a word, so everything that is not listed is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import onnx
import onnx.numpy_helper
from onnx import TensorProto

from motley.plugins.engine import DOMAIN, EngineError
from motley.plugins.nodes import attributes_of

Numbers = Callable[[str], float | None]
"""Gives the float that a name stands for in a graph; None: it is no number of the graph itself."""
UnknownInExperts = Callable[[onnx.NodeProto, Numbers], Iterable[str]]
"""Gives what an engine does not know of an ``Experts`` node, by the numbers of its graph."""

ANY = object()
"""Every value of an attribute."""

KNOWN: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("", "Add"): {},
    ("", "Cast"): {"to": TensorProto.FLOAT},
    ("", "Concat"): {"axis": 0},
    ("", "ConstantOfShape"): {"value": ANY},
    ("", "DequantizeLinear"): {"axis": 1, "block_size": ANY},
    ("", "Gather"): {"axis": 0},
    ("", "Gemm"): {"transB": 1},
    ("", "Mul"): {},
    ("", "RMSNormalization"): {"axis": -1, "epsilon": ANY},
    ("", "Reshape"): {},
    ("", "Shape"): {"start": 0, "end": 1},
    ("", "Split"): {"axis": 1},
    ("", "Swish"): {"alpha": 1.0},
    (DOMAIN, "Adapted"): {"parts": ANY, "widths": ANY, "columns": ANY},
    (DOMAIN, "CachedAttention"): {
        "q_heads": ANY,
        "kv_heads": ANY,
        "head_dim": ANY,
        "rotary_dim": ANY,
        "scale": ANY,
        "window": ANY,
        "soft_cap": 0.0,
    },
    (DOMAIN, "DistCollective"): {
        "collective_operation": b"all_reduce",
        "reduce_op": b"sum",
        "root": -1,
        "group_size": 0,
        "nb_rank": ANY,
    },
}
"""The values that each attribute of an operator may have, by its domain and name."""


def check_known(
    engine: str,
    graph: onnx.GraphProto,
    routed: Mapping[tuple[str, str], Mapping[str, Any]] = MappingProxyType({}),
    unknown_in_experts: UnknownInExperts = lambda *_: (),
) -> None:
    """Make sure that an engine on a GPU knows every node of a rank's graph.

    Args:
        routed: what it knows beside `KNOWN`, if it computes routers and experts: sums with numbers and weights, and
            products with numbers, then too.
        unknown_in_experts: if it computes experts, too.

    Raises:
        EngineError: naming each operator that it does not know, with the attribute or the operand that is in the way.
    """
    if unknown := list(dict.fromkeys(_unknown(graph, {**KNOWN, **routed}, unknown_in_experts))):
        raise EngineError(f"engine {engine!r} does not know {', '.join(unknown)}; use engine 'onnxruntime'")


def rotary_tables(graph: onnx.GraphProto) -> list[tuple[str, str]]:
    """The graph inputs with the cosines and sines that attention rotates by: a pair for each rotary embedding."""
    attends = (node for node in graph.node if node.op_type in ("CachedAttention", "CachedAttentionWithSinks"))
    return list(dict.fromkeys((node.input[6], node.input[7]) for node in attends))


def _unknown(
    graph: onnx.GraphProto,
    all_known: Mapping[tuple[str, str], Mapping[str, Any]],
    unknown_in_experts: UnknownInExperts,
) -> Iterator[str]:
    routes = (DOMAIN, "Experts") in all_known
    constants = {tensor.name: tensor for tensor in graph.initializer}
    made_by = {name: node for node in graph.node for name in node.output}
    widths = {value.name: value.type.tensor_type.shape.dim[-1].dim_value for value in graph.value_info}
    (hidden,) = (value.type.tensor_type.shape.dim[-1].dim_value for value in graph.input if value.name == "hidden")
    shapes = {name for node in graph.node if node.op_type == "ConstantOfShape" for name in node.input}
    swishes = {name for name, node in made_by.items() if node.op_type == "Swish"}
    sigmoids = {name for name, node in made_by.items() if node.op_type == "Sigmoid"}
    for node in graph.node:
        called = ".".join(filter(None, (node.domain, node.op_type)))
        known = all_known.get((node.domain, node.op_type))
        if known is None:
            yield called
            continue
        attributes = attributes_of(node)
        for name, value in attributes.items():
            allowed = known.get(name)
            if allowed is not ANY and value != allowed:
                yield f"{called} with {name}={value.decode() if isinstance(value, bytes) else value}"
        if not swishes.isdisjoint(node.input[node.op_type == "Mul" :]):
            yield f"{called} of a Swish"
        match node.op_type:
            case "Cast" if not _is_stored(constants.get(node.input[0])):
                yield f"{called} of what is no weight"
            case "Concat" if node.output[0] not in shapes:
                yield f"{called} of what is no shape"
            case "Add" if not constants.keys().isdisjoint(node.input) and not (routes and _is_last(constants, node)):
                yield f"{called} of a constant"
            case "Mul" if routes and (_is_number(constants.get(node.input[1])) or node.input[1] in sigmoids):
                pass
            case "Mul" if node.input[0] not in swishes or node.input[1] in constants:
                yield f"{called} without a Swish"
            case "RMSNormalization" if not _is_stored(constants.get(node.input[1])):
                yield f"{called} without a gain"
            case "Gemm":
                source = made_by.get(node.input[1])
                if not _is_stored(constants.get(node.input[1] if source is None else source.input[0])):
                    yield f"{called} by a matrix that is no weight"
            case "CachedAttention" | "CachedAttentionWithSinks" if attributes["rotary_dim"] != attributes["head_dim"]:
                yield f"{called} with rotary_dim={attributes['rotary_dim']} of head_dim={attributes['head_dim']}"
            case "ReduceSum" if _integers(constants.get(node.input[1])) != [1]:
                yield f"{called} of other axes than the last of two"
            case "Experts":
                yield from unknown_in_experts(node, numbers_of(constants))
            case "DistCollective" if any(widths.get(name, hidden) != hidden for name in node.input):
                yield f"{called} of rows that are not as wide as the residual"
    tables = rotary_tables(graph)
    if len(tables) > 1:
        yield f"{DOMAIN}.CachedAttention with {len(tables)} rotary tables"


def _is_last(constants: Mapping[str, TensorProto], node: onnx.NodeProto) -> bool:
    """Whether only the second operand is a constant, and a number or a row of stored floats."""
    other = constants.get(node.input[1])
    row = other is not None and _is_stored(other) and len(other.dims) == 1 and other.data_type == TensorProto.FLOAT
    return node.input[0] not in constants and (_is_number(other) or row)


def _is_number(tensor: TensorProto | None) -> bool:
    """Whether a value is one float of the graph itself."""
    return (
        tensor is not None
        and not _is_stored(tensor)
        and tensor.data_type == TensorProto.FLOAT
        and not any(each != 1 for each in tensor.dims)
    )


def numbers_of(constants: Mapping[str, TensorProto]) -> Numbers:
    """What gives the numbers of a graph, by all its constants."""

    def number(name: str) -> float | None:
        tensor = constants.get(name)
        return float(onnx.numpy_helper.to_array(tensor).item()) if tensor is not None and _is_number(tensor) else None

    return number


def _integers(tensor: TensorProto | None) -> list[int]:
    return [] if tensor is None else onnx.numpy_helper.to_array(tensor).tolist()


def _is_stored(tensor: TensorProto | None) -> bool:
    """Whether a value is a weight in the share file."""
    return tensor is not None and tensor.data_location == TensorProto.EXTERNAL
