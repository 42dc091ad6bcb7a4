"""What engines share in computing rows with adapters: refusing to, what fits a slot, and whose rows are whose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import ml_dtypes
import numpy as np
import onnx

from motley.plugins.adapted_engine import AdapterProduct, Factor
from motley.plugins.engine import DOMAIN, EngineError, RankGraph, Span
from motley.plugins.expert_engine import ExpertGraph
from motley.plugins.mixture import Slots
from motley.plugins.nodes import attributes_of

ADAPTED = "Adapted"
FACTOR_TYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
"""What the matrices of an `AdapterProduct` can be kept as."""


def is_adapted(node: onnx.NodeProto) -> bool:
    """Whether a node adds to a product what adapters make of its operand."""
    return node.domain == DOMAIN and node.op_type == ADAPTED


def adapted_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The Adapted nodes of a graph, with those of the experts in it."""
    for node in graph.node:
        if is_adapted(node):
            yield node
        for attribute in node.attribute:
            for body in attribute.graphs:
                yield from adapted_nodes(body)


def unadapted(nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Nodes as they are where nothing is added to products."""
    return [
        onnx.helper.make_node("Identity", [node.input[1]], [node.output[0]]) if is_adapted(node) else node
        for node in nodes
    ]


def parts_of(node: onnx.NodeProto) -> Iterator[tuple[str, int, int]]:
    """The parts of an Adapted node in their order: the name of each, its columns of y, and those of x."""
    attributes = attributes_of(node)
    for part, width in zip(attributes["parts"], attributes["widths"], strict=True):
        yield part.decode(), width, attributes["columns"]


def refuse_adapters(engine: str, graph: RankGraph) -> None:
    """Refuse a graph with slots for adapters, for an engine that cannot compute with any.

    Raises:
        EngineError: it has some.
    """
    if graph.adapters:
        raise no_adapters(engine)


def no_adapters(engine: str) -> EngineError:
    """What is said of an engine that cannot compute with any."""
    return EngineError(
        f"engine {engine!r} cannot compute with adapters; start the session without room for any, or use engine"
        " 'onnxruntime', or for its GPU 'cuda' or 'webgpu', on this node"
    )


class AdapterSlots:
    """The slots of an engine for adapters.

    Attributes:
        taken: the slots that have an adapter.
    """

    def __init__(self, engine: str, graph: RankGraph | ExpertGraph, experts: bool = False) -> None:
        """`experts`: whether the engine adds to what experts in the graph multiply with, too."""
        self._engine = engine
        self._count = graph.adapters
        self._shapes: dict[str, tuple[int, int]] = {}
        """(N, K) of each part of the graph."""
        whole = graph.proto.graph
        for node in adapted_nodes(whole) if experts else filter(is_adapted, whole.node):
            for part, width, columns in parts_of(node):
                self._shapes[part] = width, columns
        self.taken: set[int] = set()

    def check(self, slot: int) -> None:
        """Make sure that there is a slot.

        Raises:
            EngineError: there is not.
        """
        if not 1 <= slot <= self._count:
            raise EngineError(
                f"engine {self._engine!r} has no slot {slot} for an adapter; it has {self._count}, numbered from 1"
            )

    def fitting(self, products: Mapping[str, AdapterProduct]) -> dict[str, AdapterProduct]:
        """What an adapter has for the parts of the graph, without products of rank 0.

        Raises:
            EngineError: a product fits no part.
        """
        for part, product in products.items():
            self._check_product(part, product)
        return {part: product for part, product in products.items() if len(product.down)}

    def fitting_whole(self, whole: Mapping[str, Factor] | None) -> Mapping[str, Factor]:
        """What an adapter has in place of the base's matrices, for the parts of the graph.

        Raises:
            EngineError: a matrix fits no part.
        """
        for part, matrix in (whole or {}).items():
            self._check_matrix(part, matrix, self._shape(part))
        return whole or {}

    def refuse_whole(self, whole: Mapping[str, Factor] | None) -> None:
        """Refuse matrices in place of the base's, for an engine that cannot have any.

        Raises:
            EngineError: there are some.
        """
        if whole:
            raise EngineError(
                f"engine {self._engine!r} cannot compute with a matrix in place of the head's, which this adapter has"
                " (modules_to_save); use engine 'onnxruntime' on this node"
            )

    def rows(self, spans: Sequence[Span], head: bool = False) -> dict[int, list[int]]:
        """The rows of a step that each slot's adapter computes, by the slots.

        Args:
            head: of the rows that get logits, and have numbers of their own.

        Raises:
            EngineError: a span's slot has no adapter.
        """
        rows: dict[int, list[int]] = {}
        begin = 0
        for span in spans:
            if span.adapter:
                if span.adapter not in self.taken:
                    raise EngineError(f"engine {self._engine!r} has no adapter in slot {span.adapter}")
                rows.setdefault(span.adapter, []).extend(range(begin, begin + (span.wanted if head else span.rows)))
            begin += span.wanted if head else span.rows
        return {slot: own for slot, own in rows.items() if own}

    def _check_product(self, part: str, product: AdapterProduct) -> None:
        width, columns = self._shape(part)
        rank = len(product.down)
        self._check_matrix(part, product.down, (rank, columns))
        self._check_matrix(part, product.up, (width, rank))

    def _shape(self, part: str) -> tuple[int, int]:
        if part not in self._shapes:
            raise EngineError(f"an adapter is of {part!r}, which engine {self._engine!r} does not multiply with here")
        return self._shapes[part]

    def _check_matrix(self, part: str, matrix: Factor, shape: tuple[int, int]) -> None:
        if matrix.shape != shape or matrix.dtype not in FACTOR_TYPES:
            raise EngineError(
                f"an adapter's matrix for {part!r} should be {list(shape)} of float32, float16 or bfloat16, and is"
                f" {matrix.dtype}{list(matrix.shape)}"
            )


def rows_by_slot(slots: Slots | None) -> dict[int, list[int]]:
    """The rows of each adapter, by its slot, given the slot of each row of some, such as those that one expert gets;
    None: no row has any."""
    if slots is None:
        return {}
    return {int(slot): np.flatnonzero(slots == slot).tolist() for slot in np.unique(slots) if slot}


def slots_of_rows(rows: Mapping[int, Sequence[int]], count: int) -> Slots:
    """i32[count]: the slot of each row of a step, given the rows of each slot."""
    slots = np.zeros(count, np.int32)
    for slot, own in rows.items():
        slots[own] = slot
    return slots
