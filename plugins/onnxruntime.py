"""The CPU engine: ONNX Runtime, one session per segment, the transport between segments.

A step is a chain of ``run_with_iobinding`` calls (about 3 us each) on buffers whose addresses are bound once.
Every value that crosses a segment lives in a buffer of this engine, so the collectives work on it in place and
nothing is copied or allocated per token. KV caches are updated in place: past and present are one buffer.

Two micro-chunks take turns: one computes a segment while the sum of the other is under way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from motley.plugins.engine import DOMAIN, F32, Collectives, EngineError, EngineOptions, Pending, RankGraph, micro_chunks
from motley.plugins.onnxruntime_lowering import GROUPED, GROUPED_FROM, MICROSOFT, SEQLENS, TOTAL_LENGTH, lower
from motley.plugins.segments import ROWS, Segment, cut_at_collectives

FIRST_CAPACITY = 256
"""Tokens that a new slot has room for; it doubles when full."""

POSITION = "position"
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _Bound:
    """A segment bound to buffers, and what the transport then sums in place."""

    session: ort.InferenceSession
    binding: Any
    partial: F32 | None


class _Place:
    """Where the rows of a micro-chunk stand in their sequence: the graph's inputs, at fixed addresses."""

    def __init__(self, position: int = 0, tokens: int = 1) -> None:
        self.inputs: dict[str, Array] = {
            POSITION: np.empty(1, np.int64),
            SEQLENS: np.empty(1, np.int32),
            TOTAL_LENGTH: np.empty((), np.int32),
            GROUPED: np.empty((), np.bool_),
        }
        self.move(position, tokens)

    def move(self, position: int, tokens: int) -> None:
        end = position + tokens
        self.inputs[POSITION][...] = position
        self.inputs[SEQLENS][...] = end - 1
        self.inputs[TOTAL_LENGTH][...] = end
        self.inputs[GROUPED][...] = tokens == 1 and end >= GROUPED_FROM


@dataclass
class _Slot:
    """One sequence: its caches by graph input, and its bound decode step (void once the caches move)."""

    capacity: int
    length: int
    caches: dict[str, F32]
    decode: list[_Bound] | None = None


class OnnxRuntimeEngine:
    """See `motley.plugins.engine.Engine`."""

    def __init__(self, graph: RankGraph, collectives: Collectives, options: EngineOptions) -> None:
        if options.extra:
            raise EngineError(f"engine 'onnxruntime' has no settings called {sorted(options.extra)}")
        self._graph = graph
        self._collectives = collectives
        self._max_rows = options.max_rows
        self._slots: dict[int, _Slot] = {}

        lowered = lower(graph.proto)
        segments = cut_at_collectives(
            lowered.nodes, lowered.initializers, [output.name for output in graph.proto.graph.output]
        )
        self._segments = [
            (segment, _open_session(segment, lowered.initializers, graph, options.threads))
            for segment in segments
            if segment.outputs
        ]
        self._buffers = _assign_buffers(segments, options.max_rows, graph.hidden)

        self._decoded = _Place()
        self._row = np.zeros(1, np.int64)
        self._logits = np.empty((1, graph.vocabulary), np.float32)

    def open_slot(self, slot: int) -> None:
        if slot in self._slots:
            raise EngineError(f"slot {slot} is open already")
        self._slots[slot] = _Slot(0, 0, {})

    def close_slot(self, slot: int) -> None:
        if self._slots.pop(slot, None) is None:
            raise EngineError(f"slot {slot} is not open")

    def step(self, slot: int, hidden: F32, position: int, rows: Sequence[int], halved: bool = False) -> F32:
        state = self._slots.get(slot)
        if state is None:
            raise EngineError(f"slot {slot} is not open")
        tokens = len(hidden)
        end = position + tokens
        if not 1 <= tokens <= self._max_rows:
            raise EngineError(f"a step has 1 to {self._max_rows} rows, not {tokens}")
        if not 0 <= position <= state.length or end > self._graph.context:
            raise EngineError(
                f"positions {position} to {end} do not fit slot {slot}: it holds {state.length} tokens "
                f"of at most {self._graph.context}"
            )
        if end > state.capacity:
            self._grow(state, end)
        np.copyto(self._buffers["hidden"][:tokens], hidden)
        if tokens == 1 and len(rows) == 1:
            logits = self._decode(state, position, rows[0])
        else:
            logits = self._prefill(state, position, tokens, rows, halved)
        state.length = end
        return logits

    def close(self) -> None:
        self._slots.clear()
        self._segments.clear()
        self._buffers.clear()

    def _decode(self, state: _Slot, position: int, row: int) -> F32:
        """f32[1, V]{tp}: run one token and the head."""
        self._decoded.move(position, 1)
        self._row[0] = row
        if state.decode is None:
            only = slice(0, 1)
            state.decode = [
                *self._bind_layers(state, only, self._decoded),
                *self._bind_head(only, self._row, self._logits),
            ]
        for bound in state.decode:
            self._run(bound)
            if bound.partial is not None:
                self._collectives.all_reduce(bound.partial)
        return self._logits

    def _prefill(self, state: _Slot, position: int, tokens: int, rows: Sequence[int], halved: bool) -> F32:
        """f32[R, V]{tp}: run a chunk, or its micro-chunks by turns, and the head where it is wanted."""
        chunks = micro_chunks(tokens, halved)
        # Bindings hold addresses only: what they point to must outlive the run.
        places = [_Place(position + chunk.start, chunk.stop - chunk.start) for chunk in chunks]
        wanted = np.array(rows, np.int64)
        logits = np.empty((len(rows), self._graph.vocabulary), np.float32)
        layers = [self._bind_layers(state, chunk, place) for chunk, place in zip(chunks, places, strict=True)]
        pending: Pending | None = None
        for turn in zip(*layers, strict=True):
            for bound in turn:
                self._run(bound)
                if pending is not None:
                    pending.finish()
                    pending = None
                if bound.partial is None:
                    continue
                if len(turn) > 1:
                    pending = self._collectives.all_reduce_start(bound.partial)
                else:
                    self._collectives.all_reduce(bound.partial)
        if pending is not None:
            pending.finish()
        for bound in self._bind_head(slice(0, tokens), wanted, logits) if len(rows) else ():
            self._run(bound)
        return logits

    def _run(self, bound: _Bound) -> None:
        try:
            bound.session.run_with_iobinding(bound.binding)
        except Exception as error:  # the runtime's own classes share no other base
            raise EngineError(f"engine 'onnxruntime' failed in a step: {error}") from error

    def _grow(self, state: _Slot, needed: int) -> None:
        """Move the caches to buffers of at least twice the size."""
        context = self._graph.context
        state.capacity = min(context, max(FIRST_CAPACITY, needed, 2 * state.capacity))
        for spec in self._graph.caches:
            for kind in ("key_cache", "value_cache"):
                name = f"{kind}.{spec.layer}"
                larger = np.zeros((1, spec.heads, state.capacity, spec.head_dim), np.float32)
                if state.length:
                    larger[:, :, : state.length] = state.caches[name][:, :, : state.length]
                state.caches[name] = larger
        state.decode = None

    def _bind_layers(self, state: _Slot, chunk: slice, place: _Place) -> list[_Bound]:
        """Bind the layers to a slot's caches and to these rows of the shared buffers."""
        places = {**self._graph.constants, **place.inputs, **self._rows_of_buffers(chunk)}
        for name, cached in state.caches.items():
            places[name] = places[f"{name}.out"] = cached  # past and present are one buffer
        return [_bind(session, segment, places) for segment, session in self._segments if not segment.head]

    def _bind_head(self, chunk: slice, rows: Array, logits: F32) -> list[_Bound]:
        """Bind the head, if this rank has a part of it, to these rows of the shared buffers."""
        places = {ROWS: rows, "logits": logits, **self._rows_of_buffers(chunk)}
        return [_bind(session, segment, places) for segment, session in self._segments if segment.head]

    def _rows_of_buffers(self, chunk: slice) -> dict[str, Array]:
        return {name: buffer[chunk] for name, buffer in self._buffers.items()}


