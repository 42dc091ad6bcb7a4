"""The recurrent states of a layer, as the reference engine keeps them: ``motley.GatedDelta``, a row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from motley.plugins.engine import Span, StateSpec
from motley.plugins.reference.device import Array, ArrayModule
from motley.plugins.reference.operators import sigmoid

LEAST = 1e-6
"""What is added to the sum of squares of a query or a key."""


class _Row(NamedTuple):
    """What a layer reads of a row: q, k and v side by side, and a number b and a for each value head."""

    qkv: Array
    b: Array
    a: Array


class LayerStates:
    """The slots of one layer. A row's result does not depend on how its sequence is cut in spans."""

    def __init__(self, xp: ArrayModule, dtype: np.dtype[Any], spec: StateSpec, slots: int, epsilon: float) -> None:
        """`dtype`: what is computed in, and states are kept in."""
        self._spec = spec
        self._epsilon = dtype.type(epsilon)
        self._states = xp.zeros((slots, spec.values, spec.key_size, spec.value_size), dtype)
        self._recent = xp.zeros((slots, spec.reach - 1, spec.columns), dtype)
        """The rows that the convolution of the next one sees."""
        self._certain = [0] * slots
        """The position that each state stands before."""
        self._guessed: list[list[_Row]] = [[] for _ in range(slots)]
        """Rows from there on that have been computed and may turn out to be right."""

    def advance(
        self,
        xp: ArrayModule,
        span: Span,
        operands: Sequence[Array],
        filters: Array,
        decay: Array,
        bias: Array,
        gain: Array,
    ) -> Array:
        """The results of a span's rows, f32[rows, values]; the state stands before its first guess afterwards.

        Args:
            operands: the rows of q, k, v, z, b and a.
        """
        q, k, v, z, b, a = operands
        slot = span.slot
        if span.position == 0:
            self._states[slot], self._recent[slot] = 0, 0
            self._certain[slot], self._guessed[slot] = 0, []
        known = span.position - self._certain[slot]
        before = self._guessed[slot][:known] if 0 < known <= len(self._guessed[slot]) else []
        qkv = xp.concatenate([q, k, v], axis=1)
        rows = [*before, *(_Row(qkv[row], b[row], a[row]) for row in range(span.rows))]
        # A half of a span may begin with a guess: then what has been guessed before it stays one.
        sure = len(rows) - span.guesses if span.guesses < span.rows else 0
        state, recent = self._states[slot], self._recent[slot]
        made = []
        for number, row in enumerate(rows):
            if number == sure:
                state, recent = state.copy(), recent.copy()
            made.append(self._step(xp, state, recent, row, filters, decay, bias))
        self._certain[slot] = span.position - len(before) + sure
        self._guessed[slot] = rows[sure:]
        return self._gated(xp, xp.stack(made[len(before) :]), z, gain)

    def _step(
        self, xp: ArrayModule, state: Array, recent: Array, row: _Row, filters: Array, decay: Array, bias: Array
    ) -> Array:
        """The result [values, value_size] of a row, before its norm; state and recent rows become those after it."""
        spec = self._spec
        seen = xp.concatenate([recent, row.qkv[None]])
        recent[...] = seen[1:]
        mixed = (filters.T * seen).sum(axis=0)
        mixed = mixed * sigmoid(xp, mixed)
        width = spec.keys * spec.key_size
        q, k = (_unit(xp, mixed[at : at + width].reshape(spec.keys, -1)) for at in (0, width))
        q = q / mixed.dtype.type(spec.key_size**0.5)
        q, k = (xp.repeat(each, spec.group, axis=0)[:, None] for each in (q, k))
        v = mixed[2 * width :].reshape(spec.values, 1, -1)
        speed = row.a + bias
        speed = xp.log1p(xp.exp(-xp.abs(speed))) + xp.maximum(speed, 0)
        state *= xp.exp(-xp.exp(decay) * speed)[:, None, None]
        written = (v - k @ state) * sigmoid(xp, row.b)[:, None, None]
        state += k.swapaxes(1, 2) * written
        return (q @ state)[:, 0]

    def _gated(self, xp: ArrayModule, made: Array, z: Array, gain: Array) -> Array:
        """Norms of the results [rows, values, value_size], times their gates, as rows."""
        normed = made / xp.sqrt(xp.square(made).mean(axis=-1, keepdims=True) + self._epsilon) * gain
        return normed.reshape(z.shape) * (z * sigmoid(xp, z))


def _unit(xp: ArrayModule, heads: Array) -> Array:
    """Heads [N, d] of length one, nearly."""
    return heads / xp.sqrt(xp.square(heads).sum(axis=-1, keepdims=True) + heads.dtype.type(LEAST))
