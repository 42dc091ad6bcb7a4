"""Runs a rank's graph on a GPU of any make: a session of ONNX Runtime for each segment, with the sums between them.

Weights, KV caches and the values that cross a segment stay in the GPU's memory. Only what a collective exchanges, and
what experts are computed from, comes back to the host and goes up again; to read it is the one thing that waits for
the GPU. A step's rotary tables and the places of its rows go up once, for all layers.

Rows of several sequences are one step, as on the CPU; how they attend is told by `motley.plugins.webgpu.attention`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import onnxruntime as ort
from onnx import NodeProto, TensorProto, ValueInfoProto, helper

from motley.plugins.engine import (
    CACHE_FORMATS,
    F32,
    Collectives,
    EngineError,
    EngineOptions,
    RankGraph,
    Span,
    micro_chunks,
)
from motley.plugins.mixture import Sent, Terms, add_mixture, as_terms, deal
from motley.plugins.nodes import attributes_of, reads
from motley.plugins.onnxruntime.sessions import Crossing
from motley.plugins.segments import (
    ATTENTION,
    ROWS,
    Gathering,
    Kernel,
    Mixture,
    Reduction,
    Segment,
    buffer_numbers,
    cut_into_segments,
)
from motley.plugins.spans import check_step, spans_of, wanted_rows
from motley.plugins.webgpu.attention import AttentionSessions, Group, Heads, grouped, mask_session, slots_of
from motley.plugins.webgpu.device import NAME, Array, Run, WebGpuDevice, find_devices
from motley.plugins.webgpu.lowering import DeviceLowering

Place = Array | ort.OrtValue
"""Where a value is: in the host's memory or in the GPU's."""

BOUND_KEPT = 6
"""Numbers of rows whose steps stay bound, each with its own places; the one that was not used for longest goes first."""

@dataclass(frozen=True)
class _Part:
    """A segment that is ready to be bound.

    Attributes:
        session: computes it; None: there is nothing to compute.
        inputs: the names of what the session reads.
        outputs: the names of what it makes.
        zeros: the names of what is zero: a rank without units of a kind adds that to a sum.
        attention: what follows the segment; None: another thing follows.
    """

    segment: Segment
    session: ort.InferenceSession | None
    inputs: Sequence[str]
    outputs: Sequence[str]
    zeros: Sequence[str]
    attention: _Attention | None = None


@dataclass(frozen=True)
class _Attention:
    """A layer's attention: its sessions and the names of what it reads and makes.

    Attributes:
        cos: the names of the tables that it turns by are `cos` and `sin`.
        window: positions that a row sees; 0: all.
        sinks: in the GPU's memory; None: there are none.
    """

    sessions: AttentionSessions
    qkv: str
    y: str
    keys: str
    values: str
    cos: str
    sin: str
    window: int
    sinks: ort.OrtValue | None


@dataclass(frozen=True)
class _GroupPlaces:
    """Where a group of a step's spans is in the GPU's memory, and its mask for each window that layers have."""

    rows: ort.OrtValue
    places: ort.OrtValue
    slots: ort.OrtValue
    positions: ort.OrtValue
    masks: Mapping[int, ort.OrtValue]
    make_masks: Sequence[Run]


class _Rows:
    """The places of a step of T rows, and what is bound to them.

    Attributes:
        places: of the values that cross segments, by name.
        parts: for each gathering, f32[count, T, D] of each rank.
        order: i64[1, T], the numbers of the rows.
        slots: i64[T, 1], where their keys and values go.
        tables: of each table that rows turn by, f32[T, r/2].
        runs: what is bound to these, by what it is.
    """

    def __init__(
        self,
        device: WebGpuDevice,
        rows: int,
        places: Mapping[str, Place],
        parts: Mapping[tuple[str, ...], list[F32]],
        tables: Mapping[str, int],
    ) -> None:
        """`tables`: the widths of those that rows turn by, by name."""
        self.count = rows
        self.places = places
        self.parts = parts
        self.order = device.array(np.arange(rows)[None])
        self.slots = device.array(np.zeros((rows, 1), np.int64))
        self.tables = {name: device.empty((rows, width)) for name, width in tables.items()}
        self.queries: dict[int, ort.OrtValue] = {}
        self.runs: dict[Any, Run] = {}


class WebGpuEngine:
    """See `motley.plugins.engine.Engine`. It has no options."""

    on_gpu: ClassVar[bool] = True

    @classmethod
    def check_machine(cls) -> None:
        """See `motley.plugins.engine.lacking`."""
        WebGpuDevice()

    def __init__(self, graph: RankGraph, collectives: Collectives, options: EngineOptions) -> None:
        """
        Raises:
            EngineError: no plugin or GPU; or the provider lacks an operator of the graph.
            EngineMemoryError: the GPU has too little memory.
        """
        options.check_extra(NAME)
        graph.blocks.check_format(NAME, CACHE_FORMATS[:1])
        if options.exact:
            raise EngineError(f"engine {NAME!r} cannot keep exact=true; use engine 'onnxruntime'")
        self._graph = graph
        self._collectives = collectives
        self._max_rows = options.max_rows
        self._device = WebGpuDevice()
        self._rows: OrderedDict[int, _Rows] = OrderedDict()
        lowered = DeviceLowering.lower(graph.proto)
        self._initializers = lowered.initializers
        outputs = [output.name for output in graph.proto.graph.output]
        segments = cut_into_segments(lowered.nodes, lowered.initializers, outputs)
        self._crossing = {value.name: Crossing.declared(value) for value in graph.proto.graph.value_info}
        self._on_host = _names_on_host(segments)
        self._attentions: dict[Heads, AttentionSessions] = {}
        positions = graph.blocks.count * graph.blocks.tokens
        self._nothing = positions
        """The slot that stays zero."""
        self._caches = {
            f"{kind}_cache.{spec.layer}": self._device.empty((positions + 1, spec.heads * spec.head_dim))
            for spec in graph.caches
            for kind in ("key", "value")
        }
        parts = [self._part(segment) for segment in segments if segment.outputs or segment.then]
        self._layers = [part for part in parts if not part.segment.head]
        self._head = [part for part in parts if part.segment.head]
        self._numbers = buffer_numbers(segments, self._kind)
        """The number of the buffer of each value that crosses segments."""
        self._host = {
            (self._kind(name), number): np.zeros((options.max_rows, self._kind(name)[0].width), self._dtype(name))
            for name, number in self._numbers.items()
            if name in self._on_host
        }
        attends = [part.attention for part in parts if part.attention]
        self._heads_of_row = max((each.sessions.heads.heads for each in attends), default=1)
        tables = graph.constants(0)
        self._tables = {
            name: tables[name].shape[1]
            for each in attends
            if each.sessions.heads.rotary
            for name in (each.cos, each.sin)
        }
        self._masks = {window: mask_session(self._device, window) for window in {each.window for each in attends}}
        self._groups: OrderedDict[tuple[int, int, int, int], _GroupPlaces] = OrderedDict()
        """By number in the step and shape."""
        self._experts = {
            segment.then.totals: _LocalExperts(self._device, segment.then, self._initializers, self._folder)
            for segment in segments
            if isinstance(segment.then, Mixture) and segment.then.experts
        }
        gatherings = (each.then for each in segments if isinstance(each.then, Gathering))
        most = max((len(each.gathered) * self._kind(each.gathered[0])[0].width for each in gatherings), default=0)
        # What one segment gathers is read by the next, while that makes its own.
        self._gathers = [np.zeros(most * options.max_rows, np.float32) for _ in range(2)]

    @property
    def most_spans(self) -> int:
        return self._max_rows

    def step(self, hidden: F32, spans: Sequence[Span], halved: bool = False) -> F32:
        check_step(self._graph, hidden, spans, self._max_rows, self.most_spans)
        rows = len(hidden)
        with _told_of():
            bound = self._bound(rows)
            place = bound.places["hidden"]
            assert isinstance(place, np.ndarray)
            np.copyto(place, hidden)
            groups = self._place_spans(bound, spans_of(spans, slice(0, rows)), rows)
            chunks = micro_chunks(rows, halved)
            for number, part in enumerate(self._layers):
                self._run(bound, number, part)
                self._then(bound, part, groups, chunks)
            wanted = wanted_rows(spans)
            if not wanted:
                return np.empty((0, self._graph.vocabulary), np.float32)
            return self._logits(bound, wanted)

    def close(self) -> None:
        self._rows.clear()
        self._groups.clear()
        self._layers.clear()
        self._head.clear()
        self._caches.clear()
        self._attentions.clear()
        self._experts.clear()

    # -- what is made once -------------------------------------------------------------------------------------------

    @cached_property
    def _folder(self) -> str:
        return str(self._graph.share_file.parent)

    def _part(self, segment: Segment) -> _Part:
        attention = None
        if isinstance(segment.then, Kernel):
            assert segment.then.node.op_type == ATTENTION, segment.then.node.op_type
            attention = self._attention(segment.then)
        zeros = [node.output[0] for node in segment.nodes if node.op_type == "ConstantOfShape"]
        zeros = [name for name in zeros if name in segment.outputs]
        outputs = [name for name in segment.outputs if name not in zeros]
        nodes = _needed(segment.nodes, outputs)
        if not nodes:
            return _Part(segment, None, (), (), zeros, attention)
        read = dict.fromkeys(chain.from_iterable(map(reads, nodes)))
        inputs = [name for name in segment.inputs if name in read]
        session = self._device.session(
            nodes,
            [self._declared(name) for name in inputs],
            [self._declared(name) for name in outputs],
            [self._initializers[name] for name in read if name in self._initializers],
            self._folder,
        )
        return _Part(segment, session, inputs, outputs, zeros, attention)

    def _attention(self, then: Kernel) -> _Attention:
        attributes = attributes_of(then.node)
        qkv, keys, values, _, cos, sin, *sinks = then.node.input
        heads = Heads(
            heads=attributes["q_heads"],
            kv_heads=attributes["kv_heads"],
            width=attributes["head_dim"],
            rotary=attributes["rotary_dim"],
            scale=attributes["scale"],
            soft_cap=attributes["soft_cap"],
            sinks=bool(sinks),
        )
        if heads not in self._attentions:
            self._attentions[heads] = AttentionSessions(self._device, heads)
        width = heads.width * (heads.heads + 2 * heads.kv_heads)
        self._crossing |= {qkv: Crossing(width), then.results[0]: Crossing(heads.width * heads.heads)}
        placed = None
        if sinks:
            from motley.plugins.mapped_share import MappedShare

            share = MappedShare(self._graph.share_file)
            placed = self._device.array(np.array(share.view(self._initializers[sinks[0]])))
            share.close()
        window = attributes["window"]
        return _Attention(self._attentions[heads], qkv, then.results[0], keys, values, cos, sin, window, placed)

    def _kind(self, name: str) -> tuple[Crossing, bool]:
        """What values must have in common to share a buffer: how wide they are, and whether the host has them."""
        return self._crossing.get(name, Crossing(self._graph.hidden)), name in self._on_host

    def _dtype(self, name: str) -> np.dtype[Any]:
        if name == ROWS:
            return np.dtype(np.int64)
        return np.dtype(helper.tensor_dtype_to_np_dtype(self._kind(name)[0].kind))

    def _declared(self, name: str) -> ValueInfoProto:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(self._dtype(name)), None)

    # -- what is made for a number of rows ---------------------------------------------------------------------------

    def _bound(self, rows: int) -> _Rows:
        if rows in self._rows:
            self._rows.move_to_end(rows)
            return self._rows[rows]
        made: dict[tuple[tuple[Crossing, bool], int], Place] = {}
        places: dict[str, Place] = {}
        for name, number in self._numbers.items():
            kind = self._kind(name)
            if (kind, number) not in made:
                shape = (rows, kind[0].width)
                on_host = self._host.get((kind, number))
                made[kind, number] = self._device.empty(shape) if on_host is None else on_host[:rows]
            places[name] = made[kind, number]
        parts = {}
        for turn, part in enumerate(each for each in self._layers if isinstance(each.segment.then, Gathering)):
            gathering = part.segment.then
            assert isinstance(gathering, Gathering)
            shape = (len(gathering.gathered), rows, self._kind(gathering.gathered[0])[0].width)
            terms = self._gathers[turn % 2][: int(np.prod(shape))].reshape(shape)
            by_rank = np.split(terms, np.cumsum(gathering.counts)[:-1])
            places |= dict(zip(gathering.gathered, terms, strict=True))
            places |= dict(zip(gathering.own, by_rank[self._collectives.rank], strict=True))
            parts[gathering.gathered] = by_rank
        bound = self._rows[rows] = _Rows(self._device, rows, places, parts, self._tables)
        while len(self._rows) > BOUND_KEPT:
            self._rows.popitem(last=False)
        return bound

    def _run(self, bound: _Rows, number: int, part: _Part) -> None:
        """Run the session of a part of the layers."""
        for name in part.zeros:
            place = bound.places[name]
            assert isinstance(place, np.ndarray)
            place.fill(0)
        if part.session is None:
            return
        key = ("part", number)
        if key not in bound.runs:
            inputs = {name: bound.places[name] for name in part.inputs}
            outputs = {name: bound.places[name] for name in part.outputs}
            bound.runs[key] = self._device.bind(part.session, inputs, outputs)
        bound.runs[key]()

    def _logits(self, bound: _Rows, wanted: Sequence[int]) -> F32:
        logits = np.empty((len(wanted), self._graph.vocabulary), np.float32)
        places = {**bound.places, ROWS: np.array(wanted, np.int64), "logits": logits}
        for part in self._head:
            if part.session is not None:
                inputs = {name: places[name] for name in part.inputs}
                self._device.bind(part.session, inputs, {name: places[name] for name in part.outputs})()
        return logits

    # -- what follows a segment --------------------------------------------------------------------------------------

    def _then(
        self, bound: _Rows, part: _Part, groups: Sequence[_GroupPlaces], chunks: Sequence[slice]
    ) -> None:
        match part.segment.then:
            case Reduction(summed):
                place = bound.places[summed]
                assert isinstance(place, np.ndarray)
                for chunk in chunks:
                    self._collectives.all_reduce(place[chunk])
            case Gathering(gathered=gathered):
                parts = bound.parts[gathered]
                self._collectives.all_gather(parts[self._collectives.rank], parts)
            case Mixture() as mixture:
                self._mix(bound, mixture, chunks)
            case Kernel():
                assert part.attention is not None
                self._attend(bound, part.attention, groups)

    def _mix(self, bound: _Rows, mixture: Mixture, chunks: Sequence[slice]) -> None:
        """Add the weighted results of a layer's experts."""
        x, weights, chosen = (bound.places[name] for name in (mixture.x, mixture.weights, mixture.chosen))
        assert isinstance(x, np.ndarray)
        assert isinstance(weights, np.ndarray)
        assert isinstance(chosen, np.ndarray)
        totals = []
        for number, name in enumerate(mixture.totals):
            total = bound.places[name]
            assert isinstance(total, np.ndarray)
            base = bound.places[mixture.bases[number]] if mixture.bases else None
            if not isinstance(base, np.ndarray):
                total.fill(0)
            elif base is not total:
                np.copyto(total, base)
            totals.append(total)
        compute = self._experts.get(mixture.totals) or as_terms(partial(self._elsewhere, mixture.layer))
        for chunk in chunks:
            add_mixture([total[chunk] for total in totals], x[chunk], weights[chunk], deal(chosen[chunk]), compute)

    def _elsewhere(self, layer: int, x: F32, sent: Sequence[Sent]) -> Iterable[F32]:
        results: Iterable[F32] = self._collectives.experts(layer)(x, sent)
        return results

    # -- attention ---------------------------------------------------------------------------------------------------

    def _place_spans(self, bound: _Rows, spans: Sequence[tuple[int, Span]], rows: int) -> list[_GroupPlaces]:
        """Upload what a step's attentions read: rotary tables, slots, and the groups of its spans."""
        if not self._masks:
            return []
        device, tokens = self._device, self._graph.blocks.tokens
        own = [slots_of(span, span.position, span.position + span.rows, tokens) for _, span in spans]
        device.write(np.concatenate(own)[:, None], bound.slots)
        for name, place in bound.tables.items():
            turning = [
                self._graph.constants(span.prompt)[name][span.position : span.position + span.rows]
                for _, span in spans
            ]
            device.write(np.concatenate(turning), place)
        placed = []
        for number, group in enumerate(grouped(spans, tokens, self._heads_of_row, self._nothing)):
            places = self._group_places(number, group)
            device.write(group.rows, places.rows)
            device.write(group.rows[:, :, None], places.places)
            device.write(group.slots, places.slots)
            device.write(group.positions, places.positions)
            for make in places.make_masks:
                make()
            placed.append(places)
        self._in_order = len(placed) == 1 and group.rows.size == rows and np.array_equal(
            group.rows.ravel(), np.arange(rows)
        )
        return placed

    def _group_places(self, number: int, group: Group) -> _GroupPlaces:
        key = number, *group.shape
        if key in self._groups:
            self._groups.move_to_end(key)
            return self._groups[key]
        device, (pieces, rows, seen) = self._device, group.shape
        positions = device.array(group.positions)
        known = device.array(np.arange(seen, dtype=np.float32))
        masks = {window: device.empty((pieces, 1, 1, rows, seen)) for window in self._masks}
        make = [
            device.bind(session, {"positions": positions, "seen": known}, {"mask": masks[window]})
            for window, session in self._masks.items()
        ]
        places = _GroupPlaces(
            rows=device.array(group.rows),
            places=device.array(group.rows[:, :, None]),
            slots=device.array(group.slots),
            positions=positions,
            masks=masks,
            make_masks=make,
        )
        self._groups[key] = places
        while len(self._groups) > BOUND_KEPT:
            self._groups.popitem(last=False)
        return places

    def _attend(self, bound: _Rows, attention: _Attention, groups: Sequence[_GroupPlaces]) -> None:
        device, sessions = self._device, attention.sessions
        heads = sessions.heads
        width = heads.heads * heads.width
        qkv, y = bound.places[attention.qkv], bound.places[attention.y]
        keys, values = self._caches[attention.keys], self._caches[attention.values]
        if width not in bound.queries:
            bound.queries[width] = device.empty((bound.count, width))
        queries = bound.queries[width]
        key = ("write", attention.y)
        if key not in bound.runs:
            turning = {"cos": bound.tables[attention.cos], "sin": bound.tables[attention.sin], "order": bound.order}
            inputs = {"qkv": qkv, "slots": bound.slots, "keys": keys, "values": values}
            bound.runs[key] = device.bind(
                sessions.write,
                inputs | (turning if heads.rotary else {}),
                {"queries": queries, "keys.out": keys, "values.out": values},
            )
        bound.runs[key]()
        for group in groups:
            inputs = {"queries": queries, "rows": group.rows, "slots": group.slots, "keys": keys, "values": values}
            inputs["mask"] = group.masks[attention.window]
            if attention.sinks is not None:
                inputs["sinks"] = attention.sinks
            if self._in_order:
                device.bind(sessions.attend, inputs, {"y": y})()
            else:
                device.bind(sessions.attend_some, inputs | {"y.before": y, "places": group.places}, {"y": y})()


