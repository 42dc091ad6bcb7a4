"""A layer's experts for few rows, in one call: the weighted sum over those that each row has chosen.

The arithmetic is stated in mixture.c. Results are the same to the bit on every CPU and for any number of threads, a
row's do not depend on which other rows are computed with it, and they are those of the experts computed one by one and
added by `motley.plugins.mixture.add_mixture`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from .library import F32, address, library, place
from .matmul import QuantisedMatrix
from .rows import ACTIVATIONS, ANY, Action
from .structs import Matmul, Mixture


@dataclass(frozen=True)
class GatedExpert:
    """Two products and a gate between them.

    Attributes:
        gate_up: f32[2F, D], gates first.
        activation: what opens the gate, one of `ACTIVATIONS`.
        down: f32[E, F].
        limits: of gate and up, see `bind_gated`.
    """

    gate_up: QuantisedMatrix
    activation: str
    down: QuantisedMatrix
    limits: tuple[float, float] = ANY

    @property
    def layout(self) -> tuple[object, ...]:
        """What all experts of a layer must have in common."""
        both = self.gate_up.matmul, self.down.matmul
        return (
            self.activation,
            self.limits,
            *((each.rows, each.columns, each.bits, each.block, each.heads) for each in both),
        )


class GatedExperts:
    """All experts of a layer, which differ in nothing but weights.

    Raises:
        ValueError: there are none, they differ, or gate and up are not what their results are made of.
    """

    def __init__(self, experts: Sequence[GatedExpert]) -> None:
        if len({each.layout for each in experts}) != 1:
            raise ValueError("experts must be as large, quantised and gated as each other")
        one = experts[0]
        if one.gate_up.rows != 2 * one.down.columns:
            raise ValueError(f"gate and up have {one.gate_up.rows} columns, not twice {one.down.columns}")
        self._first = (Matmul * len(experts))(*(each.gate_up.matmul for each in experts))
        self._last = (Matmul * len(experts))(*(each.down.matmul for each in experts))
        self._activation, self._limits = ACTIVATIONS.index(one.activation), one.limits
        self._kept = tuple(experts)

    def bind(self, x: F32, chosen: npt.NDArray[np.int64], weights: F32, base: F32 | None, total: F32) -> Action:
        """Fix the operands; each call of the result then computes ``total = base + weighted sum``.

        Args:
            x: f32[T, D].
            chosen: i64[T, K], the numbers of the K different experts that each row has chosen.
            weights: f32[T, K], of their results.
            base: f32[T, E], what the sum is added to, may be `total` itself; None: nothing.
            total: f32[T, E], overwritten.

        Raises:
            MemoryError: there is no memory for what is between the stages.
            ValueError: an operand has another shape or type, is not contiguous or aligned, or `total` is read-only.

        A call raises `IndexError` if a row has chosen an expert that there is not; nothing is computed then.
        """
        tokens, choices = chosen.shape if chosen.ndim == 2 else (0, 0)
        width = self._last[0].rows
        mixture = Mixture(
            pool=self._first[0].pool,
            first=self._first,
            last=self._last,
            x=address("x", x, np.float32, tokens, self._first[0].columns),
            chosen=address("chosen", chosen, np.int64, tokens, choices),
            weights=address("weights", weights, np.float32, tokens, choices),
            base=None if base is None else address("base", base, np.float32, tokens, width),
            total=place("total", total, np.float32, tokens, width),
            experts=len(self._first),
            tokens=tokens,
            choices=choices,
            activation=self._activation,
            gate_limit=self._limits[0],
            up_limit=self._limits[1],
        )
        if not library().motley_prepare_mixture(mixture):
            raise MemoryError(f"no memory for {choices} experts of {tokens} rows")
        mixture.kept = (self, x, chosen, weights, base, total)
        return partial(library().motley_mixture, ctypes.byref(mixture))
