"""One rank's graph from a model's config and everyone's shares: the single definition of the maths.

Sharding, in the notation of the JAX scaling book (T rows, D residual, E heads * head_dim, F MLP columns, V words):

- QKV and gate/up are cut by rows of the weight: ``f32[T, D] -> f32[T, E]{tp}`` and ``f32[T, F]{tp}``;
- output and down projections by columns, so each rank has an unreduced sum ``f32[T, D]{U_tp}``, which a
  ``DistCollective`` turns into the replicated ``f32[T, D]`` that is added to the residual;
- the head by rows: ``f32[R, V]{tp}``;
- experts as MLPs: a rank has a slice of each, and one sum over the ranks follows the weighted sum over a row's experts.
  Which these are every rank finds out for itself, from the same residual.

A rank without attention or MLP units contributes zeros. Collectives act on other ranks: an engine must meet them
all, in order, also where nothing on this rank reads the result.

In *exact* mode an output or down projection is a matmul per leaf (see `motley.daemon.models.tree`). A rank sums its
leaves to subtrees, all ranks gather those of all, and everyone sums them on by the same tree. A rank without units has
nothing to gather from it. A bias belongs to the first leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import TensorProto, helper, numpy_helper

from motley.daemon.models.config import ConfigError, DynamicScaling, Experts, ModelConfig
from motley.daemon.models.holding import FLOATS, Formats
from motley.daemon.models.rope import rotary_tables
from motley.daemon.models.share import Share, kv_heads
from motley.daemon.models.tensors import EMBEDDING, HEAD, ROUTER, SHARED_GATE
from motley.daemon.models.tree import fold, subtrees
from motley.daemon.models.units import Units, units, validate_shares
from motley.daemon.weights.quantise import ZERO_POINT
from motley.daemon.weights.spec import SHARE_FILE, Encoding, Piece, Placed, Weight, lay_out
from motley.plugins.engine import DOMAIN, F32, CacheSpec, RankGraph

OPSET = 24
IR_VERSION = 11
ROTARY_TABLES = ("cos_cache", "sin_cache")

CACHED_ATTENTION = onnx.parser.parse_function("""
<domain: "motley", opset_import: ["": 24],
 doc_string: "Rotates T rows, writes their keys and values into the cache at `position`, and attends to the cache.">
