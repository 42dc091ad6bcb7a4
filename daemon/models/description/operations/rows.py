"""What is made of each row by itself: norms, products, activations, sums."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from motley.daemon.models.description.axes import Value, W


@dataclass(frozen=True)
class Norm:
    """RMS norm of rows: ``y = x / sqrt(mean(x ** 2) + epsilon) * (gain + offset)``; of sharded heads, each by itself.

    Attributes:
        gain: f32[a row's, or a head's elements], or of all heads side by side; None: there is none. Its bias is added.
        centred: it is a layer norm: of ``x - mean(x)`` in the place of x.
    """

    x: Value
    y: Value
    gain: W | None
    epsilon: float
    offset: float = 0.0
    centred: bool = False


@dataclass(frozen=True)
class WholeNorm:
    """RMS norms of sharded rows, each over its whole axis; all of them share one sum over the ranks."""

    name: str
    xs: tuple[Value, ...]
    ys: tuple[Value, ...]
    gains: tuple[W, ...]
    epsilon: float


@dataclass(frozen=True)
class StatisticalTopK:
    """What of sharded rows is above a threshold, less that: ``y = max(x - (mean + deviations * deviation), 0)`` with
    the mean and the standard deviation of the whole row, over all ranks' parts.

    Of elements that are distributed normally, the part that a normal distribution has there stays. Source: You et al.
    2025, Spark Transformer, https://arxiv.org/abs/2506.06644.

    Attributes:
        name: of the sum over the ranks.
    """

    name: str
    x: Value
    y: Value
    deviations: float


@dataclass(frozen=True)
class AsLarge:
    """Rows as large as those of another value: ``y = x * sqrt(mean(of ** 2) / max(mean(x ** 2), least))``."""

    x: Value
    of: Value
    y: Value
    least: float


@dataclass(frozen=True)
class Linear:
    """``y = x @ w.T + bias`` for each of some matrices, which engines compute as one product.

    Attributes:
        name: of the product.
    """

    name: str
    x: Value
    ws: tuple[W, ...]
    ys: tuple[Value, ...]


@dataclass(frozen=True)
class HeadLinear:
    """A product of each head with a matrix of its own: ``y[h] = x[h][first : first + K] @ w[h].T``.

    Attributes:
        w: f32[heads * N, K], N rows for each head.
        first: the first element of each head of x that is multiplied.
    """

    x: Value
    w: W
    y: Value
    first: int = 0

    @property
    def ws(self) -> tuple[W, ...]:
        """As `Linear.ws`."""
        return (self.w,)


@dataclass(frozen=True)
class Join:
    """Each head of y is that of the first x, from its element `first` on, and behind it that of the next, whole."""

    xs: tuple[Value, ...]
    y: Value
    first: int = 0


@dataclass(frozen=True)
class SideBySide:
    """Each row of y is that of the first x, and behind it that of the next, whole; every rank has all of them."""

    xs: tuple[Value, ...]
    y: Value


@dataclass(frozen=True)
class Clip:
    """``y = min(max(x, low), high)``."""

    x: Value
    y: Value
    low: float
    high: float


class Activation(StrEnum):
    """What a gated MLP makes of gate and up."""

    SILU = "silu"
    """``gate * sigmoid(gate) * up``"""
    GELU_TANH = "gelu_tanh"
    """``gelu(gate) * up``, by the approximation with tanh"""
    SIGMOID = "sigmoid"
    """``sigmoid(gate) * up``"""
    SOFTPLUS = "softplus"
    """``log(1 + exp(gate)) * up``"""
    CLAMPED = "clamped"
    """gpt-oss': gate is at most 7, up within -7 and 7; ``gate * sigmoid(1.702 * gate) * (up + 1)``"""
    RELU = "relu"
    """``max(gate, 0) * up``; of one value twice it is its square where it is positive"""


ALONE = (Activation.GELU_TANH, Activation.SIGMOID, Activation.SILU)
"""What a gate may be opened by where there is nothing that it opens for."""


@dataclass(frozen=True)
class Gated:
    """f32[T, F]{tp} twice -> f32[T, F]{tp}; of a gate alone, `up` is 1 (`ALONE`).

    Attributes:
        limits: the largest that a gate is before it opens, and that up is in magnitude (`Activation.SILU`); None: any.
    """

    gate: Value
    up: Value | None
    y: Value
    activation: Activation
    limits: tuple[float, float] | None = None


@dataclass(frozen=True)
class Xielu:
    """f32[T, F]{tp} -> f32[T, F]{tp}: ``motley.Xielu``, see `motley.daemon.models.graph.xielu`.

    Attributes:
        bend, fall: f32[1] both: how it bends where x is positive, and where it is not.
    """

    x: Value
    y: Value
    bend: W
    fall: W


@dataclass(frozen=True)
class Sum:
    """f32[T, N]{U_tp} of each x -> f32[T, N]: their sum over all ranks."""

    xs: tuple[Value, ...]
    y: Value


@dataclass(frozen=True)
class Scale:
    """``y = x * by``."""

    x: Value
    y: Value
    by: float


@dataclass(frozen=True)
class Times:
    """``y = x * w``, all elements by the one number that a weight f32[1] is, or each of a row by its own of f32[N]."""

    x: Value
    w: W
    y: Value


@dataclass(frozen=True)
class ScaleRows:
    """``y = x * sigmoid(by)``, a number per row: f32[T, N] and f32[T, 1].

    Attributes:
        opened: False: ``y = x * by``.
    """

    x: Value
    by: Value
    y: Value
    opened: bool = True


@dataclass(frozen=True)
class SoftCap:
    """``y = cap * tanh(x / cap)``."""

    x: Value
    y: Value
    cap: float


@dataclass(frozen=True)
class Add:
    """``y = residual + x``; both may be partial."""

    residual: Value
    x: Value
    y: Value
