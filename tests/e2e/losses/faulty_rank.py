"""A rank worker that computes wrongly if it is rank 1."""

from __future__ import annotations

import sys

from motley.daemon.worker.process import main
from motley.plugins.engine import Collectives, EngineOptions, RankGraph
from motley.plugins.onnxruntime.engine import OnnxRuntimeEngine
from tests.e2e.losses.faulty_engine import repeating


def wrong(self: OnnxRuntimeEngine, graph: RankGraph, collectives: Collectives, options: EngineOptions) -> None:
    right(self, repeating(graph) if collectives.rank == 1 else graph, collectives, options)


right = OnnxRuntimeEngine.__init__
OnnxRuntimeEngine.__init__ = wrong  # type: ignore[method-assign]
sys.exit(main())
