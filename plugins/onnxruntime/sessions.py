"""Makes segments ready to run: a session of ONNX Runtime for each, and for what follows a segment our own kernels.

What follows is a product, a norm, a gate or an attention.

Weights are in memory once. Quantised matrices are moved from the share file to huge pages. What the runtime gets it
packs into a layout of its own when a session is made, so the pages that a session has been made of are let go.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from weakref import WeakSet

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from motley.plugins.adapters import is_adapted
from motley.plugins.engine import EngineError, RankGraph
from motley.plugins.expert_engine import ExpertGraph
from motley.plugins.mapped_share import Array, MappedShare
from motley.plugins.native.matmul import Pool
from motley.plugins.native.reach import Product, choose_reach, is_chosen
from motley.plugins.native.rows import Action
from motley.plugins.nodes import CHOICE, attributes_of
from motley.plugins.onnxruntime.kernels import Adapt, Attend, Bind, QuantisedProduct, adapt, attention, choice, kernel
from motley.plugins.onnxruntime.lowering import MICROSOFT
from motley.plugins.onnxruntime.recurrences import Recur, recurrence
from motley.plugins.segments import ATTENTION, PRODUCT, RECURRENT, ROWS, Kernel, Segment, buffer_numbers
from motley.transport.errors import TransportError


@dataclass(frozen=True)
class Crossing:
    """A value [T, width] that crosses segments."""

    width: int
    kind: int = TensorProto.FLOAT

    @classmethod
    def declared(cls, value: onnx.ValueInfoProto) -> Crossing:
        tensor = value.type.tensor_type
        return cls(tensor.shape.dim[1].dim_value, tensor.elem_type)


def _bind_session(session: ort.InferenceSession, segment: Segment, places: Mapping[str, Array]) -> Action:
    binding = session.io_binding()
    for name in segment.inputs:
        place = places[name]
        binding.bind_input(name, "cpu", 0, place.dtype.type, place.shape, place.ctypes.data)
    for name in segment.outputs:
        place = places[name]
        binding.bind_output(name, "cpu", 0, place.dtype.type, place.shape, place.ctypes.data)
    return partial(session.run_with_iobinding, binding)


class Store:
    """Buffers that chains of segments use in turn. A chain finds no value there that another chain has left."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._buffers: dict[tuple[Crossing, int], Array] = {}

    def buffer(self, kind: Crossing, number: int) -> Array:
        if (kind, number) not in self._buffers:
            dtype = helper.tensor_dtype_to_np_dtype(kind.kind)
            self._buffers[kind, number] = np.zeros((self._rows, kind.width), dtype)
        return self._buffers[kind, number]


def compute(actions: Iterable[Action]) -> None:
    """Run actions one after another.

    Raises:
        EngineError: one of them fails.
        MemoryError, TransportError: as kernels of ours raise them, which some of them are.
    """
    try:
        for action in actions:
            action()
    except (EngineError, MemoryError, TransportError):
        raise
    except Exception as error:  # the runtime's own classes share no other base
        raise EngineError(f"engine 'onnxruntime' failed in a step: {error}") from error


@dataclass(frozen=True, eq=False)
class Part:
    """A segment that is ready to be bound to buffers.

    Attributes:
        run: binds what computes the segment itself; None: there is nothing in it to compute.
        then: binds the `Kernel` that follows it; None: another thing follows.
        attend: the attention, or the choice for one, that follows it; None: another thing follows.
        adapt: what adapters add to the product that it ends with; None: another thing follows.
        recur: the layer with a recurrent state that follows it; None: another thing follows.
    """

    segment: Segment
    run: Bind | None
    then: Bind | None = None
    attend: Attend | None = None
    adapt: Adapt | None = None
    recur: Recur | None = None


def _with_base(part: Part, before: Part | None) -> Part:
    """A part that, if it adds to a product that the part before it ends with, knows what that is made with."""
    if not before or not part.adapt or part.run or not isinstance(before.then, QuantisedProduct):
        return part
    if (before.then.x, before.then.y) != (part.adapt.x, part.adapt.product):
        return part
    return replace(part, adapt=replace(part.adapt, base=before.then.matrix))


def multiplies(segments: Sequence[Segment], initializers: Mapping[str, TensorProto]) -> bool:
    """Whether the runtime multiplies by most of the weights, as it does where they are not quantised.

    Else it is not worth threads of its own: they take the time of those that multiply, as they spin for some
    milliseconds after the little that they do.
    """
    nodes = chain.from_iterable(segment.nodes for segment in segments)
    own = dict.fromkeys(name for node in nodes for name in node.input if name in initializers)
    return 2 * sum(_elements(initializers[name]) for name in own) > sum(map(_elements, initializers.values()))


