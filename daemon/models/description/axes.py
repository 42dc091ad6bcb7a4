"""Axes, weights and activations: what the operations of a model act on.

A dimension of a weight or an activation is an `Axis`. Four kinds are cut over the ranks: query heads, KV heads, columns
of an MLP and words of the vocabulary. A matrix whose output axis is cut is split by rows (each rank makes its part of
the result), one whose input axis is cut is split by columns (each rank makes a term of the result).

Activations are f32[T, axis] for T tokens, and typed by where they are (`Placement`):

- *replicated*: every rank has the same values;
- *sharded*: each rank has its part of the axis, ``{tp}`` in docstrings;
- *partial*: each rank has a term, and the value is the sum over all ranks, ``{U_tp}``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from motley.daemon.weights.places import Part, Tensor


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


@dataclass(frozen=True)
class RecurrentHeads:
    """The heads of a layer with a recurrent state (gated DeltaNet, Mamba2).

    Such a layer is cut by key heads, each with its query head and with all value heads that read it; or, where all
    value heads read the same one, by value heads.

    Attributes:
        keys: key heads; there are as many query heads. As many as value heads, where these share one.
        values: value heads; a multiple of `keys`, each key head is read by ``values / keys`` neighbouring ones.
        key_size: elements of a query or key head.
        value_size: elements of a value head.
        shared: all value heads read one key head, and one query head, which every rank has.
    """

    keys: int
    values: int
    key_size: int
    value_size: int
    shared: bool = False

    @property
    def group(self) -> int:
        """Value heads that are not cut apart: those of a key head that is not shared."""
        return self.values // self.keys

    @property
    def key_axis(self) -> Axis:
        """All query (or key) heads, side by side; the one that is shared."""
        if self.shared:
            return Axis(Kind.PLAIN, self.key_size, "the size of a key head")
        return Axis(Kind.HEADS, self.keys * self.key_size, "key heads * their size", self.per_key(self.key_size))

    @property
    def value_axis(self) -> Axis:
        """All value heads, side by side."""
        heads = Heads(self.values, self.keys, self.value_size)
        return Axis(Kind.HEADS, self.values * self.value_size, "value heads * their size", heads)

    @property
    def group_axis(self) -> Axis:
        """The same elements, those of the value heads of a key head as one head."""
        heads = self.per_key(self.group * self.value_size)
        return Axis(Kind.HEADS, self.values * self.value_size, "value heads * their size", heads)

    @property
    def gate_axis(self) -> Axis:
        """A number for each value head."""
        return Axis(Kind.HEADS, self.values, "value heads", Heads(self.values, self.keys, 1))

    @property
    def speed_axis(self) -> Axis:
        """A number for each element of a key, for each value head."""
        heads = Heads(self.values, self.keys, self.key_size)
        return Axis(Kind.HEADS, self.values * self.key_size, "value heads * the size of a key head", heads)

    def per_key(self, size: int) -> Heads:
        """As many heads as there are key heads, of a size."""
        return Heads(self.keys, self.keys, size)


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
        stays_float: it is float32 whatever a session's matrices are held as, as it is small and decides much: which
            experts a row meets, which positions it sees, how far a gate on a norm opens, how much a block reads of
            which residual stream.
        parts: where it may lie instead, if there is no tensor of its name.
        bias_parts: the same of its bias.
    """

    name: str
    out: Axis
    in_: Axis | None = None
    bias: str = ""
    stays_float: bool = False
    parts: tuple[Part, ...] = ()
    bias_parts: tuple[Part, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole weight: ``(out,)`` or ``(out, in_)``."""
        return (self.out.size,) if self.in_ is None else (self.out.size, self.in_.size)

    def tensors(self, expert: int | None = None) -> Iterator[Tensor]:
        """The weight and, if it has one, its bias; `expert` is the number of the one that it belongs to."""
        yield Tensor(self.name, self.shape, self.parts).of(expert)
        if self.bias:
            yield Tensor(self.bias, (self.out.size,), self.bias_parts).of(expert)


class Placement(Enum):
    """Where an activation is, see the module's docstring."""

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
