"""What engines share in computing rows with adapters: refusing to, what fits a slot, and whose rows are whose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np
import onnx

from motley.plugins.engine import DOMAIN, AdapterProduct, EngineError, RankGraph, Span
from motley.plugins.nodes import attributes_of

ADAPTED = "Adapted"
FACTOR_TYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
"""What the matrices of an `AdapterProduct` can be kept as."""


def is_adapted(node: onnx.NodeProto) -> bool:
    """Whether a node adds to a product what adapters make of its operand."""
    return node.domain == DOMAIN and node.op_type == ADAPTED


def refuse_adapters(engine: str, graph: RankGraph) -> None:
    """Refuse a graph with slots for adapters, for an engine that cannot compute with any.

    Raises:
        EngineError: it has some.
    """
    if graph.adapters:
        raise EngineError(
            f"engine {engine!r} cannot compute with adapters; start the session without them, or use engine"
            " 'onnxruntime' on this node"
        )


class AdapterSlots:
    """The slots of an engine: what each of them has, by the names of the graph's parts."""

    def __init__(self, engine: str, graph: RankGraph) -> None:
        self._engine = engine
        self._count = graph.adapters
        self._shapes: dict[str, tuple[int, int]] = {}
        """(N, K) of each part."""
        for node in filter(is_adapted, graph.proto.graph.node):
            attributes = attributes_of(node)
            for name, width in zip(attributes["parts"], attributes["widths"], strict=True):
                self._shapes[name.decode()] = width, attributes["columns"]
        self._loaded: dict[int, Mapping[str, AdapterProduct]] = {}

    def load(self, slot: int, products: Mapping[str, AdapterProduct]) -> None:
        """Keep what a slot has from now on.

        Raises:
            EngineError: see `motley.plugins.engine.AdaptedEngine.load_adapter`.
        """
        self._check(slot)
        for name, product in products.items():
            self._check_product(name, product)
        self._loaded[slot] = dict(products)

    def unload(self, slot: int) -> None:
        """Forget what a slot has.

        Raises:
            EngineError: there is no such slot.
        """
        self._check(slot)
        self._loaded.pop(slot, None)

    def products(self, part: str) -> dict[int, AdapterProduct]:
        """What the slots have for a part of the graph: those that have anything, by their numbers."""
        found = {slot: products[part] for slot, products in self._loaded.items() if part in products}
        return {slot: product for slot, product in found.items() if len(product.down)}

    def rows(self, spans: Sequence[Span]) -> dict[int, list[int]]:
        """The rows of a step that each slot's adapter computes, by the slots' numbers.

        Raises:
            EngineError: a span's slot is empty, or there is none of its number.
        """
        rows: dict[int, list[int]] = {}
        begin = 0
        for span in spans:
            if span.adapter:
                if span.adapter not in self._loaded:
                    raise EngineError(f"engine {self._engine!r} has no adapter in slot {span.adapter}")
                rows.setdefault(span.adapter, []).extend(range(begin, begin + span.rows))
            begin += span.rows
        return rows

    def _check(self, slot: int) -> None:
        if not 1 <= slot <= self._count:
            raise EngineError(
                f"engine {self._engine!r} has no slot {slot} for an adapter; it has {self._count}, numbered from 1"
            )

    def _check_product(self, name: str, product: AdapterProduct) -> None:
        if name not in self._shapes:
            raise EngineError(f"an adapter is of {name!r}, which engine {self._engine!r} does not multiply with here")
        width, columns = self._shapes[name]
        rank = len(product.down)
        for factor, shape in ((product.down, (rank, columns)), (product.up, (width, rank))):
            if factor.shape != shape or factor.dtype not in FACTOR_TYPES or not factor.flags.c_contiguous:
                raise EngineError(
                    f"an adapter's matrix for {name!r} should be {list(shape)} of float32, float16 or bfloat16, row by"
                    f" row, and is {factor.dtype}{list(factor.shape)}"
                )
