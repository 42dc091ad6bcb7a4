"""One rank's graph from a model's config and everyone's shares: the single definition of the maths.

Sharding, in the notation of the JAX scaling book (T rows, D residual, E heads * head_dim, F MLP columns, V words):

- QKV and gate/up are cut by rows of the weight: ``f32[T, D] -> f32[T, E]{tp}`` and ``f32[T, F]{tp}``;
- output and down projections by columns, so each rank has an unreduced sum ``f32[T, D]{U_tp}``, which a
  ``DistCollective`` turns into the replicated ``f32[T, D]`` that is added to the residual;
- the head by rows: ``f32[R, V]{tp}``;
- experts as MLPs: a rank has a slice of each, and one sum over the ranks follows the weighted sum over a row's experts.
  Which these are every rank finds out for itself, from the same residual;
- experts *elsewhere*: the ranks are a trunk that has no slice of them. They sum the shared expert, if there is one, and
  each adds the weighted results of a row's experts to that sum: whole ones, ``f32[T, D]`` on every rank. A whole expert
  is a graph of its own.

A rank without attention or MLP units contributes zeros. Collectives act on other ranks: an engine must meet them
all, in order, also where nothing on this rank reads the result.

In *exact* mode an output or down projection is a matmul per leaf (see `motley.daemon.models.tree`). A rank sums its
leaves to subtrees, all ranks gather those of all, and everyone sums them on by the same tree. A rank without units has
nothing to gather from it. A bias belongs to the first leaf. Sliced experts make a result per leaf, and of each leaf
there is a weighted sum over a row's experts before those of all leaves are summed: so no more travels than of an MLP.
Whole experts know no leaves. Hence the two differ by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from motley.plugins.expert_engine import ExpertGraph

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
    config: ModelConfig,
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
        experts_elsewhere: the ranks are a trunk without routed experts, see `build_expert_graph`.
        beside: how other ranks hold the matrices, which their units suit too.

    Raises:
        ConfigError: the encoding or the context is not possible for this model.
        ShareError: the shares do not tile the model.
    """
    if not 1 <= context <= config.context:
        raise ConfigError(f"a context of {context} tokens is not possible; this model has {config.context} at most")
    cut = units(config, quantisation, block, stored, exact, beside)
    validate_shares(cut, shares)
    return _Builder(config, cut, shares, rank, experts_elsewhere).build(context)


@dataclass(frozen=True)
class DeclaredExpert:
    """The graph of an expert, or of a slice of one, and its weights, declared before one was read."""

    proto: onnx.ModelProto
    weights: list[Placed]
    share_bytes: int
    """The share file's size."""
    hidden: int

    @property
    def weight_bytes(self) -> int:
        """All that its weights take, without alignment."""
        return sum(place.weight.all_bytes for place in self.weights)

    def bind(self, share_file: Path) -> ExpertGraph:
        """The graph with its weights in `share_file`, which is called `SHARE_FILE` in a folder of its own."""
        assert share_file.name == SHARE_FILE, share_file
        return ExpertGraph(self.proto, share_file, self.hidden)