def _is_stored(tensor: TensorProto) -> bool:
    """Whether the share file has it, rather than the graph."""
    return tensor.data_location == TensorProto.EXTERNAL


def _elements(tensor: TensorProto) -> int:
    return math.prod(tensor.dims)


class Threads:
    """Compute threads of this process, for products and, with `multiplies`, for the runtime itself.

    Raises:
        EngineError: the kernels are missing, or the runtime has another number of threads in this process already.
    """

    def __init__(self, count: int, multiplies: bool = True) -> None:
        self.shares_pool = _share_pool(count, multiplies)
        """Whether the runtime's sessions share a pool of threads; else each runs on the thread that calls it."""
        self.workshops = WeakSet[Workshop]()
        try:
            self.pool = Pool(count)
        except ImportError as error:
            raise EngineError(f"engine 'onnxruntime' cannot be used: {error}") from error

    def close(self) -> None:
        self.pool.close()


class Workshop:
    """Makes parts of a graph, on its share file, with threads that they share."""

    def __init__(
        self, graph: RankGraph | ExpertGraph, initializers: Mapping[str, TensorProto], threads: Threads
    ) -> None:
        _share_arena()
        self._crossing = {value.name: Crossing.declared(value) for value in graph.proto.graph.value_info}
        self._residual = Crossing(graph.hidden)
        if isinstance(graph, RankGraph):
            self._crossing["hidden"] = Crossing(graph.entering)
        self._graph = graph
        self._initializers = initializers
        self._threads = threads
        self._share = MappedShare(graph.share_file)
        self._values: list[ort.OrtValue] = []
        self._moved: dict[str, Array] = {}
        self.products: dict[int, list[Product]] = {}
        """Products of one row, by the bits of their weights, until it is measured how far ahead they should fetch."""
        threads.workshops.add(self)

    def know(self, values: Iterable[onnx.ValueInfoProto]) -> None:
        """Take the widths of values that are declared elsewhere than for the whole graph."""
        self._crossing.update({value.name: Crossing.declared(value) for value in values})

    def make(self, segments: Sequence[Segment]) -> list[Part]:
        """Make segments ready, and leave out those that have nothing to compute and nothing after them.

        Raises:
            EngineError: the runtime refuses one.
            MemoryError: there is no room for it.
        """
        thens = [segment.then for segment in segments if isinstance(segment.then, Kernel)]
        read = dict.fromkeys(name for then in thens for name in then.node.input if name in self._initializers)
        self._share.make_room(filter(_is_stored, map(self._initializers.__getitem__, read)))
        parts = [self._make(segment) for segment in segments if segment.outputs or segment.then]
        parts = [_with_base(part, before) for before, part in zip([None, *parts], parts, strict=False)]
        self._choose_reach(parts)
        return parts

    def _choose_reach(self, parts: Iterable[Part]) -> None:
        """Measure how far ahead products should fetch, on those of all workshops of these threads: the products of one
        expert may be too few to tell."""
        for part in parts:
            then = part.segment.then
            if not part.then or not isinstance(then, Kernel) or then.node.op_type != PRODUCT:
                continue
            bits = attributes_of(then.node)["bits"]
            if not is_chosen(bits):
                rows = {name: np.zeros((1, self.width(name)), np.float32) for name in then.operands + then.results}
                codes = self._moved[then.node.input[1]]
                self.products.setdefault(bits, []).append((codes.nbytes, part.then(rows)))
        workshops = list(self._threads.workshops)
        for bits in list(self.products):
            choose_reach(bits, [product for each in workshops for product in each.products.get(bits, ())])
            if is_chosen(bits):
                for each in workshops:
                    each.products.pop(bits, None)

    def buffers(self, segments: Sequence[Segment], store: Store) -> dict[str, Array]:
        """A buffer [rows, width] for every value that crosses these segments, see `buffer_numbers`.

        The segments must have been made ready. A value that is neither declared in the graph nor read or made by a
        kernel is as wide as the residual.
        """
        numbers = buffer_numbers(segments, self._kind)
        return {name: store.buffer(self._kind(name), number) for name, number in numbers.items()}

    def width(self, name: str) -> int:
        """The width of a value that crosses segments."""
        return self._kind(name).width

    def _kind(self, name: str) -> Crossing:
        return self._crossing.get(name, self._residual)

    def close(self) -> None:
        """Let go of the weights; the sessions must be gone."""
        self._values.clear()
        self._moved.clear()
        self.products.clear()
        self._share.close()

    def _make(self, segment: Segment) -> Part:
        run = partial(_bind_session, self._open(segment), segment) if segment.outputs else None
        if not isinstance(segment.then, Kernel):
            return Part(segment, run)
        if segment.then.node.op_type == ATTENTION:
            assert isinstance(self._graph, RankGraph)  # experts attend to nothing
            attend, widths = attention(segment.then, self._weight, self._threads.pool, self._graph.context)
            part = Part(segment, run, attend=attend)
        elif segment.then.node.op_type == CHOICE:
            assert isinstance(self._graph, RankGraph)
            attend, widths = choice(segment.then, self._weight, self._threads.pool, self._graph.context)
            part = Part(segment, run, attend=attend)
        elif is_adapted(segment.then.node):
            added, widths = adapt(segment.then, self._graph.adapters, self._threads.pool)
            part = Part(segment, run, adapt=added)
        elif segment.then.node.op_type in RECURRENT:
            recur, widths = recurrence(segment.then, self._weight, self._threads.pool)
            part = Part(segment, run, recur=recur)
        else:
            then, widths = kernel(segment.then, self._weight, self._threads.pool)
            part = Part(segment, run, then)
        self._crossing.update({name: Crossing(width) for name, width in widths.items()})
        return part

    def _weight(self, name: str) -> Array | None:
        """A weight in huge pages, or a constant."""
        tensor = self._initializers.get(name)
        if tensor is not None and name not in self._moved:
            self._moved[name] = self._share.move(tensor) if _is_stored(tensor) else numpy_helper.to_array(tensor)
        return self._moved.get(name)

    def _open(self, segment: Segment) -> ort.InferenceSession:
        def declare(names: Sequence[str]) -> list[onnx.ValueInfoProto]:
            kinds = {name: self._crossing[name].kind for name in names if name in self._crossing} | _ELEMENT_TYPES
            return [helper.make_tensor_value_info(name, kinds.get(name, TensorProto.FLOAT), None) for name in names]

        graph = self._graph
        read = dict.fromkeys(chain.from_iterable(node.input for node in segment.nodes))
        constants = [self._initializers[name] for name in read if name in self._initializers]
        stored = list(filter(_is_stored, constants))
        model = helper.make_model(
            helper.make_graph(
                segment.nodes,
                "segment",
                declare(segment.inputs),
                declare(segment.outputs),
                constants,
            ),
            opset_imports=[*graph.proto.opset_import, helper.make_opsetid(MICROSOFT, 1)],
            ir_version=graph.proto.ir_version,
        )
        options = ort.SessionOptions()
        options.log_severity_level = 3
        if self._threads.shares_pool:
            options.use_per_session_threads = False
        else:
            options.inter_op_num_threads = options.intra_op_num_threads = 1
        options.add_session_config_entry("session.use_env_allocators", "1")
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(graph.share_file.parent)
        )
        for tensor in stored:
            self._lend(tensor, options)
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
            self._share.forget(tensor)  # what has not been packed comes back with use
        return session

    def _lend(self, tensor: TensorProto, options: ort.SessionOptions) -> None:
        """Let the session that will be made with `options` have a weight; the value must outlive it."""
        value = ort.OrtValue.ortvalue_from_numpy(self._share.view(tensor))
        options.add_initializer(tensor.name, value)
        self._values.append(value)


_ELEMENT_TYPES = {
    ROWS: TensorProto.INT64,
}

_NO_MEMORY = re.compile("bad_alloc|bad allocation|Failed to allocate memory")
"""How the runtime says so, where it does not raise a `MemoryError`."""

_pool: list[int] = []
"""The threads of the runtime's pool in this process, 1 if there is none, once that is decided."""


@cache
def _share_arena() -> None:
    """One arena for the temporaries of all segments: each session's own would keep a prefill's worth."""
    where = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(where, None)


def _share_pool(threads: int, multiplies: bool) -> bool:
    """One pool for all sessions: a pool for each made a token forty times slower.

    The first call of a process decides, as the runtime takes a pool only before its first session: engines that come
    later have that pool, or none.

    Raises:
        EngineError: the process has a pool of another size, which the runtime can neither replace nor leave unused.
    """
    if not _pool:
        _pool.append(threads if multiplies else 1)
        if _pool[0] > 1:
            ort.set_global_thread_pool_sizes(threads, 1)
    if _pool[0] not in (1, threads):
        raise EngineError(
            f"engine 'onnxruntime' cannot have threads={threads} in a process where it has had threads={_pool[0]}; "
            "give every engine of a process the same number"
        )
    return _pool[0] > 1
