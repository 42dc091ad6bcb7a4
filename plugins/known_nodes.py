"""What engine tensorrt knows of a rank's graph, and how engines refuse a graph with anything else before it is loaded.

Its lowering is for the nodes below, with these attributes and operands; engine cuda knows more of them
(`motley.plugins.cuda.known`). A node that was taken for one of these would be computed wrongly without a word, so
everything that is not listed is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import onnx
import onnx.numpy_helper
from onnx import TensorProto

from motley.plugins.engine import DOMAIN, EngineError
from motley.plugins.nodes import attributes_of

Numbers = Callable[[str], float | None]
"""Gives the float that a name stands for in a graph; None: it is no number of the graph itself."""

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


def check_known(engine: str, graph: onnx.GraphProto) -> None:
    """Make sure that every node of a rank's graph is one of `KNOWN`.

    Raises:
        EngineError: naming each operator that is not, with the attribute or the operand that is in the way.
    """
    refuse(engine, _unknown(graph))


def refuse(engine: str, unknown: Iterable[str]) -> None:
    """Refuse a graph for what an engine does not know of it, if there is anything.

    Raises:
        EngineError: there is.
    """
    if told := list(dict.fromkeys(unknown)):
        raise EngineError(f"engine {engine!r} does not know {', '.join(told)}; use engine 'onnxruntime'")


def rotary_tables(graph: onnx.GraphProto) -> list[tuple[str, str]]:
    """The graph inputs with the cosines and sines that attention rotates by: a pair for each rotary embedding."""
    tables = [name for node in graph.node for name in node.input if name.startswith(("cos_cache.", "sin_cache."))]
    return list(dict.fromkeys(zip(tables[::2], tables[1::2], strict=True)))


def check_attributes(node: onnx.NodeProto, known: Mapping[str, Any]) -> Iterator[str]:
    """The attributes of a node that are not among those that are known, or have other values, in words."""
    called = _called(node)
    for name, value in attributes_of(node).items():
        allowed = known.get(name)
        if allowed is not ANY and value != allowed:
            yield f"{called} with {name}={value.decode() if isinstance(value, bytes) else value}"


def _called(node: onnx.NodeProto) -> str:
    return ".".join(filter(None, (node.domain, node.op_type)))


def _unknown(graph: onnx.GraphProto) -> Iterator[str]:
    constants = {tensor.name: tensor for tensor in graph.initializer}
    made_by = {name: node for node in graph.node for name in node.output}
    widths = {value.name: value.type.tensor_type.shape.dim[-1].dim_value for value in graph.value_info}
    (hidden,) = (value.type.tensor_type.shape.dim[-1].dim_value for value in graph.input if value.name == "hidden")
    shapes = {name for node in graph.node if node.op_type == "ConstantOfShape" for name in node.input}
    swishes = {name for name, node in made_by.items() if node.op_type == "Swish"}
    for node in graph.node:
        called = _called(node)
        known = KNOWN.get((node.domain, node.op_type))
        if known is None:
            yield called
            continue
        yield from check_attributes(node, known)
        attributes = attributes_of(node)
        if not swishes.isdisjoint(node.input[node.op_type == "Mul" :]):
            yield f"{called} of a Swish"
        match node.op_type:
            case "Cast" if not is_stored(constants.get(node.input[0])):
                yield f"{called} of what is no weight"
            case "Concat" if node.output[0] not in shapes:
                yield f"{called} of what is no shape"
            case "Add" if not constants.keys().isdisjoint(node.input):
                yield f"{called} of a constant"
            case "Mul" if node.input[0] not in swishes or node.input[1] in constants:
                yield f"{called} without a Swish"
            case "RMSNormalization" if not is_stored(constants.get(node.input[1])):
                yield f"{called} without a gain"
            case "Gemm":
                source = made_by.get(node.input[1])
                if not is_stored(constants.get(node.input[1] if source is None else source.input[0])):
                    yield f"{called} by a matrix that is no weight"
            case "CachedAttention" if attributes["rotary_dim"] != attributes["head_dim"]:
                yield f"{called} with rotary_dim={attributes['rotary_dim']} of head_dim={attributes['head_dim']}"
            case "DistCollective" if any(widths.get(name, hidden) != hidden for name in node.input):
                yield f"{called} of rows that are not as wide as the residual"
    tables = rotary_tables(graph)
    if len(tables) > 1:
        yield f"{DOMAIN}.CachedAttention with {len(tables)} rotary tables"


def is_number(tensor: TensorProto | None) -> bool:
    """Whether a value is one float of the graph itself."""
    return (
        tensor is not None
        and not is_stored(tensor)
        and tensor.data_type == TensorProto.FLOAT
        and not any(each != 1 for each in tensor.dims)
    )


def numbers_of(constants: Mapping[str, TensorProto]) -> Numbers:
    """What gives the numbers of a graph, by all its constants."""

    def number(name: str) -> float | None:
        tensor = constants.get(name)
        return float(onnx.numpy_helper.to_array(tensor).item()) if tensor is not None and is_number(tensor) else None

    return number


def is_stored(tensor: TensorProto | None) -> bool:
    """Whether a value is a weight in the share file."""
    return tensor is not None and tensor.data_location == TensorProto.EXTERNAL
