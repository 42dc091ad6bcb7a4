"""The CPU engine's expert engine: whole experts for other machines.

A single row is taken for a decoded token, and goes through buffers that are bound once. More rows are made an even
number, the last one twice if need be, as `motley.plugins.onnxruntime.experts` explains; in exact mode a single row too.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from motley.plugins.adapted_engine import AdapterProduct
from motley.plugins.adapters import AdapterSlots, rows_by_slot
from motley.plugins.engine import F32, EngineOptions
from motley.plugins.expert_engine import ExpertGraph
from motley.plugins.mixture import Slots
from motley.plugins.native.adapted import StepRows
from motley.plugins.onnxruntime.exact import PROBE, check_company
from motley.plugins.onnxruntime.experts import Chain
from motley.plugins.onnxruntime.lowering import lower
from motley.plugins.onnxruntime.packing import clear_slot, fill_slot, pack_adapter
from motley.plugins.onnxruntime.sessions import Store, Threads, Workshop, compute


class OnnxRuntimeExperts:
    """See `motley.plugins.expert_engine.ExpertEngine`."""

    takes_adapters = True

    def __init__(self, options: EngineOptions) -> None:
        options.check_extra("onnxruntime")
        self._threads = Threads(options.threads)
        self._exact = options.exact

    def open(self, graph: ExpertGraph) -> OnnxRuntimeExpert:
        expert = OnnxRuntimeExpert(graph, self._threads, self._exact)
        if self._exact:
            _test_rows(expert, graph.hidden)
        return expert

    def close(self) -> None:
        self._threads.close()


class OnnxRuntimeExpert:
    """See `motley.plugins.expert_engine.AdaptedExpert`."""

    def __init__(self, graph: ExpertGraph, threads: Threads, exact: bool) -> None:
        lowered = lower(graph.proto)
        self._workshop = Workshop(graph, lowered.initializers, threads)
        self._chain = Chain(graph.proto.graph, lowered.nodes, self._workshop, lowered.initializers)
        self._x = np.empty((self._chain.run_for(1) if exact else 1, graph.hidden), np.float32)
        self._slots = AdapterSlots("onnxruntime", graph)
        self._adapted = StepRows(1)
        self._single, (self._y,) = self._chain.bind(self._x, Store(len(self._x)), self._adapted)

    def __call__(self, x: F32, slots: Slots | None = None) -> F32:
        count, rows = len(x), rows_by_slot(slots)
        if count == 1:
            self._adapted.set(rows)
            self._x[...] = x
            compute(self._single)
            return self._y[:1]
        if self._chain.run_for(count) > count:
            x = np.concatenate([x, x[-1:]])
        adapted = StepRows(count)
        adapted.set(rows)
        actions, (y,) = self._chain.bind(x, Store(len(x)), adapted if rows else None)
        compute(actions)
        return y[:count]

    def load_adapter(self, slot: int, products: Mapping[str, AdapterProduct]) -> None:
        self._slots.check(slot)
        adapts = self._chain.adapts
        fill_slot(adapts, slot, pack_adapter(self._slots.fitting(products), {}, [each.parts for each in adapts]))

    def unload_adapter(self, slot: int) -> None:
        self._slots.check(slot)
        clear_slot(self._chain.adapts, slot)

    def close(self) -> None:
        del self._single, self._chain
        self._workshop.close()  # not before the sessions


def _test_rows(expert: OnnxRuntimeExpert, hidden: int) -> None:
    """Refuse kernels that give a row other bits when it is computed beside others."""
    rows = np.random.default_rng(0).normal(size=(PROBE, hidden)).astype(np.float32)
    check_company(
        lambda chunk: [np.concatenate([expert(rows[at : at + chunk]).copy() for at in range(0, PROBE, chunk)])]
    )
