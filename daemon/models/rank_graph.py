"""One rank's graph, from a model's description and everyone's shares.

Where the description has a partial value summed, a ``DistCollective`` stands: an all-reduce of each rank's one term. A
rank without units contributes zeros. Collectives act on other ranks: an engine must meet them all, in order, also where
nothing on this rank reads the result.

In *exact* mode a product along a cut axis is a matmul per leaf (see `motley.daemon.models.tree`). A rank sums its
leaves to subtrees, all ranks gather those of all, and everyone sums them on by the same tree. A rank without units has
nothing to gather from it. A bias belongs to the first leaf. Sliced experts make a result per leaf, and of each leaf
there is a weighted sum over a row's experts before those of all leaves are summed: so no more travels than of an MLP.
Whole experts know no leaves. Hence the two differ by rounding.

Experts are *sliced* like MLPs: a rank has a slice of each, and one sum over the ranks follows the weighted sum over a
row's experts. Which these are every rank finds out for itself, from the same residual. Or they are *elsewhere*: the
ranks are a trunk that has no slice of them. They sum the shared expert, if there is one, and each adds the weighted
results of a row's experts to that sum: whole ones, f32[T, D] on every rank. A whole expert is a graph of its own
(`motley.daemon.models.expert_graph`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from motley.daemon.models.description import (
    Attend,
    Axis,
    Experts,
    Kind,
    Layer,
    Linear,
    Model,
    Operation,
    Placement,
    Scale,
    ScaleRows,
    Sum,
    WholeNorm,
    query_axis,
)
from motley.daemon.models.holding import Formats
from motley.daemon.models.keys import ConfigError
from motley.daemon.models.nodes import Nodes, Terms, declared_value, runs, scaled, whole_model
from motley.daemon.models.rope import Rope, rotary_tables
from motley.daemon.models.share import Share, kv_heads
from motley.daemon.models.tree import fold, subtrees
from motley.daemon.models.units import Units, units, validate_shares
from motley.daemon.weights.spec import SHARE_FILE, Piece, Placed, Weight, lay_out
from motley.plugins.engine import DOMAIN, F32, CacheSpec, RankGraph


@dataclass(frozen=True)
class Declared:
    """One rank's graph and the weights it wants, declared before a weight was read."""

    proto: onnx.ModelProto
    weights: list[Placed]
    share_bytes: int
    """The share file's size."""
    constants: Callable[[int], Mapping[str, F32]]
    """See `RankGraph.constants`."""
    caches: Sequence[CacheSpec]
    hidden: int
    words: range
    """The rows of the head that this rank has."""
    words_per_unit: int
    context: int

    @property
    def cache_bytes(self) -> int:
        """Of the KV caches, when the context is full."""
        return sum(2 * 4 * spec.heads * spec.head_dim for spec in self.caches) * self.context

    def bind(self, share_file: Path) -> RankGraph:
        """The graph with its weights in `share_file`, which is called `SHARE_FILE` in a folder of its own."""
        assert share_file.name == SHARE_FILE, share_file
        return RankGraph(
            proto=self.proto,
            share_file=share_file,
            constants=self.constants,
            caches=self.caches,
            hidden=self.hidden,
            vocabulary=len(self.words),
            context=self.context,
        )


def build_rank_graph(
    model: Model,
    shares: Sequence[Share],
    rank: int,
    quantisation: str,
    block: int,
    context: int,
    stored: Formats | None = None,
    exact: bool = False,
    experts_elsewhere: bool = False,
    beside: Collection[str] = (),
) -> Declared:
    """Declare what one rank computes and which weights it needs for it.

    Args:
        shares: of every rank, by rank.
        quantisation: of the matrices, and the block asked for: see `units`; norms and biases stay float32.
        context: the longest sequence, tokens.
        stored: how the checkpoint stores each matrix; None: as floats.
        exact: sum by a tree that does not depend on the shares, whose cuts fall on its leaves.
        experts_elsewhere: the ranks are a trunk without routed experts.
        beside: how other ranks hold the matrices, which their units suit too.

    Raises:
        ConfigError: the encoding or the context is not possible for this model.
        ShareError: the shares do not tile the model.
    """
    if not 1 <= context <= model.context:
        raise ConfigError(f"a context of {context} tokens is not possible; this model has {model.context} at most")
    cut = units(model, quantisation, block, stored, exact, beside)
    validate_shares(cut, shares)
    return _RankNodes(model, cut, shares, rank, experts_elsewhere).build(context)


