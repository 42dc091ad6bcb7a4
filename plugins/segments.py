"""Cuts a graph into segments that run one after another, and says which values can share a buffer.

A segment is what an engine runs without leaving its runtime (ONNX Runtime, TensorRT). The graph is cut at every node
that something else computes: a collective, a layer's experts, or one of the kernels below. It is also cut where the
head begins, at the first node that reads ``rows``, so that a chunk of a prompt can leave the head out. The nodes must
be in topological order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count, zip_longest

import onnx

from motley.plugins.adapters import is_adapted
from motley.plugins.engine import DOMAIN, EngineError
from motley.plugins.nodes import CHOICE, attributes_of, is_collective, is_experts, reads, weighs_heads
from motley.plugins.streams import STREAM_OPERATORS

ROWS = "rows"

# An engine that computes some nodes outside its runtime replaces them by these operators of domain ``motley``:
#
# ================  ======================================================  ==========================================
# `PRODUCT`         x f32[T, K], codes, scales, zero points, bias of W      x @ W.T + bias; attributes: bits, block
# `HEAD_PRODUCT`    x f32[T, heads * S], codes, scales, zero points         what ``motley.HeadProducts`` has;
#                                                                           attributes: bits, block, heads, first
# `ATTENTION`       q, k and v side by side f32[T, E], and what else        y and the caches
#                   ``motley.CachedAttention`` has; attribute choices:
#                   how many positions ``chosen`` has, or 0
# `CHOICE`          q, k, perhaps weights of heads, and what else           chosen and the cache
#                   ``motley.ChosenPositions`` or its kin has
# `ATTEND`          queries, turned, f32[T, heads * d], and the rest; the   y
#                   rows' keys and values are in the caches
# `NORM`            x f32[T, D], skip f32[T, D], gain and bias f32[D]       norm of x * factor + skip; that sum itself;
#                                                                           attributes: epsilon, factor, centred (a
#                                                                           layer norm)
# `HEAD_NORMS`      a value f32[T, W] of which q, k (and v) are parts; a    q, k (and v) side by side, normed head by
#                   gain f32[d] or nothing for each of these                head where a gain is; attributes: firsts,
#                                                                           heads, size, epsilon, width (W)
# `GATED`           gate and up side by side f32[T, 2 F], or gate, perhaps  silu(gate) * up, or by another activation;
#                   among others, f32[T, W] and up f32[T, F]                attributes: columns (F), activation, width,
#                                                                           first (of the gates), gate_limit, up_limit
# `DELTA`           q, k, v, z side by side and b, a side by side, and      y; attributes as ``motley.GatedDelta``
#                   what else ``motley.GatedDelta`` has
# `SPACE`           x, z side by side, b, c side by side, dt, and what      y; attributes as ``motley.StateSpace``
#                   else ``motley.StateSpace`` has
# `CONVOLUTION`     b, c, x side by side, and what else                     y; attributes as
#                   ``motley.ShortConvolution`` has                         ``motley.ShortConvolution``
# `DILATED`         as ``motley.DilatedConvolution``                        as ``motley.DilatedConvolution``
# ================  ======================================================  ==========================================
#
# Zero points, bias and skip may be absent. Those of `motley.plugins.streams` stay as they are.
PRODUCT = "QuantisedProduct"
HEAD_PRODUCT = "QuantisedHeadProduct"
ATTENTION = "AttentionOfSlots"
ATTEND = "AttendToSlots"
NORM = "Norm"
HEAD_NORMS = "HeadNorms"
GATED = "Gated"
DELTA = "DeltaOfSlots"
SPACE = "StateSpaceOfSlots"
CONVOLUTION = "ShortConvolutionOfSlots"
DILATED = "DilatedConvolutionOfSlots"
RECURRENT = (DELTA, SPACE, CONVOLUTION, DILATED)
_OPERATORS = (PRODUCT, HEAD_PRODUCT, NORM, HEAD_NORMS, GATED, *RECURRENT, *STREAM_OPERATORS)


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
    """The experts that are computed after a segment, see ``motley.Experts`` in `motley.plugins.engine`.

    Attributes:
        x: the name of what they are computed from.
        weights: the name of the weights of their sum.
        chosen: the name of the numbers of the experts that each row has chosen.
        bases: the names of what their sums are added to, one for each sum; empty: they are added to nothing.
        totals: the names of their sums: as many as each expert has results.
        experts: their graphs; empty if they are on other machines.
        layer: the layer that they are of, if they are on other machines.
    """

    x: str
    weights: str
    chosen: str
    bases: tuple[str, ...]
    totals: tuple[str, ...]
    experts: Sequence[onnx.GraphProto]
    layer: int

    @property
    def operands(self) -> list[str]:
        """The names of all values that are read."""
        return [self.x, self.weights, self.chosen, *self.bases]


@dataclass(frozen=True)
class Kernel:
    """What the engine computes itself after a segment: one of the operators above, or ``motley.Adapted``.

    Attributes:
        operands: the names of its inputs that have a row per token.
        results: the names of its outputs that have a row per token.
    """

    node: onnx.NodeProto
    operands: tuple[str, ...]
    results: tuple[str, ...]


Then = Reduction | Gathering | Mixture | Kernel


@dataclass(frozen=True)
class Segment:
    """Nodes that run without leaving the runtime, and what follows them."""

    nodes: tuple[onnx.NodeProto, ...]
    inputs: tuple[str, ...]
    """Values made outside: graph inputs and results of earlier segments (never initializers)."""
    outputs: tuple[str, ...]
    """Values that later segments read, that are exchanged, or that the graph gives; without any, it need not run."""
    then: Then | None = None
    """What is done with the outputs, outside the runtime."""
    head: bool = False
    """Whether this segment is only needed for logits."""


def cut_into_segments(
    nodes: Iterable[onnx.NodeProto], initializers: Collection[str], graph_outputs: Collection[str]
) -> list[Segment]:
    """Cut `nodes`; a graph with C cuts and a head gives C + 2 segments.

    Raises:
        EngineError: an unknown collective.
    """
    groups: list[list[onnx.NodeProto]] = [[]]
    thens: list[Then | None] = []
    head: int | None = None
    for node in nodes:
        if then := _then(node, initializers):
            thens.append(then)
            groups.append([])
            continue
        if ROWS in node.input and head is None:
            thens.append(None)
            groups.append([])
            head = len(thens)
        groups[-1].append(node)
    thens.append(None)

    wanted = set(graph_outputs)
    segments: list[Segment] = []
    for index, group, then in zip(reversed(range(len(groups))), reversed(groups), reversed(thens), strict=True):
        match then:
            case Reduction(partial, reduced):
                wanted = wanted - {reduced} | {partial}
            case Gathering(own, gathered):
                wanted = wanted - {*gathered} | {*own}
            case Mixture():
                wanted = wanted - {*then.totals} | {*then.operands}
            case Kernel(_, operands, results):
                wanted = wanted - {*results} | {*operands}
        made = {name for node in group for name in node.output if name}
        read = dict.fromkeys(name for node in group for name in reads(node))
        inputs = tuple(name for name in read if name not in made and name not in initializers)
        outputs = tuple(name for node in group for name in node.output if name in wanted)
        segments.append(Segment(tuple(group), inputs, outputs, then, head=head is not None and index >= head))
        wanted = (wanted - made) | (set(inputs) if outputs else set())
    segments.reverse()
    return segments


def buffer_numbers(segments: Sequence[Segment], kind: Callable[[str], Hashable]) -> dict[str, int]:
    """Give every activation that leaves its segment the number of a buffer; ``hidden`` is in buffer 0.

    A buffer is used again once no later segment reads the value in it. A segment's outputs never share a buffer with
    its inputs. The result of a collective takes the buffer of its operand, the sum of experts that of its base, if that
    has one, and an adapted product that of the product: nobody reads those later. Logits, caches and the terms of a
    gathering have places of their own, and no number, and so has the product that becomes logits by an adapter.

    Args:
        kind: tells the kind of a value by its name; only values of equal kinds share a buffer.
    """
    last_read: dict[str, int] = {}
    for index, segment in enumerate(segments):
        operands = segment.then.operands if isinstance(segment.then, Mixture | Kernel) else ()
        last_read.update(dict.fromkeys([*segment.inputs, *operands], index))
    adapted = (each.then for each in segments if isinstance(each.then, Kernel) and is_adapted(each.then.node))
    logits = {"logits", *(each.operands[1] for each in adapted if "logits" in each.results)}
    numbers = {"hidden": 0}
    free: dict[Hashable, list[int]] = {}
    fresh = count(1)

    def place(name: str) -> None:
        unused = free.get(kind(name))
        numbers[name] = unused.pop() if unused else next(fresh)

    for index, segment in enumerate(segments):
        gathered = segment.then.own if isinstance(segment.then, Gathering) else ()
        for name in segment.outputs:
            if name not in logits and not name.endswith(".out") and name not in gathered:
                place(name)
        dead = {name for name, last in last_read.items() if last == index and name in numbers}
        match segment.then:
            case Reduction(partial, reduced):
                numbers[reduced] = numbers[partial]
            case Mixture(bases=bases, totals=totals):
                for base, total in zip_longest(bases, totals, fillvalue=""):
                    if base in numbers:
                        numbers[total] = numbers[base]
                        dead.discard(base)
                    else:
                        place(total)
            case Kernel(node, operands, (result,)) if is_adapted(node):
                product = operands[1]
                if product in numbers:
                    numbers[result] = numbers[product]
                dead.discard(product)
            case Kernel():
                for name in segment.then.results:
                    if name not in logits:
                        place(name)
        for name in sorted(dead):
            free.setdefault(kind(name), []).append(numbers[name])
    return numbers


def _then(node: onnx.NodeProto, initializers: Collection[str]) -> Then | None:
    if is_collective(node):
        return _collective(node)
    if is_experts(node):
        return _mixture(node)
    if node.domain == DOMAIN and node.op_type in (ATTENTION, ATTEND, CHOICE):
        operands = 2 if attributes_of(node).get("choices") else 1
        if node.op_type == CHOICE:
            operands = 3 if weighs_heads(node) else 2
        return Kernel(node, tuple(node.input[:operands]), (node.output[0],))
    if is_adapted(node) or (node.domain == DOMAIN and node.op_type in _OPERATORS):
        rows = tuple(name for name in node.input if name and name not in initializers)
        return Kernel(node, rows, tuple(filter(None, node.output)))
    return None


def _mixture(node: onnx.NodeProto) -> Mixture:
    x, weights, chosen, *bases = node.input
    attributes = attributes_of(node)
    experts, layer = attributes.get("experts", ()), attributes.get("layer", -1)
    return Mixture(x, weights, chosen, tuple(bases), tuple(node.output), experts, layer)


def _collective(node: onnx.NodeProto) -> Reduction | Gathering:
    attributes = attributes_of(node)
    match attributes.get("collective_operation"):
        case b"all_reduce":
            return Reduction(node.input[0], node.output[0])
        case b"all_gather":
            return Gathering(tuple(node.input), tuple(node.output), tuple(attributes["counts"]))
        case other:
            raise EngineError(f"collective {node.name!r} is a {other!r}; known: all_reduce, all_gather")
