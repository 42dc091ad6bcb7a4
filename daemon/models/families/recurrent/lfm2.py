"""LFM2: short convolutions between two gates, attention in some layers; its mixtures have experts in most layers.

Source: https://arxiv.org/abs/2511.23404
"""

from __future__ import annotations

from collections.abc import Callable

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.experts import expert_count, experts
from motley.daemon.models.blocks.layer_kinds import FULL, attending_layers
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import Shape, read_shape
from motley.daemon.models.blocks.spelling import spelled
from motley.daemon.models.description.axes import Axis, Heads, Kind, Value, W
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.experts import Routing
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope
from motley.daemon.weights.places import Part

CONVOLUTION = "conv"
NAMES = {
    ".input_layernorm.": ".operator_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    ".self_attn.o_proj.": ".self_attn.out_proj.",
    ".q_norm.": ".q_layernorm.",
    ".k_norm.": ".k_layernorm.",
    ".mlp.": ".feed_forward.",
    ".gate_proj.": ".w1.",
    ".up_proj.": ".w3.",
    ".down_proj.": ".w2.",
    "model.norm.": "model.embedding_norm.",
}
"""What files call modules of the usual blocks."""

Feed = Callable[[Writer, int, Value], Value]
"""Writes a layer's MLP, or its experts, given its number and the normalised rows."""


def lfm2(keys: Keys) -> Model:
    """Describe a model of type ``lfm2``."""
    columns = mlp_axis(_adjusted(keys, keys.size("block_ff_dim", keys.size("intermediate_size", 12288))))
    return _hybrid("lfm2", keys, lambda shape: lambda writer, number, x: mlp(writer, number, x, columns))


def lfm2_moe(keys: Keys) -> Model:
    """Describe a model of type ``lfm2_moe``."""
    count, columns = expert_count(keys), keys.size("moe_intermediate_size")
    dense, plain = keys.size("num_dense_layers", 2, least=0), mlp_axis(keys.size("intermediate_size"))
    corrected, chosen = keys.flag("use_expert_bias", True), keys.size("num_experts_per_tok")
    normalised, scaling = keys.flag("norm_topk_prob", True), keys.number("routed_scaling_factor", 1.0)

    def feeding(shape: Shape) -> Feed:
        def feed(writer: Writer, number: int, x: Value) -> Value:
            if number < dense:
                return mlp(writer, number, x, plain)
            correction = W(f"model.layers.{number}.mlp.expert_bias", Axis(Kind.PLAIN, count, "num_experts"))
            routing = Routing(
                chosen,
                scores="sigmoid",
                normalised=normalised,
                epsilon=1e-6,
                scaling=scaling,
                correction=correction if corrected else None,
            )
            return experts(writer, shape, number, x, count, columns, routing)

        return feed

    return _hybrid("lfm2_moe", keys, feeding)


def _hybrid(family: str, keys: Keys, feeding: Callable[[Shape], Feed]) -> Model:
    epsilon, tied = keys.number("norm_eps", 1e-5), keys.flag("tie_embedding", True)
    shape = read_shape(keys, kv_heads=True, epsilon=epsilon, tied=tied)
    rope, context = read_rope(keys, shape.heads.size, theta=1e6)
    attends = _attending_layers(keys, shape.layers)
    if shape.hidden % shape.heads.queries:
        raise keys.refusal("hidden_size", f"a multiple of num_attention_heads = {shape.heads.queries}")
    bias, sees = keys.flag("conv_bias", False), keys.size("conv_L_cache", 3, least=2)
    feed = feeding(shape)

    def layer(number: int) -> Layer:
        def mix(writer: Writer, x: Value) -> Value:
            if attends[number]:
                return attention(writer, shape, number, x, qk_norm=True)
            return short_convolution(writer, shape, number, x, sees, bias)

        return pre_norm_layer(shape, number, mix, lambda writer, x: feed(writer, number, x))

    return spelled(model(family, shape, layer, {"main": rope}, context), NAMES)


def short_convolution(writer: Writer, shape: Shape, number: int, x: Value, sees: int, bias: bool) -> Value:
    """f32[T, D] -> f32[T, D]{U_tp}: b, c and x are projected; ``c * convolution(b * x)`` is projected back.

    It is cut as if the elements of the residual were those of the query heads.

    Args:
        sees: positions that the convolution sees, a row's own among them.
        bias: whether the projections and the convolution have one.
    """
    at, module, hidden = f"layers.{number}.attention", f"model.layers.{number}.conv", shape.hidden
    heads = Heads(shape.heads.queries, shape.heads.keys, hidden // shape.heads.queries)
    elements = Axis(Kind.HEADS, hidden, "hidden_size", heads)

    def projection(letter: str, start: int) -> W:
        own = f"{module}.in_proj_{letter}"
        parts = (Part(f"{module}.in_proj.weight", (3 * hidden, hidden), start),)
        bias_parts = (Part(f"{module}.in_proj.bias", (3 * hidden,), start),)
        return W(f"{own}.weight", elements, shape.residual, f"{own}.bias" * bias, parts=parts, bias_parts=bias_parts)

    matrices = [projection(letter, index * hidden) for index, letter in enumerate("bcx")]
    b, c, x = writer.linear(f"{at}.bcx", x, *matrices, ys=(f"{at}.b", f"{at}.c", f"{at}.x"))
    taps = Axis(Kind.PLAIN, sees, "conv_L_cache")
    whole = Part(f"{module}.conv.weight[:, 0]", (hidden, sees))
    own = W(f"{module}.conv_taps.weight", elements, taps, parts=(whole,))
    added = W(f"{module}.conv.bias", elements) if bias else None
    y = writer.short_convolution(f"{at}.recurrent", number, (b, c, x), own, added)
    output = W(f"{module}.out_proj.weight", shape.residual, elements, f"{module}.out_proj.bias" * bias)
    return writer.linear(f"{at}.output", y, output)[0]


def _adjusted(keys: Keys, columns: int) -> int:
    """The columns of an MLP: two thirds of what the config says, times a number, and then a multiple of one."""
    if not keys.flag("block_auto_adjust_ff_dim", True):
        return columns
    by, multiple = keys.number("block_ffn_dim_multiplier", 1.0), keys.size("block_multiple_of", 256)
    if not 0 < by <= 1000:
        raise keys.refusal("block_ffn_dim_multiplier", "a number above 0, up to 1000")
    return -(-int(by * int(2 * columns / 3)) // multiple) * multiple


def _attending_layers(keys: Keys, layers: int) -> list[bool]:
    """Which layers attend; the others convolve."""
    listed = keys.get("full_attn_idxs")
    numbers = isinstance(listed, list) and all(type(each) is int and each in range(layers) for each in listed)
    if listed is not None and not numbers:
        raise keys.refusal("full_attn_idxs", f"a list of layers from 0 to {layers - 1}")
    default = [FULL if listed is None or number in listed else CONVOLUTION for number in range(layers)]
    return attending_layers(keys, layers, default, CONVOLUTION)
