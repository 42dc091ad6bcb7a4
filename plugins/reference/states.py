"""The recurrent states of a layer, as the reference engine keeps them, and what rows make of them, one at a time.

`motley.plugins.recurrent` states what each operator computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from motley.plugins.engine import EngineError, Span
from motley.plugins.recurrent import DILATED_CONVOLUTION, GATED_DELTA, SHORT_CONVOLUTION, STATE_SPACE, StateSpec
from motley.plugins.reference.device import Array, ArrayModule
from motley.plugins.reference.operators import sigmoid, softplus

LEAST = 1e-6
"""What is added to the sum of squares of a query or a key."""

Arrays = Sequence[Array]
Step = Callable[[Array, Array, Array], Array]
"""Changes a state [heads, key_size, value_size] by a row, and gives the row's result. It gets the rows [R, C] that the
convolution sees, and the row's gates."""


class LayerStates:
    """The slots of one layer. A row's result does not depend on how its sequence is cut in spans."""

    def __init__(self, xp: ArrayModule, dtype: np.dtype[Any], spec: StateSpec, slots: int) -> None:
        """`dtype`: what is computed in, and states are kept in."""
        self._xp = xp
        self._states = xp.zeros((slots, spec.heads, spec.key_size, spec.value_size), dtype)
        self._recent = xp.zeros((slots, spec.reach - 1, spec.columns), dtype)
        """The rows that the convolution of the next one sees."""
        self._certain = [0] * slots
        """The position that each state stands before."""
        self._guessed: list[list[tuple[Array, Array]]] = [[] for _ in range(slots)]
        """Rows from there on that have been computed and may turn out to be right: what is convolved, and gates."""

    def advance(self, span: Span, columns: Array, gates: Array, step: Step) -> Array:
        """The results of a span's rows, one below the other; the state stands before its first guess afterwards.

        Args:
            columns: f32[rows, C], what is convolved.
            gates: f32[rows, N].

        Raises:
            EngineError: the span neither begins its sequence nor goes on where the state stands, or among the guesses
                behind that.
        """
        xp, slot = self._xp, span.slot
        if span.position == 0:
            self._states[slot], self._recent[slot] = 0, 0
            self._certain[slot], self._guessed[slot] = 0, []
        known = span.position - self._certain[slot]
        if not 0 <= known <= len(self._guessed[slot]):
            raise EngineError(
                f"rows from position {span.position} on cannot go on from the recurrent state in slot {slot}, which "
                f"stands before {self._certain[slot]}, with {len(self._guessed[slot])} guesses behind it"
            )
        before = self._guessed[slot][:known]
        rows = [*before, *((columns[row], gates[row]) for row in range(span.rows))]
        # A half of a span may begin with a guess: then what has been guessed before it stays one.
        sure = len(rows) - span.guesses if span.guesses < span.rows else 0
        state, recent = self._states[slot], self._recent[slot]
        made = []
        for number, (own, gate) in enumerate(rows):
            if number == sure:
                state, recent = state.copy(), recent.copy()
            seen = xp.concatenate([recent, own[None]])
            recent[...] = seen[1:]
            made.append(step(state, seen, gate))
        self._certain[slot] = span.position - len(before) + sure
        self._guessed[slot] = rows[sure:]
        return xp.stack(made[len(before) :])

    def copy(self, source: int, target: int) -> None:
        """Make one slot what another is, but for its guesses, which are forgotten."""
        self._states[target], self._recent[target] = self._states[source], self._recent[source]
        self._certain[target], self._guessed[target] = self._certain[source], []


