"""The reference engine and its experts: a rank's graph executed node by node, on NumPy or CuPy.

Functions of domain ``motley`` are inlined, so that only standard operators are left
(`motley.plugins.reference.operators`). Collectives and the experts of ``motley.Experts`` nodes are here. The body of a
function of cached attention is executed for each span of a step, on a copy of what the blocks have of its sequence. The
keys and values that it adds to this are rounded (`motley.plugins.reference.caches`) before it attends to them.

Arithmetic is float32, or float64 with ``extra={"dtype": "float64"}``. Collectives always carry float32, as every
engine's do, so the float64 yardstick is a single rank, where nothing is rounded in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.inliner

from motley.plugins.adapted_engine import AdapterProduct, Factor, PreparedAdapter
from motley.plugins.adapters import AdapterSlots, is_adapted, rows_by_slot, slots_of_rows
from motley.plugins.engine import (
    CACHE_FORMATS,
    DOMAIN,
    F32,
    Collectives,
    EngineError,
    EngineOptions,
    RankGraph,
    Span,
    micro_chunks,
)
from motley.plugins.expert_engine import ExpertGraph
from motley.plugins.mixture import Sent, Slots, Terms, add_mixture, deal
from motley.plugins.nodes import CHOSEN, OWN_FUNCTIONS, attributes_of, is_collective, is_experts
from motley.plugins.recurrent import ROWS_READ
from motley.plugins.reference.adapting import adapted, columns_of_parts, transposed
from motley.plugins.reference.caches import BlockedCache
from motley.plugins.reference.device import CPU, Array, ArrayModule, Device, open_device
from motley.plugins.reference.interpreter import Interpreter, Node
from motley.plugins.reference.operators import Operator
from motley.plugins.reference.states import RECURRENCES, LayerStates
from motley.plugins.spans import check_step, spans_of, wanted_rows

INEXACT = (
    "the reference engine cannot keep exact=true: its matmuls depend on the number of rows; use engine 'onnxruntime'"
)
_SPAN = " span"
"""The name under which the body of an attention finds the span that it is executed for; a graph has no such name."""


STEP, HEAD, EXPERT = "step", "head", "expert"
"""Whose rows an adapter adds to."""


@dataclass
class _Expert:
    """The graph of one expert: names of what it takes and makes, and what it executes."""

    x: str
    results: list[str]
    nodes: list[Node]


class ReferenceEngine(Interpreter):
    """Engine (see `motley.plugins.engine.Engine`) by interpretation.

    ``extra``: ``dtype`` = float32 or float64, what floats are computed in; ``device`` = cpu or cuda, where.

    Raises:
        EngineError: an unknown option, a device that cannot be used, or the graph has an operator or collective that
            this engine does not know.
        EngineMemoryError: the device has too little memory for the weights.
    """

    keeps_fp16 = True
    cache_formats = CACHE_FORMATS
    reads_far_blocks = True
    keeps_windows = True
    takes_adapters = True
    embeds = True

    def __init__(
        self, graph: RankGraph, collectives: Collectives, options: EngineOptions, device: Device | None = None
    ) -> None:
        """`device`: where to compute; None: where the options say."""
        options.check_extra("reference", "dtype", "device")
        graph.blocks.check_able("reference", self.cache_formats, self.reads_far_blocks, self.keeps_windows)
        if options.exact:
            raise EngineError(INEXACT)
        dtype = options.extra.get("dtype", "float32")
        if dtype not in ("float32", "float64"):
            raise EngineError(f"the reference engine computes in float32 or float64, not in {dtype!r}")
        self._graph = graph
        self._collectives = collectives
        self._max_rows = options.max_rows
        self._micro_chunks: list[slice] = []
        """Of this step."""
        self._spans: list[tuple[slice, Span]] = []
        """Of this step, with their rows."""
        self._adapters = AdapterSlots("reference", graph, experts=True)
        self._adapted: dict[str, dict[int, list[int]]] = {}
        """The rows that each slot's adapter computes: of this step, of those that get logits, of an expert's."""
        self._at = STEP
        """Which of these rows nodes have that are being made ready."""
        self._factors: dict[int, Mapping[str, tuple[Array, ...]]] = {}
        """A and B, or what is in place of the base's matrix, on the device, transposed, by the slots and the names of
        the graph's parts."""
        self._rows = (0, graph.hidden)
        """(T, D) of this step."""
        self._widths = {
            value.name: value.type.tensor_type.shape.dim[1].dim_value for value in graph.proto.graph.value_info
        }
        """Of values that cross collectives."""
        own = [(each.domain, each.name) for each in graph.proto.functions if is_own(each.name)]
        whole = onnx.inliner.inline_selected_functions(graph.proto, own, exclude=True).graph
        where = device or open_device(options.extra.get("device", "cpu"))
        super().__init__(whole, graph.share_file, np.dtype(dtype), where)
        with where.errors_told():
            self._caches = {
                name: BlockedCache(where, np.dtype(dtype), graph.blocks, spec, name, graph.far)
                for spec in graph.caches
                for name in spec.names
            }
        """By the name that the graph gives to what a sequence has of them."""
        with where.errors_told():
            self._states = {
                spec.layer: LayerStates(where.xp, np.dtype(dtype), spec, graph.blocks.states) for spec in graph.states
            }

    @property
    def most_spans(self) -> int:
        return self._max_rows

    def step(self, hidden: F32, spans: Sequence[Span], halved: bool = False) -> F32:
        check_step(self._graph, hidden, spans, self._max_rows, self.most_spans)
        count = len(hidden)
        self._adapted = {STEP: self._adapters.rows(spans), HEAD: self._adapters.rows(spans, head=True)}
        self._rows = count, self._graph.hidden
        self._micro_chunks = micro_chunks(count, halved)
        self._spans = [(slice(row, row + span.rows), span) for row, span in spans_of(spans, slice(0, count))]
        with self.device.errors_told():
            wanted = wanted_rows(spans)
            values: dict[str, Array] = {"hidden": self.floats(hidden), "rows": np.array(wanted, np.int64)}
            self.run(self.nodes, values)
            if self._graph.vocabulary == 0:
                return np.zeros((len(wanted), 0), np.float32)
            return self._on_host(values["logits"])

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        with self.device.errors_told():
            for cache in self._caches.values():
                cache.move(pairs)

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        with self.device.errors_told():
            for states in self._states.values():
                for source, target in pairs:
                    states.copy(source, target)

    def prepare_adapter(
        self, products: Mapping[str, AdapterProduct], whole: Mapping[str, Factor] | None = None
    ) -> PreparedAdapter:
        matrices: dict[str, tuple[Factor, ...]] = {**self._adapters.fitting(products)}
        matrices |= {name: (matrix,) for name, matrix in self._adapters.fitting_whole(whole).items()}
        with self.device.errors_told():
            factors = {name: tuple(map(self.floats, transposed(own))) for name, own in matrices.items()}
        return PreparedAdapter(factors, sum(4 * each.size for own in matrices.values() for each in own))

    def load_adapter(self, slot: int, adapter: PreparedAdapter) -> None:
        self._adapters.check(slot)
        self._factors[slot] = adapter.parts
        self._adapters.taken.add(slot)

    def unload_adapter(self, slot: int) -> None:
        self._adapters.check(slot)
        self._adapters.taken.discard(slot)
        self._factors.pop(slot, None)

    def close(self) -> None:
        self._caches.clear()
        self._states.clear()
        super().close()

    def prepared(self, node: onnx.NodeProto) -> Node:
        """A node, made ready; this engine computes attention, collectives and experts itself."""
        if "rows" in node.input:
            self._at = HEAD
        if node.domain == DOMAIN and has_caches(node.op_type):
            return self._prepared_with_caches(node)
        if node.domain == DOMAIN and node.op_type in RECURRENCES:
            recur = partial(self._recur, node.op_type, attributes_of(node))
            return Node(recur, list(node.input), list(node.output), {})
        if is_collective(node):
            return self._prepared_collective(node)
        if is_adapted(node):
            adapt = partial(self._adapt, columns_of_parts(node), self._at)
            return Node(adapt, list(node.input), list(node.output), {})
        if is_experts(node):
            attributes = attributes_of(node)
            compute = (
                self._computed_here(attributes["experts"])
                if "experts" in attributes
                else self._computed_elsewhere(attributes["layer"])
            )
            more = {"results": len(node.output), "compute": compute}
            return Node(self._experts, list(node.input), list(node.output), more)
        return super().prepared(node)

    # -- attention ---------------------------------------------------------------------------------------------------

    def _prepared_with_caches(self, node: onnx.NodeProto) -> Node:
        """A node with caches: its function's body runs for each span, on what the blocks have of its sequence."""
        y, *written_caches = node.output
        known_caches = {name for spec in self._graph.caches for name in spec.names}
        caches = [name for name in node.input if name in known_caches]
        rows_in = list(node.input)[: list(node.input).index(caches[0])]
        position, cosines, sines, *sinks = list(node.input)[len(rows_in) + len(caches) :]
        body = self.prepared_nodes(_body(self._graph.proto, node), keep={y})
        for cache, written in zip(caches, written_caches, strict=True):
            (made,) = (place for place, each in enumerate(body) if written in each.outputs)
            body.insert(made + 1, Node(partial(self._kept, cache), [written, _SPAN], [written], {}))

        def attend(xp: ArrayModule, *rows_of: Array) -> Array:
            results = []
            for rows, span in self._spans:
                tables = self._graph.constants(span.prompt)
                known = {name: values[rows] for name, values in zip(rows_in, rows_of, strict=False)}
                known |= zip(sinks, rows_of[len(rows_in) :], strict=True)
                known |= {name: self.floats(tables[name]) for name in (cosines, sines)}
                known |= {name: self._caches[name].gathered(span) for name in caches}
                known |= {position: np.array([span.position], np.int64), _SPAN: span}
                self.run(body, known)
                results.append(known[y])
            return xp.concatenate(results)

        return Node(attend, [*rows_in, *sinks], [y], {})

    def _kept(self, name: str, xp: ArrayModule, cache: Array, span: Span) -> Array:
        """A sequence's keys or values, after the blocks of a layer have got a span's rows of them."""
        self._caches[name].write(cache, span)
        return cache

    def _recur(self, operator: str, attributes: Mapping[str, Any], xp: ArrayModule, *operands: Array) -> Array:
        """What a layer with a recurrent state makes of the rows of all spans."""
        rows_of, weights = operands[: ROWS_READ[operator]], operands[ROWS_READ[operator] :]
        states = self._states[attributes["layer"]]
        made = [
            RECURRENCES[operator](xp, span, states, [values[rows] for values in rows_of], weights, attributes)
            for rows, span in self._spans
        ]
        return xp.concatenate(made)

    # -- collectives -------------------------------------------------------------------------------------------------

    def _prepared_collective(self, node: onnx.NodeProto) -> Node:
        attributes = attributes_of(node)
        kind, ranks = attributes["collective_operation"], attributes["nb_rank"]
        collectives: dict[bytes, Operator] = {b"all_reduce": self._all_reduce, b"all_gather": self._all_gather}
        if kind not in collectives or ranks != self._collectives.size:
            raise EngineError(
                f"the reference engine cannot do collective {node.name!r}, {kind.decode()} among {ranks} ranks; "
                f"it does all_reduce and all_gather among {self._collectives.size} ranks"
            )
        gathers = kind == b"all_gather"
        more = {"counts": attributes["counts"], "width": self._widths.get(node.output[0])} if gathers else {}
        return Node(collectives[kind], list(node.input), list(node.output), more)

    def _all_reduce(self, xp: ArrayModule, x: Array) -> Array:
        buffer = self._on_host(x)
        for chunk in self._micro_chunks:
            self._collectives.all_reduce(buffer[chunk])
        return self.floats(buffer)

    def _all_gather(self, xp: ArrayModule, *own: Array, counts: Sequence[int], width: int | None) -> Array:
        """The operands of all ranks, by rank: an array, or a list where there are several."""
        rows, hidden = self._rows
        parts = [np.empty((count, rows, width or hidden), np.float32) for count in counts]
        for place, operand in zip(parts[self._collectives.rank], own, strict=True):
            place[...] = self._on_host(operand)
        self._collectives.all_gather(parts[self._collectives.rank], parts)
        gathered = [self.floats(term) for part in parts for term in part]
        return gathered if len(gathered) > 1 else gathered[0]

    def _on_host(self, array: Array) -> F32:
        """A copy in float32 on the host, C-contiguous, as collectives and callers take it."""
        return np.array(self.device.to_host(array), np.float32, order="C")

    # -- adapters ----------------------------------------------------------------------------------------------------

    def _adapt(self, places: Mapping[str, slice], at: str, xp: ArrayModule, x: Array, y: Array) -> Array:
        """What adapters make of a product y of x, given the columns of each of its parts."""
        return adapted(self._adapted[at], self._factors, places, xp, x, y)

    # -- experts -----------------------------------------------------------------------------------------------------

    def _experts(
        self, xp: ArrayModule, x: Array, weights: Array, chosen: Array, *bases: Array, results: int, compute: Terms
    ) -> Array:
        """The weighted sums: an array, or a list where there are several."""
        totals = [base.copy() for base in bases] or [xp.zeros_like(x) for _ in range(results)]
        choices, shares = map(self.device.to_host, (chosen, weights))
        for chunk in self._micro_chunks:
            slots = slots_of_rows(self._adapted[STEP], len(x))[chunk]
            sent = [
                replace(own, rows=xp.asarray(own.rows), places=xp.asarray(own.places))
                for own in deal(choices[chunk], slots, shares[chunk])
            ]
            add_mixture([total[chunk] for total in totals], x[chunk], weights[chunk], sent, compute)
        return totals if results > 1 else totals[0]

    def _computed_here(self, graphs: Sequence[onnx.GraphProto]) -> Terms:
        """Experts that the graph holds."""
        experts = [self._prepared_expert(graph) for graph in graphs]

        def compute(x: Array, sent: Sequence[Sent]) -> Iterator[list[Array]]:
            for own in sent:
                expert = experts[own.expert]
                values = {expert.x: x[own.rows]}
                self._adapted[EXPERT] = rows_by_slot(own.slots)
                self.run(expert.nodes, values)
                yield [values[name] for name in expert.results]

        return compute

    def _prepared_expert(self, graph: onnx.GraphProto) -> _Expert:
        results = [output.name for output in graph.output]
        before, self._at = self._at, EXPERT
        try:
            return _Expert(graph.input[0].name, results, self.prepared_nodes(graph.node, keep={*results}))
        finally:
            self._at = before

    def _computed_elsewhere(self, layer: int) -> Terms:
        """Experts on other machines, which take and give arrays of the host."""
        compute, to_host = self._collectives.experts(layer), self.device.to_host

        def asked(x: Array, sent: Sequence[Sent]) -> Iterator[list[Array]]:
            there = [replace(own, rows=to_host(own.rows), places=to_host(own.places)) for own in sent]
            return ([self.floats(result)] for result in compute(self._on_host(x), there))

        return asked


