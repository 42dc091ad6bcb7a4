"""What the CPU engine's steps are once they are bound: segments and rows at fixed addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from motley.plugins.engine import F32
from motley.plugins.mapped_share import Array
from motley.plugins.native.rows import Action
from motley.plugins.onnxruntime.experts import BoundMixture


@dataclass(frozen=True)
class Bound:
    """Segments bound to buffers, and what is done in place when they have run.

    Attributes:
        actions: what computes the segments.
        partial: what is then summed over all ranks; None: nothing.
        parts: what is then gathered, by rank; empty: nothing.
        mixture: the experts that are then computed; None: none.
    """

    actions: Sequence[Action] = ()
    partial: F32 | None = None
    parts: Sequence[F32] = ()
    mixture: BoundMixture | None = None


@dataclass(frozen=True)
class BoundRows:
    """The layers bound to some rows of the buffers.

    Attributes:
        steps: what computes them, one after another, if no row has an adapter.
        adapted: what does if any has.
        places: where the values of these rows are, by name.
    """

    steps: Sequence[Bound]
    adapted: Sequence[Bound]
    places: Mapping[str, Array]


@dataclass(frozen=True)
class BoundHead:
    """The head bound to some rows of the buffers.

    Attributes:
        actions: what computes it if no row has an adapter; none if this rank has nothing of it.
        adapted: what does if any has.
        wanted: i64[R], the rows that get logits, set before each step.
        logits: f32[R, V]{tp}, where these are.
    """

    actions: Sequence[Action]
    adapted: Sequence[Action]
    wanted: Array
    logits: F32
