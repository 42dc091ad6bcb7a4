"""The GPU engine: a rank's graph as CUDA kernels on one stream, collectives included, in FP32.

Not yet run on a GPU. Its kernels compile for every architecture, and compiled for the host they compute what the
reference does; speed and driver are untried.

A step is submitted as a whole, node by node, and waited for once: the kernels of `cuda.cu`, and between them the
collectives as `motley.transport.cuda` orders them. Rows find their sequence through a table on the device, which says
where each stands, so sequences that are decoded together are rows of one step; steps of as many rows are captured as
one CUDA graph, host steps included, and run from it for whichever sequences, where the driver and the form of the host
step allow that. Weights stay on the device as they lie in the share file (float32, float16, int8 or int4 blocks) and
are widened in registers; for the many rows of a prompt they are widened to scratch memory, a part of a matrix at a
time, and multiplied by cuBLAS where that is installed. Activations, caches and sums are float32.
"""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from motley.plugins.cuda.cublas import Gemm, open_cublas
from motley.plugins.engine import (
    DOMAIN,
    F32,
    Collectives,
    EngineError,
    EngineMemoryError,
    EngineOptions,
    RankGraph,
    check_skip,
    check_step,
    grown_capacity,
    micro_chunks,
    transport,
)
from motley.plugins.mapped_share import MappedShare
from motley.transport.cuda.all_reduce import AllReduce
from motley.transport.cuda.compiler import DEVICE
from motley.transport.cuda.driver import CudaDriver, Driver, check_gpu
from motley.transport.cuda.errors import CudaError, DeviceLost, OutOfDeviceMemory
from motley.transport.cuda.host_step import HostStep
from motley.transport.cuda.stream import CudaGraph, CudaStream, DeviceArray, measure_host_steps

log = logging.getLogger(__name__)

SOURCES = (DEVICE, Path(__file__).with_name("kernels.cu"))
WARP = 32
THREADS = 128
ROWS = 2
"""Outputs per warp of a matmul, as in the source..."""
TOKENS = (1, 2, 4, 8)
"""...and the tokens that a warp can compute together."""
MOST_SEQUENCES = 16
"""Rows that are never multiplied by cuBLAS, which may round a row otherwise in other company."""
KINDS: dict[int, tuple[str, int]] = {
    TensorProto.FLOAT: ("fp32", 1),
    TensorProto.FLOAT16: ("fp16", 2),
    TensorProto.UINT8: ("int8", 4),
    TensorProto.UINT4: ("int4", 8),
}
"""How kernels call a type of weights, and how many of them are a word."""
SCRATCH_BYTES = 64 << 20
"""Of the widened part of a matrix that cuBLAS multiplies by, at most."""
PLACE = np.dtype([("cache", "u8"), ("cosines", "u8"), ("sines", "u8"), ("position", "i8"), ("capacity", "i8")])
"""`Place` in the source."""
GRAPHS_KEPT = 32
"""Captured steps; all are forgotten when there are more."""
HEADS = (64, 128, 256)
"""Widths up to which there is a kernel for heads."""
PART = 128
"""Positions that one warp attends to, at least, before a row's are given to several, as in the source."""
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


@dataclass(frozen=True)
class _Matrix:
    """Weights of a product, on the device: kind, shape [outputs, columns], and 2^shift columns per scale."""

    kind: str
    run: int
    outputs: int
    columns: int
    shift: int
    weights: int
    scales: int
    zeros: int


@dataclass
class _Slot:
    tables: dict[str, int]
    """Addresses of the rotary tables..."""
    cache: int = 0
    """...and of the cache of all layers, see `Place` in the source; 0: there is none yet."""
    capacity: int = 0
    length: int = 0

    def place(self, position: int) -> tuple[int, int, int, int, int]:
        """Of its token at `position`, a `PLACE`."""
        return self.cache, self.tables["cos_cache"], self.tables["sin_cache"], position, self.capacity


