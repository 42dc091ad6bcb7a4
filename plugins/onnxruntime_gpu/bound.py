"""What a rank on a GPU keeps ready: the parts of its graph, and these bound to places of a step's values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnxruntime as ort
from onnx import NodeProto, TensorProto, ValueInfoProto

from motley.plugins.engine import F32
from motley.plugins.latest import Latest
from motley.plugins.mapped_share import Array
from motley.plugins.mixture import Sent
from motley.plugins.nodes import reads
from motley.plugins.onnxruntime_gpu.adapting import Adapt, AdaptedRows
from motley.plugins.onnxruntime_gpu.attending import Attention, StepRows
from motley.plugins.onnxruntime_gpu.device import Action, Gpu, Mirror, Place
from motley.plugins.segments import ROWS, Mixture, Reduction, Segment

HEADS_KEPT = 4
"""Numbers of logits for which the head stays bound to a stretch of rows; the one not used for longest goes first."""


@dataclass(frozen=True)
class Crossing:
    """A value [T, *shape] that crosses segments."""

    shape: tuple[int, ...]
    kind: int = TensorProto.FLOAT

    @classmethod
    def declared(cls, value: ValueInfoProto) -> Crossing:
        """One of a graph's values [T, width]."""
        tensor = value.type.tensor_type
        return cls((tensor.shape.dim[1].dim_value,), tensor.elem_type)


@dataclass(frozen=True)
class Part:
    """A segment that is ready to be bound.

    Attributes:
        session: computes it; None: there is nothing to compute.
        inputs: the names of what the session reads.
        outputs: the names of what it makes.
        read: the names of those of these that the host reads.
        zeros: the names of what is zero: a rank without units of a kind adds that to a sum.
        attention: what follows the segment; None: another thing follows.
        adapt: what adapters add to the product that it ends with; None: another thing follows.
    """

    segment: Segment
    session: ort.InferenceSession | None = None
    inputs: Sequence[str] = ()
    outputs: Sequence[str] = ()
    read: Sequence[str] = ()
    zeros: Sequence[str] = ()
    attention: Attention | None = None
    adapt: Adapt | None = None


@dataclass(frozen=True)
class Bound:
    """Parts bound to rows of a step, with which the GPU is occupied until something else is to be done.

    Attributes:
        actions: lists of what has the GPU get the sums, or what experts have made, computes the parts, and has the host
            get what it reads. Some change with each step: what attends, and what adapters add.
        summed: what is then summed over all ranks; None: nothing.
        mixture: the experts that are then computed; None: none.
    """

    actions: Sequence[Sequence[Action]]
    summed: F32 | None = None
    mixture: Mixture | None = None


@dataclass(frozen=True)
class Head:
    """The head bound to the rows of a chunk that get logits.

    Attributes:
        wanted: i64[R], which they are.
        put: has the GPU get that.
        adapted: those of them that adapters compute.
        actions: lists of what computes their logits, which go to the host.
    """

    wanted: Array
    put: Action
    adapted: AdaptedRows
    actions: Sequence[Sequence[Action]]


@dataclass
class Chunk:
    """Rows of a step that go through the graph together.

    Attributes:
        places: where the values are that cross segments, by name, in the GPU's memory.
        mirrors: those of them that the host reads or makes, too.
        rows: what goes up of them, for all layers.
        adapted: those of them that adapters compute.
        steps: the layers bound to these places.
        heads: the head bound to them, by the first of the step's logits that it makes and the one after the last.
    """

    places: Mapping[str, ort.OrtValue]
    mirrors: Mapping[str, Mirror]
    rows: StepRows
    adapted: AdaptedRows
    steps: Sequence[Bound]
    heads: Latest[tuple[int, int], Head] = field(default_factory=lambda: Latest(HEADS_KEPT))


def products_in_place(parts: Iterable[Part], places: Mapping[str, Place]) -> dict[str, Place]:
    """The places of the products that adapters add to: where the results are to be."""
    return {part.adapt.product: places[part.adapt.y] for part in parts if part.adapt is not None}


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
    names = {ROWS, "logits"}
    for segment in segments:
        match segment.then:
            case Reduction(summed, total):
                names |= {summed, total}
            case Mixture() as mixture:
                names |= {*mixture.operands, *mixture.totals}
    return names


class LocalExperts:
    """All experts of a layer, on this GPU: `motley.plugins.mixture.Terms`."""

    def __init__(self, device: Gpu, sessions: Sequence[ort.InferenceSession]) -> None:
        self._device = device
        self._experts = [(session.get_inputs()[0].name, session) for session in sessions]

    def __call__(self, x: F32, sent: Sequence[Sent]) -> Iterator[Sequence[F32]]:
        for own in sent:
            name, session = self._experts[own.expert]
            yield self._device.run(session, {name: x[own.rows]})
