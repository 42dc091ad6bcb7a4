"""Mixtures of experts: which a row has, and what they make of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from motley.daemon.models.description.axes import Value, W

if TYPE_CHECKING:
    from motley.daemon.models.description.operations import Operation


@dataclass(frozen=True)
class Routing:
    """How a router's logits become the experts of a row and their weights.

    Attributes:
        chosen: experts per row.
        scores: ``softmax`` or ``sigmoid`` of all logits, by which experts are chosen; or they are chosen by their
            logits, for a ``softmax of chosen`` or ``sigmoid of chosen`` ones; or ``sparse mixer``: a softmax for each
            of two, of those logits alone that are near it.
        tolerance: what is near, see ``motley.SparseMixer``.
        normalised: the weights of a row are divided by their sum (plus `epsilon`).
        groups: experts are in so many groups, of which only the `groups_kept` best count: those with the largest sum of
            their two best scores. 1: they are in none.
        scaling: what the weights are multiplied by in the end.
        correction: f32[experts], added for choosing alone, to what experts are chosen by; None: nothing is.
        gains: f32[experts], what the weight of each expert is multiplied by in the end; None: nothing.
        identities: the last so many of those that are chosen from are no experts, but the row itself (a softmax of all
            logits decides then, without groups, and weights are not normalised).
    """

    chosen: int
    scores: str = "softmax"
    normalised: bool = False
    epsilon: float = 0.0
    groups: int = 1
    groups_kept: int = 1
    scaling: float = 1.0
    correction: W | None = None
    gains: W | None = None
    tolerance: float = 0.0
    identities: int = 0


@dataclass(frozen=True)
class Route:
    """f32[T, experts] -> f32[T, K] and i64[T, K]: the weights of every row's K experts, and which these are.

    Attributes:
        kept: f32[T, 1], how much a row keeps of itself: the sum of the weights by which it has chosen itself in the
            place of experts. As many of its K experts, the worst ones, weigh 0. None: it cannot.
    """

    logits: Value
    weights: Value
    chosen: Value
    routing: Routing
    kept: Value | None = None


@dataclass(frozen=True)
class Experts:
    """f32[T, D] -> f32[T, D]{U_tp}: the weighted sum of what every row's experts make of it.

    Attributes:
        layer: whose they are.
        count: of all experts.
        body: what an expert computes, from `x` on; its names have ``{expert}`` for the number.
        body_x, body_y: what goes into it, and comes out of it.
        base: f32[T, D]{U_tp}, what the sum is added to; None: nothing.
        scales_inputs: the weights multiply what experts read, not what they make of it; a row has one expert then.
    """

    layer: int
    x: Value
    weights: Value
    chosen: Value
    y: Value
    count: int
    body: tuple[Operation, ...]
    body_x: Value
    body_y: Value
    base: Value | None = None
    scales_inputs: bool = False
