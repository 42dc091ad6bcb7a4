"""Which values are made by the kernel that reads them first: what products take quantised, and sums under norms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile
from typing import NamedTuple

import onnx

from motley.plugins.adapters import ADAPTED
from motley.plugins.cuda.kernels import Coded
from motley.plugins.nodes import NORMS


class QuantisedValue(NamedTuple):
    """A value that products take quantised right after it is made."""

    coded: Coded
    read_as_floats: bool
    """Whether any other node reads its floats."""


def quantised_values(
    nodes: Sequence[onnx.NodeProto], graph: onnx.GraphProto, coded: Mapping[str, Coded]
) -> dict[str, QuantisedValue]:
    """The values that can be quantised as they are made: the products of them are the very next nodes.

    Args:
        nodes: those that are submitted in a step, in order; adapters read what they add to only where a row has one.
        graph: all that reads values, also what other nodes do along with their own work.
        coded: how matrices that are codes are multiplied, by the name of a product's second operand.
    """
    readers: dict[str, set[str]] = defaultdict(set)
    for node in graph.node:
        if node.op_type != ADAPTED:
            for name in node.input:
                readers[name].add(node.output[0])
    for output in graph.output:
        readers[output.name].add("")
    found = {}
    for number, node in enumerate(nodes):
        name, following = node.output[0], range(number + 1, len(nodes))

        def goes_on(at: int, name: str = name) -> bool:
            return nodes[at].op_type == ADAPTED or (nodes[at].op_type == "Gemm" and nodes[at].input[0] == name)

        products = [at for at in takewhile(goes_on, following) if nodes[at].op_type == "Gemm"]
        codes = [coded.get(nodes[at].input[1]) for at in products]
        if codes and codes[0] is not None:
            same = {nodes[at].output[0] for at, of in zip(products, codes, strict=True) if of == codes[0]}
            found[name] = QuantisedValue(codes[0], readers[name] != same)
    return found


def normalised_sums(nodes: Sequence[onnx.NodeProto]) -> set[str]:
    """The sums that the very next node normalises."""
    return {
        node.output[0]
        for node, behind in pairwise(nodes)
        if node.op_type == "Add" and behind.op_type in NORMS and behind.input[0] == node.output[0]
    }
