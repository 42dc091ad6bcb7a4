"""What chooses the positions that rows see, of DeepSeek Sparse Attention (https://arxiv.org/abs/2512.02556).

An *indexer* has small queries of its own, made of the row that a layer's queries are made of, and one small key for
each position, which is cached (`Choose` states the rest). Every rank that attends has all of it. Layers may see what
one before them has chosen.

The rotated elements stand first in a cached row, as those of other heads do. What published models do besides, to
compute with FP8, turns queries and keys alike and changes no product of them.

GLM-5.3 Flash's pool the keys of several neighbouring positions, Qwen4-Exp's take their mean. MiniMax M3's choose blocks
for each KV head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from motley.daemon.models.blocks.layer_kinds import layer_kinds
from motley.daemon.models.blocks.shape import Shape
from motley.daemon.models.description.axes import Axis, Heads, Kind, Value, W, key_axis
from motley.daemon.models.description.operations.attention import Means
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.keys import Keys
from motley.daemon.weights.places import Part

FULL, SHARED = "full", "shared"
"""What configs call layers that have an indexer, and those that see what the last of these has chosen."""


@dataclass(frozen=True)
class Indexer:
    """The indexers of a model's layers.

    Attributes:
        heads, size: of its queries, and elements of each, as of its key.
        count: how many positions are chosen.
        own: the layers that have one.
        turned: elements of a head that are rotated.
        turned_last: they stand behind the others in a checkpoint.
        neighbours: those that turn together are neighbours there; else a half lies between them.
        epsilon: of the norm of keys.
        pool: of so many neighbouring positions keys are pooled, by gates that each row makes; 1: they are not.
    """

    heads: int
    size: int
    count: int
    own: tuple[int, ...]
    turned: int
    turned_last: bool = False
    neighbours: bool = False
    epsilon: float = 1e-6
    pool: int = 1

    def choose(self, writer: Writer, number: int, x: Value, queries: Value, rope: str | None) -> Value:
        """i64[T, count + pool - 1]: the positions that the rows of a layer see.

        Args:
            x: the layer's normalised input.
            queries: the rows that its queries are made of.
            rope: which of the model's rotary embeddings rotates; None: none.
        """
        layer = max(own for own in self.own if own <= number)
        at, module = f"layers.{layer}.attention", f"model.layers.{layer}.self_attn.indexer"
        chosen = Value(f"{at}.chosen", Axis(Kind.PLAIN, self.count + self.pool - 1, "index_topk"))
        if layer < number:
            return chosen
        key = Axis(Kind.PLAIN, self.size, "index_head_dim")
        each = Axis(Kind.PLAIN, self.heads, "index_n_heads")
        whole = Axis(Kind.PLAIN, self.heads * self.size, "index_n_heads * index_head_dim")
        (q,) = writer.linear(f"{at}.index.q", queries, self._matrix(module, "wq_b", whole, queries.axis))
        (k,) = writer.linear(f"{at}.index.k", x, self._matrix(module, "wk", key, x.axis))
        k = writer.norm(f"{at}.index.k.norm", k, self._gain(module, key), self.epsilon, centred=True)
        proj, heads = (
            W(f"{module}.weights_proj.weight", each, x.axis, stays_float=True),
            Heads(self.heads, 1, self.size),
        )
        (weights,) = writer.linear(f"{at}.index.weights", x, proj)
        pooling = None
        if self.pool > 1:
            (gates,) = writer.linear(f"{at}.index.gates", x, W(f"{module}.index_kpool_compress_gate", key, x.axis))
            k = writer.side_by_side(f"{at}.index.k.gated", k, gates)
            places = Axis(Kind.PLAIN, self.pool, "index_kpool")
            pooling = W(f"{module}.index_kpool_compress_ape", places, key, stays_float=True)
        return writer.choose(chosen.name, number, q, k, weights, heads, self.count, rope=rope, pooling=pooling)

    def _matrix(self, module: str, name: str, out: Axis, inner: Axis) -> W:
        """A matrix that makes heads."""
        own = self._part(f"{module}.{name}.weight", out.size, inner.size)
        return W(f"{module}.{name}_halves.weight" if own else f"{module}.{name}.weight", out, inner, parts=own)

    def _gain(self, module: str, key: Axis) -> W:
        """The gain and the bias of a key's norm."""
        gain, bias = (f"{module}.k_norm.{name}" for name in ("weight", "bias"))
        parts, bias_parts = self._part(gain, key.size), self._part(bias, key.size)
        halves = f"{module}.k_halves_norm"
        if not parts:
            return W(gain, key, bias=bias)
        return W(f"{halves}.weight", key, bias=f"{halves}.bias", parts=parts, bias_parts=bias_parts)

    def _part(self, tensor: str, *shape: int) -> tuple[Part, ...]:
        """Where elements of heads lie in a checkpoint, where that is in another order than here."""
        if not (self.turned_last or self.neighbours):
            return ()
        first = self.size - self.turned if self.turned_last else 0
        step = 2 if self.neighbours else 1
        turned = [range(first + way, first + self.turned, step) for way in range(step)]
        plain = range(first) if self.turned_last else range(self.turned, self.size)
        return (Part(tensor, shape, heads=self.size, of_head=(*turned, plain)),)