CachedAttention <q_heads, kv_heads, head_dim, scale, window>
    (q, k, v, key_cache, value_cache, position, cos_cache, sin_cache) => (y, key_cache_out, value_cache_out)
{
    # q: f32[T, q_heads * head_dim], k and v: f32[T, kv_heads * head_dim], caches: f32[1, kv_heads, C, head_dim]
    zero = Constant <value_int: int = 0> ()
    one = Constant <value_int: int = 1> ()
    vector = Constant <value_ints: ints = [1]> ()
    first_axis = Constant <value_ints: ints = [0]> ()
    second_axis = Constant <value_ints: ints = [1]> ()

    # Row t stands at position + t.
    row_count = Shape <start: int = 0, end: int = 1> (q)
    row_limit = Squeeze (row_count)
    row_numbers = Range (zero, row_limit, one)
    row_positions = Add (position, row_numbers)
    position_ids = Unsqueeze (row_positions, first_axis)

    # Heads apart: [T, heads * head_dim] -> [1, heads, T, head_dim].
    all_rows = Constant <value_ints: ints = [1, -1]> ()
    q_count = Constant <value_int: int = @q_heads> ()
    q_counts = Reshape (q_count, vector)
    kv_count = Constant <value_int: int = @kv_heads> ()
    kv_counts = Reshape (kv_count, vector)
    width = Constant <value_int: int = @head_dim> ()
    widths = Reshape (width, vector)
    q_shape = Concat <axis: int = 0> (all_rows, q_counts, widths)
    kv_shape = Concat <axis: int = 0> (all_rows, kv_counts, widths)
    q_rows = Reshape (q, q_shape)
    k_rows = Reshape (k, kv_shape)
    v_rows = Reshape (v, kv_shape)
    q_heads_apart = Transpose <perm: ints = [0, 2, 1, 3]> (q_rows)
    k_heads_apart = Transpose <perm: ints = [0, 2, 1, 3]> (k_rows)
    v_heads_apart = Transpose <perm: ints = [0, 2, 1, 3]> (v_rows)

    q_rotated = RotaryEmbedding (q_heads_apart, cos_cache, sin_cache, position_ids)
    k_rotated = RotaryEmbedding (k_heads_apart, cos_cache, sin_cache, position_ids)
    key_cache_out = TensorScatter <axis: int = 2> (key_cache, k_rotated, position)
    value_cache_out = TensorScatter <axis: int = 2> (value_cache, v_heads_apart, position)

    # A row sees the positions up to its own: the last `window` of them, or all if the window is 0.
    capacity = Shape <start: int = 2, end: int = 3> (key_cache)
    key_limit = Squeeze (capacity)
    key_positions = Range (zero, key_limit, one)
    row_column = Unsqueeze (row_positions, second_axis)
    distance = Sub (row_column, key_positions)
    causal = GreaterOrEqual (distance, zero)
    reach = Constant <value_int: int = @window> ()
    near = Less (distance, reach)
    unlimited = Equal (reach, zero)
    within = Or (near, unlimited)
    mask = And (causal, within)

    attended = Attention <scale: float = @scale> (q_rotated, key_cache_out, value_cache_out, mask)
    attended_rows = Transpose <perm: ints = [0, 2, 1, 3]> (attended)
    y_shape = Shape (q)
    y = Reshape (attended_rows, y_shape)
}
""")
"""The function ``motley.CachedAttention`` in standard operators, for engines that have no kernel for the whole."""


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
    config: ModelConfig,
    shares: Sequence[Share],
    rank: int,
    quantisation: str,
    block: int,
    context: int,
    stored: Formats | None = None,
    exact: bool = False,
) -> Declared:
    """Declare what one rank computes and which weights it needs for it.

    Args:
        shares: of every rank, by rank.
        quantisation: of the matrices, and the block asked for: see `units`; norms and biases stay float32.
        context: the longest sequence, tokens.
        stored: how the checkpoint stores each matrix; None: as floats.
        exact: sum by a tree that does not depend on the shares, whose cuts fall on its leaves.

    Raises:
        ConfigError: the encoding or the context is not possible for this model.
        ShareError: the shares do not tile the model.
    """
    if not 1 <= context <= config.context:
        raise ConfigError(f"a context of {context} tokens is not possible; this model has {config.context} at most")
    cut = units(config, quantisation, block, stored, exact)
    validate_shares(cut, shares)
    return _Builder(config, cut, shares, rank).build(context)


@dataclass(frozen=True)
class _Projection:
    """A matmul back to the residual, whose inner dimension K is cut over the ranks: f32[T, K]{tp} -> f32[T, D]{U_tp}.

    Attributes:
        at: where in the model it is.
        tensor: its name in the checkpoint.
        columns: of this rank, along K.
        leaves: of every rank, by rank.
        leaf_columns: of one leaf, along K.
    """

    at: str
    tensor: str
    has_bias: bool
    columns: range
    leaves: Sequence[range]
    leaf_columns: Callable[[int], range]


class _Builder:
    """Collects nodes and weights while it walks through the layers; values are known by name."""

    def __init__(self, config: ModelConfig, cut: Units, shares: Sequence[Share], rank: int) -> None:
        self.config = config
        self.cut = cut
        self.shares = shares
        self.rank = rank
        self.size = len(shares)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self.crossing: list[onnx.ValueInfoProto] = []
        self.weights: list[Weight] = []

        share = shares[rank]
        self.q_heads = cut.query_heads(share.attention, share.attention_split, config)
        self.kv_heads = [head for group, _ in kv_heads(share) for head in cut.kv_heads(range(group, group + 1), config)]
        self.mlp_units = share.mlp
        self.words = range(
            min(share.vocabulary.start * cut.vocabulary_rows, config.vocabulary),
            min(share.vocabulary.stop * cut.vocabulary_rows, config.vocabulary),
        )

    def build(self, context: int) -> Declared:
        residual = "hidden"
        for layer in range(self.config.layers):
            residual = self.attention(layer, residual)
            residual = self.mlp_block(layer, residual)
        if self.words:
            self.head(residual)

        placed, share_bytes = lay_out(self.weights)
        caches = [
            CacheSpec(layer, len(self.kv_heads), self.config.head_dim)
            for layer in range(self.config.layers)
            if self.kv_heads
        ]
        graph = helper.make_graph(
            self.nodes,
            f"{self.config.family} rank {self.rank} of {self.size}",
            inputs=[
                _value("hidden", "T", self.config.hidden),
                _value("position", 1, kind=TensorProto.INT64),
                _value("rows", "R", kind=TensorProto.INT64),
                *(_value(name, context + 1, self.config.head_dim // 2) for name in ROTARY_TABLES),
                *(value for spec in caches for value in _cache_values(spec, "")),
            ],
            outputs=[
                *([_value("logits", "R", len(self.words))] if self.words else []),
                *(value for spec in caches for value in _cache_values(spec, ".out")),
            ],
            initializer=[*self.constants.values(), *(tensor for place in placed for tensor in _stored(place))],
            value_info=self.crossing,
        )
        proto = helper.make_model(
            graph,
            functions=[CACHED_ATTENTION] if caches else [],
            opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)],
            ir_version=IR_VERSION,
            producer_name="motley",
        )
        return Declared(
            proto=proto,
            weights=placed,
            share_bytes=share_bytes,
            constants=_constants(self.config, context),
            caches=caches,
            hidden=self.config.hidden,
            words=self.words,
            words_per_unit=self.cut.vocabulary_rows,
            context=context,
        )

    def attention(self, layer: int, residual: str) -> str:
        """f32[T, D] -> f32[T, D]: the residual with the attention block of a layer added."""
        at, checkpoint = f"layers.{layer}.attention", f"model.layers.{layer}.self_attn"
        config, width = self.config, self.config.head_dim
        finest = self.cut.attention_splits[-1]
        split = finest // self.shares[self.rank].attention_split
        output = _Projection(
            f"{at}.output",
            f"{checkpoint}.o_proj",
            config.output_bias,
            _scaled(self.q_heads, width),
            [_scaled(share.attention, split) for share in self.shares],
            lambda leaf: _scaled(self.cut.query_heads(range(leaf, leaf + 1), finest, config), width),
        )
        if not self.q_heads:
            if config.whole_qk_norm:
                self.all_reduce(self.zeros(f"{at}.squares", residual, 2), f"{at}.squares", 2)
            return self.add_product(at, residual, output, None)

        q_rows = _scaled(self.q_heads, width)
        kv_rows = [_scaled(heads, width) for heads in _runs(self.kv_heads)]
        projections = [("q_proj", q_rows), *(("k_proj", r) for r in kv_rows), *(("v_proj", r) for r in kv_rows)]
        normed = self.norm(f"{at}.norm", residual, f"model.layers.{layer}.input_layernorm.weight")
        qkv = self.matmul(
            f"{at}.qkv",
            normed,
            [Piece(f"{checkpoint}.{name}.weight", rows, range(config.hidden)) for name, rows in projections],
            [Piece(f"{checkpoint}.{name}.bias", rows) for name, rows in projections] if config.qkv_bias else [],
        )
        kv_width = len(self.kv_heads) * width
        rms = self.whole_rms(at, qkv) if config.whole_qk_norm else []
        q, k, v = self.split(qkv, {f"{at}.q": len(q_rows), f"{at}.k": kv_width, f"{at}.v": kv_width})
        if config.whole_qk_norm:
            q = self.scaled_by(f"{q}.norm", q, rms[0], [Piece(f"{checkpoint}.q_norm.weight", q_rows)])
            k = self.scaled_by(f"{k}.norm", k, rms[1], [Piece(f"{checkpoint}.k_norm.weight", rows) for rows in kv_rows])
        elif config.qk_norm:
            q = self.head_norm(f"{q}.norm", q, f"{checkpoint}.q_norm.weight", len(self.q_heads))
            k = self.head_norm(f"{k}.norm", k, f"{checkpoint}.k_norm.weight", len(self.kv_heads))
        if config.clip_qkv:
            bounds = [self.floats(-config.clip_qkv), self.floats(config.clip_qkv)]
            q, k, v = (self.node("Clip", [x, *bounds], f"{x}.clipped") for x in (q, k, v))
        caches = [f"key_cache.{layer}", f"value_cache.{layer}"]
        attended = self.node(
            "CachedAttention",
            [q, k, v, *caches, "position", "cos_cache", "sin_cache"],
            f"{at}.attended",
            *(f"{cache}.out" for cache in caches),
            domain=DOMAIN,
            q_heads=len(self.q_heads),
            kv_heads=len(self.kv_heads),
            head_dim=width,
            scale=width**-0.5,
            window=config.windows[layer],
        )
        return self.add_product(at, residual, output, attended)

    def mlp_block(self, layer: int, residual: str) -> str:
        """f32[T, D] -> f32[T, D]: the residual with the gated MLP of a layer, or with its experts, added."""
        at, module = f"layers.{layer}.mlp", f"model.layers.{layer}.mlp"
        config = self.config
        if experts := config.experts_of(layer):
            partial = (
                self.mixture(layer, residual, experts)
                if self.mlp_units
                else self.zeros(f"{at}.partial", residual, config.hidden)
            )
            return self.node("Add", [residual, self.all_reduce(partial, at, config.hidden)], f"{at}.residual")

        columns = self.cut.columns(self.mlp_units, config.intermediate)
        down = _Projection(
            f"{at}.down",
            f"{module}.down_proj",
            config.mlp_bias,
            columns,
            [share.mlp for share in self.shares],
            lambda leaf: self.cut.columns(range(leaf, leaf + 1), config.intermediate),
        )
        if not columns:
            return self.add_product(at, residual, down, None)
        normed = self.mlp_norm(layer, residual)
        return self.add_product(at, residual, down, self.gated(at, module, normed, columns))

    def mlp_norm(self, layer: int, residual: str) -> str:
        return self.norm(f"layers.{layer}.mlp.norm", residual, f"model.layers.{layer}.post_attention_layernorm.weight")

    def gated(self, at: str, module: str, x: str, columns: range) -> str:
        """f32[T, D] -> f32[T, F]{tp}: what the down projection of a gated MLP gets."""
        projections = ("gate_proj", "up_proj")
        gate_up = self.matmul(
            f"{at}.gate_up",
            x,
            [Piece(f"{module}.{name}.weight", columns, range(self.config.hidden)) for name in projections],
            [Piece(f"{module}.{name}.bias", columns) for name in projections] if self.config.mlp_bias else [],
        )
        gate, up = self.split(gate_up, {f"{at}.gate": len(columns), f"{at}.up": len(columns)})
        return self.node("Mul", [self.node("Swish", [gate], f"{gate}.swish"), up], f"{at}.gated")

    def mlp(self, at: str, module: str, x: str, columns: range) -> str:
        """f32[T, D] -> f32[T, D]{U_tp}: some columns of a gated MLP without biases."""
        down = Piece(f"{module}.down_proj.weight", range(self.config.hidden), columns)
        return self.matmul(f"{at}.down", self.gated(at, module, x, columns), [down])

    def mixture(self, layer: int, residual: str, experts: Experts) -> str:
        """f32[T, D] -> f32[T, D]{U_tp}: this rank's columns of every row's experts, weighted and summed."""
        at, module = f"layers.{layer}.mlp", f"model.layers.{layer}.mlp"
        x = self.mlp_norm(layer, residual)
        weights, chosen = self.route(f"{at}.router", f"model.layers.{layer}.{ROUTER}", x, experts)
        operands = [x, weights, chosen]
        if experts.shared:
            columns = self.cut.columns(self.mlp_units, experts.shared)
            shared = self.mlp(f"{at}.shared", f"{module}.shared_expert", x, columns)
            share = self.router(f"{at}.shared.router", f"model.layers.{layer}.{SHARED_GATE}", x, 1)
            share = self.node("Sigmoid", [share], f"{at}.shared.share")
            operands.append(self.node("Mul", [shared, share], f"{at}.shared.scaled"))
        columns = self.cut.columns(self.mlp_units, experts.intermediate)
        bodies = [
            self.expert(f"{at}.experts.{number}", f"{module}.experts.{number}", columns)
            for number in range(experts.count)
        ]
        self.crosses(weights, experts.chosen)
        self.crosses(chosen, experts.chosen, TensorProto.INT64)
        return self.node("Experts", operands, f"{at}.mixture", domain=DOMAIN, experts=bodies)

    def expert(self, at: str, module: str, columns: range) -> onnx.GraphProto:
        """f32[N, D] -> f32[N, D]{U_tp}: this rank's columns of one expert, for the rows that are sent to it."""
        around, self.nodes = self.nodes, []
        y = self.mlp(at, module, f"{at}.x", columns)
        nodes, self.nodes = self.nodes, around
        hidden = self.config.hidden
        return helper.make_graph(nodes, at, [_value(f"{at}.x", "N", hidden)], [_value(y, "N", hidden)])

    def route(self, at: str, tensor: str, x: str, experts: Experts) -> list[str]:
        """f32[T, D] -> f32[T, K] and i64[T, K]: the weights of every row's K experts, and which these are."""
        odds = self.node("Softmax", [self.router(at, tensor, x, experts.count)], f"{at}.odds", axis=-1)
        weights, chosen = f"{at}.weights", f"{at}.chosen"
        self.node("TopK", [odds, self.integers([experts.chosen])], weights, chosen, axis=-1, largest=1, sorted=1)
        if experts.normalised:
            total = self.node("ReduceSum", [weights, self.integers([1])], f"{at}.total", keepdims=1)
            weights = self.node("Div", [weights, total], f"{at}.normalised")
        return [weights, chosen]

    def router(self, name: str, tensor: str, x: str, rows: int) -> str:
        """f32[T, D] -> f32[T, rows]: products with all rows of a matrix that every rank has."""
        return self.matmul(name, x, [Piece(tensor, range(rows), range(self.config.hidden))])

    def head(self, residual: str) -> str:
        """f32[T, D] -> f32[R, V]{tp}: the logits of the rows asked for."""
        chosen = self.node("Gather", [residual, "rows"], "head.rows", axis=0)
        normed = self.norm("head.norm", chosen, "model.norm.weight")
        table = EMBEDDING if self.config.tied else HEAD
        piece = Piece(table, self.words, range(self.config.hidden))
        return self.matmul("head", normed, [piece], output="logits")

    def add_product(self, at: str, residual: str, projection: _Projection, x: str | None) -> str:
        """f32[T, D] + f32[T, K]{tp} -> f32[T, D]: the product of all ranks, added to the residual; no `x`: no units."""
        total = self.tree_sum(at, projection, x) if self.cut.exact else self.rank_sum(at, projection, x, residual)
        return self.node("Add", [residual, total], f"{at}.residual")

    def rank_sum(self, at: str, projection: _Projection, x: str | None, residual: str) -> str:
        """f32[T, K]{tp} -> f32[T, D]: one matmul per rank, summed in rank order."""
        if x is None:
            partial = self.zeros(f"{at}.partial", residual, self.config.hidden)
        else:
            partial = self.project(projection.at, projection, x, projection.columns)
        return self.all_reduce(partial, at, self.config.hidden)

    def tree_sum(self, at: str, projection: _Projection, x: str | None) -> str:
        """f32[T, K]{tp} -> f32[T, D]: one matmul per leaf, summed by the tree over all leaves."""

        def add(span: range, left: str, right: str) -> str:
            return self.node("Add", [left, right], f"{at}.sum.{span.start}.{span.stop}")

        leaves = projection.leaves
        total = range(leaves[-1].stop)
        sums: dict[range, str] = {}
        if x is not None:
            columns = {leaf: projection.leaf_columns(leaf) for leaf in leaves[self.rank]}
            xs = [x]
            if len(columns) > 1:
                xs = self.split(x, {f"{projection.at}.{leaf}.x": len(span) for leaf, span in columns.items()})
            for (leaf, span), part in zip(columns.items(), xs, strict=True):
                sums[range(leaf, leaf + 1)] = self.project(f"{projection.at}.{leaf}", projection, part, span)
        trees = [subtrees(own, len(total)) for own in leaves]
        own = [fold(span, sums, add) for span in trees[self.rank]]
        spans = [span for tree in trees for span in tree]
        gathered = [f"{at}.gathered.{span.start}.{span.stop}" for span in spans]
        counts = [len(tree) for tree in trees]
        sums = dict(
            zip(spans, self.collective(own, gathered, self.config.hidden, "all_gather", counts=counts), strict=True)
        )
        return fold(total, sums, add)

    def project(self, name: str, projection: _Projection, x: str, columns: range) -> str:
        """f32[T, K] -> f32[T, D]: the part of a projection that some columns of K make."""
        rows = range(self.config.hidden)
        bias = [Piece(f"{projection.tensor}.bias", rows)] if projection.has_bias and columns.start == 0 else []
        return self.matmul(name, x, [Piece(f"{projection.tensor}.weight", rows, columns)], bias)

    def all_reduce(self, partial: str, at: str, width: int) -> str:
        """f32[T, width] -> f32[T, width]: the sum of all ranks' terms."""
        return self.collective([partial], [f"{at}.reduced"], width, "all_reduce", reduce_op="sum")[0]

    def collective(
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
            self.crosses(value, width)
        return results

    def crosses(self, name: str, width: int, kind: int = TensorProto.FLOAT) -> None:
        """Declare a value [T, width] that is read on the other side of a collective, or of a layer's experts."""
        self.crossing.append(_value(name, "T", width, kind=kind))

    def zeros(self, name: str, residual: str, width: int) -> str:
        """f32[T, width]: what a rank without units adds to a sum."""
        rows = self.node("Shape", [residual], f"{name}.rows", start=0, end=1)
        shape = self.node("Concat", [rows, self.integers([width])], f"{name}.shape", axis=0)
        return self.node("ConstantOfShape", [shape], name)

    def matmul(self, name: str, x: str, pieces: list[Piece], bias: list[Piece] | None = None, output: str = "") -> str:
        """f32[T, K] -> f32[T, N] with the weight f32[N, K] `name`, held as its pieces' tensors are."""
        held = self.cut.held.get(pieces[0].tensor, FLOATS)
        weight = Weight(f"{name}.weight", tuple(pieces), held.encoding, held.block, held.zeros)
        matrix = self.weight(weight)
        if weight.scale_shape is not None:
            matrix = self.dequantised(weight)
        biases = [self.weight(Weight(f"{name}.bias", tuple(bias)))] if bias else []
        return self.node("Gemm", [x, matrix, *biases], output or name, transB=1)

    def dequantised(self, weight: Weight) -> str:
        """f32[N, K] of a quantised weight: ``(code - zero_point) * scale``, a scale for each block along K."""
        assert weight.scale_shape is not None
        if weight.zeros:
            zero_point = f"{weight.name}.zero"
        else:
            centre = helper.make_tensor("value", _STORED_AS[weight.encoding], [1], [ZERO_POINT[weight.encoding]])
            shape = self.integers(weight.scale_shape)
            zero_point = self.node("ConstantOfShape", [shape], f"{weight.name}.zero_point", value=centre)
        return self.node(
            "DequantizeLinear",
            [weight.name, f"{weight.name}.scale", zero_point],
            f"{weight.name}.dequantised",
            axis=1,
            block_size=weight.block,
        )

    def norm(self, name: str, x: str, tensor: str, width: int | None = None) -> str:
        vector = self.weight(Weight(f"{name}.weight", (Piece(tensor, range(width or self.config.hidden)),)))
        return self.node("RMSNormalization", [x, vector], name, axis=-1, epsilon=self.config.norm_epsilon)

    def head_norm(self, name: str, x: str, tensor: str, heads: int) -> str:
        """f32[T, heads * head_dim] -> the same, each head normalised."""
        width = self.config.head_dim
        apart = self.node("Reshape", [x, self.integers((-1, heads, width))], f"{name}.heads")
        normed = self.norm(name, apart, tensor, width)
        return self.node("Reshape", [normed, self.integers((-1, heads * width))], f"{name}.rows")

    def whole_rms(self, at: str, qkv: str) -> list[str]:
        """f32[T, E]{tp} -> f32[T, 1] twice: the root mean squares of every row's queries and of its keys, of all ranks.

        A key head that several ranks have, or one has several times, is counted where its first unit is.
        """
        config, width, share = self.config, self.config.head_dim, self.shares[self.rank]
        counted = [part.start == group * share.attention_split for group, part in kv_heads(share)]
        queries, keys = len(self.q_heads) * width, len(counted) * width
        picks = np.zeros((2, queries + 2 * keys), np.float32)
        picks[0, :queries] = 1
        picks[1, queries : queries + keys] = np.repeat(counted, width)
        self.constants["attention.picks"] = numpy_helper.from_array(picks, "attention.picks")
        squares = self.node("Mul", [qkv, qkv], f"{at}.qkv.squared")
        partial = self.node("Gemm", [squares, "attention.picks"], f"{at}.squares", transB=1)
        self.crosses(qkv, picks.shape[1])
        total = self.all_reduce(partial, f"{at}.squares", 2)
        shares = self.floats(1 / (config.heads * width), 1 / (config.kv_heads * width))
        mean = self.node("Mul", [total, shares], f"{at}.squares.mean")
        above = self.node("Add", [mean, self.floats(config.norm_epsilon)], f"{at}.squares.above")
        return self.split(self.node("Sqrt", [above], f"{at}.rms"), {f"{at}.q.rms": 1, f"{at}.k.rms": 1})

    def scaled_by(self, name: str, x: str, rms: str, pieces: list[Piece]) -> str:
        """f32[T, E]{tp} / f32[T, 1] * f32[E]{tp}: a norm whose root mean square is known."""
        vector = self.weight(Weight(f"{name}.weight", tuple(pieces)))
        return self.node("Mul", [self.node("Div", [x, rms], f"{name}.unscaled"), vector], name)

    def split(self, x: str, widths: Mapping[str, int]) -> list[str]:
        self.node("Split", [x, self.integers(widths.values())], *widths, axis=1)
        return list(widths)

    def weight(self, weight: Weight) -> str:
        self.weights.append(weight)
        return weight.name

    def integers(self, values: Iterable[int]) -> str:
        """A small constant i64 vector, shared by everyone who needs the same."""
        vector = list(values)
        name = "i64." + ".".join(map(str, vector))
        if name not in self.constants:
            self.constants[name] = helper.make_tensor(name, TensorProto.INT64, [len(vector)], vector)
        return name

    def floats(self, *values: float) -> str:
        """A small constant: f32[] if it is one value, else a vector; shared likewise."""
        name = "f32." + ".".join(map(str, values))
        if name not in self.constants:
            shape = [len(values)] if len(values) > 1 else []
            self.constants[name] = helper.make_tensor(name, TensorProto.FLOAT, shape, values)
        return name

    def node(self, op: str, inputs: list[str], *outputs: str, domain: str = "", **attributes: Any) -> str:
        """Append a node, named after its first output; returns that."""
        self.nodes.append(helper.make_node(op, inputs, list(outputs), name=outputs[0], domain=domain, **attributes))
        return outputs[0]


def _constants(config: ModelConfig, context: int) -> Callable[[int], Mapping[str, F32]]:
    scaling = config.rope.scaling
    alike = scaling.original_context if isinstance(scaling, DynamicScaling) else context
    """Prompts up to this length share their tables."""

    @lru_cache(maxsize=2)
    def tables(prompt: int) -> Mapping[str, F32]:
        both = rotary_tables(config.rope, config.head_dim, context + 1, prompt)  # an exact engine runs a row beyond
        return dict(zip(ROTARY_TABLES, both, strict=True))

    return lambda prompt: tables(prompt if prompt > alike else 0)


def _scaled(span: range, width: int) -> range:
    return range(span.start * width, span.stop * width)


def _runs(numbers: Sequence[int]) -> list[range]:
    """Numbers as ranges of neighbours: ``[1, 2, 2, 3] -> [1..2], [2..3]``."""
    groups = groupby(enumerate(numbers), key=lambda item: item[1] - item[0])
    return [range(run[0], run[-1] + 1) for run in ([number for _, number in group] for _, group in groups)]


def _value(name: str, *shape: int | str, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _cache_values(spec: CacheSpec, suffix: str) -> list[onnx.ValueInfoProto]:
    return [
        _value(f"{kind}_cache.{spec.layer}{suffix}", 1, spec.heads, "C", spec.head_dim) for kind in ("key", "value")
    ]


_STORED_AS = {
    Encoding.FP32: TensorProto.FLOAT,
    Encoding.INT8: TensorProto.UINT8,
    Encoding.INT4: TensorProto.UINT4,
}


def _stored(place: Placed) -> list[onnx.TensorProto]:
    """The initializers of a weight: references to where they are in the share file."""
    weight = place.weight
    tensors = [_external(weight.name, _STORED_AS[weight.encoding], weight.shape, place.data_offset, weight.data_bytes)]
    if weight.scale_shape is not None:
        scale = f"{weight.name}.scale"
        tensors.append(_external(scale, TensorProto.FLOAT, weight.scale_shape, place.scale_offset, weight.scale_bytes))
        if weight.zeros:
            zero, kind = f"{weight.name}.zero", _STORED_AS[weight.encoding]
            tensors.append(_external(zero, kind, weight.scale_shape, place.zero_offset, weight.zero_bytes))
    return tensors


def _external(name: str, kind: int, shape: Sequence[int], offset: int, length: int) -> onnx.TensorProto:
    tensor = TensorProto(name=name, data_type=kind, dims=shape, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", SHARE_FILE), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)
    return tensor
