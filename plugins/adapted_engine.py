"""What an engine is that can compute each row of a step with another adapter: an `Engine` with slots for adapters.

``motley.Adapted`` has the operands x: f32[T, K] and y: f32[T, N]: y is what the product before it has made of x, and
nobody else reads it. Only graphs with `RankGraph.adapters` have such nodes. The attribute ``columns`` is K; ``parts``
and ``widths`` name what lies side by side in the N columns, and how many columns each has. To row t of a part it adds
``up @ (down @ x[t])``, with the `AdapterProduct` that the row's adapter (`Span.adapter`) has for the part's name. Where
the adapter has a matrix in place of the base's, the row becomes ``whole @ x[t]``. To rows without an adapter, and to
parts that the adapter leaves alone, it adds nothing. In the graph of an expert, a row's adapter is that of the row of x
which the expert was given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

from motley.plugins.engine import Engine

Factor = npt.NDArray[Any]
"""A matrix of an adapter: float32, float16 or ml_dtypes.bfloat16."""


class AdapterProduct(NamedTuple):
    """What an adapter adds to a product of the graph, ``y += up @ (down @ x)``: as much of it as this rank computes.

    Engines compute it in float32, whatever its matrices are kept as.

    Attributes:
        down: [R, K], of the K columns of x that are here.
        up: [N, R], of the N columns of y that are here, with the adapter's scale in it.
    """

    down: Factor
    up: Factor


@dataclass(frozen=True)
class PreparedAdapter:
    """An adapter as an engine computes with it, see `AdaptedEngine.prepare_adapter`.

    Attributes:
        parts: what it has for each part of a product; what that is, the engine alone knows.
        nbytes: memory that it takes.
    """

    parts: Mapping[str, Any]
    nbytes: int


class AdaptedEngine(Engine, Protocol):
    """An engine that can compute each row of a step with another adapter: then its class has ``takes_adapters = True``.

    An adapter is in a slot. The bits of a row depend neither on what the other slots have nor on the adapters of other
    rows; a product of rank 0, or of zeros alone, changes no bit of them.
    """

    def prepare_adapter(
        self, products: Mapping[str, AdapterProduct], whole: Mapping[str, Factor] | None = None
    ) -> PreparedAdapter:
        """Copy an adapter to where and how this engine computes with it. Any thread may call this, also while the
        engine computes.

        Args:
            products: by the names that the graph's Adapted nodes have for their parts; parts that are absent stay as
                they are.
            whole: [N, K] each, with which parts of the head are multiplied in place of the base's matrix; by the same
                names.

        Raises:
            EngineError: a product fits no part, or the engine cannot have any in place of the base's.
            EngineMemoryError: there is no room.
        """

    def load_adapter(self, slot: int, adapter: PreparedAdapter) -> None:
        """Put an adapter in a slot, between two steps; what was there before is forgotten. Nothing is copied.

        Args:
            slot: 1 to `RankGraph.adapters`.
            adapter: what this engine has prepared.

        Raises:
            EngineError: there is no such slot.
        """

    def unload_adapter(self, slot: int) -> None:
        """Forget what is in a slot, between two steps; nothing happens if it is empty.

        Raises:
            EngineError: there is no such slot.
        """
