"""What a model computes, declared once: weights with named axes, and layers as lists of operations on them.

Everything else follows from a description: which tensors a checkpoint must have (`expected_shapes`), how the model can
be cut (`motley.daemon.models.units`), what a share costs (`motley.daemon.models.profile`), and each rank's graph with
its collectives (`motley.daemon.models.rank_graph`).

**Axes.** A dimension of a weight or an activation is an `Axis`. Four kinds are cut over the ranks: query heads, KV
heads, columns of an MLP and words of the vocabulary. A matrix whose output axis is cut is split by rows (each rank
makes its part of the result), one whose input axis is cut is split by columns (each rank makes a term of the result).

**Activations** are f32[T, axis] for T tokens, and typed by where they are (`Placement`):

- *replicated*: every rank has the same values;
- *sharded*: each rank has its part of the axis, ``{tp}`` in docstrings;
- *partial*: each rank has a term, and the value is the sum over all ranks, ``{U_tp}``.

A residual is replicated, so whatever is added to it and partial is summed first: that is where collectives stand.
`motley.daemon.models.writing` makes operations and checks their types.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from math import prod

from motley.daemon.models.rope import Rope
from motley.daemon.weights.places import Part as Part
from motley.daemon.weights.places import Tensor as Tensor
from motley.daemon.weights.places import numbered as numbered

EMBEDDING = "model.embed_tokens.weight"
"""The table whose rows, by token, are a graph's input: f32[vocabulary, D]."""
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Heads:
    """The heads of a layer's attention.

    Attributes:
        queries: query heads; a multiple of `keys`.
        keys: KV heads, each read by ``queries / keys`` neighbouring query heads.
        size: elements of a head.
    """

    queries: int
    keys: int
    size: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.queries // self.keys


class Kind(Enum):
    """What lies along an axis. All but `HIDDEN` and `PLAIN` are cut over the ranks."""

    HIDDEN = auto()
    """The residual."""
    HEADS = auto()
    """Query heads, side by side."""
    KV_HEADS = auto()
    """Key or value heads, side by side."""
    MLP = auto()
    """Columns between the projections of an MLP, of a shared expert, or of routed ones."""
    VOCABULARY = auto()
    PLAIN = auto()
    """Something that every rank has all of: one head's elements, experts that a router chooses from."""


@dataclass(frozen=True)
class Axis:
    """A dimension of weights and activations.

    Attributes:
        size: elements in the whole model.
        called: what a config calls its size, for messages.
        heads: of which heads it is made, for `HEADS` and `KV_HEADS`.
        routed: it is of experts that a router chooses from (`MLP`).
    """

    kind: Kind
    size: int
    called: str
    heads: Heads | None = None
    routed: bool = False

    @property
    def cut(self) -> bool:
        """Whether ranks have parts of it."""
        return self.kind not in (Kind.HIDDEN, Kind.PLAIN)


def query_axis(heads: Heads) -> Axis:
    """All query heads, side by side."""
    return Axis(Kind.HEADS, heads.queries * heads.size, "heads per KV head * head_dim", heads)


def key_axis(heads: Heads) -> Axis:
    """All key (or value) heads, side by side."""
    return Axis(Kind.KV_HEADS, heads.keys * heads.size, "num_key_value_heads * head_dim", heads)


