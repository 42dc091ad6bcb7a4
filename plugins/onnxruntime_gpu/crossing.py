"""Which nodes of a segment a GPU has to run, and which values that cross segments the host must have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onnx import NodeProto

from motley.plugins.nodes import reads
from motley.plugins.segments import ROWS, Mixture, Reduction, Segment


def needed(nodes: Sequence[NodeProto], outputs: Iterable[str]) -> list[NodeProto]:
    """Choose the nodes that some values depend on."""
    needed, wanted = [], set(outputs)
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.output):
            needed.append(node)
            wanted.update(reads(node))
    return needed[::-1]


def names_on_host(segments: Sequence[Segment]) -> set[str]:
    """The values that cross segments in the host's memory, as something else reads or makes them there."""
    names = {"hidden", ROWS, "logits"}
    for segment in segments:
        match segment.then:
            case Reduction(summed, total):
                names |= {summed, total}
            case Mixture() as mixture:
                names |= {*mixture.operands, *mixture.totals}
    return names
