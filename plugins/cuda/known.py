"""What engine cuda knows of a rank's graph, and which of its nodes are submitted in a step.

A node that was taken for one of these would be computed wrongly without a word, so everything that is not listed is
refused by name, before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import onnx
from onnx import TensorProto

from motley.plugins.cuda.expert_groups import best_groups
from motley.plugins.cuda.experts import unknown_in
from motley.plugins.cuda.kernels import GATES
from motley.plugins.engine import DOMAIN
from motley.plugins.known_nodes import ANY, KNOWN, check_attributes, is_number, is_stored, numbers_of, refuse
from motley.plugins.nodes import CHOSEN_BLOCKS, CHOSEN_MEANS, CHOSEN_POOLS, CHOSEN_POSITIONS, SPARSE_MIXER, XIELU
from motley.plugins.recurrent import DILATED_CONVOLUTION, GATED_DELTA, SHORT_CONVOLUTION, STATE_SPACE
from motley.plugins.streams import MATCH_STREAMS, READ_STREAMS, STREAM_GATES, WRITE_STREAMS

_ATTENTION = {**KNOWN[DOMAIN, "CachedAttention"], "soft_cap": ANY}
_CHOICE = ("heads", "head_dim", "rotary_dim", "count")
_WARMTH = {"warm_span": ANY, "warm_offset": ANY, "warmth": ANY}
_DELTA = {"decays": ANY, "written": ANY, "floor": ANY, "gate": ANY}
_GATES = dict.fromkeys(("streams", "epsilon", "written", "least", "rounds"), ANY)
_HEADS = {"layer": ANY, "group": ANY, "key_size": ANY, "value_size": ANY}

KNOWN_HERE: Mapping[tuple[str, str], Mapping[str, Any]] = {
    **KNOWN,
    ("", "Clip"): {},
    ("", "Concat"): {"axis": ANY},
    ("", "Div"): {},
    ("", "GatherElements"): {"axis": 1},
    ("", "Gelu"): {"approximate": b"tanh"},
    ("", "LayerNormalization"): KNOWN["", "RMSNormalization"],
    ("", "ReduceSum"): {"keepdims": 1},
    ("", "Min"): {},
    ("", "Relu"): {},
    ("", "Sigmoid"): {},
    ("", "Slice"): {},
    ("", "Softmax"): {"axis": -1},
    ("", "Softplus"): {},
    ("", "Split"): {"axis": ANY},
    ("", "Sqrt"): {},
    ("", "Swish"): {"alpha": ANY},
    ("", "Tanh"): {},
    ("", "TopK"): {"axis": -1, "largest": 1, "sorted": 1},
    ("", "Where"): {},
    (DOMAIN, "CachedAttention"): _ATTENTION,
    (DOMAIN, "CachedAttentionInChunks"): {**_ATTENTION, "chunk": ANY},
    (DOMAIN, "CachedAttentionToChosen"): {**_ATTENTION, "choices": ANY},
    (DOMAIN, "CachedAttentionToChosenKeys"): {**_ATTENTION, "choices": ANY},
    (DOMAIN, "CachedAttentionToChosenKeysWithSinks"): {**_ATTENTION, "choices": ANY},
    (DOMAIN, "CachedAttentionToKeys"): _ATTENTION,
    (DOMAIN, "CachedAttentionToKeysWithSinks"): _ATTENTION,
    (DOMAIN, "CachedAttentionWarmed"): {**_ATTENTION, **_WARMTH},
    (DOMAIN, "CachedAttentionWithGains"): _ATTENTION,
    (DOMAIN, "CachedAttentionWithSinks"): _ATTENTION,
    (DOMAIN, CHOSEN_BLOCKS): dict.fromkeys((*_CHOICE, "block", "blocks", "latest"), ANY),
    (DOMAIN, CHOSEN_MEANS): dict.fromkeys((*_CHOICE, "block", "blocks", "lists", "epsilon"), ANY),
    (DOMAIN, CHOSEN_POOLS): dict.fromkeys(("heads", "head_dim", "count", "block", "blocks"), ANY),
    (DOMAIN, CHOSEN_POSITIONS): dict.fromkeys(_CHOICE, ANY),
    (DOMAIN, "Experts"): {"experts": ANY},
    (DOMAIN, "HeadProducts"): {"heads": ANY, "first": ANY, "last": ANY, "width": ANY},
    (DOMAIN, GATED_DELTA): {**_HEADS, "key_heads": ANY, "epsilon": ANY, **_DELTA},
    (DOMAIN, DILATED_CONVOLUTION): {"layer": ANY, "dilation": ANY},
    (DOMAIN, MATCH_STREAMS): {"streams": ANY, "scale": ANY},
    (DOMAIN, SHORT_CONVOLUTION): {"layer": ANY},
    (DOMAIN, SPARSE_MIXER): {"tolerance": ANY},
    (DOMAIN, XIELU): {},
    **dict.fromkeys(((DOMAIN, name) for name in STREAM_GATES), _GATES),
    (DOMAIN, READ_STREAMS): {"streams": ANY},
    (DOMAIN, WRITE_STREAMS): {"streams": ANY},
    (DOMAIN, STATE_SPACE): {**_HEADS, "heads": ANY, "least": ANY, "most": ANY},
}
"""The values that each attribute of an operator may have, by its domain and name."""

_FOLDED = ("Cast", "DequantizeLinear", "Shape")
"""Operators whose work another node's kernel does: they lead to a weight, or to a shape; so do gates."""


