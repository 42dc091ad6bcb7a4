"""What an expert engine is: it computes whole experts, and knows nothing of the model around them.

Expert hosts have one. An expert that is not part of a rank's graph is a graph of its own. It has standard operators,
one input, one output, and weights in a share file of its own, as a rank's graph has (see `motley.plugins.engine`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import onnx

from motley.plugins.adapted_engine import AdapterProduct
from motley.plugins.engine import F32, EngineError, EngineOptions
from motley.plugins.installed import EngineKind
from motley.plugins.mixture import Slots


@dataclass(frozen=True)
class ExpertGraph:
    """One whole expert, f32[N, D] -> f32[N, D], with all that an engine needs to compute it.

    Attributes:
        proto: its graph.
        share_file: where its weights are.
        hidden: D, the width of the residual.
        adapters: slots for adapters, numbered from 1; 0: there are none, and no Adapted nodes.
    """

    proto: onnx.ModelProto
    share_file: Path
    hidden: int
    adapters: int = 0


class Expert(Protocol):
    """An expert that can be computed, by one thread at a time. Other threads may compute other experts meanwhile."""

    def __call__(self, x: F32) -> F32:
        """Compute the expert on N >= 1 rows: f32[N, D] -> f32[N, D], both C-contiguous.

        The result is valid until the next call.

        Raises:
            EngineError: it cannot be computed.
        """

    def close(self) -> None:
        """Free everything; the expert cannot be used again."""


class AdaptedExpert(Expert, Protocol):
    """An expert that can compute each of its rows with another adapter."""

    def __call__(self, x: F32, slots: Slots | None = None) -> F32:
        """As `Expert`; `slots`: i32[N], of the adapters of the rows; None: none has one."""

    def load_adapter(self, slot: int, products: Mapping[str, AdapterProduct]) -> None:
        """Have an adapter in a slot, in place of what is there.

        Args:
            products: what it adds, by the names of the parts of the graph's Adapted nodes.

        Raises:
            EngineError: there is no such slot, or a product fits no part.
            EngineMemoryError: there is no room for it.
        """

    def unload_adapter(self, slot: int) -> None:
        """Forget what is in a slot."""


class ExpertEngine(Protocol):
    """Opens experts. If they are each an `AdaptedExpert`, its class has ``takes_adapters = True``.

    They share what they need besides their weights, such as compute threads."""

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


def experts_take_adapters(name: str) -> bool:
    """Whether an engine's experts can compute their rows with adapters; not, where the engine is not installed here."""
    try:
        return getattr(load_expert_engine(name), "takes_adapters", False)
    except EngineError:
        return False
