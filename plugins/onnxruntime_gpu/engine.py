"""Runs a rank's graph on a GPU by a provider of ONNX Runtime: a session for each segment, with the sums between them.

Weights, KV caches and the values that cross a segment stay in the GPU's memory. Only what a collective exchanges, and
what experts are computed from, comes back to the host and goes up again; to read it is the one thing that waits for
the GPU. What a step's rows are made of goes up as one array, for all layers. Sessions are bound once for each number of
rows.

Rows of several sequences are one step, as on the CPU; `motley.plugins.onnxruntime_gpu.groups` tells how they attend.
Two micro-chunks of a step take turns: one computes a segment while the sum of the other is under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import onnxruntime as ort
from onnx import GraphProto, NodeProto, TensorProto, ValueInfoProto, helper

from motley.plugins.adapted_engine import AdapterProduct, Factor, PreparedAdapter
from motley.plugins.adapters import is_adapted, slots_of_rows, unadapted
from motley.plugins.engine import (
    CACHE_FORMATS,
    DOMAIN,
    F32,
    Collectives,
    DeviceSpeed,
    EngineError,
    EngineOptions,
    Pending,
    RankGraph,
    Span,
    is_alone,
    micro_chunks,
)
from motley.plugins.latest import Latest
from motley.plugins.mapped_share import Array, MappedShare
from motley.plugins.mixture import Sent, add_mixture, as_terms, deal
from motley.plugins.nodes import CHOSEN, SPARSE_MIXER, reads
from motley.plugins.onnxruntime_gpu.adapting import Adapt, AdaptedRows, Adapting
from motley.plugins.onnxruntime_gpu.attending import Attending, Attention, StepRows, written_name
from motley.plugins.onnxruntime_gpu.attention import ORDER, SLOTS, WINDOW_SLOTS
from motley.plugins.onnxruntime_gpu.bound import (
    Bound,
    Chunk,
    Crossing,
    Head,
    LocalExperts,
    Part,
    names_on_host,
    needed,
    products_in_place,
)
from motley.plugins.onnxruntime_gpu.device import (
    Action,
    ErrorsTold,
    Gpu,
    Mirror,
    Place,
    carry_out,
    upload,
)
from motley.plugins.onnxruntime_gpu.fp16 import (
    ACTIVATIONS,
    is_fp16_asked_for,
    with_caches_in_fp16,
    with_products_in_fp16,
)
from motley.plugins.onnxruntime_gpu.lowering import lowered_for
from motley.plugins.onnxruntime_gpu.measuring import measure_speed
from motley.plugins.onnxruntime_gpu.providers import CUDA, TENSORRT_RTX, WEBGPU, Provider
from motley.plugins.recurrent import ROWS_READ
from motley.plugins.segments import (
    ROWS,
    Kernel,
    Mixture,
    Reduction,
    Segment,
    buffer_numbers,
    cut_into_segments,
)
from motley.plugins.spans import check_step, spans_of, wanted_rows
from motley.plugins.streams import STREAM_OPERATORS

BOUND_KEPT = 6
"""Stretches of rows that stay bound, each with places of its own; the one not used for longest goes first."""

_UNKNOWN = {
    "CachedAttentionInChunks",
    "CachedAttentionToChosen",
    "CachedAttentionToChosenKeys",
    "CachedAttentionToChosenKeysWithSinks",
    "CachedAttentionToKeys",
    "CachedAttentionToKeysWithSinks",
    "CachedAttentionWarmed",
    "CachedAttentionWithGains",
    *CHOSEN,
    SPARSE_MIXER,
    *STREAM_OPERATORS,
}
"""Attention, routers and residual streams that these engines do not have."""


class WebGpuEngine:
    """A GPU of any make; see `motley.plugins.engine.Engine`. ``extra``: `ACTIVATIONS`."""

    on_gpu: ClassVar[bool] = True
    keeps_windows: ClassVar[bool] = True
    takes_adapters: ClassVar[bool] = True
    cache_formats: ClassVar[Sequence[str]] = CACHE_FORMATS[:2]
    provider: ClassVar[Provider] = WEBGPU

    @classmethod
    def check_machine(cls) -> None:
        """See `motley.plugins.installed.lacking`."""
        Gpu(cls.provider)

    @classmethod
    def device_speed(cls) -> DeviceSpeed:
        """See `motley.plugins.installed.device_speed`."""
        return measure_speed(Gpu(cls.provider))

    def __init__(self, graph: RankGraph, collectives: Collectives, options: EngineOptions) -> None:
        """
        Raises:
            EngineError: no plugin or GPU; or engine, provider or GPU lack what the graph or an option wants.
            EngineMemoryError: the GPU has too little memory.
        """
        name = self.provider.engine
        options.check_extra(name, *((ACTIVATIONS,) if self.provider.fp16 else ()))
        graph.blocks.check_able(name, self.cache_formats, keeps_windows=self.keeps_windows)
        if options.exact:
            raise EngineError(f"engine {name!r} cannot keep exact=true; use engine 'onnxruntime'")
        if graph.beside:
            raise EngineError(f"engine {name!r} does not know rows beside the residual; use engine 'onnxruntime'")
        there = {node.op_type for node in graph.proto.graph.node if node.domain == DOMAIN}
        if unknown := sorted(there.intersection((*_UNKNOWN, *ROWS_READ))):
            names = ", ".join(f"{DOMAIN}.{each}" for each in unknown)
            raise EngineError(f"engine {name!r} does not know {names}; use engine 'onnxruntime'")
        self._graph = graph
        self._collectives = collectives
        self._max_rows = options.max_rows
        self._device = Gpu(self.provider)
        self._fp16 = is_fp16_asked_for(options, self._device)
        self._errors_told = ErrorsTold(name)
        self._chunks = Latest[tuple[int, int, bool], Chunk](BOUND_KEPT)
        """By the first of their rows, the one after the last, and whether the rank is alone."""
        lowered = lowered_for(self.provider, graph.proto)
        self._initializers = lowered.initializers
        half = graph.blocks.format == "fp16"
        if half:
            self._device.check_fp16()
        self._attending = Attending(self._device, graph)
        caches = self._attending.caches
        nodes = with_caches_in_fp16(lowered.nodes, caches) if half else lowered.nodes
        outputs = [output.name for output in graph.proto.graph.output]
        segments = cut_into_segments(nodes, lowered.initializers, outputs)
        self._crossing = {value.name: Crossing.declared(value) for value in graph.proto.graph.value_info}
        if half:
            kept = Crossing((), TensorProto.FLOAT16)
            self._crossing |= dict.fromkeys([*caches, *map(written_name, caches)], kept)
        self._crossing |= dict.fromkeys((ORDER, SLOTS, WINDOW_SLOTS), Crossing((1,), TensorProto.INT64))
        self._on_host = names_on_host(segments)
        assert "hidden" not in self._on_host, "it goes up with all else that a row has"
        self._adapting = Adapting(self._device, name, graph)
        parts = [self._part(segment) for segment in segments if segment.outputs or segment.then]
        self._layers = [part for part in parts if not part.segment.head]
        self._head = [part for part in parts if part.segment.head]
        self._numbers = buffer_numbers(segments, self._kind)
        """The number of the buffer of each value that crosses segments."""
        self._host = {
            (self._kind(name), number): np.zeros((options.max_rows, *self._kind(name)[0].shape), self._dtype(name))
            for name, number in self._numbers.items()
            if name in self._on_host
        }
        self._logits = np.empty((options.max_rows, graph.vocabulary), np.float32)
        self._experts = {
            segment.then.totals: LocalExperts(self._device, [self._session_of(each) for each in segment.then.experts])
            for segment in segments
            if isinstance(segment.then, Mixture) and segment.then.experts
        }

    @property
    def most_spans(self) -> int:
        return self._max_rows

    def step(self, hidden: F32, spans: Sequence[Span], halved: bool = False) -> F32:
        check_step(self._graph, hidden, spans, self._max_rows, self.most_spans)
        with self._errors_told:
            chunks = []
            for rows in micro_chunks(len(hidden), halved):
                chunk = self._chunk(rows)
                chunks.append(chunk)
                own = spans_of(spans, rows)
                self._attending.begin(chunk.rows, own)
                if self._graph.adapters:
                    self._adapting.begin(chunk.adapted, [span for _, span in own])
                chunk.rows.hidden[:] = hidden[rows]
            if len(chunks) == 1:
                self._run(chunks[0])
            else:
                self._run_by_turns(chunks)
            return self._computed_logits(chunks, spans)

    def prepare_adapter(
        self, products: Mapping[str, AdapterProduct], whole: Mapping[str, Factor] | None = None
    ) -> PreparedAdapter:
        return self._adapting.prepare(products, whole)

    def load_adapter(self, slot: int, adapter: PreparedAdapter) -> None:
        self._adapting.load(slot, adapter)

    def unload_adapter(self, slot: int) -> None:
        self._adapting.unload(slot)

    def close(self) -> None:
        for kept in (self._chunks, self._layers, self._head, self._experts):
            kept.clear()
        self._attending.close()
        self._adapting.close()

    # -- what is made once -------------------------------------------------------------------------------------------

    def _part(self, segment: Segment) -> Part:
        attention = adapt = None
        if isinstance(segment.then, Kernel):
            if is_adapted(segment.then.node):
                adapt = self._adapt(segment.then)
            else:
                attention = self._attention(segment.then)
        made_zero = {node.output[0] for node in segment.nodes if node.op_type == "ConstantOfShape"}
        zeros = [name for name in segment.outputs if name in made_zero]
        outputs = [name for name in segment.outputs if name not in made_zero]
        nodes = needed(segment.nodes, outputs)
        if not nodes:
            return Part(segment, zeros=zeros, attention=attention, adapt=adapt)
        read = {name for node in nodes for name in reads(node)}
        inputs = [name for name in segment.inputs if name in read]
        ends = list(map(self._declared, inputs)), list(map(self._declared, outputs))
        session = self._session(nodes, *ends, captured=True)
        read_back = [name for name in outputs if name in self._on_host]
        return Part(segment, session, inputs, outputs, read_back, zeros, attention, adapt)

    def _session_of(self, graph: GraphProto) -> ort.InferenceSession:
        """The session of one expert; adapters add nothing to what it multiplies with."""
        return self._session(unadapted(graph.node), graph.input, graph.output)

    def _session(
        self,
        nodes: Sequence[NodeProto],
        inputs: Sequence[ValueInfoProto],
        outputs: Sequence[ValueInfoProto],
        captured: bool = False,
    ) -> ort.InferenceSession:
        """A session with the weights that its nodes read."""
        if self._fp16:
            nodes = with_products_in_fp16(nodes, [output.name for output in outputs], self._initializers)
        read = dict.fromkeys(chain.from_iterable(map(reads, nodes)))
        weights = [self._initializers[name] for name in read if name in self._initializers]
        return self._device.session(nodes, inputs, outputs, weights, str(self._graph.share_file.parent), captured)

    def _attention(self, then: Kernel) -> Attention:
        sinks = self._weight(then.node.input[6]) if len(then.node.input) > 6 else None
        attention = self._attending.add(then, sinks)
        heads = attention.sessions.heads
        self._crossing[attention.queries] = Crossing((1, heads.heads * heads.width))
        self._crossing[attention.y] = Crossing((heads.kv_heads, 1, heads.group, heads.width))
        return attention

    def _adapt(self, then: Kernel) -> Adapt:
        adapt, widths = self._adapting.add(then)
        self._crossing |= {name: Crossing((width,)) for name, width in widths.items()}
        return adapt

    def _weight(self, name: str) -> Array:
        """A copy of a weight."""
        share = MappedShare(self._graph.share_file)
        try:
            return np.array(share.view(self._initializers[name]))
        finally:
            share.close()

    def _kind(self, name: str) -> tuple[Crossing, bool]:
        """What values must have in common to share a buffer: their shape, and whether the host has them."""
        return self._crossing.get(name, Crossing((self._graph.hidden,))), name in self._on_host

    def _dtype(self, name: str) -> np.dtype[Any]:
        return np.dtype(np.int64 if name == ROWS else helper.tensor_dtype_to_np_dtype(self._kind(name)[0].kind))

    def _declared(self, name: str) -> ValueInfoProto:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(self._dtype(name)), None)

    # -- a step --------------------------------------------------------------------------------------------------------

    def _chunk(self, rows: slice) -> Chunk:
        """Places for some rows of a step."""
        alone = is_alone(self._collectives)
        return self._chunks.get((rows.start, rows.stop, alone), lambda: self._new_chunk(rows, alone))

    def _new_chunk(self, rows: slice, alone: bool) -> Chunk:
        made: dict[tuple[tuple[Crossing, bool], int], ort.OrtValue | Mirror] = {}
        for name, number in self._numbers.items():
            kind = self._kind(name)
            if (kind, number) not in made:
                host, count = self._host.get((kind, number)), rows.stop - rows.start
                shape = count, *kind[0].shape
                made[kind, number] = self._device.empty(shape) if host is None else self._device.mirror(host[rows])
        found = {name: made[self._kind(name), number] for name, number in self._numbers.items()}
        mirrors = {name: each for name, each in found.items() if isinstance(each, Mirror)}
        places = {name: each.there if isinstance(each, Mirror) else each for name, each in found.items()}
        of_rows = self._attending.rows(places["hidden"])
        places |= self._attending.places(of_rows) | products_in_place(self._layers, places)
        adapted = self._adapting.rows()
        steps = self._bound_layers(places, mirrors, of_rows, adapted, alone)
        return Chunk(places, mirrors, of_rows, adapted, steps)

    def _bind(self, part: Part, session: ort.InferenceSession, places: Mapping[str, Place], captured: bool) -> Action:
        inputs, outputs = ({name: places[name] for name in names} for names in (part.inputs, part.outputs))
        return self._device.bind(session, inputs, outputs, captured)

    def _bound_layers(
        self,
        places: Mapping[str, ort.OrtValue],
        mirrors: Mapping[str, Mirror],
        rows: StepRows,
        adapted: AdaptedRows,
        alone: bool,
    ) -> list[Bound]:
        """The layers bound to places of their values. Of a rank that is alone, what it would sum stays where it is: the
        sum has the same place."""
        steps = []
        actions: list[Sequence[Action]] = [rows.actions]
        first: list[Action] = []
        for part in self._layers:
            then = part.segment.then
            summed = then.partial if isinstance(then, Reduction) and not alone else ""
            actions += self._bound_part(first, part, places, mirrors, rows, adapted, summed)
            first = []
            if isinstance(then, Reduction):
                if alone:
                    continue
                steps.append(Bound(actions, summed=mirrors[then.partial].host))
                actions, first = [], [upload([mirrors[then.partial]])]
            elif isinstance(then, Mixture):
                steps.append(Bound(actions, mixture=then))
                actions, first = [], [upload([mirrors[name] for name in then.totals])]
            else:
                assert then is None or isinstance(then, Kernel), "gatherings are of exact mode, which is refused"
        return [*steps, Bound([*actions, first])]

    def _bound_part(
        self,
        first: Iterable[Action],
        part: Part,
        places: Mapping[str, ort.OrtValue],
        mirrors: Mapping[str, Mirror],
        rows: StepRows,
        adapted: AdaptedRows,
        summed: str,
    ) -> list[Sequence[Action]]:
        """A part of the layers bound to places of its values, after what is first to be done; `summed` is the one that
        is summed next, if any is."""
        then = part.segment.then
        total = then.partial if isinstance(then, Reduction) else ""
        actions: list[Action] = [*first, *(partial(mirrors[name].host.fill, 0) for name in part.zeros)]
        if read_here := [mirrors[name] for name in part.zeros if name != summed]:
            actions.append(upload(read_here))
        captured = self._device.captures(rows.count)
        if part.session is not None:
            # A sum goes to the host with the run that makes it: nothing else reads it. A captured run cannot do that.
            here: dict[str, Place] = {summed: mirrors[summed].host} if summed in part.read and not captured else {}
            actions.append(self._bind(part, part.session, {**places, **here}, captured))
        if back := [mirrors[name] for name in part.read if name != total or (captured and summed)]:
            actions.append(self._device.download(back))
        lists: list[Sequence[Action]] = [actions]
        if part.attention is not None:
            lists.append(self._attending.actions(rows, part.attention, places))
        if part.adapt is not None:
            lists.append(self._adapting.actions(adapted, part.adapt, places))
            if part.adapt.y in mirrors:
                lists.append([self._device.download([mirrors[part.adapt.y]])])
        return lists

    def _run(self, chunk: Chunk) -> None:
        """Compute the layers for all rows of a step."""
        for bound in chunk.steps:
            carry_out(bound.actions)
            if bound.summed is not None:
                self._collectives.all_reduce(bound.summed)
            elif bound.mixture is not None:
                self._mix(chunk, bound.mixture)

    def _run_by_turns(self, chunks: Sequence[Chunk]) -> None:
        """Compute a part for each chunk in turn; while one computes, the sum of the other is under way."""
        sums: dict[int, Pending] = {}
        """Under way, by the number of their chunk, in the order in which they were begun."""
        for steps in zip(*(chunk.steps for chunk in chunks), strict=True):
            for turn, bound in enumerate(steps):
                if turn in sums:
                    sums.pop(turn).finish()
                for action in bound.actions:
                    carry_out((action,))
                    for pending in sums.values():
                        pending.advance()
                if bound.summed is not None:
                    sums[turn] = self._collectives.all_reduce_start(bound.summed)
                elif bound.mixture is not None:
                    while sums:  # others may be asked for experts, and nothing else goes on meanwhile
                        sums.pop(next(iter(sums))).finish()
                    self._mix(chunks[turn], bound.mixture)
        assert not sums, "the layers do not end with a sum"

    def _mix(self, chunk: Chunk, mixture: Mixture) -> None:
        """Add the weighted results of a layer's experts to their bases."""
        at = {name: mirror.host for name, mirror in chunk.mirrors.items()}
        totals = [at[name] for name in mixture.totals]
        for total, base in zip(totals, mixture.bases or [""] * len(totals), strict=True):
            if not base:
                total.fill(0)
            elif at[base] is not total:
                np.copyto(total, at[base])
        compute = self._experts.get(mixture.totals) or as_terms(partial(self._elsewhere, mixture.layer))
        x, weights, chosen = (at[name] for name in (mixture.x, mixture.weights, mixture.chosen))
        slots = slots_of_rows(chunk.adapted.slots, len(chosen))
        add_mixture(totals, x, weights, deal(chosen, slots, weights), compute)

    def _elsewhere(self, layer: int, x: F32, sent: Sequence[Sent]) -> Iterable[F32]:
        results: Iterable[F32] = self._collectives.experts(layer)(x, sent)
        return results

    def _computed_logits(self, chunks: Iterable[Chunk], spans: Sequence[Span]) -> F32:
        """f32[R, V]{tp} of the wanted rows of a step, which these chunks have computed; good until the next step."""
        begin = done = 0
        wanted = wanted_rows(spans)
        for chunk in chunks:
            end = begin + chunk.rows.count
            own = [row - begin for row in wanted if begin <= row < end]
            if own and self._graph.vocabulary:
                head = self._bound_head(chunk, done, own)
                if self._graph.adapters:
                    of_chunk = [span for _, span in spans_of(spans, slice(begin, end))]
                    self._adapting.begin(head.adapted, of_chunk, head=True)
                carry_out(head.actions)
            begin = end
            done += len(own)
        return self._logits[:done]

    def _bound_head(self, chunk: Chunk, done: int, wanted: Sequence[int]) -> Head:
        """The head bound to rows of a chunk, before whose logits there are `done` ones of the step."""
        key = done, done + len(wanted)
        head = chunk.heads.get(key, lambda: self._new_head(chunk, slice(*key), np.array(wanted, np.int64)))
        if head.wanted.tolist() != wanted:
            head.wanted[:] = wanted
            carry_out([[head.put]])
        return head

    def _new_head(self, chunk: Chunk, logits: slice, wanted: Array) -> Head:
        rows, adapted = self._device.mirror(wanted), self._adapting.rows()
        captured = self._device.captures(chunk.rows.count)
        places: dict[str, Place] = {**chunk.places, ROWS: rows.there, "logits": self._logits[logits]}
        adapts = [part.adapt for part in self._head if part.adapt is not None]
        made = [*(name for part in self._head for name in part.outputs), *(each.y for each in adapts)]
        to_host: list[Mirror] = []
        for name in made:
            if name != "logits":
                places[name] = self._device.empty((len(wanted), *self._kind(name)[0].shape))
            elif captured or any(each.y == name for each in adapts):
                to_host.append(self._device.mirror(self._logits[logits]))
                places[name] = to_host[0].there
        places |= products_in_place(self._head, places)
        actions: list[Sequence[Action]] = []
        for part in self._head:
            if part.session is not None:
                actions.append([self._bind(part, part.session, places, captured)])
            if part.adapt is not None:
                actions.append(self._adapting.actions(adapted, part.adapt, places))
        if to_host:
            actions.append([self._device.download(to_host)])
        return Head(rows.host, upload([rows]), adapted, actions)


class CudaProviderEngine(WebGpuEngine):
    """A GPU of NVIDIA by the runtime's CUDA provider."""

    cache_formats = CACHE_FORMATS[:1]
    provider = CUDA


class TensorRtRtxProviderEngine(WebGpuEngine):
    """A GPU of NVIDIA by the runtime's provider for TensorRT for RTX."""

    cache_formats = CACHE_FORMATS[:1]
    provider = TENSORRT_RTX
