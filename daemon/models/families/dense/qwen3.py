"""Qwen3: Llama with norms of every query and key head, and windows in some layers."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import windows_from_a_layer
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope


def qwen3(keys: Keys) -> Model:
    """Describe a model of type ``qwen3``."""
    shape = read_shape(keys, head_dim=128)
    rope, context = read_rope(keys, shape.heads.size)
    windows = windows_from_a_layer(keys, shape.layers)
    bias = keys.flag("attention_bias", False)
    columns = mlp_axis(keys.size("intermediate_size"))

    def layer(number: int) -> Layer:
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: attention(
                writer, shape, number, x, qkv_bias=bias, output_bias=bias, qk_norm=True, window=windows[number]
            ),
            lambda writer, x: mlp(writer, number, x, columns),
        )

    return model("qwen3", shape, layer, {"main": rope}, context)