class RankHolding:
    """What a rank has of each axis: see `motley.daemon.models.nodes.Holding`."""

    def __init__(self, model: Model, cut: Units, share: Share) -> None:
        self._model = model
        self._cut = cut
        self._share = share

    def ranges(self, axis: Axis) -> list[range]:
        """The elements of an axis, in order."""
        match axis.kind:
            case Kind.HEADS | Kind.KV_HEADS:
                assert axis.heads is not None
                queries = self._cut.query_heads(self._share.attention, self._share.attention_split, axis.heads)
                own = (
                    [queries] if axis.kind is Kind.HEADS else runs([head for head, _ in kv_heads(queries, axis.heads)])
                )
                found = [scaled(heads, axis.heads.size) for heads in own]
            case Kind.MLP:
                found = [self._cut.columns(self._share.mlp, axis.size)]
            case Kind.VOCABULARY:
                rows = self._cut.vocabulary_rows
                bounds = (self._share.vocabulary.start, self._share.vocabulary.stop)
                found = [range(*(min(bound * rows, axis.size) for bound in bounds))]
            case _:
                found = [range(axis.size)]
        return [each for each in found if each]

    def leaves(self, axis: Axis) -> dict[range, range]:
        """The terms that a product along an axis is made in."""
        own = self.leaf_range(axis)
        if not self._cut.exact:
            return dict(zip([own], self.ranges(axis), strict=False))
        return {range(leaf, leaf + 1): self._leaf(leaf, axis) for leaf in own}

    def leaf_range(self, axis: Axis) -> range:
        """The leaves of the tree of sums that this rank has of products along an axis."""
        if axis.kind is Kind.MLP:
            return self._share.mlp
        return scaled(self._share.attention, self._cut.attention_splits[-1] // self._share.attention_split)

    def _leaf(self, leaf: int, axis: Axis) -> range:
        one = range(leaf, leaf + 1)
        if axis.kind is Kind.MLP:
            return self._cut.columns(one, axis.size)
        assert axis.heads is not None
        return scaled(self._cut.query_heads(one, self._cut.attention_splits[-1], axis.heads), axis.heads.size)


class _RankNodes(Nodes):
    """One rank's nodes, with the collectives among them."""

    def __init__(self, model: Model, cut: Units, shares: Sequence[Share], rank: int, experts_elsewhere: bool) -> None:
        holdings = [RankHolding(model, cut, share) for share in shares]
        super().__init__(holdings[rank], cut.held)
        self.model = model
        self.cut = cut
        self.holdings = holdings
        self.rank = rank
        self.size = len(shares)
        self.experts_elsewhere = experts_elsewhere
        self.crossing: dict[str, onnx.ValueInfoProto] = {}
        self.residual = ""
        self.inner = {name: axis for layer in model.layers for name, axis in _inner_axes(layer.operations).items()}
        """The axes along which partial values are made, which say what their leaves are."""
        words = self.holding.ranges(model.embedding.out)
        self.words = words[0] if words else range(0)

    def build(self, context: int) -> Declared:
        """Lower the whole model."""
        model = self.model
        self.given(model.layers[0].x, "hidden")  # whichever layer of a whole model it is
        if model.embedding_scale != 1.0:
            scale = self.floats(model.embedding_scale)
            self.given(model.layers[0].x, self.node("Mul", ["hidden", scale], "hidden.scaled"))
        for layer in model.layers:
            self._lower_layer(layer)
        if self.words:
            last = self.read(model.layers[-1].y)
            self.given(model.head_x, self.node("Gather", [last, "rows"], model.head_x.name, axis=0))
            self.lower(model.head)
            self.read(model.logits)

        placed, share_bytes = lay_out(self.weights)
        attentions = [layer.attention for layer in model.layers]
        caches = [spec for attend in attentions if attend is not None and (spec := self._cache(attend)).heads]
        ropes = _tables_of(model) if caches else {}
        graph = helper.make_graph(
            self.nodes,
            f"{model.family} rank {self.rank} of {self.size}",
            inputs=[
                declared_value("hidden", "T", model.hidden),
                declared_value("position", 1, kind=TensorProto.INT64),
                declared_value("rows", "R", kind=TensorProto.INT64),
                *(
                    declared_value(f"{table}_cache.{name}", context + 1, size // 2)
                    for name, (_, size) in ropes.items()
                    for table in ("cos", "sin")
                ),
                *(value for spec in caches for value in _cache_values(spec, "")),
            ],
            outputs=[
                *([declared_value("logits", "R", len(self.words))] if self.words else []),
                *(value for spec in caches for value in _cache_values(spec, ".out")),
            ],
            initializer=self.initializers(placed),
            value_info=list(self.crossing.values()),
        )
        return Declared(
            proto=whole_model(graph, list(self.functions.values())),
            weights=placed,
            share_bytes=share_bytes,
            constants=_constants(ropes, context),
            caches=caches,
            hidden=model.hidden,
            words=self.words,
            words_per_unit=self.cut.vocabulary_rows,
            context=context,
        )

    def _lower_layer(self, layer: Layer) -> None:
        self.residual = self.read(layer.x)
        self.lower(layer.operations)
        self.read(layer.y)

    def _cache(self, attend: Attend) -> CacheSpec:
        return CacheSpec(attend.layer, self.width(attend.k.axis) // attend.heads.size, attend.heads.size)

    def rotary_size(self, attend: Attend) -> int:
        """How many elements of each head are rotated."""
        return attend.heads.size if attend.rope is None else self.model.ropes[attend.rope].size

    # -- sums over the ranks -----------------------------------------------------------------------------------------

    def sum(self, operation: Sum) -> None:
        """f32[T, N]{U_tp} -> f32[T, N]."""
        x, y = operation.x, operation.y
        if self.is_whole(x):  # experts elsewhere have summed it
            self.given(y, self.read(x))
            return
        self.given(y, self._summed(self.partial(x), self.inner[operation.x.name], y.name, x.axis.size))

    def _summed(self, terms: Terms, axis: Axis, name: str, width: int) -> str:
        at = name.removesuffix(".reduced")
        if self.cut.exact:
            return self._tree_sum(at, axis, terms, width)
        own = next(iter(terms.values()), "") or self._zeros(f"{at}.partial", width)
        return self._all_reduce(own, at, width)

    def _tree_sum(self, at: str, axis: Axis, terms: Terms, width: int) -> str:
        """f32[T, width] of this rank's leaves -> f32[T, width]: the sum of all ranks', by the tree over all leaves."""

        def add(span: range, left: str, right: str) -> str:
            return self.node("Add", [left, right], f"{at}.sum.{span.start}.{span.stop}")

        leaves = [holding.leaf_range(axis) for holding in self.holdings]
        total = range(leaves[-1].stop)
        trees = [subtrees(own, len(total)) for own in leaves]
        own = [fold(span, terms, add) for span in trees[self.rank]]
        spans = [span for tree in trees for span in tree]
        gathered = [f"{at}.gathered.{span.start}.{span.stop}" for span in spans]
        counts = [len(tree) for tree in trees]
        everyone = self._collective(own, gathered, width, "all_gather", counts=counts)
        return fold(total, dict(zip(spans, everyone, strict=True)), add)

    def _all_reduce(self, partial: str, at: str, width: int) -> str:
        """f32[T, width]{U_tp} -> f32[T, width]: the sum of all ranks' terms, in rank order."""
        return self._collective([partial], [f"{at}.reduced"], width, "all_reduce", reduce_op="sum")[0]

    def _collective(
        self, operands: list[str], results: list[str], width: int, operation: str, **attributes: Any
    ) -> list[str]:
        self.node(
            "DistCollective",
            operands,
            *results,
            domain=DOMAIN,
            collective_operation=operation,
            root=-1,
            group_size=0,
            nb_rank=self.size,
            **attributes,
        )
        for value in (*operands, *results):
            self._crosses(value, width)
        return results

    def _crosses(self, name: str, width: int, kind: int = TensorProto.FLOAT) -> None:
        """Declare a value [T, width] that is read on the other side of a collective, or of a layer's experts."""
        self.crossing[name] = declared_value(name, "T", width, kind=kind)

    def _zeros(self, name: str, width: int) -> str:
        """f32[T, width]: what a rank without units adds to a sum."""
        rows = self.node("Shape", [self.residual], f"{name}.rows", start=0, end=1)
        shape = self.node("Concat", [rows, self.integers([width])], f"{name}.shape", axis=0)
        return self.node("ConstantOfShape", [shape], name)

    # -- experts -----------------------------------------------------------------------------------------------------

    def experts(self, operation: Experts) -> None:
        """f32[T, D] -> f32[T, D]{U_tp}: every row's experts, weighted and summed, and what they are added to."""
        if self.experts_elsewhere:
            self._experts_elsewhere(operation)
            return
        leaves = self.holding.leaves(self.inner[operation.y.name])
        if not leaves:
            self.terms[operation.y.name] = {}
            return
        bases = [*self.partial(operation.base).values()] if operation.base is not None else []
        bodies = [self._expert_body(operation, number) for number in range(operation.count)]
        name = operation.y.name
        totals = {leaf: f"{name}.{leaf.start}" if len(leaves) > 1 else name for leaf in leaves}
        self.node("Experts", [*self._routed(operation), *bases], *totals.values(), domain=DOMAIN, experts=bodies)
        for total in totals.values():
            self._crosses(total, self.model.hidden)
        self.terms[name] = totals

    def _experts_elsewhere(self, operation: Experts) -> None:
        """Experts elsewhere give every rank whole results, so only what they are added to is summed over the ranks."""
        base = []
        if operation.base is not None:
            at = f"{operation.y.name.removesuffix('.mixture')}.reduced"
            terms, width = self.partial(operation.base), self.model.hidden
            base = [self._summed(terms, self.inner[operation.base.name], at, width)]
        name = self.node(
            "Experts", [*self._routed(operation), *base], operation.y.name, domain=DOMAIN, layer=operation.layer
        )
        self._crosses(name, self.model.hidden)
        self.given(operation.y)

    def _routed(self, operation: Experts) -> list[str]:
        """f32[T, D], f32[T, K] and i64[T, K]: what experts get."""
        count = operation.chosen.axis.size
        x, weights, chosen = map(self.read, (operation.x, operation.weights, operation.chosen))
        self._crosses(x, self.model.hidden)
        self._crosses(weights, count)
        self._crosses(chosen, count, TensorProto.INT64)
        return [x, weights, chosen]

    def _expert_body(self, operation: Experts, number: int) -> onnx.GraphProto:
        """f32[N, D] -> f32[N, D]{U_tp} for each leaf: this rank's slices of one expert, for the rows sent to it."""
        body = Nodes(self.holding, self.held, number)
        body.constants = self.constants
        graph = expert_body(body, operation)
        self.weights += body.weights
        return graph

    # -- norms over all ranks' parts ---------------------------------------------------------------------------------

    def whole_norm(self, operation: WholeNorm) -> None:
        """Root mean squares of every row over all ranks' parts of some axes, and the norms by them.

        A key head that several ranks have, or one has several times, is counted where its first query head is.
        """
        at, xs = operation.name, operation.xs
        heads = xs[0].axis.heads
        assert heads is not None
        queries = query_axis(heads)
        present = self.has(xs[0])
        if present:
            product = self._waiting[xs[0].name]
            for made in product.ys if isinstance(product, Linear) else xs:  # values are read beside queries and keys
                self._crosses(self.read(made), self.width(made.axis))
        if self.cut.exact:
            terms = self._leaf_squares(operation) if present else {}
            total = self._tree_sum(at, queries, terms, len(xs))
        else:
            own = self._own_squares(operation) if present else self._zeros(at, len(xs))
            total = self._all_reduce(own, at, len(xs))
        if not present:
            return
        shares = self.floats(*(1 / x.axis.size for x in xs))
        mean = self.node("Mul", [total, shares], f"{at}.mean")
        above = self.node("Add", [mean, self.floats(operation.epsilon)], f"{at}.above")
        rms = self.split(self.node("Sqrt", [above], f"{at}.rms"), {f"{at}.rms.{index}": 1 for index in range(len(xs))})
        for x, y, gain, own in zip(xs, operation.ys, operation.gains, rms, strict=True):
            pieces = tuple(Piece(gain.name, rows) for rows in self.holding.ranges(gain.out))
            vector = self.weight(Weight(f"{y.name}.weight", pieces))
            unscaled = self.node("Div", [self.read(x), own], f"{y.name}.unscaled")
            self.given(y, self.node("Mul", [unscaled, vector], y.name))

    def _own_squares(self, operation: WholeNorm) -> str:
        """f32[T, 1 per axis]{U_tp}: the sums of squares of this rank's parts."""
        sums = []
        for x in operation.xs:
            heads = self._counted(x.axis)
            counted = np.repeat(heads, self.width(x.axis) // len(heads))
            name = f"f32.counted.{len(counted)}." + "".join(str(int(each)) for each in heads)
            self.constants[name] = numpy_helper.from_array(counted.astype(np.float32)[None], name)
            read = self.read(x)
            squares = self.node("Mul", [read, read], f"{x.name}.squared")
            sums.append(self.node("Gemm", [squares, name], f"{x.name}.squares", transB=1))
        return self.node("Concat", sums, operation.name, axis=1)

    def _counted(self, axis: Axis) -> list[bool]:
        """For each head of an axis that this rank has, whether it is this one that counts."""
        assert axis.heads is not None
        (queries,) = self.holding.ranges(query_axis(axis.heads))
        own = range(queries.start // axis.heads.size, queries.stop // axis.heads.size)
        if axis.kind is Kind.HEADS:
            return [True] * len(own)
        return [part.start == head * axis.heads.group for head, part in kv_heads(own, axis.heads)]

    def _leaf_squares(self, operation: WholeNorm) -> dict[range, str]:
        """f32[T, 1 per axis] for each of this rank's leaves: the sums of squares of it alone."""
        heads = operation.xs[0].axis.heads
        assert heads is not None
        none = self._zeros(f"{operation.name}.none", 1)
        sums: dict[range, list[str]] = {}
        for x in operation.xs:
            read = self.read(x)
            squares = self.node("Mul", [read, read], f"{x.name}.squared")
            for leaf, parts in self._heads_by_leaf(x.axis).items():
                columns = [column for start in parts for column in range(start * heads.size, (start + 1) * heads.size)]
                if not columns:
                    sums.setdefault(leaf, []).append(none)
                    continue
                at = f"{x.name}.squares.{leaf.start}"
                own = self.node("Gather", [squares, self.integers(columns)], f"{at}.columns", axis=1)
                sums.setdefault(leaf, []).append(self.node("ReduceSum", [own, self.integers([1])], at, keepdims=1))
        return {
            leaf: self.node("Concat", parts, f"{operation.name}.{leaf.start}", axis=1) for leaf, parts in sums.items()
        }

    def _heads_by_leaf(self, axis: Axis) -> dict[range, list[int]]:
        """Which of this rank's heads of an axis, by their place, count in each of its leaves."""
        assert axis.heads is not None
        size, group = axis.heads.size, axis.heads.group
        (queries,) = self.holding.ranges(query_axis(axis.heads))
        own = range(queries.start // size, queries.stop // size)
        firsts = (
            [*own]
            if axis.kind is Kind.HEADS
            else [part.start if part.start == head * group else -1 for head, part in kv_heads(own, axis.heads)]
        )
        return {
            leaf: [place for place, first in enumerate(firsts) if first * size in columns]
            for leaf, columns in self.holding.leaves(query_axis(axis.heads)).items()
        }


def expert_body(nodes: Nodes, operation: Experts) -> onnx.GraphProto:
    """f32[N, D] -> f32[N, D]{U_tp} for each term: the graph of one expert, whose number `nodes` has."""
    x, hidden = nodes.named(operation.body_x.name), operation.body_x.axis.size
    nodes.given(operation.body_x)
    nodes.lower(operation.body)
    results = nodes.partial(operation.body_y).values()
    return helper.make_graph(
        nodes.nodes,
        x.removesuffix(".x"),
        [declared_value(x, "N", hidden)],
        [declared_value(result, "N", hidden) for result in results],
    )


def _inner_axes(operations: Sequence[Operation]) -> dict[str, Axis]:
    """The axes along which partial values are made, by their names."""
    axes: dict[str, Axis] = {}
    for each in operations:
        if isinstance(each, Linear) and each.ys[0].placement is Placement.PARTIAL:
            assert each.ws[0].in_ is not None
            axes[each.ys[0].name] = each.ws[0].in_
        elif isinstance(each, Scale | ScaleRows) and each.x.name in axes:
            axes[each.y.name] = axes[each.x.name]
        elif isinstance(each, Experts):
            axes[each.y.name] = _inner_axes(each.body)[each.body_y.name]
    return axes


def _tables_of(model: Model) -> dict[str, tuple[Rope | None, int]]:
    """The rotary embeddings that attention asks for, by name, and how many elements of a head each turns."""
    found: dict[str, tuple[Rope | None, int]] = {}
    for layer in model.layers:
        if (attend := layer.attention) is not None:
            rope = None if attend.rope is None else model.ropes[attend.rope]
            found[attend.rope or "none"] = (rope, rope.size if rope else attend.heads.size)
    return found


def _constants(ropes: Mapping[str, tuple[Rope | None, int]], context: int) -> Callable[[int], Mapping[str, F32]]:
    originals = [rope.original_context for rope, _ in ropes.values() if rope and rope.original_context]
    alike = min(originals, default=context)
    """Prompts up to this length share their tables."""

    @lru_cache(maxsize=2)
    def tables(prompt: int) -> Mapping[str, F32]:
        made: dict[str, F32] = {}
        for name, (rope, size) in ropes.items():
            shape = (context + 1, size // 2)  # an exact engine runs a row beyond
            if rope is None:
                both = np.ones(shape, np.float32), np.zeros(shape, np.float32)
            else:
                both = rotary_tables(rope, context + 1, prompt)
            made |= dict(zip((f"cos_cache.{name}", f"sin_cache.{name}"), both, strict=True))
        return made

    return lambda prompt: tables(prompt if prompt > alike else 0)


def _cache_values(spec: CacheSpec, suffix: str) -> list[onnx.ValueInfoProto]:
    return [
        declared_value(f"{kind}_cache.{spec.layer}{suffix}", 1, spec.heads, "C", spec.head_dim)
        for kind in ("key", "value")
    ]
