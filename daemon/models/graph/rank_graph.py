"""One rank's graph, from a model's description and everyone's shares.

Where the description has a partial value summed, a ``DistCollective`` stands: an all-reduce of each rank's one term. A
rank without units contributes zeros. Collectives act on other ranks: an engine must meet them all, in order, also where
nothing on this rank reads the result.

In *exact* mode a product along a cut axis is a matmul per leaf (see `motley.daemon.models.cutting.tree`). A rank sums
its leaves to subtrees, all ranks gather those of all, and everyone sums them on by the same tree. A rank without units
has nothing to gather from it. A bias belongs to the first leaf. Sliced experts make a result per leaf, and of each leaf
there is a weighted sum over a row's experts before those of all leaves are summed: so no more travels than of an MLP.
Whole experts know no leaves. Hence the two differ by rounding.

Where ranks form *stages* (`motley.daemon.models.cutting.stages`), the graph is that of the rank's layers. What enters
the first stage are embeddings, what enters others the residual of the layer before. A stage that is not the last gives,
in the place of logits, the residual of the rows that are asked for, f32[R, D], the same on all its ranks.

Experts are *sliced* like MLPs: a rank has a slice of each, and one sum over the ranks follows the weighted sum over a
row's experts. Which these are every rank finds out for itself, from the same residual. Or they are *elsewhere*: the
ranks are a trunk that has no slice of them. They sum the shared expert, if there is one, and each adds the weighted
results of a row's experts to that sum: whole ones, f32[T, D] on every rank. A whole expert is a graph of its own
(`motley.daemon.models.graph.expert_graph`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from motley.daemon.models.cutting.holding import Formats
from motley.daemon.models.cutting.share import Share
from motley.daemon.models.cutting.stages import Stage, stage_of, validate_stage
from motley.daemon.models.cutting.states import state_spec
from motley.daemon.models.cutting.units import Units, units
from motley.daemon.models.description.axes import Value
from motley.daemon.models.description.model import EMBEDDED, Layer, Model
from motley.daemon.models.description.operations.attention import Attend, Choose
from motley.daemon.models.description.operations.experts import Experts
from motley.daemon.models.description.operations.recurrence import Recurrence
from motley.daemon.models.description.operations.rows import Linear, SoftCap, StatisticalTopK, WholeNorm
from motley.daemon.models.description.rope import Rope, rotary_tables
from motley.daemon.models.graph.nodes import Nodes
from motley.daemon.models.graph.protos import declared_value, whole_model
from motley.daemon.models.graph.rank_norms import lower_whole_norm
from motley.daemon.models.graph.rank_sums import RankSums
from motley.daemon.models.graph.rank_top_k import lower_statistical_top_k
from motley.daemon.models.graph.recurrence import lower_recurrence
from motley.daemon.models.keys import ConfigError
from motley.daemon.weights.spec import SHARE_FILE, Piece, Placed, lay_out
from motley.plugins.engine import DOMAIN, F32, CacheBlocks, CacheSpec, RankGraph
from motley.plugins.recurrent import StateSpec
from motley.protocol import CACHE_BLOCK

TABLES_KEPT = 8
"""Rotary tables of so many lengths of long prompts are kept, where they depend on these."""


@dataclass(frozen=True)
class Declared:
    """One rank's graph and the weights it wants, declared before a weight was read."""

    proto: onnx.ModelProto
    weights: list[Placed]
    share_bytes: int
    """The share file's size."""
    constants: Callable[[int], Mapping[str, F32]]
    """See `RankGraph.constants`."""
    same_tables: Callable[[int], int]
    """See `RankGraph.same_tables`."""
    caches: Sequence[CacheSpec]
    """Of the layers of which this rank has heads."""
    stage: Stage
    """The ranks that have its layers, and which these are."""
    hidden: int
    """D, elements of the residual."""
    beside: int
    """See `RankGraph.beside`."""
    words: range
    """The rows of the head that this rank has."""
    width: int
    """Of a row of the result: logits, perhaps with what is handed behind them; the residual, or the head's norm of it;
    0: there is none."""
    words_per_unit: int
    """Rows of the head that are one unit of a share."""
    context: int
    """The longest sequence, tokens."""
    blocks: CacheBlocks
    adapters: int
    """See `RankGraph.adapters`."""
    adapted: Mapping[str, tuple[Piece, ...]]
    """What this rank has of the matrices that adapters may add to, by the parts' names in the graph's Adapted nodes."""
    states: Sequence[StateSpec]
    """Of the layers with a recurrent state of which this rank has heads."""

    @property
    def cache_bytes(self) -> int:
        """How many bytes the KV caches take, all blocks, and recurrent states, all slots."""
        return self.blocks.bytes_of(self.caches) + self.blocks.states * sum(each.bytes for each in self.states)

    def bind(self, share_file: Path) -> RankGraph:
        """The graph with its weights in `share_file`, which is called `SHARE_FILE` in a folder of its own."""
        assert share_file.name == SHARE_FILE, share_file
        return RankGraph(
            proto=self.proto,
            share_file=share_file,
            constants=self.constants,
            same_tables=self.same_tables,
            caches=self.caches,
            hidden=self.hidden,
            beside=self.beside,
            vocabulary=self.width,
            context=self.context,
            blocks=self.blocks,
            adapters=self.adapters,
            states=self.states,
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
    blocks: CacheBlocks | None = None,
    adapters: int = 0,
    cut: Units | None = None,
    embeds: bool = False,
    hands: bool = False,
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
        blocks: of the KV caches; None: as many of the usual size as one sequence may need.
        adapters: how many slots for adapters there are. They may add to every product of the layers and the head with
            a matrix of the model, those of routed experts here included.
        cut: the units that shares are of, where the model is some layers of another; None: the model's own.
        embeds: nothing follows the head's norm: the results are its rows, the same on all ranks, and no rank has a
            weight of the head.
        hands: a row of the result is its logits on this rank, and behind them `Model.handed`.

    Raises:
        ConfigError: the encoding or the context is not possible for this model.
        ShareError: the shares do not tile the model.
    """
    if not 1 <= context <= model.context:
        raise ConfigError(f"a context of {context} tokens is not possible; this model has {model.context} at most")
    cut = cut or units(model, quantisation, block, stored, exact, beside)
    stage = stage_of(shares, rank, len(model.layers))
    if model.whole and not (stage.first and stage.last):
        raise ConfigError(
            f"models of type {model.family} like this one cannot be cut in stages: their layers read what layers far"
            " before them have made. Plan the session with one stage"
        )
    first = model.layers[stage.layers.start]
    if first.follows and not _sees_all(first.attention, context):
        raise ConfigError(
            f"layer {stage.layers.start} cannot be the first of a stage in a context of {context} tokens: an earlier"
            " layer chooses what its rows see. Plan the session anew, or with one stage"
        )
    among = [shares[other] for other in stage.ranks]
    validate_stage(cut, stage, among)
    blocks = blocks or CacheBlocks(ceil(context / CACHE_BLOCK), CACHE_BLOCK)
    nodes = _RankNodes(model, cut, stage, among, rank - stage.ranks.start, experts_elsewhere)
    return nodes.build(context, blocks, adapters, embeds, hands)


class _RankNodes(RankSums):
    """One rank's nodes of the layers of its stage."""

    def __init__(
        self, model: Model, cut: Units, stage: Stage, shares: Sequence[Share], rank: int, experts_elsewhere: bool
    ) -> None:
        """`shares` and `rank`: of the ranks of the stage, and which of them this one is."""
        super().__init__(model, cut, shares, rank)
        self.model = model
        self.stage = stage
        self.layers = model.layers[stage.layers.start : stage.layers.stop]
        self.experts_elsewhere = experts_elsewhere
        words = self.holding.ranges(model.embedding.out)
        self.words = words[0] if words else range(0)

    def build(self, context: int, blocks: CacheBlocks, adapters: int, embeds: bool, hands: bool) -> Declared:
        """Lower the stage's layers, and what follows them."""
        model = self.model
        self._begin()
        self.adapts = adapters > 0
        for layer in self.layers:
            self._lower_layer(layer, context)
        width = self._lower_end(self.read(self.layers[-1].y), embeds, hands)

        entering = self.layers[0].x.axis.size
        entering += sum(layer.given.axis.size for layer in self.layers if layer.given is not None)
        placed, share_bytes = lay_out(self.weights)
        recurrences = [each for layer in self.layers for each in layer.recurrences]
        caches = [spec for layer in self.layers for spec in self._caches(layer, context)]
        ropes = model.rotations(self.layers) if caches else {}
        graph = helper.make_graph(
            self.nodes,
            f"{model.family} rank {self.rank} of {self.size}",
            inputs=[
                declared_value("hidden", "T", entering),
                declared_value("position", 1, kind=TensorProto.INT64),
                declared_value("rows", "R", kind=TensorProto.INT64),
                *(
                    declared_value(f"{table}_cache.{name}", context, size // 2)
                    for name, (_, size) in ropes.items()
                    for table in ("cos", "sin")
                ),
                *(value for spec in caches for value in _cache_values(spec, "")),
            ],
            outputs=[
                *([declared_value("logits", "R", width)] if width else []),
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
            same_tables=lambda prompt: max((rope.same_tables(prompt) for rope in model.ropes.values()), default=0),
            caches=caches,
            stage=self.stage,
            hidden=model.hidden,
            beside=entering - model.hidden,
            words=self.words,
            width=width,
            words_per_unit=self.cut.vocabulary_rows,
            context=context,
            blocks=blocks,
            adapters=adapters,
            adapted=self.adapted,
            states=[state_spec(each, self.width) for each in recurrences if self.has(each.y)],
        )

    def _begin(self) -> None:
        """Lower what is before the layers: rows that enter taken apart where they are of two tables, and scaled."""
        model, rows = self.model, "hidden"
        if parts := [layer.given for layer in self.layers if layer.given is not None]:
            widths = {"hidden.rows": self.layers[0].x.axis.size} | {part.name: part.axis.size for part in parts}
            rows = self.split("hidden", widths)[0]
            self.crosses(rows, widths[rows])  # several residual streams may enter
            for part in parts:
                self.given(part)
                self.crosses(part.name, part.axis.size)
        if self.stage.first and model.embedding_scale != 1.0:
            rows = self.node("Mul", [rows, self.floats(model.embedding_scale)], "hidden.scaled")
        self.given(self.layers[0].x, rows)  # whichever layer of a whole model it is
        self.given(Value(EMBEDDED, self.layers[0].x.axis), rows)

    def _lower_end(self, residual: str, embeds: bool, hands: bool) -> int:
        """Lower what follows the layers, which end with this residual; how wide a row of the result is, 0: none."""
        if not self.stage.last:
            self.node("Gather", [residual, "rows"], "logits", axis=0)
            return self.layers[-1].y.axis.size
        norm = self.model.last_norm
        if embeds and norm is None:
            self.node("Gather", [residual, "rows"], "logits", axis=0)
            return self.model.hidden
        if self.words or embeds or hands:
            self.given(self.model.head_x, self.node("Gather", [residual, "rows"], self.model.head_x.name, axis=0))
        if embeds and norm is not None:
            result = replace(norm.y, name="logits")
            self.lower([replace(norm, y=result)])
            self.read(result)
            return self.model.hidden
        if hands:
            return self._lower_handed()
        if self.words:
            self.lower(self.model.head)
            self.read(self.model.logits)
        return len(self.words)

    def _lower_handed(self) -> int:
        """Lower the head, as far as this rank has words, and put what is handed behind logits; how wide both are."""
        *before, last = self.model.head
        assert isinstance(last, Linear | SoftCap), "it makes logits"
        logits = replace(self.model.logits, name="logits.words")
        named = replace(last, ys=(logits,)) if isinstance(last, Linear) else replace(last, y=logits)
        self.lower([*before, named])
        norm = self.model.last_norm
        handed = self.read(self.model.handed or (norm.y if norm else self.model.head_x))
        words = [self.read(logits)] if self.words else []
        if words:
            self.crosses(words[0], len(self.words))
        self.node("Concat", [*words, handed], "logits", axis=1)
        return len(self.words) + self.model.hidden

    def _lower_layer(self, layer: Layer, context: int) -> None:
        self.residual = self.read(layer.x)
        all_seen = _sees_all(layer.attention, context)
        self.lower(
            replace(each, chosen=None) if isinstance(each, Attend) and all_seen else each for each in layer.operations
        )
        self.read(layer.y)

    def _caches(self, layer: Layer, context: int) -> Iterator[CacheSpec]:
        """What this rank caches of a layer."""
        attend, choose = layer.attention, layer.choice
        if attend is None or attend.borrowed or not self.width(attend.k.axis):
            return
        size = attend.heads.size
        yield CacheSpec(attend.layer, self.width(attend.k.axis) // size, size, attend.window, attend.v is None)
        if choose is not None and not _sees_all(attend, context):
            yield CacheSpec(choose.layer, choose.heads.keys, choose.cached, keys_alone=True, index=True)

    def rotary_size(self, operation: Attend | Choose) -> int:
        """How many elements of each head are rotated."""
        return operation.heads.size if operation.rope is None else self.model.ropes[operation.rope].size

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
            self.crosses(total, operation.y.axis.size)
        self.terms[name] = totals

    def _experts_elsewhere(self, operation: Experts) -> None:
        """Experts elsewhere give every rank whole results, so only what they are added to is summed over the ranks."""
        base = []
        if operation.base is not None:
            at = f"{operation.y.name.removesuffix('.mixture')}.reduced"
            terms, width = self.partial(operation.base), self.model.hidden
            base = [self.summed(terms, self.inner[operation.base.name], at, width)]
        name = self.node(
            "Experts", [*self._routed(operation), *base], operation.y.name, domain=DOMAIN, layer=operation.layer
        )
        self.crosses(name, operation.y.axis.size)
        self.given(operation.y)

    def _routed(self, operation: Experts) -> list[str]:
        """f32[T, D], f32[T, K] and i64[T, K]: what experts get."""
        count = operation.chosen.axis.size
        x, weights, chosen = map(self.read, (operation.x, operation.weights, operation.chosen))
        if operation.scales_inputs:
            x = self.node("Mul", [x, weights], f"{operation.y.name}.x")
            weights = self.node("Div", [weights, weights], f"{operation.y.name}.ones")
        self.crosses(x, operation.x.axis.size)
        self.crosses(weights, count)
        self.crosses(chosen, count, TensorProto.INT64)
        return [x, weights, chosen]

    def _expert_body(self, operation: Experts, number: int) -> onnx.GraphProto:
        """f32[N, D] -> f32[N, D]{U_tp} for each leaf: this rank's slices of one expert, for the rows sent to it."""
        body = Nodes(self.holding, self.held, number)
        body.constants = self.constants
        body.adapts = self.adapts
        graph = expert_body(body, operation)
        self.weights += body.weights
        self.adapted |= body.adapted
        return graph

    def recurrence(self, operation: Recurrence) -> None:
        """See `motley.daemon.models.graph.recurrence`."""
        lower_recurrence(self, operation)

    def whole_norm(self, operation: WholeNorm) -> None:
        """See `motley.daemon.models.graph.rank_norms`."""
        lower_whole_norm(self, operation)

    def statistical_top_k(self, operation: StatisticalTopK) -> None:
        """See `motley.daemon.models.graph.rank_top_k`."""
        lower_statistical_top_k(self, operation)


def _sees_all(attend: Attend | None, context: int) -> bool:
    """Whether rows of sequences of so many positions see all of them, as so many are chosen at least, or none are."""
    return attend is None or attend.chosen is None or attend.choices >= context


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


def _constants(ropes: Mapping[str, tuple[Rope | None, int]], context: int) -> Callable[[int], Mapping[str, F32]]:
    @lru_cache(maxsize=TABLES_KEPT)
    def tables(prompt: int) -> Mapping[str, F32]:
        made: dict[str, F32] = {}
        for name, (rope, size) in ropes.items():
            shape = (context, size // 2)
            if rope is None:
                both = np.ones(shape, np.float32), np.zeros(shape, np.float32)
            else:
                both = rotary_tables(rope, context, prompt)
            made |= dict(zip((f"cos_cache.{name}", f"sin_cache.{name}"), both, strict=True))
        return made

    return lambda prompt: tables(max((rope.same_tables(prompt) for rope, _ in ropes.values() if rope), default=0))


def _cache_values(spec: CacheSpec, suffix: str) -> list[onnx.ValueInfoProto]:
    return [declared_value(f"{name}{suffix}", 1, spec.heads, "C", spec.head_dim) for name in spec.names]
