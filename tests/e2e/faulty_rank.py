"""A rank worker that computes wrongly if it is rank 1: its rotary tables repeat after a hundred positions."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np

from motley.daemon.rank import main
from motley.plugins.engine import F32, Collectives, EngineOptions, RankGraph
from motley.plugins.onnxruntime import OnnxRuntimeEngine


def wrong(self: OnnxRuntimeEngine, graph: RankGraph, collectives: Collectives, options: EngineOptions) -> None:
    def repeating(prompt: int) -> dict[str, F32]:
        return {name: np.resize(table[:100], table.shape) for name, table in graph.constants(prompt).items()}

    right(self, replace(graph, constants=repeating) if collectives.rank == 1 else graph, collectives, options)


right = OnnxRuntimeEngine.__init__
OnnxRuntimeEngine.__init__ = wrong  # type: ignore[method-assign]
sys.exit(main())
