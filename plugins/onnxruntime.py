"""The CPU engine: ONNX Runtime, one session per segment, the transport between segments.

A step is a chain of ``run_with_iobinding`` calls (about 3 us each) on buffers whose addresses are bound once.
Every value that crosses a segment lives in a buffer of this engine, so the collectives work on it in place and
nothing is copied or allocated per token. KV caches are updated in place: past and present are one buffer.

Weights are in memory once. The runtime packs matrices into a layout of its own when a session is made; of those it
maps itself it keeps the scales resident beside that. So the share file is mapped here, and the pages that a session has
been made of are let go.

The experts of a layer are sessions too, one each, between two segments (`onnxruntime_experts.py`).

Two micro-chunks take turns: one computes a segment while the sum of the other is under way.

In exact mode the last row of an odd number is run twice: kernels take rows by twos, and round a lone one otherwise. The
twin stands at the next position, which no other row sees and which is written again when its turn comes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from motley.plugins.engine import (
    DOMAIN,
    F32,
    Collectives,
    EngineError,
    EngineOptions,
    Pending,
    RankGraph,
    check_skip,
    check_step,
    micro_chunks,
)
from motley.plugins.mapped_share import Array, MappedShare
from motley.plugins.onnxruntime_experts import BoundMixture, LocalExperts
from motley.plugins.onnxruntime_lowering import GROUPED, GROUPED_FROM, MICROSOFT, SEQLENS, TOTAL_LENGTH, lower
from motley.plugins.segments import ROWS, Gathering, Mixture, Reduction, Segment, cut_into_segments

FIRST_CAPACITY = 256
"""Tokens that a new slot has room for; it doubles when full."""

EXACT_PROBE = 7
"""Tokens with which an exact engine tests its kernels: odd, as last rows are what some compute differently."""

POSITION = "position"


@dataclass(frozen=True)
class _Bound:
    """A segment bound to buffers, and what is then done with them in place: by experts or by the transport.

    Attributes:
        session: None if there is nothing to run.
        partial: what is summed over all ranks.
        parts: what is gathered, by rank.
    """

    session: ort.InferenceSession | None
    binding: Any
    partial: F32 | None = None
    parts: Sequence[F32] = ()
    mixture: BoundMixture | None = None


Exchange = Callable[[_Bound], None]
"""What is done after a segment has run."""


class _Place:
    """Where the rows of a micro-chunk stand in their sequence: the graph's inputs, at fixed addresses."""

    def __init__(self, position: int, count: int) -> None:
        self._count = count
        self.inputs: dict[str, Array] = {
            POSITION: np.empty(1, np.int64),
            SEQLENS: np.empty(1, np.int32),
            TOTAL_LENGTH: np.empty((), np.int32),
            GROUPED: np.empty((), np.bool_),
        }
        self.move(position)

    def move(self, position: int) -> None:
        end = position + self._count
        self.inputs[POSITION][...] = position
        self.inputs[SEQLENS][...] = end - 1
        self.inputs[TOTAL_LENGTH][...] = end
        self.inputs[GROUPED][...] = self._count == 1 and end >= GROUPED_FROM


@dataclass
class _Slot:
    """One sequence: what it reads and keeps, by graph input, and its bound decode step (void once the caches move)."""

    constants: Mapping[str, F32]
    caches: dict[str, F32] = field(default_factory=dict)
    capacity: int = 0
    length: int = 0
    decode: list[_Bound] | None = None


