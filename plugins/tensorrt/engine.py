"""Runs a rank's graph as TensorRT engines on one CUDA stream: one for each segment, or a single one.

Not yet run on a GPU. What is tested without one: the lowering, that TensorRT builds every part, the kept plans, and
what is submitted in which order.

A step is submitted as a whole, and waited for once: copies of what the step reads, then engine after engine, with the
sums over all ranks between them or inside (`motley.plugins.tensorrt.sums`). Values that cross a segment, KV caches and
TensorRT's scratch memory lie in device memory of this engine, allocated when it is opened. TensorRT has no caches but
whole ones, which it updates in place. So a block is one sequence's whole cache, as long as the context, and a step has
one sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from motley.plugins import nccl
from motley.plugins.adapters import refuse_adapters
from motley.plugins.engine import (
    CACHE_FORMATS,
    F32,
    Collectives,
    EngineError,
    EngineMemoryError,
    EngineOptions,
    RankGraph,
    Span,
    micro_chunks,
)
from motley.plugins.mapped_share import Array, MappedShare
from motley.plugins.segments import ROWS, Reduction, Segment, buffer_numbers
from motley.plugins.spans import check_step, wanted_rows
from motley.plugins.tensorrt.builds import PlanFolder, messages, open_library
from motley.plugins.tensorrt.lowering import Part, lower, segments, whole
from motley.plugins.tensorrt.sums import BetweenEngines, InsideEngine, rows_of
from motley.transport.cuda.driver import CudaDriver, check_gpu
from motley.transport.cuda.errors import CudaError, OutOfDeviceMemory
from motley.transport.cuda.stream import CudaEvent, CudaStream, DeviceArray, measure_host_steps

logger = logging.getLogger(__name__)

DECODE = 0
"""The number of the optimisation profile for one row; the last profile is for chunks."""
SUMS_SINCE = (8, 0)
"""The oldest GPUs that TensorRT's documentation gives collectives inside an engine."""
STEP_S = 600.0
"""Longest wait for a step; each collective in it has a deadline of its own."""
ZEROS = 1 << 20
"""Bytes that are cleared by one copy."""
STRETCHED = 4
"""Where a rotary embedding is stretched for long prompts: so many prompts have their tables on the device at a time."""


@dataclass(frozen=True)
class _Loaded:
    """A part of the graph, its TensorRT engine, and an execution context for each optimisation profile.

    A part without outputs has neither an engine nor contexts.
    """

    part: Part
    engine: Any
    contexts: list[Any]

    @property
    def segment(self) -> Segment:
        return self.part.segment


