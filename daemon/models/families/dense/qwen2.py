"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values, and windows in some layers."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import windows_from_a_layer
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope


def qwen2(keys: Keys) -> Model:
    """Describe a model of type ``qwen2``."""
    shape = read_shape(keys)
    rope, context = read_rope(keys, shape.heads.size)
    windows = windows_from_a_layer(keys, shape.layers)
    columns = mlp_axis(keys.size("intermediate_size"))

    def layer(number: int) -> Layer:
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: attention(writer, shape, number, x, qkv_bias=True, window=windows[number]),
            lambda writer, x: mlp(writer, number, x, columns),
        )

    return model("qwen2", shape, layer, {"main": rope}, context)