def has_caches(function: str) -> bool:
    """Whether the name of a function of domain ``motley`` is one of those that read and write caches."""
    return function.startswith("CachedAttention") or function in CHOSEN


def is_own(function: str) -> bool:
    """Whether this engine computes a function of domain ``motley`` itself."""
    return has_caches(function) or function in OWN_FUNCTIONS


def _body(model: onnx.ModelProto, call: onnx.NodeProto) -> list[onnx.NodeProto]:
    """The nodes of the function that a node calls, with the names of the call's operands and results."""
    inputs = [onnx.ValueInfoProto(name=name) for name in call.input]
    outputs = [onnx.ValueInfoProto(name=name) for name in call.output]
    alone = onnx.helper.make_model(
        onnx.helper.make_graph([call], "attention", inputs, outputs),
        functions=[each for each in model.functions if each.name == call.op_type],
        opset_imports=model.opset_import,
        ir_version=model.ir_version,
    )
    return list(onnx.inliner.inline_local_functions(alone).graph.node)


class ReferenceExperts:
    """Expert engine (see `motley.plugins.expert_engine.ExpertEngine`) by interpretation, in float32 on the processor.

    Raises:
        EngineError: an option; it has none, nor an exact mode.
    """

    takes_adapters = True

    def __init__(self, options: EngineOptions) -> None:
        options.check_extra("reference")
        if options.exact:
            raise EngineError(INEXACT)

    def open(self, graph: ExpertGraph) -> ReferenceExpert:
        return ReferenceExpert(graph)

    def close(self) -> None:
        pass


