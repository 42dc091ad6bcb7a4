"""The GPU engine: a rank's graph as CUDA kernels on one stream, collectives included, in FP32.

Not yet run on a GPU. Its kernels compile for every architecture, and compiled for the host they compute what the
reference does; speed and driver are untried.

A step is submitted as a whole, node by node, and waited for once: the kernels of ``kernels.cu``, and between them the
collectives as `motley.transport.cuda` orders them. A table on the device says where each row finds its sequence, so
sequences that are decoded together are rows of one step. Steps of equally many rows are captured as one CUDA graph,
host steps included, and run from it for whichever sequences, where the driver and the form of the host step allow that.
Activations, caches and sums are float32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np

from motley.plugins.cuda.cublas import Gemm, open_cublas
from motley.plugins.cuda.device_graph import DeviceGraph
from motley.plugins.cuda.kernels import MOST_PARTS, PART, PLACE
from motley.plugins.cuda.step import MOST_SEQUENCES, submit_nodes, submitted_nodes
from motley.plugins.engine import (
    F32,
    Collectives,
    EngineError,
    EngineMemoryError,
    EngineOptions,
    RankGraph,
    micro_chunks,
    transport,
)
from motley.plugins.known_nodes import rotary_tables
from motley.plugins.slots import Slots, check_reserve, check_rows, check_skip, check_step, grown_capacity
from motley.transport.cuda.driver import CudaDriver, Driver, check_gpu
from motley.transport.cuda.errors import CudaError, DeviceLost, OutOfDeviceMemory
from motley.transport.cuda.host_step import HostStep
from motley.transport.cuda.stream import CudaGraph, CudaStream, measure_host_steps

log = logging.getLogger(__name__)

GRAPHS_KEPT = 32
"""Captured steps; all are forgotten when there are more."""
FIRST_CAPACITY = 256
"""Tokens that the cache of a new slot holds."""


@dataclass
class _Slot:
    """One sequence.

    Attributes:
        tables: the addresses of its rotary tables, cosines and sines; empty: this rank attends to nothing.
        cache: the address of the cache of all layers, see `Place` in the source; 0: there is none yet.
        capacity: tokens that the cache has room for.
        length: tokens that are in it.
    """

    tables: list[int]
    cache: int = 0
    capacity: int = 0
    length: int = 0

    def place(self, position: int) -> tuple[int, int, int, int, int]:
        """The `PLACE` of its token at `position`."""
        cosines, sines = self.tables or (0, 0)
        return self.cache, cosines, sines, position, self.capacity


@contextmanager
def _told(where: str = "") -> Iterator[None]:
    """Raise `EngineError` for what goes wrong with the GPU meanwhile; `where` says when that was."""
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
        options.check_extra("cuda", "host_step")
        if options.exact:
            raise EngineError("engine 'cuda' does not know exact=true; use engine 'onnxruntime'")
        self._graph = graph
        self._collectives = collectives
        self._max_rows = options.max_rows
        self._slots = Slots[_Slot]()
        self._captures = True
        """Whether capturing is worth a try: neither the driver nor the host steps have refused it yet."""
        self._graphs: dict[tuple[Collectives, int, int], CudaGraph] = {}
        """Captured decode steps, by what they are summed through, their rows, and the parts of their attention."""
        self._stepped: set[tuple[Collectives, int]] = set()
        """(what it was summed through, rows) of decode steps that have run. Such steps can be captured: their memory is
        allocated and their kernels are loaded."""
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
        nodes = submitted_nodes(self._graph.proto.graph)
        self._stream = CudaStream(driver, HostStep(form), name="compute")
        self._memory.callback(self._stream.close)
        rows = self._max_rows
        multiply = open_gemm if rows > MOST_SEQUENCES else None
        self._on_device = DeviceGraph(self._graph, nodes, self._stream, self._memory, rows, multiply)
        self._places_staging = self._on_device.pinned(PLACE.itemsize * rows).view(PLACE)
        self._hidden = self._on_device.pinned(4 * rows * self._graph.hidden).view(np.float32)
        self._open_head(self.most_sequences)
        self._on_device.upload()

    # -- the engine's calls ------------------------------------------------------------------------------------------

    @property
    def most_sequences(self) -> int:
        return min(MOST_SEQUENCES, self._max_rows)

    def open_slot(self, slot: int, prompt: int = 0) -> None:
        self._slots.check_free(slot)
        with _told(), ExitStack() as tables:
            state = _Slot([])
            constants = self._graph.constants(prompt)
            for name in chain(*rotary_tables(self._graph.proto.graph)):
                table = np.ascontiguousarray(constants[name], np.float32)
                address = self._driver.allocate(max(1, table.nbytes))
                tables.callback(self._driver.free, address)
                state.tables.append(address)
                self._on_device.send(address, table.reshape(-1).view(np.uint8))
            tables.pop_all()
        self._slots[slot] = state

    def close_slot(self, slot: int) -> None:
        state = self._slots.take(slot)
        with _told():
            self._release(state)

    def reserve(self, slot: int, tokens: int) -> None:
        state = self._slots[slot]
        check_reserve(slot, tokens, self._graph.context)
        with _told(f" failed to make room for {tokens} tokens of a sequence"):
            self._make_room(state, tokens)

    def skip(self, slot: int, position: int) -> None:
        state = self._slots[slot]
        check_skip(slot, state.length, position, self._graph.context)
        with _told():
            self._make_room(state, position)
            for start, row in self._heads(state):
                self._on_device.fill(start + state.length * row, (position - state.length) * row // 4)
            self._on_device.finish()
        state.length = position

    def step(self, slot: int, hidden: F32, position: int, rows: Sequence[int], halved: bool = False) -> F32:
        state, tokens = self._slots[slot], len(hidden)
        check_rows(hidden, rows, self._max_rows, self._graph.hidden)
        check_step(slot, state.length, position, tokens, self._graph.context)
        with _told(" failed in a step"):
            if len(rows) > self._on_device.head_rows:
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
        states = [self._slots[slot] for slot in slots]
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

    def _release(self, state: _Slot) -> None:
        with ExitStack() as parts:
            for address in filter(None, (*state.tables, state.cache)):
                parts.callback(self._driver.free, address)

    def _open_head(self, rows: int) -> None:
        """Make room for the logits of so many rows. They are wide: at first there is room for decoded tokens only."""
        self._forget_graphs()
        self._on_device.head_rows = rows
        self._logits = self._on_device.pinned(4 * rows * self._graph.vocabulary).view(np.float32)

    def _heads(self, state: _Slot) -> Iterator[tuple[int, int]]:
        """For the keys and for the values of each KV head: their address, and the bytes from one token to the next."""
        for spec in self._graph.caches:
            for kind in ("key", "value"):
                for head in range(spec.heads):
                    before = self._on_device.before[f"{kind}_cache.{spec.layer}"] + head * spec.head_dim
                    yield state.cache + 4 * before * state.capacity, 4 * spec.head_dim

    def _make_room(self, state: _Slot, tokens: int) -> None:
        if tokens <= state.capacity:
            return
        capacity = grown_capacity(state.capacity, tokens, FIRST_CAPACITY, self._graph.context)
        grown = _Slot(state.tables, self._driver.allocate(max(1, 4 * self._on_device.per_token * capacity)), capacity)
        with ExitStack() as unused:
            unused.callback(self._driver.free, grown.cache)
            if state.length:
                for (source, row), (target, _) in zip(self._heads(state), self._heads(grown), strict=True):
                    self._driver.copy(target, source, state.length * row, self._stream.handle)
                self._on_device.finish()
            unused.pop_all()
        old, state.cache, state.capacity = state.cache, grown.cache, capacity
        if old:
            self._driver.free(old)

    # -- work --------------------------------------------------------------------------------------------------------

    def _parts(self, capacity: int) -> int:
        """The most parts that a row's attention is cut in; how many it is depends on what the row sees."""
        return min(MOST_PARTS, -(-capacity // PART))

    def _run(self, hidden: F32, submit: Callable[[], None]) -> None:
        """Run a step whose rows have their places in the staging, and wait for it."""
        np.copyto(self._hidden[: hidden.size].reshape(hidden.shape), hidden)
        submit()
        self._on_device.finish()

    def _answer(self, rows: int) -> F32:
        return self._logits[: rows * self._graph.vocabulary].reshape(rows, self._graph.vocabulary)

    def _submit(self, count: int, rows: list[int], halved: bool, parts: int) -> None:
        """Submit a step, from the staging for rows and places to the staging for logits."""
        device, copy, stream = self._on_device, self._driver.copy, self._stream.handle
        into = device.buffer("hidden", self._graph.hidden, self._max_rows)
        copy(into.address, self._hidden.ctypes.data, 4 * count * into.width, stream)
        copy(device.places, self._places_staging.ctypes.data, PLACE.itemsize * count, stream)
        submit_nodes(device, transport(self._collectives), count, rows, micro_chunks(count, halved), parts)
        if wanted := len(rows) * self._graph.vocabulary:
            copy(self._logits.ctypes.data, device.values["logits"].address, 4 * wanted, stream)

    def _decode(self, count: int, parts: int) -> None:
        """Submit a decode step of so many rows: at first node by node, then captured, and replayed from then on."""
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
