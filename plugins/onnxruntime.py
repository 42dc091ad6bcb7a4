"""The CPU engine: ONNX Runtime, one session per segment, the transport between segments.

A step is a chain of ``run_with_iobinding`` calls (about 3 us each) on buffers whose addresses are bound once.
Every value that crosses a segment lives in a buffer of this engine, so the collectives work on it in place and
nothing is copied or allocated per token. KV caches are updated in place: past and present are one buffer.

Weights are in memory once. The runtime packs matrices into a layout of its own when a session is made; of those it
maps itself it keeps the scales resident beside that. So the share file is mapped here, and the pages that a session has
been made of are let go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from motley.plugins.engine import DOMAIN, F32, Collectives, EngineError, EngineOptions, RankGraph
from motley.plugins.mapped_share import Array, MappedShare
from motley.plugins.onnxruntime_lowering import MICROSOFT, SEQLENS, TOTAL_LENGTH, lower
from motley.plugins.segments import ROWS, Segment, cut_at_collectives

FIRST_CAPACITY = 256
"""Tokens that a new slot has room for; it doubles when full."""

POSITION = "position"


@dataclass(frozen=True)
class _Bound:
    """A segment bound to buffers, and what the transport then sums in place."""

    session: ort.InferenceSession
    binding: Any
    partial: F32 | None


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
        self._all_reduce = collectives.all_reduce
        self._max_rows = options.max_rows
        self._slots: dict[int, _Slot] = {}

        lowered = lower(graph.proto)
        segments = cut_at_collectives(
            lowered.nodes, lowered.initializers, [output.name for output in graph.proto.graph.output]
        )
        self._weights = _Weights(graph.share_file)
        self._segments = [
            (segment, _open_session(segment, lowered.initializers, graph, self._weights, options.threads))
            for segment in segments
            if segment.outputs
        ]
        self._buffers = _assign_buffers(segments, options.max_rows, graph.hidden)

        self._position = np.zeros(1, np.int64)
        self._seqlens = np.zeros(1, np.int32)
        self._total_length = np.zeros((), np.int32)
        self._row = np.zeros(1, np.int64)
        self._logits = np.empty((1, graph.vocabulary), np.float32)

    def open_slot(self, slot: int, prompt: int = 0) -> None:
        if slot in self._slots:
            raise EngineError(f"slot {slot} is open already")
        self._slots[slot] = _Slot(self._graph.constants(prompt))

    def close_slot(self, slot: int) -> None:
        if self._slots.pop(slot, None) is None:
            raise EngineError(f"slot {slot} is not open")

    def skip(self, slot: int, position: int) -> None:
        state = self._slot(slot)
        if not state.length <= position <= self._graph.context:
            raise EngineError(
                f"slot {slot} holds {state.length} tokens of at most {self._graph.context}: "
                f"it cannot go on at {position}"
            )
        if position > state.capacity:
            self._grow(state, position)
        for cached in state.caches.values():
            cached[:, :, state.length : position] = 0
        state.length = position

    def step(self, slot: int, hidden: F32, position: int, rows: Sequence[int]) -> F32:
        state = self._slot(slot)
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
        self._position[0] = position
        self._seqlens[0] = end - 1
        self._total_length[...] = end
        np.copyto(self._buffers["hidden"][:tokens], hidden)

        if tokens == 1 and len(rows) == 1:
            self._row[0] = rows[0]
            logits = self._logits
            if state.decode is None:
                state.decode = self._bind(state, 1, self._row, logits)
            bound = state.decode
        else:
            logits = np.empty((len(rows), self._graph.vocabulary), np.float32)
            wanted = np.array(rows, np.int64)  # bindings hold addresses only: it must outlive the run
            bound = self._bind(state, tokens, wanted, logits)
        for segment in bound:
            try:
                segment.session.run_with_iobinding(segment.binding)
            except Exception as error:  # the runtime's own classes share no other base
                raise EngineError(f"engine 'onnxruntime' failed in a step: {error}") from error
            if segment.partial is not None:
                self._all_reduce(segment.partial)
        state.length = end
        return logits

    def close(self) -> None:
        self._slots.clear()
        self._segments.clear()
        self._weights.close()  # not before the sessions
        self._buffers.clear()

    def _slot(self, slot: int) -> _Slot:
        state = self._slots.get(slot)
        if state is None:
            raise EngineError(f"slot {slot} is not open")
        return state

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

    def _bind(self, state: _Slot, tokens: int, rows: Array, logits: F32) -> list[_Bound]:
        """Bind the segments to a slot's caches and to the first `tokens` rows of the shared buffers."""
        places: dict[str, Array] = {
            **state.constants,
            POSITION: self._position,
            SEQLENS: self._seqlens,
            TOTAL_LENGTH: self._total_length,
            ROWS: rows,
            "logits": logits,
        }
        for name, buffer in self._buffers.items():
            places[name] = buffer[:tokens]
        for name, cached in state.caches.items():
            places[name] = places[f"{name}.out"] = cached  # past and present are one buffer
        bound = []
        for segment, session in self._segments:
            if segment.head and not len(rows):
                continue
            binding = session.io_binding()
            for name in segment.inputs:
                place = places[name]
                binding.bind_input(name, "cpu", 0, place.dtype.type, place.shape, place.ctypes.data)
            for name in segment.outputs:
                place = places[name]
                binding.bind_output(name, "cpu", 0, place.dtype.type, place.shape, place.ctypes.data)
            partial = places[segment.reduction.partial] if segment.reduction else None
            bound.append(_Bound(session, binding, partial))
        return bound


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
}


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
    segment: Segment, initializers: Mapping[str, TensorProto], graph: RankGraph, weights: _Weights, threads: int
) -> ort.InferenceSession:
    """Make a session of one segment."""

    def declare(names: Sequence[str]) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info(name, _ELEMENT_TYPES.get(name, TensorProto.FLOAT), None) for name in names
        ]

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
    if threads > 1:
        _share_threads(threads)
        options.use_per_session_threads = False
    else:
        options.inter_op_num_threads = options.intra_op_num_threads = 1
    options.add_session_config_entry("session.use_env_allocators", "1")
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(graph.share_file.parent)
    )
    for tensor in stored:
        weights.lend(tensor, options)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    for tensor in stored:
        weights.forget(tensor)
    return session


@cache
def _share_arena() -> None:
    """One arena for the temporaries of all segments: each session's own would keep a prefill's worth."""
    where = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(where, None)


@cache
def _share_threads(threads: int) -> None:
    """One pool for all segments: a pool for each made a token forty times slower."""
    ort.set_global_thread_pool_sizes(threads, 1)
