"""The CPU engine, but on rank 0 it computes wrongly: its rotary tables repeat after a hundred positions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from motley.plugins.engine import F32, Collectives, EngineOptions, RankGraph
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine


def repeating(graph: RankGraph) -> RankGraph:
    def constants(prompt: int) -> dict[str, F32]:
        return {name: np.resize(table[:100], table.shape) for name, table in graph.constants(prompt).items()}

    return replace(graph, constants=constants)


class FaultyEngine(OnnxRuntimeEngine):
    def __init__(self, graph: RankGraph, collectives: Collectives, options: EngineOptions) -> None:
        super().__init__(repeating(graph) if collectives.rank == 0 else graph, collectives, options)