class OnnxRuntimeEngine:
    """See `motley.plugins.engine.Engine`."""

    def __init__(self, graph: RankGraph, collectives: Collectives, options: EngineOptions) -> None:
        if options.extra:
            raise EngineError(f"engine 'onnxruntime' has no settings called {sorted(options.extra)}")
        self._graph = graph
        self._collectives = collectives
        self._max_rows = options.max_rows
        self._exact = options.exact
        self._slots: dict[int, _Slot] = {}

        lowered = lower(graph.proto, options.exact)
        segments = cut_into_segments(
            lowered.nodes, lowered.initializers, [output.name for output in graph.proto.graph.output]
        )
        self._weights = _Weights(graph.share_file)
        crossing = {value.name: _Crossing.declared(value) for value in graph.proto.graph.value_info}

        def open_session(segment: Segment) -> ort.InferenceSession:
            return _open_session(segment, lowered.initializers, graph, self._weights, crossing, options.threads)

        self._segments = [
            (segment, open_session(segment) if segment.outputs else None)
            for segment in segments
            if segment.outputs or segment.then
        ]
        most_rows = self._even(options.max_rows)
        self._buffers = _assign_buffers(segments, most_rows, crossing, _Crossing(graph.hidden))
        rows, results = (np.zeros((most_rows + 1, graph.hidden), np.float32) for _ in range(2))
        self._experts = {
            segment.then.total: LocalExperts(
                [open_session(_whole(expert)) for expert in segment.then.experts], rows, results, self._run_session
            )
            for segment in segments
            if isinstance(segment.then, Mixture)
        }
        most = max((len(each.then.gathered) for each in segments if isinstance(each.then, Gathering)), default=0)
        # What one segment gathers is read by the next, while that makes its own.
        self._gathers = [np.zeros(most * most_rows * graph.hidden, np.float32) for _ in range(2)]

        self._decoded = _Place(0, self._even(1))
        self._decoded_rows = np.zeros(self._even(1), np.int64)
        self._logits = np.empty((self._even(1), graph.vocabulary), np.float32)
        if options.exact:
            self._test_rows(_kinds(lowered.nodes))

    def open_slot(self, slot: int, prompt: int = 0) -> None:
        if slot in self._slots:
            raise EngineError(f"slot {slot} is open already")
        self._slots[slot] = _Slot(self._graph.constants(prompt))

    def close_slot(self, slot: int) -> None:
        if self._slots.pop(slot, None) is None:
            raise EngineError(f"slot {slot} is not open")

    def skip(self, slot: int, position: int) -> None:
        state = self._slot(slot)
        check_skip(slot, state.length, position, self._graph.context)
        if position > state.capacity:
            self._grow(state, position)
        for cached in state.caches.values():
            cached[:, :, state.length : position] = 0
        state.length = position

    def step(self, slot: int, hidden: F32, position: int, rows: Sequence[int], halved: bool = False) -> F32:
        return self._step(slot, hidden, position, rows, halved, self._exchange)

    def close(self) -> None:
        self._slots.clear()
        self._segments.clear()
        self._experts.clear()
        self._weights.close()  # not before the sessions
        self._buffers.clear()
        self._gathers.clear()

    def _step(
        self, slot: int, hidden: F32, position: int, rows: Sequence[int], halved: bool, exchange: Exchange
    ) -> F32:
        """`step`, with `exchange` in the place of the collective after a segment."""
        state = self._slot(slot)
        tokens = len(hidden)
        end = position + tokens
        if not 1 <= tokens <= self._max_rows:
            raise EngineError(f"a step has 1 to {self._max_rows} rows, not {tokens}")
        check_step(slot, state.length, position, tokens, self._graph.context)
        if halved and self._exact:
            raise EngineError("engine 'onnxruntime' takes no step in halves with exact=true")
        count = self._even(tokens)
        if position + count > state.capacity:
            self._grow(state, position + count)
        buffer = self._buffers["hidden"]
        np.copyto(buffer[:tokens], hidden)
        buffer[tokens:count] = hidden[-1]
        if tokens == len(rows) == 1:
            logits = self._decode(state, position, exchange)
        else:
            logits = self._prefill(state, position, count, rows, halved, exchange)
        state.length = end
        return logits

    def _even(self, rows: int) -> int:
        """How many rows are run for so many."""
        return rows + rows % 2 if self._exact else rows

    def _decode(self, state: _Slot, position: int, exchange: Exchange) -> F32:
        """f32[1, V]{tp}: run one token and the head."""
        self._decoded.move(position)
        if state.decode is None:
            only = slice(0, len(self._decoded_rows))
            layers, places = self._bind_layers(state, only, self._decoded)
            state.decode = [*layers, *self._bind_head(places, only, self._decoded_rows, self._logits)]
        for bound in state.decode:
            self._run(bound)
            exchange(bound)
        return self._logits[:1]

    def _prefill(
        self, state: _Slot, position: int, count: int, rows: Sequence[int], halved: bool, exchange: Exchange
    ) -> F32:
        """f32[R, V]{tp}: run a chunk, or its micro-chunks by turns, and the head where it is wanted."""
        chunks = micro_chunks(count, halved)
        # Bindings hold addresses only: what they point to must outlive the run.
        standing = [_Place(position + chunk.start, chunk.stop - chunk.start) for chunk in chunks]
        wanted = np.zeros(self._even(len(rows)), np.int64)
        wanted[: len(rows)] = rows
        logits = np.empty((len(wanted), self._graph.vocabulary), np.float32)
        bindings = [self._bind_layers(state, chunk, place) for chunk, place in zip(chunks, standing, strict=True)]
        pending: Pending | None = None
        for turn in zip(*(layers for layers, _ in bindings), strict=True):
            for bound in turn:
                self._run(bound)
                if pending is not None:
                    pending.finish()
                    pending = None
                if len(turn) > 1 and bound.partial is not None:
                    pending = self._collectives.all_reduce_start(bound.partial)
                else:
                    exchange(bound)
        if pending is not None:
            pending.finish()
        if len(rows):
            for bound in self._bind_head(bindings[0][1], slice(0, count), wanted, logits):
                self._run(bound)
        return logits[: len(rows)]

    def _run(self, bound: _Bound) -> None:
        if bound.session is not None:
            self._run_session(bound.session, bound.binding)
        if bound.mixture is not None:
            bound.mixture.add()

    def _run_session(self, session: ort.InferenceSession, binding: Any) -> None:
        try:
            session.run_with_iobinding(binding)
        except Exception as error:  # the runtime's own classes share no other base
            raise EngineError(f"engine 'onnxruntime' failed in a step: {error}") from error

    def _exchange(self, bound: _Bound) -> None:
        if bound.partial is not None:
            self._collectives.all_reduce(bound.partial)
        elif bound.parts:
            self._collectives.all_gather(bound.parts[self._collectives.rank], bound.parts)

    def _test_rows(self, kinds: str) -> None:
        """Refuse kernels that give a row other bits when it is computed beside others; no peer is asked.

        Args:
            kinds: the kernels, for people.
        """
        rank = self._collectives.rank
        count = min(EXACT_PROBE, self._max_rows, self._graph.context)
        hidden = np.random.default_rng(0).normal(size=(count, self._graph.hidden)).astype(np.float32)

        def outcome(chunk: int) -> list[F32]:
            """What this rank contributes and its logits, of all rows, computed `chunk` rows at a time."""
            steps: list[list[F32]] = []

            def keep(bound: _Bound) -> None:
                for other, part in enumerate(bound.parts):
                    if other == rank:
                        steps[-1].append(part[:, : len(rows)].copy())
                    else:
                        part.fill(0)

            self.open_slot(-1)
            for start in range(0, count, chunk):
                rows = hidden[start : start + chunk]  # which `keep` reads too
                steps.append([])
                logits = self._step(-1, rows, start, range(len(rows)), False, keep)
                steps[-1].append(logits[None].copy())
            self.close_slot(-1)
            return [np.concatenate(pieces, axis=1) for pieces in zip(*steps, strict=True)]

        together = outcome(count)
        for chunk in (3, 1):
            if not all(map(np.array_equal, outcome(chunk), together)):
                raise EngineError(
                    f"engine 'onnxruntime' cannot keep exact=true with {kinds} on this machine: its kernels give a row "
                    "other bits beside other rows; take smaller quantisation blocks, or another quantisation"
                )

    def _slot(self, slot: int) -> _Slot:
        state = self._slots.get(slot)
        if state is None:
            raise EngineError(f"slot {slot} is not open")
        return state

    def _grow(self, state: _Slot, needed: int) -> None:
        """Move the caches to buffers of at least twice the size."""
        context = self._graph.context + self._exact
        state.capacity = min(context, max(FIRST_CAPACITY, needed, 2 * state.capacity))
        for spec in self._graph.caches:
            for kind in ("key_cache", "value_cache"):
                name = f"{kind}.{spec.layer}"
                larger = np.zeros((1, spec.heads, state.capacity, spec.head_dim), np.float32)
                if state.length:
                    larger[:, :, : state.length] = state.caches[name][:, :, : state.length]
                state.caches[name] = larger
        state.decode = None

    def _bind_layers(self, state: _Slot, chunk: slice, place: _Place) -> tuple[list[_Bound], Mapping[str, Array]]:
        """Bind the layers to a slot's caches and to these rows of the shared buffers; also what stands where."""
        places = {**state.constants, **place.inputs, **self._rows_of_buffers(chunk)}
        for name, cached in state.caches.items():
            places[name] = places[f"{name}.out"] = cached  # past and present are one buffer
        gathers = cycle(self._gathers)
        bound = []
        for segment, session in self._segments:
            if segment.head:
                continue
            match segment.then:
                case Reduction(summed):
                    bound.append(_bind(session, segment, places, partial=places[summed]))
                case Gathering():
                    parts = self._place(segment.then, next(gathers), chunk.stop - chunk.start, places)
                    bound.append(_bind(session, segment, places, parts=parts))
                case Mixture():
                    bound.append(_bind(session, segment, places, mixture=self._mixture(segment.then, places)))
                case None:
                    bound.append(_bind(session, segment, places))
        return bound, places

    def _mixture(self, mixture: Mixture, places: Mapping[str, Array]) -> BoundMixture:
        return BoundMixture(
            x=places[mixture.x],
            weights=places[mixture.weights],
            chosen=places[mixture.chosen],
            total=places[mixture.total],
            on_base=mixture.base is not None,
            compute=self._experts[mixture.total],
        )

    def _bind_head(self, places: Mapping[str, Array], chunk: slice, rows: Array, logits: F32) -> list[_Bound]:
        """Bind the head, if this rank has a part of it, to where the last layer stands and these rows of buffers."""
        places = {**places, **self._rows_of_buffers(chunk), ROWS: rows, "logits": logits}
        return [_bind(session, segment, places) for segment, session in self._segments if segment.head]

    def _rows_of_buffers(self, chunk: slice) -> dict[str, Array]:
        return {name: buffer[chunk] for name, buffer in self._buffers.items()}

    def _place(self, gathering: Gathering, memory: F32, tokens: int, places: dict[str, Array]) -> list[F32]:
        """Give every gathered term its place, f32[T, D]; where each rank's terms are, f32[count, T, D], by rank."""
        shape = (len(gathering.gathered), tokens, self._graph.hidden)
        terms = memory[: prod(shape)].reshape(shape)
        places.update(zip(gathering.gathered, terms, strict=True))
        parts = np.split(terms, np.cumsum(gathering.counts)[:-1])
        places.update(zip(gathering.own, parts[self._collectives.rank], strict=True))
        return parts


