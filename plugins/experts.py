"""Rows on their way to experts and back: what a ``motley.Experts`` node means (see `motley.plugins.engine`).

All rows of one expert travel together, and results are added in the order of the experts' numbers. So the sum has the
same bits wherever an expert is computed, and in whatever order the results arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = Any
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sent:
    """The rows that one expert gets.

    Attributes:
        rows: i64[N], ascending.
        places: i64[N], which of a row's chosen experts it is.
    """

    expert: int
    rows: I64
    places: I64


Compute: TypeAlias = Callable[[Array, Sequence[Sent]], Iterable[Array]]
"""What the experts make of their rows of x: for f32[T, D], an f32[N, D] for each that was sent, in order. It knows all
of them before the first result is wanted, so that experts elsewhere can be at work while those here are computed."""

Terms: TypeAlias = Callable[[Array, Sequence[Sent]], Iterable[Sequence[Array]]]
"""The same of experts that make several results of a row, which are summed apart: for each, S times f32[N, D]."""


def as_terms(compute: Compute) -> Terms:
    """Experts of a single result each."""
    return lambda x, sent: ((result,) for result in compute(x, sent))


def deal(chosen: I64) -> list[Sent]:
    """Every expert's rows, for the experts i64[T, K] that the rows have chosen, K different ones each."""
    count = chosen.shape[1]
    order = np.argsort(chosen, axis=None, kind="stable")
    experts = chosen.ravel()[order]
    starts = np.flatnonzero(np.diff(experts, prepend=-1))
    return [
        Sent(int(experts[part[0]]), order[part] // count, order[part] % count)
        for part in np.split(np.arange(len(order)), starts[1:])
    ]


def add_mixture(totals: Sequence[Array], x: Array, weights: Array, chosen: I64, compute: Terms) -> None:
    """Add to S totals f32[T, D] what the chosen experts make of the rows of x f32[T, D], weighted by f32[T, K]."""
    sent = deal(chosen)
    for own, results in zip(sent, compute(x, sent), strict=True):
        weight = weights[own.rows, own.places][:, None]
        for total, result in zip(totals, results, strict=True):
            total[own.rows] += weight * result
