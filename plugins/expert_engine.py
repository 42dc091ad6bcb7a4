"""What an expert engine is: it computes whole experts for whoever asks, and knows nothing of the model around them.

An expert that is no part of a rank's graph is a graph of its own: standard operators with one input and one output, and
weights in a share file of its own, as a rank's graph has them (see `motley.plugins.engine`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import onnx

from motley.plugins.engine import F32, EngineKind, EngineOptions


@dataclass(frozen=True)
class ExpertGraph:
    """One whole expert, f32[N, D] -> f32[N, D], with all that an engine needs to compute it.

    Attributes:
        hidden: D, the width of the residual.
    """

    proto: onnx.ModelProto
    share_file: Path
    hidden: int


class Expert(Protocol):
    """An expert that can be computed. One thread at a time uses it; others may use other experts meanwhile."""

    def __call__(self, x: F32) -> F32:
        """f32[N, D] -> f32[N, D], C-contiguous both, N >= 1: the result is valid until the next call.

        Raises:
            EngineError: it cannot be computed.
        """

    def close(self) -> None:
        """Free everything; the expert cannot be used again."""


class ExpertEngine(Protocol):
    """Opens experts, which share what they need besides their weights."""

    def open(self, graph: ExpertGraph) -> Expert:
        """Make an expert ready to be computed; any thread may do so while others compute.

        Raises:
            EngineError: the graph has what this engine does not know.
            MemoryError: there is no room for it.
        """

    def close(self) -> None:
        """Free what is shared; all experts are closed."""


ExpertEngineFactory = Callable[[EngineOptions], ExpertEngine]


EXPERT_ENGINES: EngineKind[ExpertEngineFactory] = EngineKind("motley.experts", "engine of single experts")
expert_engine_names, load_expert_engine = EXPERT_ENGINES.names, EXPERT_ENGINES.load