def submitted_nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes of a graph that are submitted in a step: all but those whose work another one does.

    Raises:
        EngineError: there is no kernel for one.
    """
    refuse("cuda", _unknown(graph))
    constants = {tensor.name for tensor in graph.initializer}
    deciding = {name for groups in best_groups(graph).values() for name in groups.deciding}
    shapes, gates = _shapes(graph), _gates(graph)

    def is_folded(node: onnx.NodeProto) -> bool:
        of_a_constant = node.op_type == "ConstantOfShape" and node.input[0] in constants
        return node.op_type in _FOLDED or of_a_constant or node.output[0] in deciding | shapes | gates

    return [node for node in graph.node if not is_folded(node)]


def _shapes(graph: onnx.GraphProto) -> set[str]:
    """The values that are shapes of zeros."""
    return {name for node in graph.node if node.op_type == "ConstantOfShape" for name in node.input}


def _gates(graph: onnx.GraphProto) -> set[str]:
    """The values that open a gate: a product with them computes them too. What else reads one has it made."""
    multiplied = {node.input[0] for node in graph.node if node.op_type == "Mul"}
    made = {node.output[0]: node for node in graph.node if node.op_type in GATES}
    return made.keys() & multiplied


def _unknown(graph: onnx.GraphProto) -> Iterator[str]:
    constants = {tensor.name: tensor for tensor in graph.initializer}
    made_by = {name: node for node in graph.node for name in node.output}
    groups, shapes, gates = best_groups(graph), _shapes(graph), _gates(graph)
    deciding = {name for found in groups.values() for name in found.deciding}
    for node in graph.node:
        if node.output[0] in deciding:
            continue
        called = ".".join(filter(None, (node.domain, node.op_type)))
        if (known := KNOWN_HERE.get((node.domain, node.op_type))) is None:
            yield called
            continue
        yield from check_attributes(node, known)
        makers = [made_by.get(name) for name in node.input]
        for index, maker in enumerate(makers):
            if maker is not None and maker.output[0] in gates and (node.op_type != "Mul" or index > 0):
                yield f"{called} of a {maker.op_type}"
            if maker is not None and _is_of_heads(maker) and not _takes_heads(node):
                yield f"{called} of a part of heads"
        stored = [is_stored(constants.get(name)) for name in node.input]
        match node.op_type:
            case "Cast" if not stored[0]:
                yield f"{called} of what is no weight"
            case "Concat" if not (_is_shape(node, shapes) or _axis(node) in (1, 2)):
                yield f"{called} of what is no shape"
            case "Split" if _axis(node) not in (1, 2):
                yield f"{called} with axis={_axis(node)}"
            case "Slice" if [_integers(constants, name) for name in node.input[3:]] != [[2]]:
                yield f"{called} of what are no heads"
            case "Gather" if node.input[1] != "rows" and not stored[0]:
                yield f"{called} of other rows than those that get logits"
            case "Reshape" if len(_integers(constants, node.input[1])) not in (2, 3):
                yield f"{called} to what is neither rows nor heads"
            case "Add" | "Mul" | "Div" if node.input[0] in constants or not _is_operand(constants, node.input[1]):
                yield f"{called} of a constant"
            case "Clip" if not all(is_number(constants.get(name)) for name in node.input[1:]):
                yield f"{called} without bounds"
            case "Min" if len(node.input) != 2 or not is_number(constants.get(node.input[1])):
                yield f"{called} of what is no number"
            case "Where" if node.output[0] not in groups:
                yield f"{called} of what are no groups of experts"
            case "RMSNormalization" | "LayerNormalization" if not constants.keys() >= {*node.input[1:]}:
                yield f"{called} without a gain"
            case "Gemm" | "HeadProducts":
                source = made_by.get(node.input[1])
                if (node.input[1] if source is None else source.input[0]) not in constants:
                    yield f"{called} by a matrix that is no weight"
            case "ReduceSum" if _integers(constants, node.input[1]) != [1]:
                yield f"{called} of other axes than the last of two"
            case "Experts":
                yield from unknown_in(node, numbers_of(constants))


def _axis(node: onnx.NodeProto) -> int:
    (axis,) = (attribute.i for attribute in node.attribute if attribute.name == "axis")
    return int(axis)


def _is_shape(node: onnx.NodeProto, shapes: set[str]) -> bool:
    return _axis(node) == 0 and node.output[0] in shapes


def _is_of_heads(node: onnx.NodeProto) -> bool:
    """Whether a node gives parts of heads, which do not lie as rows do."""
    return node.op_type == "Slice" or (node.op_type == "Split" and _axis(node) == 2)


def _takes_heads(node: onnx.NodeProto) -> bool:
    return node.op_type == "Reshape" or _is_of_heads(node) or (node.op_type == "Concat" and _axis(node) == 2)


def _is_operand(constants: Mapping[str, TensorProto], name: str) -> bool:
    """Whether a value can be a second operand: rows, or floats that are the same for every row."""
    tensor = constants.get(name)
    return tensor is None or (tensor.data_type == TensorProto.FLOAT and len(tensor.dims) <= 1)


def _integers(constants: Mapping[str, TensorProto], name: str) -> list[int]:
    tensor = constants.get(name)
    return [] if tensor is None else onnx.numpy_helper.to_array(tensor).tolist()