@dataclass(frozen=True)
class BlockIndexer:
    """The indexers of layers whose KV heads see blocks of positions, each those that it chooses (MiniMax M3).

    There is an index query for each KV head, and one index key; all of them are normed.

    Attributes:
        size: elements of an index query, and of the key.
        blocks, block: how many blocks a head sees, of so many positions each.
        latest: how many of these are the latest ones.
    """

    size: int
    blocks: int
    block: int
    latest: int

    def choose(self, writer: Writer, shape: Shape, number: int, x: Value, rope: str) -> Value:
        """i64[T, KV heads * blocks * block]{tp}: the positions that each KV head of a layer's rows sees.

        Args:
            x: the layer's normalised input.
            rope: which of the model's rotary embeddings rotates.
        """
        at, module = f"layers.{number}.attention", f"model.layers.{number}.self_attn.indexer"
        one, heads = Axis(Kind.PLAIN, self.size, "index_head_dim"), replace(shape.heads, size=self.size)
        made = []
        for letter, out in (("q", key_axis(heads)), ("k", one)):
            (rows,) = writer.linear(f"{at}.index.{letter}", x, W(f"{module}.{letter}_proj.weight", out, x.axis))
            gain = W(f"{module}.{letter}_norm.weight", one)
            made.append(writer.norm(f"{at}.index.{letter}.norm", rows, gain, shape.epsilon, shape.norm_offset))
        q, k = made
        sizes = self.blocks, self.block, self.latest
        return writer.choose_blocks(f"{at}.chosen", number, q, k, heads, *sizes, rope=rope)


@dataclass(frozen=True)
class MeansIndexer:
    """The indexers of layers whose rows see blocks of positions, chosen by the means of their keys (Qwen4-Exp).

    All heads count alike. Queries are normed, and so are the means of keys; one matrix makes queries and keys.

    Attributes:
        heads, size: of its queries, and elements of each, as of its key.
        count: how many positions are chosen, besides those behind the last whole block.
        block: positions of a block.
    """

    heads: int
    size: int
    count: int
    block: int

    def choose(self, writer: Writer, shape: Shape, number: int, x: Value, rope: str) -> Value:
        """i64[T, KV heads * (count + block - 1)]{tp}: the positions that each KV head of a layer's rows sees.

        Args:
            x: the layer's normalised input.
            rope: which of the model's rotary embeddings rotates.
        """
        at, module = f"layers.{number}.attention", f"model.layers.{number}.self_attn.indexer"
        heads = Heads(self.heads, 1, self.size)
        key = Axis(Kind.PLAIN, self.size, "indexer_head_dim")
        queries = Axis(Kind.PLAIN, self.heads * self.size, "indexer_n_heads * indexer_head_dim", heads)
        both = f"{module}.index_qk_proj.weight", (queries.size + key.size, x.axis.size)
        ws = (
            W(f"{module}.index_{letter}_proj.weight", out, x.axis, parts=(Part(*both, start),))
            for letter, out, start in (("q", queries, 0), ("k", key, queries.size))
        )
        q, k = writer.linear(f"{at}.index", x, *ws, ys=(f"{at}.index.q", f"{at}.index.k"))
        gain = W(f"{module}.q_layernorm.weight", key)
        q = writer.norm(f"{at}.index.q.norm", q, gain, shape.epsilon, shape.norm_offset)
        means = Means(W(f"{module}.k_layernorm.weight", key), shape.epsilon, shape.norm_offset)
        sizes = self.count, self.block
        return writer.choose_means(f"{at}.chosen", number, q, k, heads, shape.heads, *sizes, means, rope=rope)


def read_indexer(keys: Keys, turned: int) -> Indexer:
    """The indexers of a model of which so many elements of each head are rotated.

    Raises:
        ConfigError: naming the key that is missing or not possible.
    """
    layers = keys.layers()
    kinds = layer_kinds(keys, "indexer_types", keys.get("indexer_types") or [FULL] * layers, layers, [FULL, SHARED])
    if kinds[0] != FULL:
        raise keys.refusal("indexer_types", f"{FULL} for the first layer")
    return Indexer(
        heads=keys.size("index_n_heads"),
        size=keys.size("index_head_dim", 128, least=turned),
        count=keys.size("index_topk", 2048),
        own=tuple(number for number, kind in enumerate(kinds) if kind == FULL),
        turned=turned,
    )


def indexer_types(keys: Keys) -> Any:
    """Which layers have indexers, where the config tells it by a pattern, or by how often."""
    pattern = keys.get("index_topk_pattern")
    if isinstance(pattern, str):
        return [{"F": FULL, "S": SHARED}.get(letter, letter) for letter in pattern]
    if pattern is not None:
        return pattern
    often, first = keys.size("index_topk_freq", 1), keys.size("index_skip_topk_offset", 2, least=0)
    layers = range(keys.layers())
    return [SHARED if max(number - first + 1, 0) % often else FULL for number in layers]
