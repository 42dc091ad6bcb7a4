"""LFM3: LFM2's short convolutions, attention with windows in some layers, a gate on each head, norms around blocks."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import read_window
from motley.daemon.models.blocks.layer_kinds import FULL, SLIDING, layer_kinds
from motley.daemon.models.blocks.layers import both_norms_layer, model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.blocks.spelling import spelled
from motley.daemon.models.description.axes import Value
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.rope import Rope
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.families.recurrent.lfm2 import CONVOLUTION, short_convolution
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import USUAL, rope_keys_of_both_kinds, rope_of

ROPES = {
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
"""The rotary embeddings of layers where a config is silent."""
NORMS = "post_operator_norm", "ffn_norm", "post_ffn_norm"
NAMES = {
    ".input_layernorm.": ".operator_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    ".mlp.gate_proj.": ".feed_forward.w1.",
    ".mlp.up_proj.": ".feed_forward.w3.",
    ".mlp.down_proj.": ".feed_forward.w2.",
    "model.norm.": "model.embedding_norm.",
}
"""What files call modules of the usual blocks."""


def lfm3(keys: Keys) -> Model:
    """Describe a model of type ``lfm3``."""
    keys = keys.filled({"rope_parameters": ROPES})
    epsilon, context = keys.number("norm_eps", 1e-5), keys.size("max_position_embeddings", 128000)
    shape = read_shape(keys.filled({"max_position_embeddings": context}), head_dim=128, epsilon=epsilon, tied=True)
    if shape.hidden % shape.heads.queries:
        raise keys.refusal("hidden_size", f"a multiple of num_attention_heads = {shape.heads.queries}")
    ropes = _ropes(keys.filled({"max_position_embeddings": context}), shape.heads.size)
    kinds, window = _kinds(keys, shape.layers), read_window(keys, 256)
    bias, sees = keys.flag("conv_bias", False), keys.size("conv_L_cache", 7, least=2)
    attention_bias, gate = keys.flag("attention_bias", False), "gate_proj" * keys.flag("use_attention_gate", True)
    columns, around = mlp_axis(keys.size("intermediate_size")), keys.flag("use_sandwich_norm", True)

    def layer(number: int) -> Layer:
        def mix(writer: Writer, x: Value) -> Value:
            if kinds[number] == CONVOLUTION:
                return short_convolution(writer, shape, number, x, sees, bias)
            return attention(
                writer,
                shape,
                number,
                x,
                qkv_bias=attention_bias,
                output_bias=attention_bias,
                qk_norm=True,
                gate=gate,
                gate_of_heads=True,
                rope=kinds[number],
                window=window if kinds[number] == SLIDING else 0,
            )

        def feed(writer: Writer, x: Value) -> Value:
            return mlp(writer, number, x, columns)

        return both_norms_layer(shape, number, mix, feed, NORMS) if around else pre_norm_layer(shape, number, mix, feed)

    return spelled(model("lfm3", shape, layer, ropes, context), NAMES)


def _ropes(keys: Keys, head_size: int) -> dict[str, Rope]:
    full, sliding = rope_keys_of_both_kinds(keys)
    types = (*USUAL, "proportional")
    return {
        FULL: rope_of(keys, full, head_size, 1e6, 1.0, types)[0],
        SLIDING: rope_of(keys, sliding, head_size, 1e6, 1.0, types)[0],
    }


def _kinds(keys: Keys, layers: int) -> list[str]:
    """What each layer has in the place of attention, or with which windows it attends."""
    default = [
        FULL if number % 4 == 2 else SLIDING if number and number % 4 == 0 else CONVOLUTION for number in range(layers)
    ]
    kinds = layer_kinds(keys, "layer_types", keys.get("layer_types") or default, layers, [FULL, SLIDING, CONVOLUTION])
    if not {FULL, SLIDING} & {*kinds}:
        raise keys.refusal("layer_types", "a list with attention in some layers")
    return kinds