class ReferenceExpert(Interpreter):
    """See `motley.plugins.expert_engine.AdaptedExpert`."""

    def __init__(self, graph: ExpertGraph) -> None:
        whole = graph.proto.graph
        self._slots = AdapterSlots("reference", graph)
        self._factors: dict[int, Mapping[str, tuple[Array, ...]]] = {}
        self._rows: dict[int, list[int]] = {}
        super().__init__(whole, graph.share_file, np.dtype(np.float32), CPU)
        self._x, self._y = whole.input[0].name, whole.output[0].name

    def prepared(self, node: onnx.NodeProto) -> Node:
        """A node, made ready, with what adapters add to products."""
        if not is_adapted(node):
            return super().prepared(node)
        columns = columns_of_parts(node)

        def adapt(xp: ArrayModule, x: Array, y: Array) -> Array:
            return adapted(self._rows, self._factors, columns, xp, x, y)

        return Node(adapt, list(node.input), list(node.output), {})

    def load_adapter(self, slot: int, products: Mapping[str, AdapterProduct]) -> None:
        self._slots.check(slot)
        self._factors[slot] = {part: transposed(own) for part, own in self._slots.fitting(products).items()}

    def unload_adapter(self, slot: int) -> None:
        self._slots.check(slot)
        self._factors.pop(slot, None)

    def __call__(self, x: F32, slots: Slots | None = None) -> F32:
        self._rows = rows_by_slot(slots)
        values: dict[str, Array] = {self._x: x}
        self.run(self.nodes, values)
        result: F32 = values[self._y]
        return result
