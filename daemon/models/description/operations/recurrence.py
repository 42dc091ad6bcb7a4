"""What rows make of a state that those before them have left."""

from __future__ import annotations

from dataclasses import dataclass

from motley.daemon.models.description.axes import RecurrentHeads, Value, W


@dataclass(frozen=True)
class HeadParts:
    """Takes the heads of sharded rows apart: each head has the elements of all results, one after another."""

    x: Value
    ys: tuple[Value, ...]


@dataclass(frozen=True)
class DeltaRule:
    """What a gated DeltaNet layer does between its projections: reads and changes the recurrent state of a sequence.

    ``motley.GatedDelta`` in `motley.plugins.recurrent` states the mathematics.

    Attributes:
        q, k, v: queries, keys and values, before the convolution.
        z: along the axis of values, opens the gates of the result.
        b: a number per value head: how much of a value is written.
        a: how fast the state decays: a number per value head, or one for each row of a head's state.
        filters: of q, k and v, f32[elements, positions that the convolution sees]; the last is the row's own.
        decay: f32[value heads], the logarithm of each head's decay.
        bias: added to `a`.
        gain: f32[value_size], of the norm of each value head of the result.
        epsilon: of that norm.
        written: how much of a value is written at most.
        squashed: the gates of the result are opened by the sigmoid of z, not by ``silu(z)``.
        floor: the logarithm of what is left of a state at least, a negative number that a sigmoid is multiplied by; 0:
            there is none, and a softplus takes its place.
    """

    layer: int
    q: Value
    k: Value
    v: Value
    z: Value
    b: Value
    a: Value
    y: Value
    heads: RecurrentHeads
    filters: tuple[W, W, W]
    decay: W
    bias: W
    gain: W
    epsilon: float
    written: float = 1.0
    squashed: bool = False
    floor: float = 0.0

    @property
    def decays(self) -> int:
        """How many numbers say how fast a value head's state decays."""
        return self.a.axis.size // self.b.axis.size


@dataclass(frozen=True)
class StateSpace:
    """What a Mamba2 layer does between its projections: reads and changes the recurrent state of a sequence.

    ``motley.StateSpace`` in `motley.plugins.recurrent` states the mathematics.

    Attributes:
        x: inputs of the heads, before the convolution.
        z: opens the gates of the result.
        b, c: what a state is written with, and read with, before the convolution.
        dt: a number per head: how fast the state decays, and how much of x is written.
        filters: of x, b and c, f32[elements, positions that the convolution sees]; the last is the row's own.
        filter_biases: of x, b and c; None: there are none.
        decay: f32[heads], the logarithm of each head's decay.
        bias: f32[heads], added to `dt`.
        skip: f32[heads], how much of its x a head adds to what it reads.
        limits: the least and the largest that `dt` becomes.
    """

    layer: int
    x: Value
    z: Value
    b: Value
    c: Value
    dt: Value
    y: Value
    heads: RecurrentHeads
    filters: tuple[W, W, W]
    filter_biases: tuple[W, W, W] | None
    decay: W
    bias: W
    skip: W
    limits: tuple[float, float]


@dataclass(frozen=True)
class ShortConvolution:
    """``y = c * convolution(b * x)``, element by element: its state is the rows that the convolution sees.

    ``motley.ShortConvolution`` in `motley.plugins.recurrent` states the mathematics.

    Attributes:
        filter: f32[elements, positions that the convolution sees]; the last is the row's own.
        filter_bias: f32[elements]; None: there is none.
    """

    layer: int
    b: Value
    c: Value
    x: Value
    y: Value
    filter: W
    filter_bias: W | None = None


@dataclass(frozen=True)
class DilatedConvolution:
    """``y = silu(convolution(x))``, element by element, whose filter is `dilation` rows wide from one element to the
    next; f32[T, N] -> f32[T, N]. Every rank has all of it.

    ``motley.DilatedConvolution`` in `motley.plugins.recurrent` states the mathematics.

    Attributes:
        layer: whose state it is: no layer's number, where the layer has another state besides.
        filter: f32[elements, taps]; the last is the row's own.
    """

    layer: int
    x: Value
    y: Value
    filter: W
    dilation: int


Recurrence = DeltaRule | StateSpace | ShortConvolution | DilatedConvolution
"""What reads and changes a recurrent state."""
