"""Cutting a graph at its collectives and experts into segments that run one after another.

A segment is what an engine runs without leaving its runtime. One cut is after every operand of a collective or of a
layer's experts; one more is where the head begins (the first reader of ``rows``), so that a prefill chunk can leave
the head out. The nodes must be in topological order. Values that a later segment reads are outputs of the one that
makes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import onnx

from motley.plugins.engine import DOMAIN, EngineError

COLLECTIVE = "DistCollective"
EXPERTS = "Experts"
ROWS = "rows"


@dataclass(frozen=True)
class Reduction:
    """The collective after a segment: `reduced` is the sum of every rank's `partial`."""

    partial: str
    reduced: str


@dataclass(frozen=True)
class Gathering:
    """The collective after a segment: `gathered` are the terms of all ranks, by rank.

    Attributes:
        own: this rank's, none or more.
        counts: how many each rank has.
    """

    own: tuple[str, ...]
    gathered: tuple[str, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Mixture:
    """The experts after a segment, see `motley.plugins.engine`.

    Attributes:
        base: what their sum is added to; None: nothing.
        experts: their graphs.
    """

    x: str
    weights: str
    chosen: str
    base: str | None
    total: str
    experts: Sequence[onnx.GraphProto]

    @property
    def operands(self) -> list[str]:
        return [name for name in (self.x, self.weights, self.chosen, self.base) if name]


@dataclass(frozen=True)
class Segment:
    nodes: tuple[onnx.NodeProto, ...]
    inputs: tuple[str, ...]
    """Values made outside: graph inputs and results of earlier segments (never initializers)."""
    outputs: tuple[str, ...]
    """Values read by later segments, exchanged, or graph outputs; a segment without any need not run."""
    then: Reduction | Gathering | Mixture | None = None
    """What is done with the outputs, outside the runtime."""
    head: bool = False
    """Whether this segment only makes logits."""


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """The values that a node needs: its inputs, and what its branches take from outside."""
    yield from filter(None, node.input)
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            inside = {name for own in attribute.g.node for name in own.output}
            inside.update(tensor.name for tensor in attribute.g.initializer)
            yield from (name for own in attribute.g.node for name in reads(own) if name not in inside)


def is_collective(node: onnx.NodeProto) -> bool:
    return node.domain == DOMAIN and node.op_type == COLLECTIVE


def is_experts(node: onnx.NodeProto) -> bool:
    return node.domain == DOMAIN and node.op_type == EXPERTS


def cut_into_segments(
    nodes: Iterable[onnx.NodeProto], initializers: Collection[str], graph_outputs: Collection[str]
) -> list[Segment]:
    """Cut `nodes`; a graph with C collectives or layers of experts and a head gives C + 2 segments.

    Raises:
        EngineError: an unknown collective.
    """
    groups: list[list[onnx.NodeProto]] = [[]]
    thens: list[Reduction | Gathering | Mixture | None] = []
    has_head = False
    for node in nodes:
        if is_collective(node) or is_experts(node):
            thens.append(_collective(node) if is_collective(node) else _mixture(node))
            groups.append([])
            continue
        if ROWS in node.input and not has_head:
            has_head = True
            thens.append(None)
            groups.append([])
        groups[-1].append(node)
    thens.append(None)

    wanted = set(graph_outputs)
    segments: list[Segment] = []
    for group, then in zip(reversed(groups), reversed(thens), strict=True):
        match then:
            case Reduction(partial, reduced):
                wanted = wanted - {reduced} | {partial}
            case Gathering(own, gathered):
                wanted = wanted - {*gathered} | {*own}
            case Mixture():
                wanted = wanted - {then.total} | {*then.operands}
        made = {name for node in group for name in node.output if name}
        read = dict.fromkeys(name for node in group for name in reads(node))
        inputs = tuple(name for name in read if name not in made and name not in initializers)
        outputs = tuple(name for node in group for name in node.output if name in wanted)
        segments.append(Segment(tuple(group), inputs, outputs, then, head=has_head and not segments))
        wanted = (wanted - made) | (set(inputs) if outputs else set())
    segments.reverse()
    return segments


def _mixture(node: onnx.NodeProto) -> Mixture:
    x, weights, chosen, *base = node.input
    (experts,) = (attribute.graphs for attribute in node.attribute if attribute.name == "experts")
    return Mixture(x, weights, chosen, base[0] if base else None, node.output[0], experts)


def _collective(node: onnx.NodeProto) -> Reduction | Gathering:
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    match attributes.get("collective_operation"):
        case b"all_reduce":
            return Reduction(node.input[0], node.output[0])
        case b"all_gather":
            return Gathering(tuple(node.input), tuple(node.output), tuple(attributes["counts"]))
        case other:
            raise EngineError(f"collective {node.name!r} is a {other!r}; known: all_reduce, all_gather")
