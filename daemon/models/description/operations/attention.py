"""What rows make of those before them in their sequence, kept in caches."""

from __future__ import annotations

from dataclasses import dataclass

from motley.daemon.models.description.axes import Heads, Value, W


@dataclass(frozen=True)
class Warmth:
    """How queries grow with their positions p, so that attention to many positions stays as sharp
    (https://arxiv.org/abs/2501.19399): times ``1 + growth * log(1 + floor((p + offset) / span))``."""

    growth: float
    span: int
    offset: int = 0


@dataclass(frozen=True)
class Means:
    """Keys of blocks of positions that are the means of these positions' keys, with an RMS norm, and turned then as the
    first of the positions is.

    Attributes:
        gain: f32[elements of a key], of the norm, whose other two `Norm` has.
    """

    gain: W
    epsilon: float
    offset: float


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
    besides. Or the same of keys that are means (`Means`); the heads then count alike, and all KV heads see the same.

    Attributes:
        layer: whose cache has the index keys.
        q: the row's index queries, the heads side by side; sharded by KV heads where each head chooses.
        k: its index key, which all heads share; where keys are pooled, its gates behind it.
        weights: a number for each head; None: each head chooses, or keys are means.
        y: i64[T, count]: positions up to the row's own, the best `count` of them or all, and -1 in the place of more;
            as many for each KV head, side by side, where each head chooses, or keys are means.
        heads: of the queries.
        rope: which of `Model.ropes` rotates; None: no rotation.
        pooling: f32[block, elements of a key]; None: keys are not pooled by gates.
        means: None: keys are no means.
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
    means: Means | None = None

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