def _bind(session: ort.InferenceSession, segment: Segment, places: Mapping[str, Array]) -> _Bound:
    binding = session.io_binding()
    for name in segment.inputs:
        place = places[name]
        binding.bind_input(name, "cpu", 0, place.dtype.type, place.shape, place.ctypes.data)
    for name in segment.outputs:
        place = places[name]
        binding.bind_output(name, "cpu", 0, place.dtype.type, place.shape, place.ctypes.data)
    return _Bound(session, binding, places[segment.reduction.partial] if segment.reduction else None)


def _assign_buffers(segments: Sequence[Segment], max_rows: int, width: int) -> dict[str, F32]:
    """Give every activation that crosses a segment a buffer f32[max_rows, D], reused when its value is dead.

    A segment's outputs never share a buffer with its inputs; a collective's result stands where its operand stood.
    """
    last_read: dict[str, int] = {}
    for index, segment in enumerate(segments):
        for name in segment.inputs:
            last_read[name] = index
    buffers: dict[str, F32] = {"hidden": np.zeros((max_rows, width), np.float32)}
    free: list[F32] = []
    for index, segment in enumerate(segments):
        for name in segment.outputs:
            if name == "logits" or name.endswith(".out"):
                continue
            buffers[name] = free.pop() if free else np.zeros((max_rows, width), np.float32)
        free += [buffers[name] for name in segment.inputs if name in buffers and last_read[name] == index]
        if segment.reduction is not None:
            buffers[segment.reduction.reduced] = buffers[segment.reduction.partial]
    return buffers


_ELEMENT_TYPES = {
    SEQLENS: TensorProto.INT32,
    TOTAL_LENGTH: TensorProto.INT32,
    ROWS: TensorProto.INT64,
    POSITION: TensorProto.INT64,
    GROUPED: TensorProto.BOOL,
}


def _open_session(
    segment: Segment, initializers: Mapping[str, TensorProto], graph: RankGraph, threads: int
) -> ort.InferenceSession:
    """Make a session of one segment whose weights are mapped from the share file."""

    def declare(names: Sequence[str]) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info(name, _ELEMENT_TYPES.get(name, TensorProto.FLOAT), None) for name in names
        ]

    read = dict.fromkeys(name for node in segment.nodes for name in node.input)
    model = helper.make_model(
        helper.make_graph(
            segment.nodes,
            "segment",
            declare(segment.inputs),
            declare(segment.outputs),
            [initializers[name] for name in read if name in initializers],
        ),
        functions=graph.proto.functions if any(node.domain == DOMAIN for node in segment.nodes) else (),
        opset_imports=[*graph.proto.opset_import, helper.make_opsetid(MICROSOFT, 1)],
        ir_version=graph.proto.ir_version,
    )
    _share_arena()
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if threads > 1:
        _share_threads(threads)
        options.use_per_session_threads = False
    else:
        options.inter_op_num_threads = options.intra_op_num_threads = 1
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(graph.share_file.parent)
    )
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@cache
def _share_arena() -> None:
    """One arena for the temporaries of all segments: each session's own would keep a prefill's worth."""
    where = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(where, None)


@cache
def _share_threads(threads: int) -> None:
    """One pool for all segments: a pool for each made a token forty times slower."""
    ort.set_global_thread_pool_sizes(threads, 1)