@dataclass(frozen=True)
class W:
    """A weight: a matrix f32[out, in_], or a vector f32[out].

    Attributes:
        name: of its tensor in a checkpoint, by Hugging Face's convention; ``{expert}`` stands for an expert's number.
        in_: None: it is a vector.
        bias: the name of the tensor with its bias f32[out]; empty: it has none.
        routes: it decides which experts a row meets, so it stays float32: a small error would send the row elsewhere.
        parts: where it may lie instead, if there is no tensor of its name.
        bias_parts: the same of its bias.
    """

    name: str
    out: Axis
    in_: Axis | None = None
    bias: str = ""
    routes: bool = False
    parts: tuple[Part, ...] = ()
    bias_parts: tuple[Part, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole weight: ``(out,)`` or ``(out, in_)``."""
        return (self.out.size,) if self.in_ is None else (self.out.size, self.in_.size)

    def tensors(self, expert: int | None = None) -> Iterator[Tensor]:
        """The weight and, if it has one, its bias; `expert` is the number of the one that it belongs to."""
        yield Tensor(self.name, self.shape, self.parts).of(expert)
        if self.bias:
            yield Tensor(self.bias, (self.out.size,), self.bias_parts).of(expert)


class Placement(Enum):
    """Where an activation is, see the module."""

    REPLICATED = "replicated"
    SHARDED = "sharded"
    PARTIAL = "partial"


@dataclass(frozen=True)
class Value:
    """An activation f32[T, axis]; for `Route.chosen` i64[T, axis].

    Attributes:
        name: unique in the model: where it is made.
    """

    name: str
    axis: Axis
    placement: Placement = Placement.REPLICATED


# -- operations ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Norm:
    """RMS norm of rows: ``y = x / sqrt(mean(x ** 2) + epsilon) * (gain + offset)``; of sharded heads, each by itself.

    Attributes:
        gain: None: there is none.
    """

    x: Value
    y: Value
    gain: W | None
    epsilon: float
    offset: float = 0.0


@dataclass(frozen=True)
class WholeNorm:
    """RMS norms of sharded rows, each over its whole axis; all of them share one sum over the ranks."""

    name: str
    xs: tuple[Value, ...]
    ys: tuple[Value, ...]
    gains: tuple[W, ...]
    epsilon: float


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
class Clip:
    """``y = min(max(x, low), high)``."""

    x: Value
    y: Value
    low: float
    high: float


@dataclass(frozen=True)
class Attend:
    """Rotates queries and keys, caches keys and values, and attends to the cache, causally.

    Attributes:
        rope: which of `Model.ropes` rotates; None: no rotation.
        window: how many positions a row sees, itself included; 0: all.
        scale: of the products of queries and keys.
        soft_cap: products are ``cap * tanh(product / cap)``; 0: they are not.
        sinks: f32[query heads], a logit per head that takes part in the softmax and is no position; None: none.
    """

    layer: int
    q: Value
    k: Value
    v: Value
    y: Value
    heads: Heads
    rope: str | None
    window: int
    scale: float
    soft_cap: float = 0.0
    sinks: W | None = None


class Activation(StrEnum):
    """What a gated MLP makes of gate and up."""

    SILU = "silu"
    """``gate * sigmoid(gate) * up``"""
    GELU_TANH = "gelu_tanh"
    """``gelu(gate) * up``, by the approximation with tanh"""
    CLAMPED = "clamped"
    """gpt-oss': gate is at most 7, up within -7 and 7; ``gate * sigmoid(1.702 * gate) * (up + 1)``"""


@dataclass(frozen=True)
class Gated:
    """f32[T, F]{tp} twice -> f32[T, F]{tp}."""

    gate: Value
    up: Value
    y: Value
    activation: Activation


@dataclass(frozen=True)
class Sum:
    """f32[T, N]{U_tp} -> f32[T, N]: the sum over all ranks."""

    x: Value
    y: Value


@dataclass(frozen=True)
class Scale:
    """``y = x * by``."""

    x: Value
    y: Value
    by: float


@dataclass(frozen=True)
class ScaleRows:
    """``y = x * sigmoid(by)``, a number per row: f32[T, N] and f32[T, 1]."""

    x: Value
    by: Value
    y: Value


@dataclass(frozen=True)
class SoftCap:
    """``y = cap * tanh(x / cap)``."""

    x: Value
    y: Value
    cap: float


@dataclass(frozen=True)
class Add:
    """``y = residual + x``."""

    residual: Value
    x: Value
    y: Value


@dataclass(frozen=True)
class Routing:
    """How a router's logits become the experts of a row and their weights.

    Attributes:
        chosen: experts per row.
        scores: ``softmax`` or ``sigmoid`` of all logits, or ``softmax of chosen``: of the largest logits alone.
        normalised: the weights of a row are divided by their sum (plus `epsilon`).
        groups: experts are in so many groups, of which only the `groups_kept` best count: those with the largest sum of
            their two best scores. 1: they are in none.
        scaling: what the weights are multiplied by in the end.
        correction: f32[experts], added to the scores for choosing alone; None: nothing is.
    """

    chosen: int
    scores: str = "softmax"
    normalised: bool = False
    epsilon: float = 0.0
    groups: int = 1
    groups_kept: int = 1
    scaling: float = 1.0
    correction: W | None = None


@dataclass(frozen=True)
class Route:
    """f32[T, experts] -> f32[T, K] and i64[T, K]: the weights of every row's K experts, and which these are."""

    logits: Value
    weights: Value
    chosen: Value
    routing: Routing


@dataclass(frozen=True)
class Experts:
    """f32[T, D] -> f32[T, D]{U_tp}: the weighted sum of what every row's experts make of it.

    Attributes:
        layer: whose they are.
        count: of all experts.
        body: what an expert computes, from `x` on; its names have ``{expert}`` for the number.
        body_x, body_y: what goes into it, and comes out of it.
        base: f32[T, D]{U_tp}, what the sum is added to; None: nothing.
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


Operation = (
    Norm | WholeNorm | Linear | Clip | Attend | Gated | Sum | Scale | ScaleRows | SoftCap | Add | Route | Experts
)


@dataclass(frozen=True)
class Layer:
    """Some operations from a residual to a residual, f32[T, D] both."""

    x: Value
    y: Value
    operations: tuple[Operation, ...]

    @property
    def experts(self) -> Experts | None:
        """The experts of the layer; None: it has none."""
        return next((each for each in self.operations if isinstance(each, Experts)), None)

    @property
    def attention(self) -> Attend | None:
        """The attention of the layer; None: it has none."""
        return next((each for each in self.operations if isinstance(each, Attend)), None)


@dataclass(frozen=True)
class Model:
    """A model of any family.

    Attributes:
        hidden: D, elements of the residual.
        vocabulary: words.
        context: the longest sequence that it is for, tokens.
        eos: tokens that end a text.
        embedding: the table f32[vocabulary, D] whose rows are looked up.
        embedding_scale: what these are multiplied by.
        layers: in order.
        head: from `head_x`, the residuals of the rows that are asked for, to `logits`.
        ropes: rotary embeddings by name, as `Attend.rope` calls them.
        ignored: what the names of tensors begin with that a checkpoint may have and this model does not use.
        prefixes: what names may begin with in the place of ``model.``: the model is a part of a larger one.
    """

    family: str
    hidden: int
    vocabulary: int
    context: int
    eos: tuple[int, ...]
    embedding: W
    layers: tuple[Layer, ...]
    head: tuple[Operation, ...]
    head_x: Value
    logits: Value
    ropes: Mapping[str, Rope] = field(default_factory=dict)
    embedding_scale: float = 1.0
    ignored: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding table."""
        return any(w.name == self.embedding.name for each in self.head for w in weights_of(each))

    @property
    def experts(self) -> Experts | None:
        """The experts of the first layer that has any; None: no layer has."""
        return next((layer.experts for layer in self.layers if layer.experts), None)

    @property
    def expert_layers(self) -> list[int]:
        """The layers that have experts."""
        return [number for number, layer in enumerate(self.layers) if layer.experts]

    def experts_of(self, layer: int) -> Experts | None:
        """The experts of a layer; None: it has none, or there is no such layer."""
        return self.layers[layer].experts if 0 <= layer < len(self.layers) else None

    @property
    def operations(self) -> Iterator[Operation]:
        """All operations of the layers and the head, those of experts' bodies once per layer."""
        for layer in self.layers:
            for each in layer.operations:
                yield each
                if isinstance(each, Experts):
                    yield from each.body
        yield from self.head


def weights_of(operation: Operation) -> tuple[W, ...]:
    """The weights of an operation; not those of the bodies of experts."""
    match operation:
        case Norm(gain=W() as gain):
            return (gain,)
        case WholeNorm(gains=gains):
            return gains
        case Linear(ws=ws):
            return ws
        case Attend(sinks=W() as sinks):
            return (sinks,)
        case Route(routing=Routing(correction=W() as correction)):
            return (correction,)
        case _:
            return ()


def tensors(model: Model) -> Iterator[Tensor]:
    """Every tensor that a model wants, those of all experts apart; a tied head is the embedding table."""
    found = [*model.embedding.tensors(), *(each for layer in model.layers for each in _tensors(layer.operations))]
    found += [tensor for tensor in _tensors(model.head) if tensor.name != model.embedding.name]
    for tensor in found:
        elsewhere = (Part(_with_prefix(tensor.name, prefix), tensor.shape) for prefix in model.prefixes)
        yield Tensor(tensor.name, tensor.shape, (*tensor.parts, *elsewhere))


def _with_prefix(name: str, prefix: str) -> str:
    """The name of a tensor of a model that is a part of a larger one; its head is beside the rest."""
    if name.startswith("model."):
        return prefix + name.removeprefix("model.")
    return prefix.removesuffix("model.") + name


def _tensors(operations: Iterable[Operation]) -> Iterator[Tensor]:
    for each in operations:
        for w in weights_of(each):
            yield from w.tensors()
        if isinstance(each, Experts):
            inner = [w for one in each.body for w in weights_of(one)]
            for number in range(each.count):
                for w in inner:
                    yield from w.tensors(number)


def expected_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model wants with its whole shape.

    A share may lie within a tensor that is of another shape than the config says; it would read the wrong weights
    without noticing. Comparing whole shapes finds that before anything is loaded.
    """
    return {tensor.name: tensor.shape for tensor in tensors(model)}


def parameters(model: Model) -> int:
    """Elements of all tensors."""
    return sum(prod(tensor.shape) for tensor in tensors(model))


def products(model: Model) -> Iterator[tuple[Linear, int | None]]:
    """The products with matrices that are held in a session's quantisation, each with the number of its expert.

    Routers are not among them: they stay float32.
    """
    for layer in model.layers:
        for each in layer.operations:
            if isinstance(each, Linear) and not each.ws[0].routes:
                yield each, None
            if isinstance(each, Experts):
                inner = [one for one in each.body if isinstance(one, Linear)]
                for number in range(each.count):
                    yield from ((one, number) for one in inner)
    yield from ((each, None) for each in model.head if isinstance(each, Linear))
