"""The CPU engine's expert engine: whole experts for other machines.

A single row is taken for a decoded token, and goes through buffers that are bound once. More rows are made an even
number, the last one twice if need be, as `motley.plugins.onnxruntime.experts` explains; in exact mode a single row too.
"""

from __future__ import annotations

import numpy as np

from motley.plugins.engine import F32, EngineError, EngineOptions
from motley.plugins.expert_engine import ExpertGraph
from motley.plugins.onnxruntime.experts import Chain
from motley.plugins.onnxruntime.lowering import lower
from motley.plugins.onnxruntime.sessions import EXACT_PROBE, ROWS_DIFFER, Store, Threads, Workshop, compute


class OnnxRuntimeExperts:
    """See `motley.plugins.expert_engine.ExpertEngine`."""

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
    """See `motley.plugins.expert_engine.Expert`."""

    def __init__(self, graph: ExpertGraph, threads: Threads, exact: bool) -> None:
        lowered = lower(graph.proto)
        self._workshop = Workshop(graph, lowered.initializers, threads)
        self._chain = Chain(graph.proto.graph, lowered.nodes, self._workshop, lowered.initializers)
        self._x = np.empty((self._chain.run_for(1) if exact else 1, graph.hidden), np.float32)
        self._single, (self._y,) = self._chain.bind(self._x, Store(len(self._x)))

    def __call__(self, x: F32) -> F32:
        count = len(x)
        if count == 1:
            self._x[...] = x
            compute(self._single)
            return self._y[:1]
        if self._chain.run_for(count) > count:
            x = np.concatenate([x, x[-1:]])
        actions, (y,) = self._chain.bind(x, Store(len(x)))
        compute(actions)
        return y[:count]

    def close(self) -> None:
        del self._single, self._chain
        self._workshop.close()  # not before the sessions


def _test_rows(expert: OnnxRuntimeExpert, hidden: int) -> None:
    """Refuse kernels that give a row other bits when it is computed beside others."""
    rows = np.random.default_rng(0).normal(size=(EXACT_PROBE, hidden)).astype(np.float32)
    together = expert(rows).copy()
    for chunk in (3, 1):
        apart = [expert(rows[start : start + chunk]).copy() for start in range(0, EXACT_PROBE, chunk)]
        if not np.array_equal(np.concatenate(apart), together):
            raise EngineError(ROWS_DIFFER)
