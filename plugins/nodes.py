"""What engines ask about the nodes and weights of a rank's graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx
from onnx import helper

from motley.plugins.engine import DOMAIN
from motley.plugins.streams import STREAM_OPERATORS

COLLECTIVE = "DistCollective"
EXPERTS = "Experts"
SPARSE_MIXER, XIELU = "SparseMixer", "Xielu"
"""Functions of domain ``motley``: by which a row chooses two experts, and an activation."""
OWN_FUNCTIONS = ("HeadProducts", SPARSE_MIXER, XIELU, *STREAM_OPERATORS)
"""Functions of domain ``motley``, besides attention, that the reference computes as a whole."""
NORMS = ("RMSNormalization", "LayerNormalization")


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """A node's attributes by name."""
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """The values that a node needs: its inputs, and what the graphs in its attributes take from around them."""
    yield from filter(None, node.input)
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            inside = {name for own in attribute.g.node for name in own.output}
            inside.update(tensor.name for tensor in attribute.g.initializer)
            yield from (name for own in attribute.g.node for name in reads(own) if name not in inside)


def is_collective(node: onnx.NodeProto) -> bool:
    """Whether a node exchanges values with the other ranks."""
    return node.domain == DOMAIN and node.op_type == COLLECTIVE


def is_experts(node: onnx.NodeProto) -> bool:
    """Whether a node computes the experts of a layer."""
    return node.domain == DOMAIN and node.op_type == EXPERTS
