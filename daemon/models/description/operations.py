"""The operations that layers are lists of. Each names the values it reads and makes, and the weights it has.

`motley.daemon.models.description.writing` makes them and checks the types of their values.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from motley.daemon.models.description.axes import Heads, RecurrentHeads, Value, W


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
class StreamGates:
    """How a block reads residual streams, and perhaps writes to them and mixes them: f32[T, N] -> f32[T, N].

    ``motley.StreamGates`` and its kin in `motley.plugins.streams` state the mathematics.

    Attributes:
        logits: S numbers for each row where streams are read, 2 S where they are written to as well, and 2 S + S S
            where they are also mixed.
        scale: f32[1 to 3], what the logits of each of these parts are multiplied by.
        base: f32[N], added to them then.
        streams: S.
        epsilon: added to what is read, and where streams are mixed.
        written: how much of what a block makes a stream gets at most, besides `least`.
        least: what every stream gets of it.
        rounds: how often rows and columns of what mixes streams are divided by their sums.
    """

    logits: Value
    y: Value
    scale: W
    base: W
    streams: int
    epsilon: float
    written: float = 0.0
    least: float = 0.0
    rounds: int = 0


@dataclass(frozen=True)
class ReadStreams:
    """f32[T, S D] -> f32[T, D]: the sum of residual streams, each times its gate: one for each row, or for all."""

    x: Value
    gates: Value | tuple[float, ...]
    y: Value


@dataclass(frozen=True)
class WriteStreams:
    """f32[T, S D] -> f32[T, S D]: residual streams after a block, mixed if gates say so, each with its part of what the
    block has made, `rows` f32[T, D].

    Attributes:
        gates: of each row, see `StreamGates`; or S numbers: how much of `rows` each stream gets, in all rows.
    """

    x: Value
    gates: Value | tuple[float, ...]
    rows: Value
    y: Value


@dataclass(frozen=True)
class Clip:
    """``y = min(max(x, low), high)``."""

    x: Value
    y: Value
    low: float
    high: float


@dataclass(frozen=True)
class Warmth:
    """How queries grow with their positions p, so that attention to many positions stays as sharp
    (https://arxiv.org/abs/2501.19399): times ``1 + growth * log(1 + floor((p + offset) / span))``."""

    growth: float
    span: int
    offset: int = 0


@dataclass(frozen=True)
class Choose:
    """Which positions each row sees: those that an indexer scores best (https://arxiv.org/abs/2512.02556).

    It turns index queries and keys, and caches the keys. A position's score is ``sum of weights[h] * max(q[h] @ k, 0)``
    over the heads h of the row's queries; of equal ones the earlier position counts as better. What all scores of a row
    are multiplied by, and is positive, makes no difference and is left out.

    Or each head chooses for the KV head that it belongs to, of blocks of `block` neighbouring positions, cut from
    position 0 on: a position's score is ``q[h] @ k`` then, a block's is the best of its positions up to the row's own,
    and the last `latest` blocks up to the row's own are always chosen.

    Or the keys of such blocks are pooled: the key of a block is the sum of its positions' keys, each element weighed by
    the softmax, over these positions, of its gates and what `pooling` adds to those of each place in a block. All heads
    choose together among the blocks that end up to the row's own position; what follows the last of these is seen
    besides.

    Attributes:
        layer: whose cache has the index keys.
        q: the row's index queries, the heads side by side; sharded by KV heads where each head chooses.
        k: its index key, which all heads share; where keys are pooled, its gates behind it.
        weights: a number for each head; None: each head chooses.
        y: i64[T, count]: positions up to the row's own, the best `count` of them or all, and -1 in the place of more;
            as many for each KV head, side by side, where each head chooses.
        heads: of the queries.
        rope: which of `Model.ropes` rotates; None: no rotation.
        pooling: f32[block, elements of a key]; None: keys are not pooled.
    """

    layer: int
    q: Value
    k: Value
    weights: Value | None
    y: Value
    heads: Heads
    rope: str | None
    block: int = 1
    latest: int = 0
    pooling: W | None = None

    @property
    def cached(self) -> int:
        """Elements of a row of the cache: of a key, and of its gates if it has any."""
        return self.heads.size * (1 if self.pooling is None else 2)


@dataclass(frozen=True)
class Attend:
    """Rotates queries and keys, caches keys and values, and attends to the cache, causally.

    Attributes:
        v: None: the values are the keys, rotated as they are cached, and there is no cache of values.
        rope: which of `Model.ropes` rotates; None: no rotation.
        window: how many positions a row sees, itself included; 0: all.
        scale: of the products of queries and keys.
        soft_cap: products are ``cap * tanh(product / cap)``; 0: they are not.
        sinks: f32[query heads], a logit per head that takes part in the softmax and is no position; None: none.
        chunked: positions are cut in chunks of `window` from 0 on, and a row sees those of its own up to itself.
        warmth: None: queries do not grow with their positions.
        gains: f32[head size] twice, what the elements of rotated queries and keys are multiplied by; None: nothing.
        borrowed: `layer` is an earlier one, whose keys and values k and v are: its cache has them already, and to write
            them again changes nothing.
        chosen: which positions a row sees, or each KV head of it, as `Choose` has them; None: all.
    """

    layer: int
    q: Value
    k: Value
    v: Value | None
    y: Value
    heads: Heads
    rope: str | None
    window: int
    scale: float
    soft_cap: float = 0.0
    sinks: W | None = None
    chunked: bool = False
    warmth: Warmth | None = None
    gains: tuple[W, W] | None = None
    borrowed: bool = False
    chosen: Value | None = None

    @property
    def choices(self) -> int:
        """How many positions are chosen for a row, or for each KV head of it; 0: none are."""
        if self.chosen is None:
            return 0
        axis = self.chosen.axis
        return axis.size if axis.heads is None else axis.heads.size


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


Recurrence = DeltaRule | StateSpace | ShortConvolution
"""What reads and changes a recurrent state."""


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


@dataclass(frozen=True)
class Gated:
    """f32[T, F]{tp} twice -> f32[T, F]{tp}; of a gate alone, `up` is 1 (`Activation.GELU_TANH`).

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


Operation = (
    Norm
    | WholeNorm
    | StatisticalTopK
    | AsLarge
    | Linear
    | HeadLinear
    | Join
    | SideBySide
    | StreamGates
    | ReadStreams
    | WriteStreams
    | Clip
    | HeadParts
    | Choose
    | Attend
    | DeltaRule
    | StateSpace
    | ShortConvolution
    | Gated
    | Xielu
    | Sum
    | Scale
    | Times
    | ScaleRows
    | SoftCap
    | Add
    | Route
    | Experts
)


def weights_of(operation: Operation) -> tuple[W, ...]:
    """The weights of an operation; not those of the bodies of experts."""
    match operation:
        case Norm(gain=W() as gain):
            return (gain,)
        case WholeNorm(gains=gains):
            return gains
        case Linear(ws=ws):
            return ws
        case HeadLinear(w=w):
            return (w,)
        case Attend(sinks=sinks, gains=gains):
            return (*([] if sinks is None else [sinks]), *(gains or ()))
        case Choose(pooling=pooling) if pooling is not None:
            return (pooling,)
        case DeltaRule(filters=filters, decay=decay, bias=bias, gain=gain):
            return (*filters, decay, bias, gain)
        case StateSpace(filters=filters, filter_biases=biases, decay=decay, bias=bias, skip=skip):
            return (*filters, *(biases or ()), decay, bias, skip)
        case ShortConvolution(filter=own, filter_bias=added):
            return (own,) if added is None else (own, added)
        case StreamGates(scale=scale, base=base):
            return (scale, base)
        case Times(w=w):
            return (w,)
        case Xielu(bend=bend, fall=fall):
            return (bend, fall)
        case Route(routing=Routing(correction=correction, gains=gains)):
            return tuple(w for w in (correction, gains) if w is not None)
        case _:
            return ()
