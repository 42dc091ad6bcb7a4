"""The weighted sum over a layer's chosen experts: which rows each expert gets, and how its results are added.

This is the meaning of a ``motley.Experts`` node (see `motley.plugins.engine`), whatever computes the experts. Each
expert gets all of its rows at once, and results are added in the order of the experts' numbers. So the sum has the same
bits wherever an expert is computed, and in whatever order the results arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = Any
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
Slots = npt.NDArray[np.int32]
"""Of the adapters of some rows; 0: none."""


@dataclass(frozen=True)
class Sent:
    """The rows that one expert gets.

    Attributes:
        expert: its number in the layer.
        rows: i64[N], ascending.
        places: i64[N]: the expert is the ``places[n]``-th of those that row ``rows[n]`` has chosen.
        slots: i32[N], of the adapters of the rows; None: no row of this layer has one.
    """

    expert: int
    rows: I64
    places: I64
    slots: Slots | None = None


Compute: TypeAlias = Callable[[Array, Sequence[Sent]], Iterable[Array]]
"""Computes experts that have one result: given x: f32[T, D] and the rows of each expert, it gives an f32[N, D] for each
expert, in the order of the sequence. It is told of all experts before the first result is asked for, so that experts on
other machines can be at work while those on this one are computed."""

Terms: TypeAlias = Callable[[Array, Sequence[Sent]], Iterable[Sequence[Array]]]
"""Computes experts that have S results, which are summed apart: like `Compute`, with S times f32[N, D] for each."""


def as_terms(compute: Compute) -> Terms:
    """Experts of one result each, as `add_mixture` takes them."""
    return lambda x, sent: ((result,) for result in compute(x, sent))


def deal(chosen: I64, slots: Slots | None = None, weights: F32 | None = None) -> list[Sent]:
    """The rows of every expert that was chosen.

    Args:
        chosen: i64[T, K], the numbers of the K different experts that each row has chosen.
        slots: of the adapters of T rows or more; None: none has one.
        weights: f32[T, K], of these experts: those that weigh 0 get nothing. None: all count.
    """
    if slots is not None and not slots.any():
        slots = None
    count = chosen.shape[1]
    order = np.argsort(chosen, axis=None, kind="stable")
    if weights is not None and not weights.all():
        order = order[weights.ravel()[order] != 0]
    if len(chosen) == 1:  # a decoded token: each expert gets the row, and there is nothing to group
        row, numbers = np.zeros(1, np.int64), chosen[0].tolist()
        own = None if slots is None else slots[:1]
        return [Sent(numbers[place], row, order[at : at + 1], own) for at, place in enumerate(order.tolist())]
    if not len(order):
        return []
    experts = chosen.ravel()[order]
    starts = np.flatnonzero(np.diff(experts, prepend=-1))
    sent = []
    for part in np.split(np.arange(len(order)), starts[1:]):
        rows = order[part] // count
        own = None if slots is None else slots[rows]
        sent.append(Sent(int(experts[part[0]]), rows, order[part] % count, own))
    return sent


def add_mixture(totals: Sequence[Array], x: Array, weights: Array, sent: Sequence[Sent], compute: Terms) -> None:
    """Add the weighted results of the chosen experts.

    All arrays, those in `sent` too, are of one array module.

    Args:
        totals: S times f32[T, D], added to in place.
        x: f32[T, D], which the experts are computed from.
        weights: f32[T, K], of the experts that each row has chosen.
        sent: the rows of each expert, see `deal`.
        compute: gives the S results of each expert.
    """
    alone = len(x) == 1
    for own, results in zip(sent, compute(x, sent), strict=True):
        weight = weights[:, own.places] if alone else weights[own.rows, own.places][:, None]
        for total, result in zip(totals, results, strict=True):
            if alone:
                total += weight * result
            else:
                total[own.rows] += weight * result
