"""The GPU engine: a rank's graph as CUDA kernels on one stream, collectives included, in FP32.

Not yet run on a GPU. Its kernels compile for every architecture, and compiled for the host they compute what the
reference does; speed and driver are untried.

A step is submitted as a whole, node by node, and waited for once: the kernels of `cuda.cu`, and between them the
collectives as `motley.transport.cuda` orders them. Weights stay on the device as they lie in the share file (float32,
int8 or int4 blocks) and are widened in registers; activations, caches and sums are float32.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from motley.plugins.engine import (
    DOMAIN,
    F32,
    CacheSpec,
    Collectives,
    EngineError,
    EngineOptions,
    RankGraph,
    check_skip,
    check_step,
    micro_chunks,
    transport,
)
from motley.plugins.mapped_share import MappedShare
from motley.transport.cuda.all_reduce import AllReduce
from motley.transport.cuda.driver import CudaDriver, Driver
from motley.transport.cuda.errors import CudaError
from motley.transport.cuda.host_step import HostStep
from motley.transport.cuda.stream import CudaEvent, CudaStream, DeviceArray, measure_host_steps

SOURCES = (Path(__file__).with_name("cuda.cu"),)
WARP = 32
THREADS = 128
ROWS = 2
"""Outputs per warp of a matmul, as in the source..."""
TOKENS = 4
"""...and tokens, where there are several."""
RUNS: dict[int, tuple[str, int]] = {
    TensorProto.FLOAT: ("fp32", 4),
    TensorProto.UINT8: ("int8", 16),
    TensorProto.UINT4: ("int4", 32),
}
"""How matmuls call a type of weights, and how many of them are 16 bytes."""
WIDEST_HEAD = 256
PART = 128
"""Positions that one warp attends to, at least, before a row's are given to several."""
MOST_PARTS = 64

FIRST_CAPACITY = 256
"""Tokens that the cache of a new slot holds; it doubles when it is full."""
UPLOAD_BYTES = 16 << 20
_LAYER = re.compile(r"^layers\.[0-9]+\.")
STEP_S = 1200.0
"""Longest step: its collectives have shorter deadlines of their own."""


@dataclass(frozen=True)
class _View:
    """f32[T, width] on the device, or a part of such rows."""

    address: int
    width: int
    stride: int
    """Elements from one row to the next."""


@dataclass
class _Slot:
    tables: dict[str, int]
    """Addresses of the rotary tables..."""
    caches: dict[str, int] = field(default_factory=dict)
    """...and of the caches, by graph input."""
    capacity: int = 0
    length: int = 0


