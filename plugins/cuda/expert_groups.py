"""Routers that choose among the best groups of experts alone: the nodes that decide it, read as one.

`motley.daemon.models.graph.routing` makes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import numpy_helper

from motley.plugins.nodes import attributes_of

LOWEST = float(np.float32(-3e38))
"""The score of experts in groups that do not count, as in the source."""


@dataclass(frozen=True)
class BestGroups:
    """The scores of experts, of which those count that are in one of the best groups.

    Attributes:
        scores: the value that has them, f32[T, experts].
        groups: how many groups of neighbours they are in.
        kept: how many of the groups count: those whose two best scores add up to most.
        deciding: the results of the nodes that decide it.
    """

    scores: str
    groups: int
    kept: int
    deciding: frozenset[str]


def best_groups(graph: onnx.GraphProto) -> dict[str, BestGroups]:
    """All choices of groups in a graph, by the names of the scores that they make."""
    reader = _Reader(graph)
    found = ((node.output[0], reader.read(node)) for node in graph.node if node.op_type == "Where")
    return {name: groups for name, groups in found if groups is not None}


class _Reader:
    def __init__(self, graph: onnx.GraphProto) -> None:
        self._made_by = {name: node for node in graph.node for name in node.output}
        self._constants: Mapping[str, onnx.TensorProto] = {each.name: each for each in graph.initializer}

    def read(self, where: onnx.NodeProto) -> BestGroups | None:
        """What a choice between scores and `LOWEST` decides; None: something else."""
        mask, apart, lowest = where.input
        chain = [*self._chain(mask, ["Unsqueeze", "GreaterOrEqual", "ReduceSum", "TopK", "Reshape"])]
        if len(chain) != 5 or self._numbers(lowest) != [LOWEST]:
            return None
        unsqueeze, counts, worth, two, groups = chain
        least = [*self._chain(counts.input[1], ["ReduceMin", "TopK"])]
        if len(least) != 2 or least[1].input[0] != counts.input[0] or groups.output[0] != apart:
            return None
        shape, kept = self._numbers(groups.input[1]), self._numbers(least[1].input[1])
        alike = [self._numbers(node.input[1]) for node in (unsqueeze, worth, two, least[0])] == [[2], [2], [2], [1]]
        largest = all(attributes_of(node) == {"axis": -1, "largest": 1, "sorted": 1} for node in (two, least[1]))
        summed = attributes_of(worth) == {"keepdims": 0} and attributes_of(least[0]) == {"keepdims": 1}
        if len(shape) != 3 or len(kept) != 1 or not (alike and largest and summed) or shape[2] < 2:
            return None
        deciding = [unsqueeze, counts, worth, two, *least]
        names = frozenset(name for node in deciding for name in node.output)
        return BestGroups(groups.input[0], int(shape[1]), int(kept[0]), names)

    def _chain(self, name: str, operators: list[str]) -> Iterator[onnx.NodeProto]:
        """The nodes that make a value, the one after the other by their first operands, as far as they are these."""
        for operator in operators:
            node = self._made_by.get(name)
            if node is None or node.op_type != operator:
                return
            yield node
            name = node.input[0]

    def _numbers(self, name: str) -> list[float]:
        tensor = self._constants.get(name)
        if tensor is None or tensor.data_location == onnx.TensorProto.EXTERNAL:
            return []
        numbers: list[float] = numpy_helper.to_array(tensor).reshape(-1).tolist()
        return numbers