@contextmanager
def _told(where: str = "") -> Iterator[None]:
    """What goes wrong with the GPU is an error of the engine."""
    try:
        yield
    except OutOfDeviceMemory as error:
        raise EngineMemoryError(f"engine 'cuda'{where}: {error}") from error
    except CudaError as error:
        raise EngineError(f"engine 'cuda'{where}: {error}") from error
    except TimeoutError as error:
        raise EngineError(f"engine 'cuda'{where}: the GPU hangs ({error}): restart the machine") from error


class CudaEngine:
    """See `motley.plugins.engine.Engine`. ``extra``: ``host_step`` = function, spinning or memory; else the quickest.

    Raises:
        EngineMemoryError: too little memory.
        EngineError: no GPU, an unknown option, or a graph that this engine has no kernels for.
    """

    keeps_fp16 = True
    on_gpu = True

    @staticmethod
    def check_machine() -> None:
        """See `motley.plugins.engine.lacking`."""
        try:
            check_gpu()
        except CudaError as error:
            raise EngineError(f"engine 'cuda': {error}") from error

    def __init__(
        self,
        graph: RankGraph,
        collectives: Collectives,
        options: EngineOptions,
        driver: Driver | None = None,
        open_gemm: Callable[[CudaStream], Gemm] | None = open_cublas,
    ) -> None:
        """`driver`: None is the first GPU's. `open_gemm`: what multiplies prompts; None: our own kernels."""
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
        self._captures = True
        """Whether to try: the driver and the host steps have not refused."""
        self._graphs: dict[tuple[Collectives, int, int], CudaGraph] = {}
        """Decode steps, by what they are summed through, rows, and parts of the attention."""
        self._stepped: set[tuple[Collectives, int]] = set()
        """What steps of so many rows have been summed through: the memory for it is there, and kernels are loaded."""
        self._values: dict[str, _View] = {}
        self._buffers: dict[tuple[str, int], _View] = {}
        """By name, and how many rows they have."""
        self._memory = ExitStack()
        try:
            with _told():
                self._open(options, driver, open_gemm)
        except BaseException:
            with suppress(DeviceLost):
                self._memory.close()
            raise

    def _open(
        self, options: EngineOptions, driver: Driver | None, open_gemm: Callable[[CudaStream], Gemm] | None
    ) -> None:
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
        if any(spec.head_dim > HEADS[-1] or spec.head_dim % 2 for spec in graph.caches):
            raise EngineError(f"engine 'cuda' has attention for heads of an even width up to {HEADS[-1]}")
        driver.function(SOURCES, "add")  # whether this GPU is compiled for shows before anything is read
        self._weights = self._allocate(max(1, graph.share_file.stat().st_size))
        self._matrices = {node.input[1]: self._matrix(node) for node in self._nodes if node.op_type == "Gemm"}
        self._before: dict[str, int] = {}
        """What of a token lies before a layer's keys or values in a cache: elements."""
        self._per_token = 0
        for spec in graph.caches:
            for kind in ("key", "value"):
                self._before[f"{kind}_cache.{spec.layer}"] = self._per_token
                self._per_token += spec.heads * spec.head_dim
        self._stream = CudaStream(driver, HostStep(form), name="compute")
        self._memory.callback(self._stream.close)
        self._places = self._allocate(PLACE.itemsize * rows)
        self._places_staging = self._pinned(PLACE.itemsize * rows).view(PLACE)
        self._hidden = self._pinned(4 * rows * graph.hidden).view(np.float32)
        self._open_head(self.most_sequences)
        self._gemm = self._open_gemm(open_gemm) if open_gemm is not None and rows > MOST_SEQUENCES else None
        self._upload()

    def _open_gemm(self, open_gemm: Callable[[CudaStream], Gemm]) -> Gemm | None:
        try:
            gemm = open_gemm(self._stream)
        except CudaError as error:
            log.warning("prompts are computed by Motley's own kernels, which are slower than cuBLAS: %s", error)
            return None
        self._memory.callback(gemm.close)
        widest = [4 * each.outputs * each.columns for each in self._matrices.values() if each.kind != "fp32"]
        self._scratch_bytes = min(SCRATCH_BYTES, max(widest, default=0))
        if self._scratch_bytes:
            self._scratch = self._allocate(self._scratch_bytes)
        return gemm

    # -- the engine's calls ------------------------------------------------------------------------------------------

    @property
    def most_sequences(self) -> int:
        return min(MOST_SEQUENCES, self._max_rows)

    def open_slot(self, slot: int, prompt: int = 0) -> None:
        if slot in self._slots:
            raise EngineError(f"slot {slot} is open already")
        with _told(), ExitStack() as tables:
            state = _Slot({})
            for name, table in self._graph.constants(prompt).items():
                address = state.tables[name] = self._driver.allocate(max(1, table.nbytes))
                tables.callback(self._driver.free, address)
                self._send(address, np.ascontiguousarray(table, np.float32).reshape(-1).view(np.uint8))
            tables.pop_all()
        self._slots[slot] = state

    def close_slot(self, slot: int) -> None:
        self._slot(slot)
        with _told():
            self._release(self._slots.pop(slot))

    def skip(self, slot: int, position: int) -> None:
        state = self._slot(slot)
        check_skip(slot, state.length, position, self._graph.context)
        with _told():
            self._make_room(state, position)
            for start, row in self._heads(state):
                self._fill(start + state.length * row, (position - state.length) * row // 4)
            self._finish()
        state.length = position

    def step(self, slot: int, hidden: F32, position: int, rows: Sequence[int], halved: bool = False) -> F32:
        state, tokens = self._slot(slot), len(hidden)
        if not 1 <= tokens <= self._max_rows or hidden.shape[1] != self._graph.hidden:
            raise EngineError(f"a step takes f32[1..{self._max_rows}, {self._graph.hidden}], not {hidden.shape}")
        check_step(slot, state.length, position, tokens, self._graph.context)
        if not all(0 <= row < tokens for row in rows) or len(rows) > self._max_rows:
            raise EngineError(f"logits of rows {list(rows)} were asked for; the step has {tokens} rows")
        with _told(" failed in a step"):
            if len(rows) > self._head_rows:
                self._open_head(self._max_rows)
            self._make_room(state, position + tokens)
            places = self._places_staging[:tokens]
            places[:] = state.place(position)
            places["position"] += np.arange(tokens)
            if tokens == len(rows) == 1:
                self._run(hidden, partial(self._decode, 1, self._parts(state.capacity)))
            else:
                parts = self._parts(state.capacity) if tokens == 1 else 1
                self._run(hidden, partial(self._submit, tokens, list(rows), halved, parts))
        state.length = position + tokens
        return self._answer(len(rows))

    def decode(self, slots: Sequence[int], hidden: F32, positions: Sequence[int]) -> F32:
        if not 1 <= len(slots) == len(set(slots)) <= self.most_sequences:
            raise EngineError(f"a step decodes 1 to {self.most_sequences} sequences, each once, not slots {[*slots]}")
        states = [self._slot(slot) for slot in slots]
        if hidden.shape != (len(slots), self._graph.hidden):
            raise EngineError(
                f"{len(slots)} sequences take f32[{len(slots)}, {self._graph.hidden}], not {hidden.shape}"
            )
        for slot, state, position in zip(slots, states, positions, strict=True):
            check_step(slot, state.length, position, 1, self._graph.context)
        with _told(" failed in a step"):
            for row, (state, position) in enumerate(zip(states, positions, strict=True)):
                self._make_room(state, position + 1)
                self._places_staging[row] = state.place(position)
            widest = max(state.capacity for state in states)
            self._run(hidden, partial(self._decode, len(slots), self._parts(widest)))
        for state, position in zip(states, positions, strict=True):
            state.length = position + 1
        return self._answer(len(slots))

    def close(self) -> None:
        with suppress(DeviceLost), ExitStack() as parts:  # of a device that is lost nothing is left to free
            parts.callback(self._memory.close)
            while self._slots:
                parts.callback(self._release, self._slots.popitem()[1])
            parts.callback(self._stream.close)  # first: nothing is freed that is still read

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

    def _pinned(self, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        pinned = self._driver.allocate_pinned(max(4, nbytes))
        self._memory.callback(self._driver.free_pinned, pinned)
        return pinned.host[:nbytes]

    def _release(self, state: _Slot) -> None:
        with ExitStack() as parts:
            for address in filter(None, (*state.tables.values(), state.cache)):
                parts.callback(self._driver.free, address)

    def _open_head(self, rows: int) -> None:
        """Have room for the logits of so many rows. They are wide; who serves wants those of decoded tokens only."""
        self._forget_graphs()
        self._head_rows = rows
        self._logits = self._pinned(4 * rows * self._graph.vocabulary).view(np.float32)

    def _buffer(self, name: str, width: int, rows: int) -> _View:
        """Where the value of this name lies, f32[rows, width]. Layers share their buffers: a layer reads nothing of
        another but the residual, which the one before left in the buffer that its own last node will write."""
        key = _LAYER.sub("", name), rows
        view = self._buffers.get(key)
        if view is None:
            view = _View(self._allocate(4 * rows * max(1, width)), width, width)
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

    def _matrix(self, node: onnx.NodeProto) -> _Matrix:
        """What a product multiplies by."""
        name = node.input[1]
        made = self._made_by.get(name)
        tensor = self._initializers[name if made is None else made.input[0]]
        outputs, columns = tensor.dims
        kind, run = KINDS[tensor.data_type]
        block, scales, zeros = 1, 0, 0
        if made is not None and made.op_type == "DequantizeLinear":
            block = _attributes(made)["block_size"]
            _, scale, zero = made.input
            scales = self._address(scale)
            zeros = self._address(zero) if zero in self._initializers else 0
            if block % run or block & block - 1:
                raise EngineError(f"engine 'cuda' has no kernel for blocks of {block} columns ({node.name})")
        elif columns % run:
            kind, run = f"odd_{kind}", 1
        return _Matrix(kind, run, outputs, columns, block.bit_length() - 1, self._address(tensor.name), scales, zeros)

    def _heads(self, state: _Slot) -> Iterator[tuple[int, int]]:
        """Where the keys and the values of each KV head begin, and the bytes from one token to the next."""
        for spec in self._graph.caches:
            for kind in ("key", "value"):
                for head in range(spec.heads):
                    before = self._before[f"{kind}_cache.{spec.layer}"] + head * spec.head_dim
                    yield state.cache + 4 * before * state.capacity, 4 * spec.head_dim

    def _make_room(self, state: _Slot, tokens: int) -> None:
        if tokens <= state.capacity:
            return
        capacity = grown_capacity(state.capacity, tokens, FIRST_CAPACITY, self._graph.context)
        grown = _Slot(state.tables, self._driver.allocate(max(1, 4 * self._per_token * capacity)), capacity)
        with ExitStack() as unused:
            unused.callback(self._driver.free, grown.cache)
            if state.length:
                for (source, row), (target, _) in zip(self._heads(state), self._heads(grown), strict=True):
                    self._driver.copy(target, source, state.length * row, self._stream.handle)
                self._finish()
            unused.pop_all()
        old, state.cache, state.capacity = state.cache, grown.cache, capacity
        if old:
            self._driver.free(old)

    # -- work --------------------------------------------------------------------------------------------------------

    def _parts(self, capacity: int) -> int:
        """In how many parts a row attends, at most; how many it is follows from what the row sees."""
        return min(MOST_PARTS, -(-capacity // PART))

    def _run(self, hidden: F32, submit: Callable[[], None]) -> None:
        """A step of rows whose places are in the staging."""
        np.copyto(self._hidden[: hidden.size].reshape(hidden.shape), hidden)
        submit()
        self._finish()

    def _answer(self, rows: int) -> F32:
        return self._logits[: rows * self._graph.vocabulary].reshape(rows, self._graph.vocabulary)

    def _submit(self, count: int, rows: list[int], halved: bool, parts: int) -> None:
        """A step, of what lies in the staging, into the staging for logits."""
        step = _Step(self, count, rows, halved, parts)
        into = self._buffer("hidden", self._graph.hidden, self._max_rows)
        places = self._places_staging.ctypes.data
        self._driver.copy(into.address, self._hidden.ctypes.data, 4 * count * into.width, self._stream.handle)
        self._driver.copy(self._places, places, PLACE.itemsize * count, self._stream.handle)
        for node in self._nodes:
            _SUBMITTERS[node.domain, node.op_type](step, node)
        if wanted := len(rows) * self._graph.vocabulary:
            logits = self._values["logits"].address
            self._driver.copy(self._logits.ctypes.data, logits, 4 * wanted, self._stream.handle)

    def _decode(self, count: int, parts: int) -> None:
        """A step of so many rows: captured when one has been submitted node by node, and run from that ever after."""
        submit = partial(self._submit, count, list(range(count)), False, parts)
        summing = transport(self._collectives)
        graph = self._graphs.get((summing, count, parts))
        if graph is None and self._captures and (summing, count) in self._stepped:
            graph = self._capture(submit)
            if graph is not None:
                self._graphs[summing, count, parts] = graph
        if graph is not None:
            self._stream.replay(graph)
        else:
            submit()
            self._stepped.add((summing, count))

    def _capture(self, submit: Callable[[], None]) -> CudaGraph | None:
        if len(self._graphs) >= GRAPHS_KEPT:
            self._forget_graphs()
        try:
            return self._stream.capture(submit)
        except (DeviceLost, OutOfDeviceMemory):
            raise
        except CudaError as error:
            log.info("steps are submitted node by node, as they cannot be captured: %s", error)
            self._captures = False
            return None

    def _forget_graphs(self) -> None:
        while self._graphs:
            self._graphs.popitem()[1].close()

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
        return node.op_type in ("Cast", "Concat", "DequantizeLinear", "Shape", "Swish")


def _pointer(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address)


def _rows(view: _View) -> tuple[ctypes.c_void_p, ctypes.c_int]:
    return ctypes.c_void_p(view.address), ctypes.c_int(view.stride)


def _integers(*values: int) -> tuple[ctypes.c_int, ...]:
    return tuple(map(ctypes.c_int, values))


class _Step:
    """One step being submitted: how each node of the graph becomes kernels."""

    def __init__(self, engine: CudaEngine, tokens: int, rows: list[int], halved: bool, parts: int) -> None:
        self._engine = engine
        self._chunks = micro_chunks(tokens, halved)
        self._tokens = tokens
        self._rows = rows
        self._parts = parts
        self._in_head = False

    @property
    def _count(self) -> int:
        """Rows of what is computed: the step's, or in the head those asked for."""
        return len(self._rows) if self._in_head else self._tokens

    def _result(self, node: onnx.NodeProto, width: int) -> _View:
        engine = self._engine
        return engine._buffer(node.output[0], width, engine._head_rows if self._in_head else engine._max_rows)

    def gemm(self, node: onnx.NodeProto) -> None:
        engine, x = self._engine, self._engine._values[node.input[0]]
        matrix, count = engine._matrices[node.input[1]], self._count
        assert x.stride % matrix.run == 0 == x.address % (4 * matrix.run)  # read as widely as weights are
        if not count:
            return
        y = self._result(node, matrix.outputs)
        bias = engine._address(node.input[2]) if len(node.input) > 2 else 0
        if engine._gemm is not None and count > MOST_SEQUENCES:
            self._multiply_many(engine._gemm, x, matrix, y)
            if bias:
                size = _integers(count, matrix.outputs)
                engine._launch("add", count * matrix.outputs, *_rows(y), *_rows(_View(bias, 0, 0)), *_rows(y), *size)
            return
        tokens = next((each for each in TOKENS if each >= count), TOKENS[-1])
        warps = -(-matrix.outputs // ROWS) * -(-count // tokens)
        engine._launch(
            f"matmul_{matrix.kind}_{tokens}",
            warps * WARP,
            *_rows(x),
            *map(_pointer, (matrix.weights, matrix.scales, matrix.zeros, bias)),
            *_rows(y),
            *_integers(count, matrix.outputs, matrix.columns, matrix.shift),
        )

    def _multiply_many(self, gemm: Gemm, x: _View, matrix: _Matrix, y: _View) -> None:
        """As many of the matrix's rows at a time as there is scratch memory for; all, if they are float32 already."""
        engine, columns, widened = self._engine, matrix.columns, matrix.kind != "fp32"
        most = max(1, engine._scratch_bytes // (4 * columns)) if widened else matrix.outputs
        for start in range(0, matrix.outputs, most):
            outputs = min(most, matrix.outputs - start)
            weights = matrix.weights + 4 * start * columns
            if widened:
                weights = engine._scratch
                engine._launch(
                    f"widen_{matrix.kind}",
                    outputs * (columns // matrix.run),
                    *map(_pointer, (matrix.weights, matrix.scales, matrix.zeros, weights)),
                    *_integers(start, outputs, columns, matrix.shift),
                )
            gemm.multiply(x.address, x.stride, weights, y.address + 4 * start, y.stride, self._count, outputs, columns)

    def norm(self, node: onnx.NodeProto) -> None:
        engine, x = self._engine, self._engine._values[node.input[0]]
        (width,) = engine._initializers[node.input[1]].dims
        y, groups = self._result(node, x.width), x.width // width
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
        engine, attributes, rows = self._engine, _attributes(node), self._tokens
        q, k, v = (engine._values[name] for name in node.input[:3])
        caches = _integers(*(engine._before[name] for name in node.input[3:5]))
        heads, kv_heads, width = (attributes[name] for name in ("q_heads", "kv_heads", "head_dim"))
        places, shape = _pointer(engine._places), _integers(rows, heads, kv_heads, width)
        threads = rows * (heads + 2 * kv_heads) * (width // 2)
        engine._launch("rotate", threads, *_rows(q), *_rows(k), *_rows(v), places, *caches, *shape)
        window = attributes["window"]
        most = min(self._parts, -(-window // PART)) if window else self._parts
        # Room for all rows in one part, or for those of several sequences in many.
        room = -(-max(engine._max_rows, engine.most_sequences * MOST_PARTS) // engine._max_rows)
        partials = engine._buffer(f"partials of {heads} heads", heads * (2 + width) * room, engine._max_rows)
        y = self._result(node, heads * width)
        engine._launch(
            f"attend_{next(each for each in HEADS if width <= each)}",
            rows * heads * most * WARP,
            *_rows(q),
            places,
            *caches,
            _pointer(partials.address),
            *shape,
            ctypes.c_float(attributes["scale"]),
            *_integers(window, most),
        )
        engine._launch(
            "combine",
            rows * heads * width,
            _pointer(partials.address),
            *_rows(y),
            places,
            *_integers(rows, heads, width, window, most),
        )

    def multiply(self, node: onnx.NodeProto) -> None:
        """Of a swish, which is part of the kernel."""
        engine = self._engine
        swish = engine._made_by[node.input[0]]
        gate, up = engine._values[swish.input[0]], engine._values[node.input[1]]
        y = self._result(node, up.width)
        size = _integers(self._tokens, up.width)
        engine._launch("swish_mul", self._tokens * up.width, *_rows(gate), *_rows(up), *_rows(y), *size)

    def add(self, node: onnx.NodeProto) -> None:
        engine = self._engine
        a, b = (engine._values[name] for name in node.input)
        y = self._result(node, a.width)
        size = _integers(self._tokens, a.width)
        engine._launch("add", self._tokens * a.width, *_rows(a), *_rows(b), *_rows(y), *size)

    def zeros(self, node: onnx.NodeProto) -> None:
        """The partial sum of a rank without units."""
        engine = self._engine
        engine._fill(self._result(node, engine._graph.hidden).address, self._tokens * engine._graph.hidden)

    def choose_rows(self, node: onnx.NodeProto) -> None:
        engine, x = self._engine, self._engine._values[node.input[0]]
        self._in_head = True
        if self._rows == list(range(self._tokens)):
            engine._values[node.output[0]] = x
        else:
            y = self._result(node, x.width)
            for index, row in enumerate(self._rows):
                source, target = x.address + 4 * row * x.stride, y.address + 4 * index * y.stride
                engine._driver.copy(target, source, 4 * x.width, engine._stream.handle)

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
            engine._reductions[key].submit()


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