class CudaEngine:
    """See `motley.plugins.engine.Engine`. ``extra``: ``host_step`` = function, spinning or memory; else the quickest.

    Raises:
        EngineError: no GPU, too little memory, an unknown option, or a graph that this engine has no kernels for.
    """

    def __init__(
        self, graph: RankGraph, collectives: Collectives, options: EngineOptions, driver: Driver | None = None
    ) -> None:
        unknown = set(options.extra) - {"host_step"}
        if unknown:
            raise EngineError(f"engine 'cuda' has no option {', '.join(sorted(unknown))}; it has: host_step")
        if options.exact:
            raise EngineError("engine 'cuda' does not know exact=true; use engine 'onnxruntime'")
        self._graph = graph
        self._collectives = collectives
        self._max_rows = options.max_rows
        self._slots: dict[int, _Slot] = {}
        self._reductions: dict[tuple[int, int, Collectives], AllReduce] = {}
        """By address, rows, and by what they are summed through."""
        self._values: dict[str, _View] = {}
        self._buffers: dict[str, _View] = {}
        self._memory = ExitStack()
        try:
            self._open(options, driver)
        except CudaError as error:
            self._memory.close()
            raise EngineError(f"engine 'cuda': {error}") from error
        except BaseException:
            self._memory.close()
            raise

    def _open(self, options: EngineOptions, driver: Driver | None) -> None:
        if driver is None:
            own = CudaDriver()
            self._memory.callback(own.close)
            driver = own
        self._driver = driver
        form = options.extra.get("host_step")
        if form is not None and form not in set(HostStep):
            raise EngineError(f"engine 'cuda' has no host step {form!r}; it has: {', '.join(HostStep)}")
        if form is None:
            form = next(iter(measure_host_steps(driver))) if self._collectives.size > 1 else HostStep.FUNCTION
        graph, rows = self._graph, self._max_rows
        proto = graph.proto.graph
        self._initializers = {tensor.name: tensor for tensor in proto.initializer}
        self._made_by = {output: node for node in proto.node for output in node.output}
        self._nodes = [node for node in proto.node if not self._is_folded(node)]
        for node in self._nodes:
            if (node.domain, node.op_type) not in _SUBMITTERS:
                raise EngineError(f"engine 'cuda' has no kernel for {node.domain}.{node.op_type} ({node.name})")
        if any(spec.head_dim > WIDEST_HEAD or spec.head_dim % 2 for spec in graph.caches):
            raise EngineError(f"engine 'cuda' has attention for heads of an even width up to {WIDEST_HEAD}")
        self._weights = self._allocate(max(1, graph.share_file.stat().st_size))
        self._stream = CudaStream(driver, HostStep(form), name="compute")
        self._memory.callback(self._stream.close)
        self._done = CudaEvent(driver)
        self._memory.callback(self._done.close)
        self._hidden = self._pinned(rows * graph.hidden)
        self._logits = self._pinned(rows * graph.vocabulary)
        self._upload()

    # -- the engine's calls ------------------------------------------------------------------------------------------

    def open_slot(self, slot: int, prompt: int = 0) -> None:
        if slot in self._slots:
            raise EngineError(f"slot {slot} is open already")
        tables: dict[str, int] = {}
        try:
            for name, table in self._graph.constants(prompt).items():
                tables[name] = self._driver.allocate(max(1, table.nbytes))
                self._send(tables[name], np.ascontiguousarray(table, np.float32).reshape(-1).view(np.uint8))
        except CudaError as error:
            for address in tables.values():
                self._driver.free(address)
            raise EngineError(f"engine 'cuda': {error}") from error
        self._slots[slot] = _Slot(tables)

    def close_slot(self, slot: int) -> None:
        state = self._slot(slot)
        del self._slots[slot]
        for address in (*state.tables.values(), *state.caches.values()):
            self._driver.free(address)

    def skip(self, slot: int, position: int) -> None:
        state = self._slot(slot)
        check_skip(slot, state.length, position, self._graph.context)
        self._make_room(state, position)
        for spec, address in self._caches(state):
            for head in range(spec.heads):
                start = address + 4 * spec.head_dim * (head * state.capacity + state.length)
                self._fill(start, (position - state.length) * spec.head_dim)
        self._finish()
        state.length = position

    def step(self, slot: int, hidden: F32, position: int, rows: Sequence[int], halved: bool = False) -> F32:
        state, tokens = self._slot(slot), len(hidden)
        if not 1 <= tokens <= self._max_rows or hidden.shape[1] != self._graph.hidden:
            raise EngineError(f"a step takes f32[1..{self._max_rows}, {self._graph.hidden}], not {hidden.shape}")
        check_step(slot, state.length, position, tokens, self._graph.context)
        if not all(0 <= row < tokens for row in rows) or len(rows) > self._max_rows:
            raise EngineError(f"logits of rows {list(rows)} were asked for; the step has {tokens} rows")
        try:
            self._make_room(state, position + tokens)
            step = _Step(self, state, tokens, position, list(rows), halved)
            np.copyto(self._hidden[: hidden.size].reshape(hidden.shape), hidden)
            into = self._buffer("hidden", self._graph.hidden)
            self._driver.copy(into.address, self._hidden.ctypes.data, hidden.nbytes, self._stream.handle)
            for node in self._nodes:
                _SUBMITTERS[node.domain, node.op_type](step, node)
            wanted = len(rows) * self._graph.vocabulary
            if wanted:
                logits = self._values["logits"].address
                self._driver.copy(self._logits.ctypes.data, logits, 4 * wanted, self._stream.handle)
            self._finish()
        except CudaError as error:
            raise EngineError(f"engine 'cuda' failed in a step: {error}") from error
        state.length = position + tokens
        return self._logits[:wanted].reshape(len(rows), self._graph.vocabulary)

    def close(self) -> None:
        try:
            self._stream.close()  # nothing is freed that is still read
        finally:
            for slot in list(self._slots):
                self.close_slot(slot)
            self._memory.close()

    # -- memory ------------------------------------------------------------------------------------------------------

    def _slot(self, slot: int) -> _Slot:
        if slot not in self._slots:
            raise EngineError(f"slot {slot} is not open; open: {sorted(self._slots)}")
        return self._slots[slot]

    def _allocate(self, nbytes: int) -> int:
        """Memory that the engine keeps."""
        address = self._driver.allocate(nbytes)
        self._memory.callback(self._driver.free, address)
        return address

    def _pinned(self, elements: int) -> F32:
        pinned = self._driver.allocate_pinned(4 * max(1, elements))
        self._memory.callback(self._driver.free_pinned, pinned)
        return pinned.host.view(np.float32)

    def _buffer(self, name: str, width: int) -> _View:
        """Where the value of this name lies, f32[max_rows, width]. Layers share their buffers: a layer reads nothing of
        another but the residual, which the one before left in the buffer that its own last node will write."""
        key = _LAYER.sub("", name)
        view = self._buffers.get(key)
        if view is None:
            view = _View(self._allocate(4 * self._max_rows * max(1, width)), width, width)
            self._buffers[key] = view
        self._values[name] = view
        return view

    def _upload(self) -> None:
        """The share file to the device, as it lies."""
        share = MappedShare(self._graph.share_file)
        try:
            for tensor in self._initializers.values():
                if tensor.data_location == TensorProto.EXTERNAL:
                    self._send(self._address(tensor.name), share.bytes_of(tensor))
                    share.forget(tensor)
        finally:
            share.close()

    def _send(self, address: int, source: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        staging = self._driver.allocate_pinned(max(1, min(UPLOAD_BYTES, len(source))))
        try:
            for start in range(0, len(source), UPLOAD_BYTES):
                chunk = source[start : start + UPLOAD_BYTES]
                staging.host[: len(chunk)] = chunk
                self._driver.copy(address + start, staging.host.ctypes.data, len(chunk), self._stream.handle)
                self._finish()
        finally:
            self._driver.free_pinned(staging)

    def _address(self, name: str) -> int:
        """Where an initializer lies on the device."""
        entries = {entry.key: entry.value for entry in self._initializers[name].external_data}
        return self._weights + int(entries["offset"])

    def _caches(self, state: _Slot) -> list[tuple[CacheSpec, int]]:
        return [
            (spec, state.caches[f"{kind}_cache.{spec.layer}"])
            for spec in self._graph.caches
            for kind in ("key", "value")
            if f"{kind}_cache.{spec.layer}" in state.caches
        ]

    def _make_room(self, state: _Slot, tokens: int) -> None:
        if tokens <= state.capacity:
            return
        capacity = max(FIRST_CAPACITY, state.capacity)
        while capacity < tokens:
            capacity *= 2
        capacity = min(capacity, self._graph.context)
        grown: dict[str, int] = {}
        try:
            for spec in self._graph.caches:
                row = 4 * spec.head_dim
                for kind in ("key", "value"):
                    name = f"{kind}_cache.{spec.layer}"
                    grown[name] = self._driver.allocate(spec.heads * capacity * row)
                    for head in range(spec.heads if state.length else 0):
                        target = grown[name] + head * capacity * row
                        source = state.caches[name] + head * state.capacity * row
                        self._driver.copy(target, source, state.length * row, self._stream.handle)
            self._finish()
        except CudaError as error:
            for address in grown.values():
                self._driver.free(address)
            raise EngineError(f"engine 'cuda': {error}") from error
        for address in state.caches.values():
            self._driver.free(address)
        state.caches, state.capacity = grown, capacity

    # -- work --------------------------------------------------------------------------------------------------------

    def _launch(self, kernel: str, threads: int, *arguments: Any) -> None:
        """A kernel of so many threads in all. Integers are i32, floats f32, views and pointers addresses."""
        self._stream.launch(SOURCES, kernel, -(-threads // THREADS), THREADS, arguments)

    def _fill(self, address: int, elements: int) -> None:
        if elements:
            self._launch("fill", elements, _pointer(address), ctypes.c_float(0), ctypes.c_longlong(elements))

    def _finish(self) -> None:
        self._stream.synchronise(STEP_S)

    def _is_folded(self, node: onnx.NodeProto) -> bool:
        """Whether another node does its work: what leads to a weight, to a shape, or to a product after swish."""
        if node.op_type == "ConstantOfShape":
            return node.input[0] in self._initializers
        return node.op_type in ("Concat", "DequantizeLinear", "Shape", "Swish")


def _pointer(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address)


def _rows(view: _View) -> tuple[ctypes.c_void_p, ctypes.c_int]:
    return ctypes.c_void_p(view.address), ctypes.c_int(view.stride)


def _integers(*values: int) -> tuple[ctypes.c_int, ...]:
    return tuple(map(ctypes.c_int, values))


class _Step:
    """One step being submitted: how each node of the graph becomes kernels."""

    def __init__(
        self, engine: CudaEngine, state: _Slot, tokens: int, position: int, rows: list[int], halved: bool
    ) -> None:
        self._engine = engine
        self._chunks = micro_chunks(tokens, halved)
        self._state = state
        self._tokens = tokens
        self._position = position
        self._rows = rows
        self._in_head = False

    @property
    def _count(self) -> int:
        """Rows of what is computed: the step's, or in the head those asked for."""
        return len(self._rows) if self._in_head else self._tokens

    def gemm(self, node: onnx.NodeProto) -> None:
        engine, x = self._engine, self._engine._values[node.input[0]]
        matrix = node.input[1]
        dequantised = engine._made_by.get(matrix)
        scales = zeros = 0
        name = matrix
        if dequantised is not None:
            name, scale, zero = dequantised.input
            scales = engine._address(scale)
            zeros = engine._address(zero) if zero in engine._initializers else 0
        tensor = engine._initializers[name]
        outputs, columns = tensor.dims
        block = _attributes(dequantised)["block_size"] if dequantised is not None else columns
        kind, run = RUNS[tensor.data_type]
        if not self._count:
            return
        y = engine._buffer(node.output[0], outputs)
        width = "wide" if block % run == 0 else "any"
        many = self._count > 1
        warps = -(-outputs // ROWS) * -(-self._count // (TOKENS if many else 1))
        bias = engine._address(node.input[2]) if len(node.input) > 2 else 0
        engine._launch(
            f"matmul_{kind}_{width}_{'many' if many else 'one'}",
            warps * WARP,
            *_rows(x),
            *map(_pointer, (engine._address(name), scales, zeros, bias)),
            *_rows(y),
            *_integers(self._count, outputs, columns, block),
        )

    def norm(self, node: onnx.NodeProto) -> None:
        engine, x = self._engine, self._engine._values[node.input[0]]
        (width,) = engine._initializers[node.input[1]].dims
        y, groups = engine._buffer(node.output[0], x.width), x.width // width
        if self._count:
            engine._launch(
                "rms_norm",
                self._count * groups * WARP,
                *_rows(x),
                _pointer(engine._address(node.input[1])),
                *_rows(y),
                *_integers(self._count, groups, width),
                ctypes.c_float(_attributes(node)["epsilon"]),
            )

    def reshape(self, node: onnx.NodeProto) -> None:
        """Heads apart and together: the rows stay as they are."""
        self._engine._values[node.output[0]] = self._engine._values[node.input[0]]

    def split(self, node: onnx.NodeProto) -> None:
        engine, x = self._engine, self._engine._values[node.input[0]]
        start = 0
        for name, width in zip(
            node.output, numpy_helper.to_array(engine._initializers[node.input[1]]).tolist(), strict=True
        ):
            engine._values[name] = _View(x.address + 4 * start, width, x.stride)
            start += width

    def attention(self, node: onnx.NodeProto) -> None:
        engine, state, attributes = self._engine, self._state, _attributes(node)
        q, k, v = (engine._values[name] for name in node.input[:3])
        keys, values = (_pointer(state.caches[name]) for name in node.input[3:5])
        cosines, sines = (_pointer(state.tables[name]) for name in node.input[6:8])
        heads, kv_heads, width = (attributes[name] for name in ("q_heads", "kv_heads", "head_dim"))
        tokens, place = self._tokens, _integers(self._tokens, self._position, heads, kv_heads, width, state.capacity)
        engine._launch(
            "rotate",
            tokens * (heads + 2 * kv_heads) * (width // 2),
            *_rows(q),
            *_rows(k),
            *_rows(v),
            keys,
            values,
            cosines,
            sines,
            *place,
        )
        window = attributes["window"]
        seen = min(self._position + tokens, window or self._position + tokens)
        parts = min(MOST_PARTS, -(-seen // PART)) if tokens == 1 else 1
        # Room for a row in parts, or for all rows in one.
        room = max(1, -(-MOST_PARTS // engine._max_rows))
        partials = engine._buffer(f"partials of {heads} heads", heads * (2 + width) * room)
        y = engine._buffer(node.output[0], heads * width)
        engine._launch(
            "attend",
            tokens * heads * parts * WARP,
            *_rows(q),
            keys,
            values,
            _pointer(partials.address),
            *place,
            ctypes.c_float(attributes["scale"]),
            *_integers(window, parts),
        )
        engine._launch(
            "combine",
            tokens * heads * width,
            _pointer(partials.address),
            *_rows(y),
            *_integers(tokens, heads, width, parts),
        )

    def multiply(self, node: onnx.NodeProto) -> None:
        """Of a swish, which is part of the kernel."""
        engine = self._engine
        swish = engine._made_by[node.input[0]]
        gate, up = engine._values[swish.input[0]], engine._values[node.input[1]]
        y = engine._buffer(node.output[0], up.width)
        size = _integers(self._tokens, up.width)
        engine._launch("swish_mul", self._tokens * up.width, *_rows(gate), *_rows(up), *_rows(y), *size)

    def add(self, node: onnx.NodeProto) -> None:
        engine = self._engine
        a, b = (engine._values[name] for name in node.input)
        y = engine._buffer(node.output[0], a.width)
        size = _integers(self._tokens, a.width)
        engine._launch("add", self._tokens * a.width, *_rows(a), *_rows(b), *_rows(y), *size)

    def zeros(self, node: onnx.NodeProto) -> None:
        """The partial sum of a rank without units."""
        engine = self._engine
        engine._fill(engine._buffer(node.output[0], engine._graph.hidden).address, self._tokens * engine._graph.hidden)

    def choose_rows(self, node: onnx.NodeProto) -> None:
        engine, x = self._engine, self._engine._values[node.input[0]]
        y = engine._buffer(node.output[0], x.width)
        for index, row in enumerate(self._rows):
            source, target = x.address + 4 * row * x.stride, y.address + 4 * index * y.stride
            engine._driver.copy(target, source, 4 * x.width, engine._stream.handle)
        self._in_head = True

    def all_reduce(self, node: onnx.NodeProto) -> None:
        """In place: the partial sum is nobody's but this node's."""
        engine = self._engine
        partial = engine._values[node.input[0]]
        engine._values[node.output[0]] = partial
        summing = transport(engine._collectives)
        for chunk in self._chunks:
            address = partial.address + 4 * chunk.start * partial.width
            key = address, chunk.stop - chunk.start, summing
            if key not in engine._reductions:
                array = DeviceArray(address, (key[1], partial.width), np.dtype(np.float32))
                engine._reductions[key] = AllReduce(engine._stream, summing, array)
                engine._memory.callback(engine._reductions[key].close)
            engine._reductions[key].submit(engine._done)


def _attributes(node: onnx.NodeProto) -> Mapping[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


_SUBMITTERS: dict[tuple[str, str], Callable[[_Step, onnx.NodeProto], None]] = {
    ("", "Add"): _Step.add,
    ("", "ConstantOfShape"): _Step.zeros,
    ("", "Gather"): _Step.choose_rows,
    ("", "Gemm"): _Step.gemm,
    ("", "Mul"): _Step.multiply,
    ("", "RMSNormalization"): _Step.norm,
    ("", "Reshape"): _Step.reshape,
    ("", "Split"): _Step.split,
    (DOMAIN, "CachedAttention"): _Step.attention,
    (DOMAIN, "DistCollective"): _Step.all_reduce,
}