def _bind(
    session: ort.InferenceSession | None,
    segment: Segment,
    places: Mapping[str, Array],
    **then: Any,
) -> _Bound:
    """Bind a segment; `then` is what follows it, see `_Bound`."""
    if session is None:
        return _Bound(None, None, **then)
    binding = session.io_binding()
    for name in segment.inputs:
        place = places[name]
        binding.bind_input(name, "cpu", 0, place.dtype.type, place.shape, place.ctypes.data)
    for name in segment.outputs:
        place = places[name]
        binding.bind_output(name, "cpu", 0, place.dtype.type, place.shape, place.ctypes.data)
    return _Bound(session, binding, **then)


@dataclass(frozen=True)
class _Crossing:
    """A value [T, width] that crosses segments."""

    width: int
    kind: int = TensorProto.FLOAT

    @classmethod
    def declared(cls, value: onnx.ValueInfoProto) -> _Crossing:
        tensor = value.type.tensor_type
        return cls(tensor.shape.dim[1].dim_value, tensor.elem_type)

    def buffer(self, rows: int) -> Array:
        return np.zeros((rows, self.width), helper.tensor_dtype_to_np_dtype(self.kind))


def _assign_buffers(
    segments: Sequence[Segment], max_rows: int, crossing: Mapping[str, _Crossing], residual: _Crossing
) -> dict[str, Array]:
    """Give every activation that crosses a segment a buffer [max_rows, width], reused when its value is dead.

    A segment's outputs never share a buffer with its inputs; a collective's result stands where its operand stood, and
    that of experts where stood what they are added to.

    Args:
        residual: of values that are not in `crossing`.
    """
    last_read: dict[str, int] = {}
    for index, segment in enumerate(segments):
        operands = segment.then.operands if isinstance(segment.then, Mixture) else ()
        last_read.update(dict.fromkeys([*segment.inputs, *operands], index))
    buffers: dict[str, Array] = {"hidden": residual.buffer(max_rows)}
    free: dict[_Crossing, list[Array]] = {}

    def place(name: str) -> None:
        kind = crossing.get(name, residual)
        buffers[name] = free[kind].pop() if free.get(kind) else kind.buffer(max_rows)

    for index, segment in enumerate(segments):
        gathered = segment.then.own if isinstance(segment.then, Gathering) else ()
        for name in segment.outputs:
            if name != "logits" and not name.endswith(".out") and name not in gathered:
                place(name)
        dead = {name for name, last in last_read.items() if last == index and name in buffers}
        match segment.then:
            case Reduction(partial, reduced):
                buffers[reduced] = buffers[partial]
            case Mixture(total=total, base=None):
                place(total)
            case Mixture(total=total, base=base):
                assert base is not None
                buffers[total] = buffers[base]
                dead.discard(base)
        for name in sorted(dead):
            free.setdefault(crossing.get(name, residual), []).append(buffers[name])
    return buffers