class TensorRTEngine:
    """See `motley.plugins.engine.Engine`. It has a TensorRT engine per segment, sums between these, and no options."""

    keeps_fp16 = True
    has_whole_caches = True
    most_spans = 1
    name: ClassVar[str] = "tensorrt"
    is_whole: ClassVar[bool] = False
    """Whether there is a single TensorRT engine, with the sums inside it."""
    on_gpu: ClassVar[bool] = True

    @classmethod
    def check_machine(cls) -> None:
        """See `motley.plugins.installed.lacking`."""
        open_library()
        try:
            check_gpu()
        except CudaError as error:
            raise EngineError(f"engine {cls.name!r}: {error}") from error

    def __init__(self, graph: RankGraph, collectives: Collectives, options: EngineOptions) -> None:
        """Build the engines that are not kept from an earlier start, in seconds to minutes, and load them.

        Raises:
            EngineError: no library, no driver or no GPU that it is for; or the blocks of the caches are not as long as
                the context.
            EngineMemoryError: the GPU has too little memory.
        """
        options.check_extra(self.name)
        graph.blocks.check_able(self.name, CACHE_FORMATS[:1])
        refuse_adapters(self.name, graph)
        if options.exact:
            raise EngineError(f"engine {self.name!r} cannot keep exact=true; use engine 'onnxruntime'")
        if graph.blocks.tokens != graph.context:
            raise EngineError(
                f"engine {self.name!r} has whole caches only: blocks of {graph.blocks.tokens} tokens were asked for, in"
                f" a context of {graph.context}; give the caches blocks of {graph.context} tokens"
            )
        self._graph = graph
        self._max_rows = options.max_rows
        self._bound: list[tuple[int, int, int, int] | None] = [None, None]
        """(block, place of the rotary tables, rows, logits) that the contexts are bound to, for the first and the last
        profile."""
        self._rows = (1, options.max_rows) if options.max_rows > 1 else (1,)
        self._library = open_library()
        self._owned = ExitStack()
        try:
            self._driver = CudaDriver()
            self._owned.callback(self._driver.close)
            form = next(iter(measure_host_steps(self._driver)))
            self._stream = CudaStream(self._driver, form, name=self.name)
            self._owned.callback(self._stream.close)
            self._done = CudaEvent(self._driver)
            self._owned.callback(self._done.close)
            self._caches = self._allocate_caches()
            self._tables = self._allocate_tables()
            self._held: list[Mapping[str, F32] | None] = [None] * len(self._tables)
            """What was uploaded to each of `_tables`."""
            self._oldest = 0
            """The place of `_tables` that is written to next."""
            self._tables_of(0)
            lowered = lower(graph)
            is_whole = self.is_whole and self._sums_inside(collectives.size)
            parts = [whole(lowered)] if is_whole else segments(lowered)
            self._places, self._staging = self._allocate_places([part.segment for part in parts])
            self._sums: BetweenEngines | InsideEngine
            if is_whole:
                self._sums = InsideEngine(self._driver, form, collectives, graph.hidden)
            else:
                thens = [part.segment.then for part in parts]
                operands = [self._places[each.partial] for each in thens if isinstance(each, Reduction)]
                self._sums = BetweenEngines(self._stream, collectives, operands)
            self._owned.callback(self._sums.close)
            self._parts = self._load(parts)
            self._owned.callback(self._unload)
            self._share_scratch()
        except OutOfDeviceMemory as error:
            self._owned.close()
            raise EngineMemoryError(f"engine {self.name!r} has too little memory on its GPU: {error}") from error
        except (CudaError, TimeoutError, nccl.NcclError) as error:
            self._owned.close()
            raise EngineError(f"engine {self.name!r}: {error}") from error
        except BaseException:
            self._owned.close()
            raise

    def step(self, hidden: F32, spans: Sequence[Span], halved: bool = False) -> F32:
        check_step(self._graph, hidden, spans, self._max_rows, self.most_spans)
        try:
            return self._run(hidden, spans[0], wanted_rows(spans), micro_chunks(len(hidden), halved))
        except CudaError as error:
            raise EngineError(f"engine {self.name!r} failed in a step: {error}") from error
        except TimeoutError as error:
            raise EngineError(f"engine {self.name!r}: the GPU has not finished a step: {error}") from error

    def close(self) -> None:
        self._owned.close()

    def _sums_inside(self, ranks: int) -> bool:
        can = ranks > 1 and self._driver.capability >= SUMS_SINCE
        if not can:
            why = "TensorRT sums inside an engine for several ranks, on GPUs of compute capability 8.0 or newer"
            logger.warning("engine %r runs as 'tensorrt' does, with an engine per segment: %s", self.name, why)
        return can

    def _load(self, parts: Sequence[Part]) -> list[_Loaded]:
        trt, log = self._library.module, messages()
        built = [part for part in parts if part.proto.graph.output]
        folder = PlanFolder(self._graph.share_file, self._library, built, self._rows, self._driver.capability)
        runtime = trt.Runtime(log)
        share = MappedShare(self._graph.share_file)
        loaded = []
        try:
            for part in parts:
                engine, contexts = None, []
                if part in built:
                    engine = runtime.deserialize_cuda_engine(folder.plan(part, share))
                    if engine is None:  # kept and intact, but this driver or library does not take it
                        log.take_errors()
                        engine = runtime.deserialize_cuda_engine(folder.rebuilt(part, share))
                    if engine is None:
                        raise EngineError(f"{self._library} cannot load {part.name}: {log.take_errors()}")
                    contexts = [self._context(engine, index) for index in range(len(self._rows))]
                loaded.append(_Loaded(part, engine, contexts))
        finally:
            share.close()
        return loaded

    def _unload(self) -> None:
        """Let go of the contexts, also where an error that is still around holds the frames of its step."""
        for loaded in self._parts:
            loaded.contexts.clear()
        self._parts.clear()

    def _context(self, engine: Any, profile: int) -> Any:
        strategy = self._library.module.ExecutionContextAllocationStrategy.USER_MANAGED
        context = engine.create_execution_context(strategy)
        if context is None or not context.set_optimization_profile_async(profile, int(self._stream.handle)):
            raise EngineError(f"{self._library} cannot execute {engine.name}: {messages().take_errors()}")
        if isinstance(self._sums, InsideEngine) and not self._sums.attach(context):
            raise EngineError(
                f"{self._library} does not sum through Motley's NCCL ({messages().take_errors()}); use engine "
                "'tensorrt', which sums by itself"
            )
        return context

    def _share_scratch(self) -> None:
        """Give all contexts the same scratch memory: they run one after the other."""
        sizes = [
            loaded.engine.get_device_memory_size_for_profile_v2(profile)
            for loaded in self._parts
            for profile in range(len(loaded.contexts))
        ]
        nbytes = max(sizes, default=0)
        if nbytes:
            address = self._allocate((nbytes,), np.uint8, self._owned).address
            for loaded in self._parts:
                for context in loaded.contexts:
                    context.set_device_memory(address, nbytes)

    def _allocate_places(self, cut: Sequence[Segment]) -> tuple[dict[str, DeviceArray], dict[str, Array]]:
        """Device memory for what crosses a segment, and pinned memory for what the host writes and reads."""
        graph = self._graph
        shape = (self._max_rows, graph.hidden)
        numbers = buffer_numbers(cut, kind=lambda name: shape)
        buffers = [self._allocate(shape, np.float32, self._owned) for _ in range(1 + max(numbers.values()))]
        places = {name: buffers[number] for name, number in numbers.items()} | {
            "position": self._allocate((1,), np.int64, self._owned),
            ROWS: self._allocate((self._max_rows,), np.int64, self._owned),
            "logits": self._allocate((self._max_rows, max(graph.vocabulary, 1)), np.float32, self._owned),
        }
        staging = {
            name: self._pinned(places[name].nbytes, self._owned).view(places[name].dtype).reshape(places[name].shape)
            for name in ("hidden", "position", ROWS, "logits")
        }
        return places, staging

    def _allocate_caches(self) -> dict[str, DeviceArray]:
        """f32[blocks, H, C, head_dim] for each cache of the graph, zeroed."""
        graph = self._graph
        caches = {
            f"{kind}.{spec.layer}": self._allocate(
                (graph.blocks.count, spec.heads, graph.context, spec.head_dim), np.float32, self._owned
            )
            for spec in graph.caches
            for kind in ("key_cache", "value_cache")
        }
        with ExitStack() as passing:  # all of them are there: none is freed while it is being cleared
            zeros = self._pinned(ZEROS, passing)
            for cache in caches.values():
                self._clear(cache, zeros)
            self._stream.synchronise(STEP_S)
        return caches | {f"{name}.out": cache for name, cache in caches.items()}

    def _allocate_tables(self) -> list[dict[str, DeviceArray]]:
        """Places for the rotary tables: for one set of them or, where they depend on the prompt, for a few."""
        graph = self._graph
        return [
            {name: self._allocate(table.shape, np.float32, self._owned) for name, table in graph.constants(0).items()}
            for _ in range(STRETCHED if graph.same_tables(graph.context) else 1)
        ]

    def _tables_of(self, prompt: int) -> int:
        """Which of `_tables` has those of a prompt of so many tokens. If none has, they are uploaded, over those that
        were uploaded first."""
        wanted = self._graph.constants(prompt)
        for place, held in enumerate(self._held):
            if held is wanted:
                return place
        place, self._oldest = self._oldest, (self._oldest + 1) % len(self._tables)
        self._held[place] = None
        for name, table in wanted.items():
            self._upload(table, self._tables[place][name])
        self._held[place] = wanted
        return place

    def _run(self, hidden: F32, span: Span, rows: Sequence[int], chunks: Sequence[slice]) -> F32:
        wanted = len(rows)
        if isinstance(self._sums, InsideEngine):
            rows = rows or [0]  # one engine has no head that could be left out, nor takes less than a row
        tokens, count = len(hidden), len(rows)
        staging, places, stream = self._staging, self._places, self._stream
        target = int(span.blocks[0]), self._tables_of(span.prompt), tokens, count
        self._sums.begin(tokens, chunks)  # before anything is under way
        staging["hidden"][:tokens] = hidden
        staging["position"][0] = span.position
        staging[ROWS][:count] = rows
        for name, used in (("hidden", tokens), ("position", 1), (ROWS, count)):
            if used:
                stream.copy_back(staging[name][:used], _first(places[name], used))
        profile = DECODE if tokens == 1 and count <= 1 else len(self._rows) - 1
        if self._bound[profile] != target:
            self._bind(profile, *target)
            self._bound[profile] = target
        for loaded in self._parts:
            if loaded.segment.head and not count:
                continue
            if loaded.contexts and not loaded.contexts[profile].execute_async_v3(int(stream.handle)):
                raise EngineError(f"{self._library} failed in {loaded.part.name}: {messages().take_errors()}")
            if isinstance(loaded.segment.then, Reduction):
                assert isinstance(self._sums, BetweenEngines)
                self._sums.submit(places[loaded.segment.then.partial])
        if wanted and self._graph.vocabulary:
            stream.copy_out(_first(places["logits"], wanted), staging["logits"][:wanted])
        stream.record(self._done)
        self._done.synchronise(STEP_S)
        self._sums.check()
        return staging["logits"][:wanted, : self._graph.vocabulary].copy()

    def _bind(self, profile: int, block: int, tables: int, tokens: int, count: int) -> None:
        """Point the contexts of a profile to a block of the caches and to rotary tables, and tell them the shapes."""
        for loaded in self._parts:
            if not loaded.contexts or (loaded.segment.head and not count):
                continue
            context = loaded.contexts[profile]
            for value in loaded.part.proto.graph.input:
                sizes = value.type.tensor_type.shape.dim
                known = {"T": tokens, "R": count}
                shape = tuple(known[size.dim_param] if size.dim_param else size.dim_value for size in sizes)
                context.set_input_shape(value.name, shape)
            for name in (*loaded.segment.inputs, *loaded.segment.outputs):
                if cache := self._caches.get(name):
                    context.set_tensor_address(name, cache.address + block * (cache.nbytes // cache.shape[0]))
                else:
                    place = self._tables[tables].get(name) or self._places[name]
                    context.set_tensor_address(name, place.address)

    def _allocate(self, shape: tuple[int, ...], dtype: npt.DTypeLike, memory: ExitStack) -> DeviceArray:
        """Device memory that is freed when `memory` is closed."""
        place = DeviceArray(0, shape, np.dtype(dtype))
        address = self._driver.allocate(place.nbytes)
        memory.callback(self._driver.free, address)
        return DeviceArray(address, shape, place.dtype)

    def _pinned(self, nbytes: int, memory: ExitStack) -> npt.NDArray[np.uint8]:
        pinned = self._driver.allocate_pinned(nbytes)
        memory.callback(self._driver.free_pinned, pinned)
        return pinned.host

    def _upload(self, values: F32, place: DeviceArray) -> None:
        with ExitStack() as passing:
            staging = self._pinned(place.nbytes, passing).view(place.dtype).reshape(place.shape)
            staging[...] = values
            self._stream.copy_back(staging, place)
            self._stream.synchronise(STEP_S)

    def _clear(self, place: DeviceArray, zeros: npt.NDArray[np.uint8]) -> None:
        """Zero device memory, in the stream's order, from pinned memory."""
        for start in range(0, place.nbytes, len(zeros)):
            count = min(len(zeros), place.nbytes - start)
            self._driver.copy(place.address + start, zeros.ctypes.data, count, self._stream.handle)


def _first(place: DeviceArray, count: int) -> DeviceArray:
    return rows_of(place, slice(0, count))


class WholeTensorRTEngine(TensorRTEngine):
    """See `motley.plugins.engine.Engine`. One TensorRT engine, which calls Motley's NCCL for its sums.

    For a rank that is alone, and on old GPUs, it is a `TensorRTEngine`.
    """

    name = "tensorrt-whole"
    is_whole = True