def build_expert_graph(
    config: ModelConfig, cut: Units, layer: int, index: int, slice_: int = 0, slices: int = 1
) -> DeclaredExpert:
    """Declare one expert, f32[N, D] -> f32[N, D], or one slice of it, whose result is a term of a sum over all slices.

    Args:
        cut: how the model's matrices are held, as `units` gives it: values and blocks are those of any slice.
        slice_, slices: the number of the slice, and into how many the expert is cut: at most `cut.mlp`.

    Raises:
        ConfigError: the model has no such expert, or it has fewer units than slices.
    """
    experts = config.experts_of(layer) if 0 <= layer < config.layers else None
    if experts is None or not 0 <= index < experts.count:
        raise ConfigError(f"this model has no expert {index} in layer {layer} ({config.family})")
    if not slices <= cut.mlp:
        raise ConfigError(f"an expert of {cut.mlp} units cannot be cut in {slices} slices ({config.family})")
    builder = _Nodes(config, cut)
    number = f"mlp.experts.{index}"
    columns = cut.columns(range(cut.mlp * slice_ // slices, cut.mlp * (slice_ + 1) // slices), experts.intermediate)
    at = f"layers.{layer}.{number}" + (f".slice.{slice_}.of.{slices}" if slices > 1 else "")
    graph = builder.expert(at, f"model.layers.{layer}.{number}", {at: columns})
    placed, share_bytes = lay_out(builder.weights)
    graph.initializer.extend(builder.initializers(placed))
    return DeclaredExpert(_model(graph), placed, share_bytes, config.hidden)


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


class _Nodes:
    """Collects nodes and weights; values are known by name."""

    def __init__(self, config: ModelConfig, cut: Units) -> None:
        self.config = config
        self.cut = cut
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self.weights: list[Weight] = []

    def initializers(self, placed: Iterable[Placed]) -> list[onnx.TensorProto]:
        return [*self.constants.values(), *(tensor for place in placed for tensor in _stored(place))]

    def gate_up(self, at: str, module: str, x: str, columns: range) -> str:
        """f32[T, D] -> f32[T, 2 F]{tp}: gate and up of a gated MLP, side by side."""
        projections = ("gate_proj", "up_proj")
        return self.matmul(
            f"{at}.gate_up",
            x,
            [Piece(f"{module}.{name}.weight", columns, range(self.config.hidden)) for name in projections],
            [Piece(f"{module}.{name}.bias", columns) for name in projections] if self.config.mlp_bias else [],
        )

    def gated(self, at: str, gate_up: str, columns: range) -> str:
        """f32[T, 2 F]{tp} -> f32[T, F]{tp}: what the down projection of a gated MLP gets."""
        gate, up = self.split(gate_up, {f"{at}.gate": len(columns), f"{at}.up": len(columns)})
        return self.node("Mul", [self.node("Swish", [gate], f"{gate}.swish"), up], f"{at}.gated")

    def mlps(self, module: str, x: str, columns: Mapping[str, range]) -> list[str]:
        """f32[T, D] -> f32[T, D]{U_tp} each: some columns of a gated MLP without biases, by where in the model that is.

        What is alike stands together, as an engine may run it in one go.
        """
        gate_ups = [self.gate_up(at, module, x, own) for at, own in columns.items()]
        gated = [self.gated(at, both, own) for both, (at, own) in zip(gate_ups, columns.items(), strict=True)]
        down, rows = f"{module}.down_proj.weight", range(self.config.hidden)
        return [
            self.matmul(f"{at}.down", inner, [Piece(down, rows, own)])
            for inner, (at, own) in zip(gated, columns.items(), strict=True)
        ]

    def expert(self, at: str, module: str, columns: Mapping[str, range]) -> onnx.GraphProto:
        """f32[N, D] -> f32[N, D]{U_tp} each: some columns of one expert for the rows that are sent to it, as `mlps`."""
        around, self.nodes = self.nodes, []
        results = self.mlps(module, f"{at}.x", columns)
        nodes, self.nodes = self.nodes, around
        hidden = self.config.hidden
        outputs = [_value(result, "N", hidden) for result in results]
        return helper.make_graph(nodes, at, [_value(f"{at}.x", "N", hidden)], outputs)

    def matmul(self, name: str, x: str, pieces: list[Piece], bias: list[Piece] | None = None, output: str = "") -> str:
        """f32[T, K] -> f32[T, N] with the weight f32[N, K] `name`, held as its pieces' tensors are."""
        held = self.cut.held.get(pieces[0].tensor, FLOATS)
        weight = Weight(f"{name}.weight", tuple(pieces), held.encoding, held.block, held.zeros)
        matrix = self.weight(weight)
        if weight.scale_shape is not None:
            matrix = self.dequantised(weight)
        elif weight.encoding is not Encoding.FP32:
            matrix = self.node("Cast", [matrix], f"{matrix}.fp32", to=TensorProto.FLOAT)
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

    def node(self, op: str, inputs: list[str], *outputs: str, domain: str = "", **attributes: Any) -> str:
        """Append a node, named after its first output; returns that."""
        self.nodes.append(helper.make_node(op, inputs, list(outputs), name=outputs[0], domain=domain, **attributes))
        return outputs[0]


class _Builder(_Nodes):
    """One rank's, collected while it walks through the layers."""

    def __init__(
        self, config: ModelConfig, cut: Units, shares: Sequence[Share], rank: int, experts_elsewhere: bool
    ) -> None:
        super().__init__(config, cut)
        self.shares = shares
        self.rank = rank
        self.size = len(shares)
        self.experts_elsewhere = experts_elsewhere
        self.crossing: dict[str, onnx.ValueInfoProto] = {}

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
            initializer=self.initializers(placed),
            value_info=list(self.crossing.values()),
        )
        return Declared(
            proto=_model(graph, [CACHED_ATTENTION] if caches else []),
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
            if config.whole_qk_norm and self.cut.exact:
                self.tree_sum(f"{at}.squares", output.leaves, {}, 2)
            elif config.whole_qk_norm:
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
        rms = self.whole_rms(at, qkv, output.leaves) if config.whole_qk_norm else []
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
            mixture = self.mixture_elsewhere if self.experts_elsewhere else self.mixture
            return self.node("Add", [residual, mixture(layer, residual, experts)], f"{at}.residual")

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
        gate_up = self.gate_up(at, module, self.mlp_norm(layer, residual), columns)
        return self.add_product(at, residual, down, self.gated(at, gate_up, columns))

    def mlp_norm(self, layer: int, residual: str) -> str:
        return self.norm(f"layers.{layer}.mlp.norm", residual, f"model.layers.{layer}.post_attention_layernorm.weight")

    def mixture(self, layer: int, residual: str, experts: Experts) -> str:
        """f32[T, D] -> f32[T, D]: every row's experts, weighted and summed, and the shared one."""
        at, module = f"layers.{layer}.mlp", f"model.layers.{layer}.mlp"
        partial: dict[range, str] = {}
        if parts := self.mlp_parts():
            x, weights, chosen = self.routed(layer, residual, experts)
            shared = self.shared_expert(layer, x, experts) if experts.shared else []
            bodies = [
                self.expert(
                    f"{at}.experts.{number}",
                    f"{module}.experts.{number}",
                    self.columns_of(parts, f"{at}.experts.{number}", experts.intermediate),
                )
                for number in range(experts.count)
            ]
            partial = {part: f"{at}.mixture{suffix}" for part, suffix in parts.items()}
            self.node("Experts", [x, weights, chosen, *shared], *partial.values(), domain=DOMAIN, experts=bodies)
            for total in partial.values():
                self.crosses(total, self.config.hidden)
        return self.mlp_sum(at, residual, partial)

    def mlp_parts(self) -> dict[range, str]:
        """What this rank has of an expert, of which there is a result each, and how they are called: all in one, or in
        exact mode leaves."""
        units = self.mlp_units
        if self.cut.exact:
            return {range(leaf, leaf + 1): f".{leaf}" for leaf in units}
        return {units: ""} if units else {}

    def columns_of(self, parts: Mapping[range, str], at: str, width: int) -> dict[str, range]:
        """The columns of parts in an MLP of `width` columns."""
        return {f"{at}{suffix}": self.cut.columns(part, width) for part, suffix in parts.items()}

    def mlp_sum(self, at: str, residual: str, partial: Mapping[range, str]) -> str:
        """f32[T, D]{U_tp} -> f32[T, D]: the sum of all ranks' parts of an MLP; none: this rank has none."""
        hidden = self.config.hidden
        if self.cut.exact:
            return self.tree_sum(at, [share.mlp for share in self.shares], partial, hidden)
        own = partial.get(self.mlp_units) or self.zeros(f"{at}.partial", residual, hidden)
        return self.all_reduce(own, at, hidden)

    def mixture_elsewhere(self, layer: int, residual: str, experts: Experts) -> str:
        """f32[T, D] -> f32[T, D]: the same; experts elsewhere give every rank whole results, so only the shared one is
        summed over the ranks."""
        at = f"layers.{layer}.mlp"
        x, weights, chosen = self.routed(layer, residual, experts)
        base = []
        if experts.shared:
            parts = self.mlp_parts()
            shared = self.shared_expert(layer, x, experts) if parts else []
            base = [self.mlp_sum(at, residual, dict(zip(parts, shared, strict=True)))]
        total = self.node("Experts", [x, weights, chosen, *base], f"{at}.mixture", domain=DOMAIN, layer=layer)
        self.crosses(total, self.config.hidden)
        return total

    def routed(self, layer: int, residual: str, experts: Experts) -> list[str]:
        """f32[T, D] -> f32[T, D], f32[T, K] and i64[T, K]: what experts get, and what `route` gives."""
        x = self.mlp_norm(layer, residual)
        weights, chosen = self.route(f"layers.{layer}.mlp.router", f"model.layers.{layer}.{ROUTER}", x, experts)
        self.crosses(weights, experts.chosen)
        self.crosses(chosen, experts.chosen, TensorProto.INT64)
        return [x, weights, chosen]

    def shared_expert(self, layer: int, x: str, experts: Experts) -> list[str]:
        """f32[T, D] -> f32[T, D]{U_tp} each: this rank's parts of the shared expert, as much of it as each row gets."""
        at, parts = f"layers.{layer}.mlp.shared", self.mlp_parts()
        columns = self.columns_of(parts, at, experts.shared)
        results = self.mlps(f"model.layers.{layer}.mlp.shared_expert", x, columns)
        share = self.router(f"{at}.router", f"model.layers.{layer}.{SHARED_GATE}", x, 1)
        share = self.node("Sigmoid", [share], f"{at}.share")
        return [
            self.node("Mul", [result, share], f"{at}.scaled{suffix}")
            for result, suffix in zip(results, parts.values(), strict=True)
        ]

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
        total = self.leaf_sum(at, projection, x) if self.cut.exact else self.rank_sum(at, projection, x, residual)
        return self.node("Add", [residual, total], f"{at}.residual")

    def rank_sum(self, at: str, projection: _Projection, x: str | None, residual: str) -> str:
        """f32[T, K]{tp} -> f32[T, D]: one matmul per rank, summed in rank order."""
        if x is None:
            partial = self.zeros(f"{at}.partial", residual, self.config.hidden)
        else:
            partial = self.project(projection.at, projection, x, projection.columns)
        return self.all_reduce(partial, at, self.config.hidden)

    def leaf_sum(self, at: str, projection: _Projection, x: str | None) -> str:
        """f32[T, K]{tp} -> f32[T, D]: one matmul per leaf, summed by the tree over all leaves."""
        leaves = projection.leaves
        sums: dict[range, str] = {}
        if x is not None:
            columns = {leaf: projection.leaf_columns(leaf) for leaf in leaves[self.rank]}
            xs = [x]
            if len(columns) > 1:
                xs = self.split(x, {f"{projection.at}.{leaf}.x": len(span) for leaf, span in columns.items()})
            for (leaf, span), part in zip(columns.items(), xs, strict=True):
                sums[range(leaf, leaf + 1)] = self.project(f"{projection.at}.{leaf}", projection, part, span)
        return self.tree_sum(at, leaves, sums, self.config.hidden)

    def tree_sum(self, at: str, leaves: Sequence[range], sums: Mapping[range, str], width: int) -> str:
        """f32[T, width] of this rank's leaves -> f32[T, width]: the sum of all ranks', by the tree over all leaves.

        Args:
            leaves: of every rank, by rank.
            sums: by spans of one leaf.
        """

        def add(span: range, left: str, right: str) -> str:
            return self.node("Add", [left, right], f"{at}.sum.{span.start}.{span.stop}")

        total = range(leaves[-1].stop)
        trees = [subtrees(own, len(total)) for own in leaves]
        own = [fold(span, sums, add) for span in trees[self.rank]]
        spans = [span for tree in trees for span in tree]
        gathered = [f"{at}.gathered.{span.start}.{span.stop}" for span in spans]
        counts = [len(tree) for tree in trees]
        everyone = self.collective(own, gathered, width, "all_gather", counts=counts)
        return fold(total, dict(zip(spans, everyone, strict=True)), add)

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
        self.crossing[name] = _value(name, "T", width, kind=kind)

    def zeros(self, name: str, residual: str, width: int) -> str:
        """f32[T, width]: what a rank without units adds to a sum."""
        rows = self.node("Shape", [residual], f"{name}.rows", start=0, end=1)
        shape = self.node("Concat", [rows, self.integers([width])], f"{name}.shape", axis=0)
        return self.node("ConstantOfShape", [shape], name)

    def norm(self, name: str, x: str, tensor: str, width: int | None = None) -> str:
        vector = self.weight(Weight(f"{name}.weight", (Piece(tensor, range(width or self.config.hidden)),)))
        return self.node("RMSNormalization", [x, vector], name, axis=-1, epsilon=self.config.norm_epsilon)

    def head_norm(self, name: str, x: str, tensor: str, heads: int) -> str:
        """f32[T, heads * head_dim] -> the same, each head normalised."""
        width = self.config.head_dim
        apart = self.node("Reshape", [x, self.integers((-1, heads, width))], f"{name}.heads")
        normed = self.norm(name, apart, tensor, width)
        return self.node("Reshape", [normed, self.integers((-1, heads * width))], f"{name}.rows")

    def whole_rms(self, at: str, qkv: str, leaves: Sequence[range]) -> list[str]:
        """f32[T, E]{tp} -> f32[T, 1] twice: the root mean squares of every row's queries and of its keys, of all ranks.

        A key head that several ranks have, or one has several times, is counted where its first unit is.

        Args:
            leaves: of attention, of every rank, by rank.
        """
        config, width = self.config, self.config.head_dim
        squares = self.node("Mul", [qkv, qkv], f"{at}.qkv.squared")
        self.crosses(qkv, (len(self.q_heads) + 2 * len(self.kv_heads)) * width)
        if self.cut.exact:
            total = self.tree_sum(f"{at}.squares", leaves, self.leaf_squares(at, squares, leaves[self.rank]), 2)
        else:
            total = self.all_reduce(self.own_squares(at, squares), f"{at}.squares", 2)
        shares = self.floats(1 / (config.heads * width), 1 / (config.kv_heads * width))
        mean = self.node("Mul", [total, shares], f"{at}.squares.mean")
        above = self.node("Add", [mean, self.floats(config.norm_epsilon)], f"{at}.squares.above")
        return self.split(self.node("Sqrt", [above], f"{at}.rms"), {f"{at}.q.rms": 1, f"{at}.k.rms": 1})

    def own_squares(self, at: str, squares: str) -> str:
        """f32[T, E]{tp} -> f32[T, 2]{U_tp}: the sums of this rank's queries' squares, and of its keys'."""
        width, share = self.config.head_dim, self.shares[self.rank]
        counted = [part.start == group * share.attention_split for group, part in kv_heads(share)]
        queries, keys = len(self.q_heads) * width, len(counted) * width
        picks = np.zeros((2, queries + 2 * keys), np.float32)
        picks[0, :queries] = 1
        picks[1, queries : queries + keys] = np.repeat(counted, width)
        self.constants["attention.picks"] = numpy_helper.from_array(picks, "attention.picks")
        return self.node("Gemm", [squares, "attention.picks"], f"{at}.squares", transB=1)

    def leaf_squares(self, at: str, squares: str, leaves: range) -> dict[range, str]:
        """f32[T, E]{tp} -> f32[T, 2] for each of this rank's leaves: the same sums of it alone."""
        config, finest, share = self.config, self.cut.attention_splits[-1], self.shares[self.rank]
        queries = {
            f"{at}.squares.{leaf}.q": len(self.cut.query_heads(range(leaf, leaf + 1), finest, config))
            for leaf in leaves
        }
        groups = [group for group, _ in kv_heads(share)]
        keys = {
            f"{at}.squares.{index}.k": len(self.cut.kv_heads(range(group, group + 1), config))
            for index, group in enumerate(groups)
        }
        heads = {**queries, **keys, f"{at}.squares.v": len(self.kv_heads)}
        self.split(squares, {name: count * config.head_dim for name, count in heads.items()})
        none = self.zeros(f"{at}.squares.none", squares, 1)
        terms: dict[range, str] = {}
        for leaf, query in zip(leaves, queries, strict=True):
            group, part = divmod(leaf, finest)
            columns = [query] if part else [query, [*keys][groups.index(group)]]
            sums = [self.node("ReduceSum", [x, self.integers([1])], f"{x}.sum", keepdims=1) for x in columns]
            pair = [*sums, none][:2]
            terms[range(leaf, leaf + 1)] = self.node("Concat", pair, f"{at}.squares.{leaf}", axis=1)
        return terms

    def scaled_by(self, name: str, x: str, rms: str, pieces: list[Piece]) -> str:
        """f32[T, E]{tp} / f32[T, 1] * f32[E]{tp}: a norm whose root mean square is known."""
        vector = self.weight(Weight(f"{name}.weight", tuple(pieces)))
        return self.node("Mul", [self.node("Div", [x, rms], f"{name}.unscaled"), vector], name)

    def floats(self, *values: float) -> str:
        """A small constant: f32[] if it is one value, else a vector; shared likewise."""
        name = "f32." + ".".join(map(str, values))
        if name not in self.constants:
            shape = [len(values)] if len(values) > 1 else []
            self.constants[name] = helper.make_tensor(name, TensorProto.FLOAT, shape, values)
        return name


def _model(graph: onnx.GraphProto, functions: Sequence[onnx.FunctionProto] = ()) -> onnx.ModelProto:
    return helper.make_model(
        graph,
        functions=functions,
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)],
        ir_version=IR_VERSION,
        producer_name="motley",
    )


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
    Encoding.FP16: TensorProto.FLOAT16,
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