def gated_delta(
    xp: ArrayModule,
    span: Span,
    states: LayerStates,
    rows: Arrays,
    weights: Arrays,
    of: Mapping[str, Any],
) -> Array:
    """``motley.GatedDelta`` of the rows of a span."""
    q, k, v, z, b, a = rows
    filters, decay, bias, gain = weights
    heads, group, size = of["key_heads"], of["group"], of["key_size"]
    width, values = heads * size, heads * group
    gate = sigmoid if of["gate"] == b"sigmoid" else _silu

    def step(state: Array, seen: Array, gates: Array) -> Array:
        mixed = _silu(xp, (filters.T * seen).sum(axis=0))
        q, k = (_unit(xp, mixed[at : at + width].reshape(heads, -1)) for at in (0, width))
        q = q / mixed.dtype.type(size**0.5)
        q, k = (xp.repeat(each, group, axis=0)[:, None] for each in (q, k))
        v = mixed[2 * width :].reshape(values, 1, -1)
        speeds, rates = (gates[values:] + bias).reshape(values, -1), xp.exp(decay)[:, None]
        floor = mixed.dtype.type(of["floor"])
        logs = floor * sigmoid(xp, rates * speeds) if floor else -rates * softplus(xp, speeds)
        state *= xp.exp(logs)[:, :, None]
        share = sigmoid(xp, gates[:values]) * mixed.dtype.type(of["written"])
        state += k.swapaxes(1, 2) * ((v - k @ state) * share[:, None, None])
        return (q @ state)[:, 0]

    made = states.advance(span, xp.concatenate([q, k, v], axis=1), xp.concatenate([b, a], axis=1), step)
    epsilon = made.dtype.type(of["epsilon"])
    normed = made / xp.sqrt(xp.square(made).mean(axis=-1, keepdims=True) + epsilon) * gain
    return normed.reshape(z.shape) * gate(xp, z)


def state_space(
    xp: ArrayModule,
    span: Span,
    states: LayerStates,
    rows: Arrays,
    weights: Arrays,
    of: Mapping[str, Any],
) -> Array:
    """``motley.StateSpace`` of the rows of a span."""
    x, z, b, c, dt = rows
    filters, decay, bias, skip, *more = weights
    heads, size, width = of["heads"], of["key_size"], x.shape[1]

    def step(state: Array, seen: Array, gates: Array) -> Array:
        mixed = _silu(xp, sum(more, (filters.T * seen).sum(axis=0)))
        own = mixed[:width].reshape(heads, 1, -1)
        write, read = (xp.repeat(each.reshape(-1, size), of["group"], axis=0) for each in xp.split(mixed[width:], 2))
        speed = xp.clip(softplus(xp, gates + bias), of["least"], of["most"])[:, None, None]
        state *= xp.exp(-xp.exp(decay)[:, None, None] * speed)
        state += write[:, :, None] * (own * speed)
        return (read[:, None] @ state + skip[:, None, None] * own)[:, 0]

    made = states.advance(span, xp.concatenate([x, b, c], axis=1), dt, step)
    return made.reshape(z.shape) * _silu(xp, z)


def short_convolution(
    xp: ArrayModule,
    span: Span,
    states: LayerStates,
    rows: Arrays,
    weights: Arrays,
    of: Mapping[str, Any],
) -> Array:
    """``motley.ShortConvolution`` of the rows of a span."""
    b, c, x = rows
    filters, *more = weights
    return c * states.advance(
        span, b * x, b[:, :0], lambda state, seen, gates: sum(more, (filters.T * seen).sum(axis=0))
    )


def dilated_convolution(
    xp: ArrayModule,
    span: Span,
    states: LayerStates,
    rows: Arrays,
    weights: Arrays,
    of: Mapping[str, Any],
) -> Array:
    """``motley.DilatedConvolution`` of the rows of a span."""
    (x,), (filters,) = rows, weights

    def step(state: Array, seen: Array, gates: Array) -> Array:
        return _silu(xp, (filters.T * seen[:: of["dilation"]]).sum(axis=0))

    return states.advance(span, x, x[:, :0], step)


RECURRENCES = {
    GATED_DELTA: gated_delta,
    STATE_SPACE: state_space,
    SHORT_CONVOLUTION: short_convolution,
    DILATED_CONVOLUTION: dilated_convolution,
}


def _silu(xp: ArrayModule, x: Array) -> Array:
    return x * sigmoid(xp, x)


def _unit(xp: ArrayModule, heads: Array) -> Array:
    """Heads [N, d] of length one, nearly."""
    return heads / xp.sqrt(xp.square(heads).sum(axis=-1, keepdims=True) + heads.dtype.type(LEAST))
