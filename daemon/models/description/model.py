"""What a model computes, declared once: weights with named axes, and layers as lists of operations on them.

Everything else follows from a description: which tensors a checkpoint must have (`expected_shapes`), how the model can
be cut (`motley.daemon.models.cutting.units`), what a share costs (`motley.daemon.models.cutting.profile`), and each
rank's graph with its collectives (`motley.daemon.models.graph.rank_graph`).

Axes, weights and activations are in `motley.daemon.models.description.axes`, operations in
`motley.daemon.models.description.operations`. A residual is replicated, so whatever is added to it and partial is
summed first: that is where collectives stand. `motley.daemon.models.description.writing` makes operations and checks
their types.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from motley.daemon.models.description.axes import Value, W
from motley.daemon.models.description.hashed_rows import HashedRows
from motley.daemon.models.description.operations import Operation, weights_of
from motley.daemon.models.description.operations.attention import Attend, Choose
from motley.daemon.models.description.operations.experts import Experts
from motley.daemon.models.description.operations.recurrence import Recurrence
from motley.daemon.models.description.operations.rows import HeadLinear, Linear, Norm
from motley.daemon.models.description.rope import Rope
from motley.daemon.weights.places import Part, Tensor, numbered

EMBEDDING = "model.embed_tokens.weight"
"""The table whose rows, by token, are a graph's input: f32[vocabulary, D]."""
HEAD = "lm_head.weight"
EMBEDDED = "embeddings"
"""The name of the embeddings that a step begins with, scaled, where layers read them."""