def _whole(graph: onnx.GraphProto) -> Segment:
    """A graph as one segment."""
    return Segment(
        tuple(graph.node), tuple(value.name for value in graph.input), tuple(value.name for value in graph.output)
    )


_ELEMENT_TYPES = {
    SEQLENS: TensorProto.INT32,
    TOTAL_LENGTH: TensorProto.INT32,
    ROWS: TensorProto.INT64,
    POSITION: TensorProto.INT64,
    GROUPED: TensorProto.BOOL,
}


_NO_MEMORY = re.compile("bad_alloc|bad allocation|Failed to allocate memory")
"""How the runtime says so, where it does not raise a `MemoryError`."""

_pool: list[int] = []
"""The threads of this process's pool, once there is one."""


class _Weights:
    """The share file's weights as values that sessions use where they are."""

    def __init__(self, share_file: Path) -> None:
        self._share = MappedShare(share_file)
        self._values: list[ort.OrtValue] = []

    def lend(self, tensor: TensorProto, options: ort.SessionOptions) -> None:
        """Let the session that will be made with `options` have an initializer; the value must outlive it."""
        value = ort.OrtValue.ortvalue_from_numpy(self._share.view(tensor))
        options.add_initializer(tensor.name, value)
        self._values.append(value)

    def forget(self, tensor: TensorProto) -> None:
        """Let go of the pages of an initializer whose session is made: what has not been packed comes back with use."""
        self._share.forget(tensor)

    def close(self) -> None:
        self._values.clear()
        self._share.close()


