"""What engines ask about the nodes and weights of a rank's graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import onnx
from onnx import helper

from motley.plugins.engine import DOMAIN
from motley.plugins.streams import MATCH_STREAMS, STREAM_OPERATORS

COLLECTIVE = "DistCollective"
EXPERTS = "Experts"
SPARSE_MIXER, XIELU = "SparseMixer", "Xielu"
"""Functions of domain ``motley``: by which a row chooses two experts, and an activation."""
CHOSEN_POSITIONS, CHOSEN_BLOCKS, CHOSEN_POOLS = "ChosenPositions", "ChosenBlocks", "ChosenPools"
CHOSEN_MEANS = "ChosenMeans"
CHOSEN = (CHOSEN_POSITIONS, CHOSEN_BLOCKS, CHOSEN_POOLS, CHOSEN_MEANS)
"""The functions of domain ``motley`` that say which positions rows see, or which each KV head of theirs."""
CHOICE = "ChoiceOfSlots"
"""What some engines compute in its place, see `motley.plugins.segments`."""
OWN_FUNCTIONS = ("HeadProducts", SPARSE_MIXER, XIELU, MATCH_STREAMS, *STREAM_OPERATORS)
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


def is_choice(node: onnx.NodeProto) -> bool:
    """Whether a node says which positions rows see."""
    return node.domain == DOMAIN and node.op_type in (*CHOSEN, CHOICE)


def heads_choose(node: onnx.NodeProto) -> bool:
    """Whether each head chooses, of a node that says which positions rows see."""
    return "latest" in attributes_of(node)


def weighs_heads(node: onnx.NodeProto) -> bool:
    """Whether the third operand of such a node are weights of the heads: else each of these chooses, or, where keys are
    means of blocks, all count alike."""
    return attributes_of(node).keys().isdisjoint(("latest", "epsilon"))


def all_seen(nodes: Iterable[onnx.NodeProto], context: int) -> int:
    """How many positions a row may see so that it sees all of them: the context, where none are chosen."""
    return min((attributes_of(node)["count"] for node in nodes if is_choice(node)), default=context)


def only_for_choices(nodes: Sequence[onnx.NodeProto], results: Collection[str]) -> set[str]:
    """The values that serve nothing but to choose among positions, so that a step need not make them whose rows see no
    more positions than are chosen: index queries and their weights, and what only these are made of.

    Args:
        nodes: in topological order.
        results: of the graph.
    """
    needed, serving = set(results), set[str]()
    for node in reversed(nodes):
        if is_choice(node):
            q, k, *others = node.input
            serving.update([q, others.pop(0)] if weighs_heads(node) else [q])
            needed.update((k, *others))
        elif not needed.isdisjoint(node.output) or serving.isdisjoint(node.output) or is_collective(node):
            needed.update((*reads(node), *node.output))  # whoever makes one of its results makes all
        else:
            serving.update(reads(node))
    return serving - needed


def is_collective(node: onnx.NodeProto) -> bool:
    """Whether a node exchanges values with the other ranks."""
    return node.domain == DOMAIN and node.op_type == COLLECTIVE


def is_experts(node: onnx.NodeProto) -> bool:
    """Whether a node computes the experts of a layer."""
    return node.domain == DOMAIN and node.op_type == EXPERTS