@dataclass(frozen=True)
class Layer:
    """Some operations from a residual to a residual, f32[T, D] both, or of several streams of D elements side by side
    where a model has these between its layers.

    Attributes:
        given: the layer's part of the rows that enter beside the embeddings: those of `Model.beside` or of
            `Model.hashed` or, where there are no such tables, what the caller gives; None: it reads none.
    """

    x: Value
    y: Value
    operations: tuple[Operation, ...]
    given: Value | None = None

    @property
    def experts(self) -> Experts | None:
        """The experts of the layer; None: it has none."""
        return next((each for each in self.operations if isinstance(each, Experts)), None)

    @property
    def attention(self) -> Attend | None:
        """The attention of the layer; None: it has none."""
        return next((each for each in self.operations if isinstance(each, Attend)), None)

    @property
    def choice(self) -> Choose | None:
        """What says which positions the rows see; None: all, or an earlier layer says it."""
        return next((each for each in self.operations if isinstance(each, Choose)), None)

    @property
    def follows(self) -> bool:
        """Whether its rows see what an earlier layer has chosen."""
        return self.attention is not None and self.attention.chosen is not None and self.choice is None

    @property
    def recurrences(self) -> list[Recurrence]:
        """What reads and changes recurrent states in the layer."""
        return [each for each in self.operations if isinstance(each, Recurrence)]


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
        beside: a second table f32[words, layers * P], by token, each layer of which is given P columns, the first row
            where a token is beyond it; None: there is none.
        hashed: rows by hashes of the last tokens, that layers are given, in their order; such a model has nothing
            `beside`.
        layers: in order.
        head: from `head_x`, the residuals of the rows that are asked for, to `logits`.
        ropes: rotary embeddings by name, as `Attend.rope` calls them.
        ignored: what the names of tensors begin with that a checkpoint may have and this model does not use.
        prefixes: what names may begin with in the place of ``model.``: the model is a part of a larger one.
        spelled: what files may write in the place of what names begin with; the first that fits a name counts.
        handed: of a row, what a head is given that predicts the token after the next one, f32[R, D], replicated; None:
            the last norm of it.
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
    beside: W | None = None
    hashed: tuple[HashedRows, ...] = ()
    spelled: Mapping[str, str] = field(default_factory=dict)
    handed: Value | None = None

    @property
    def tables(self) -> tuple[W, ...]:
        """The tables whose rows enter a step."""
        return self.tables_of(range(len(self.layers)))

    def tables_of(self, layers: range) -> tuple[W, ...]:
        """Those of a stage that has these layers: rows by token enter the first one."""
        by_token = (self.embedding,) if self.beside is None else (self.embedding, self.beside)
        return (
            *(by_token if layers.start == 0 else ()),
            *(part for rows in self.hashed if rows.layer in layers for part in rows.parts),
        )

    @property
    def recent(self) -> int:
        """How many tokens before a row say, besides its own, which rows of tables it begins with."""
        return max((len(rows.multipliers) - 1 for rows in self.hashed), default=0)

    @property
    def further_streams(self) -> int:
        """Residual streams beside the first, each of D elements, that go from layer to layer."""
        return max(layer.y.axis.size for layer in self.layers) // self.hidden - 1

    @property
    def whole(self) -> bool:
        """Whether its layers need more than a residual of those before: they cannot be cut apart."""
        borrows = any(layer.attention is not None and layer.attention.borrowed for layer in self.layers)
        return borrows or (not self.hashed and any(layer.given for layer in self.layers))

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding table."""
        return any(w.name == self.embedding.name for each in self.head for w in weights_of(each))

    @property
    def last_norm(self) -> Norm | None:
        """The norm that the head begins with; what follows it is about words. None: there is none, all of it is."""
        first = next(iter(self.head), None)
        return first if isinstance(first, Norm) else None

    @property
    def experts(self) -> Experts | None:
        """The experts of the first layer that has any; None: no layer has."""
        return next((layer.experts for layer in self.layers if layer.experts), None)

    @property
    def expert_width(self) -> int:
        """Elements of the rows that experts read and make."""
        return self.hidden if self.experts is None else self.experts.x.axis.size

    @property
    def expert_layers(self) -> list[int]:
        """The layers that have experts."""
        return [number for number, layer in enumerate(self.layers) if layer.experts]

    def rotations(self, layers: Sequence[Layer]) -> dict[str, tuple[Rope | None, int]]:
        """The rotary embeddings that the attention of some layers asks for, by name, and how many elements of a head
        each turns: graphs have a table of cosines and one of sines for each, f32[context, elements / 2]."""
        found: dict[str, tuple[Rope | None, int]] = {}
        for layer in layers:
            if (attend := layer.attention) is not None:
                rope = None if attend.rope is None else self.ropes[attend.rope]
                found[attend.rope or "none"] = (rope, rope.size if rope else attend.heads.size)
        return found

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


def tensors(model: Model) -> Iterator[Tensor]:
    """Every tensor that a model wants, those of all experts apart; a tied head is the embedding table."""
    embedding, *others = (tensor for w, expert in _weights(model) for tensor in w.tensors(expert))
    for tensor in (embedding, *(each for each in others if each.name != embedding.name)):
        places = Part(tensor.name, tensor.shape), *tensor.parts
        spelled = [
            place.within(model.spelled[begin] + place.tensor.removeprefix(begin))
            for place in places
            for begin in [next(filter(place.tensor.startswith, model.spelled), None)]
            if begin is not None
        ]
        elsewhere = (
            place.within(_with_prefix(place.tensor, prefix))
            for prefix in model.prefixes
            for place in (*places, *spelled)
        )
        yield Tensor(tensor.name, tensor.shape, (*tensor.parts, *spelled, *elsewhere))


def _weights(model: Model) -> Iterator[tuple[W, int | None]]:
    """Every weight, the embeddings first, those of experts' bodies once for each, with its number."""
    yield from ((table, None) for table in model.tables)
    for operations in (*(layer.operations for layer in model.layers), model.head):
        for each in operations:
            yield from ((w, None) for w in weights_of(each))
            if isinstance(each, Experts):
                inner = [w for one in each.body for w in weights_of(one)]
                yield from ((w, number) for number in range(each.count) for w in inner)


def _with_prefix(name: str, prefix: str) -> str:
    """The name of a tensor of a model that is a part of a larger one; its head is beside the rest."""
    if name.startswith("model."):
        return prefix + name.removeprefix("model.")
    outer, dot, _ = prefix.removesuffix(".").rpartition(".")
    return outer + dot + name


def expected_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model wants with its whole shape.

    A share may lie within a tensor that is of another shape than the config says; it would read the wrong weights
    without noticing. Comparing whole shapes finds that before anything is loaded.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for w, expert in _weights(model):
        shapes[numbered(w.name, expert)] = w.shape
        if w.bias:
            shapes[numbered(w.bias, expert)] = (w.out.size,)
    return shapes


def parameters(model: Model) -> int:
    """Elements of all tensors."""
    return sum(map(prod, expected_shapes(model).values()))


def products(model: Model) -> Iterator[tuple[Linear | HeadLinear, int | None]]:
    """The products with matrices that are held in a session's quantisation, each with the number of its expert.

    Routers are not among them: they stay float32.
    """
    for layer in model.layers:
        for each in layer.operations:
            if isinstance(each, Linear | HeadLinear) and not each.ws[0].stays_float:
                yield each, None
            if isinstance(each, Experts):
                inner = [one for one in each.body if isinstance(one, Linear)]
                for number in range(each.count):
                    yield from ((one, number) for one in inner)
    yield from ((each, None) for each in model.head if isinstance(each, Linear))