def _open_session(
    segment: Segment,
    initializers: Mapping[str, TensorProto],
    graph: RankGraph,
    weights: _Weights,
    crossing: Mapping[str, _Crossing],
    threads: int,
) -> ort.InferenceSession:
    """Make a session of one segment.

    Raises:
        EngineError: the runtime refuses it, or this process has another number of threads already.
        MemoryError: there is no room for it.
    """

    def declare(names: Sequence[str]) -> list[onnx.ValueInfoProto]:
        kinds = {name: crossing[name].kind for name in names if name in crossing} | _ELEMENT_TYPES
        return [helper.make_tensor_value_info(name, kinds.get(name, TensorProto.FLOAT), None) for name in names]

    read = dict.fromkeys(name for node in segment.nodes for name in node.input)
    constants = [initializers[name] for name in read if name in initializers]
    stored = [tensor for tensor in constants if tensor.data_location == TensorProto.EXTERNAL]
    model = helper.make_model(
        helper.make_graph(
            segment.nodes,
            "segment",
            declare(segment.inputs),
            declare(segment.outputs),
            constants,
        ),
        functions=graph.proto.functions if any(node.domain == DOMAIN for node in segment.nodes) else (),
        opset_imports=[*graph.proto.opset_import, helper.make_opsetid(MICROSOFT, 1)],
        ir_version=graph.proto.ir_version,
    )
    _share_arena()
    options = ort.SessionOptions()
    options.log_severity_level = 3
    _share_threads(threads)
    if threads > 1:
        options.use_per_session_threads = False
    else:
        options.inter_op_num_threads = options.intra_op_num_threads = 1
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(graph.share_file.parent)
    )
    for tensor in stored:
        weights.lend(tensor, options)
    try:
        session = ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"], enable_fallback=0
        )
    except MemoryError:
        raise
    except Exception as error:  # the runtime's own classes share no other base
        if _NO_MEMORY.search(str(error)):
            raise MemoryError(str(error)) from error
        raise EngineError(
            f"engine 'onnxruntime' cannot prepare the part of the graph from {segment.nodes[0].name!r} on: {error}"
        ) from error
    for tensor in stored:
        weights.forget(tensor)
    return session


def _kinds(nodes: Sequence[onnx.NodeProto]) -> str:
    """The matmuls of a graph in words: ``int4 in blocks of 32``."""
    kinds = set()
    for node in nodes:
        if node.op_type == "MatMulNBits":
            attributes = {attribute.name: attribute.i for attribute in node.attribute}
            kinds.add(f"int{attributes['bits']} in blocks of {attributes['block_size']}")
    return " and ".join(sorted(kinds)) or "fp32"


@cache
def _share_arena() -> None:
    """One arena for the temporaries of all segments: each session's own would keep a prefill's worth."""
    where = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(where, None)


def _share_threads(threads: int) -> None:
    """One pool for all segments: a pool for each made a token forty times slower.

    Raises:
        EngineError: the process has a pool of another size, which the runtime can neither replace nor leave unused.
    """
    if threads > 1 and not _pool:
        ort.set_global_thread_pool_sizes(threads, 1)
        _pool.append(threads)
    if _pool and _pool != [threads]:
        raise EngineError(
            f"engine 'onnxruntime' cannot have threads={threads} in a process where it has had threads={_pool[0]}; "
            "give every engine of a process the same number"
        )