class _LocalExperts:
    """All experts of a layer, on this GPU: `motley.plugins.mixture.Terms`."""

    def __init__(
        self, device: WebGpuDevice, mixture: Mixture, initializers: Mapping[str, TensorProto], folder: str
    ) -> None:
        self._device = device
        self._experts: list[tuple[str, ort.InferenceSession]] = []
        for graph in mixture.experts:
            read = dict.fromkeys(chain.from_iterable(map(reads, graph.node)))
            constants = [initializers[name] for name in read if name in initializers]
            session = device.session(graph.node, graph.input, graph.output, constants, folder)
            self._experts.append((graph.input[0].name, session))

    def __call__(self, x: Any, sent: Sequence[Sent]) -> Iterable[Sequence[Any]]:
        for own in sent:
            name, session = self._experts[own.expert]
            yield self._device.run(session, {name: x[own.rows]})


def _needed(nodes: Sequence[NodeProto], outputs: Sequence[str]) -> list[NodeProto]:
    """Those nodes that some values depend on."""
    needed, wanted = [], set(outputs)
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.output):
            needed.append(node)
            wanted.update(reads(node))
    return needed[::-1]


def _names_on_host(segments: Sequence[Segment]) -> set[str]:
    """The values that cross segments in the host's memory, as something else reads or makes them there."""
    names = {"hidden", ROWS, "logits"}
    for segment in segments:
        match segment.then:
            case Reduction(summed, total):
                names |= {summed, total}
            case Gathering(own, gathered):
                names |= {*own, *gathered}
            case Mixture() as mixture:
                names |= {*mixture.operands, *mixture.totals}
    return names


@contextmanager
def _told_of() -> Any:
    """Raise the errors of the runtime as those of this engine."""
    try:
        yield
    except Exception as error:  # the runtime's own classes share no other base
        if type(error).__module__.startswith("onnxruntime"):
            raise EngineError(f"engine {NAME!r} failed in a step: {error}") from error
        raise
