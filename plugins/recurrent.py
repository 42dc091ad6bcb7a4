"""Layers with a recurrent state, of which an engine keeps one for each sequence: what they compute, and what they keep.

All of them begin with a convolution over a row and the R - 1 rows before it, element by element: ``sum of filters[:, r]
* the row R - 1 - r before it``; rows before a sequence's first are zero. Then each changes a state, row after row, and
reads it. States lie in *slots*, of which an engine has a fixed number (`CacheBlocks.slots` in `motley.plugins.engine`);
`Span` says which one a sequence has. The nodes' attribute ``layer`` says whose state it is.

``motley.GatedDelta`` (gated DeltaNet, https://arxiv.org/abs/2412.06464). For H key heads of dk elements and G value
heads each, of dv elements, its operands are q, k: f32[T, H dk], v, z: f32[T, H G dv], b: f32[T, H G], a: f32[T, H G n],
filters: f32[C, R] of the C = 2 H dk + H G dv elements of q, k and v, decay: f32[H G], bias: f32[H G n], gain: f32[dv];
its result is y: f32[T, H G dv]. A state decays as a whole, n = 1, or each of its rows by itself, n = dk (Kimi Delta
Attention, https://arxiv.org/abs/2510.26692).

1. q, k and v, side by side, become ``silu(convolution)``. Then each head of q and k becomes ``x / sqrt(sum(x ** 2) +
   1e-6)``; q is divided by sqrt(dk) besides.
2. Each value head has a state f32[dk, dv], at first zero. With its group's q and k:
   ``state *= exp(-exp(decay) * softplus(a + bias))``, or ``exp(floor * sigmoid(exp(decay) * (a + bias)))`` where there
   is a floor; ``state += outer(k, (v - k @ state) * written * sigmoid(b))``.
3. ``o = q @ state``, ``y = o / sqrt(mean(o ** 2) + epsilon) * gain * silu(z)``, or ``sigmoid(z)`` in its place.

The attributes are key_heads (H), group (G), key_size (dk), value_size (dv), decays (n), written, floor (0: there is
none), gate (``silu`` or ``sigmoid``) and epsilon.

``motley.StateSpace`` (Mamba2, https://arxiv.org/abs/2405.21060). For H heads of dv elements, each G of which share a
write and a read vector of dk elements, its operands are x, z: f32[T, H dv], b, c: f32[T, H / G dk], dt: f32[T, H],
filters: f32[C, R] of the elements of x, b and c, decay, bias, skip: f32[H] and, if there is one, filter_bias: f32[C];
its result is y: f32[T, H dv].

1. x, b and c, side by side, become ``silu(convolution + filter_bias)``.
2. Each head has a state f32[dk, dv], at first zero. With ``step = min(max(softplus(dt + bias), least), most)``:
   ``state = state * exp(-exp(decay) * step) + outer(b, x * step)``.
3. ``y = (c @ state + skip * x) * silu(z)``.

The attributes are heads (H), group (G), key_size (dk), value_size (dv), least and most.

``motley.ShortConvolution`` (https://arxiv.org/abs/2511.23404). Its operands are b, c, x: f32[T, C], filters: f32[C, R]
and, if there is one, filter_bias: f32[C]; its result is ``c * (convolution of b * x + filter_bias)``, f32[T, C]. The
state is nothing but the rows that the convolution sees.

``motley.DilatedConvolution``. Its operands are x: f32[T, C] and filters: f32[C, K]; its result is ``silu(convolution of
x)``, f32[T, C], of which element k of the filter is for the row ``(K - 1 - k) * dilation`` before a row. So it sees R =
``(K - 1) * dilation + 1`` rows, which are its state. The attributes are layer and dilation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

WIDEST_HEAD = 512
"""Elements of a head at most, of keys and of values; stated in native/kernels/recurrent.h too."""
MOST_GUESSES = 16
"""Rows of a span at most that may be guesses, where a model has recurrent states."""

GATED_DELTA, STATE_SPACE, SHORT_CONVOLUTION = "GatedDelta", "StateSpace", "ShortConvolution"
DILATED_CONVOLUTION = "DilatedConvolution"

ROWS_READ: Mapping[str, int] = {GATED_DELTA: 6, STATE_SPACE: 5, SHORT_CONVOLUTION: 3, DILATED_CONVOLUTION: 1}
"""How many of the first operands of each operator have a row for each token; those that follow are weights."""


@dataclass(frozen=True)
class StateSpec:
    """A recurrent state of one layer on this rank.

    Attributes:
        layer: whose it is; no layer's number, where the layer has another state besides.
        columns: C, elements of a row that the convolution sees.
        reach: R, rows that it sees, a row's own among them.
        heads: how many have a state of their own; 0: there is none but the rows that the convolution sees.
        key_size: dk.
        value_size: dv.
        gates: numbers that a row has besides, which decide how a state changes.
    """

    layer: int
    columns: int
    reach: int
    heads: int = 0
    key_size: int = 0
    value_size: int = 0
    gates: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of a slot: the state, the rows that the convolution sees, and guesses that may turn out to be right."""
        state = self.heads * self.key_size * self.value_size
        guesses = MOST_GUESSES * (self.columns + self.gates)
        return 4 * (state + (self.reach - 1) * self.columns + guesses)


@runtime_checkable
class RecurrentEngine(Protocol):
    """What an engine that keeps such states has besides."""

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Make states of all layers what others are, one after another, between two steps; guesses are not copied.

        Args:
            pairs: the numbers of a slot or a snapshot, and of the one that is overwritten; both are valid, the caller
                has seen to that.
        """
