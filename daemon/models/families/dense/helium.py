"""Helium: Llama, where neighbouring elements of a head turn together."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import no_windows
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope


def helium(keys: Keys) -> Model:
    """Describe a model of type ``helium``."""
    shape = read_shape(keys, head_dim=128, epsilon=1e-8)
    rope, context = read_rope(keys, shape.heads.size, theta=1e5)
    no_windows(keys, shape.layers)
    bias, mlp_bias = keys.flag("attention_bias", False), keys.flag("mlp_bias", False)
    columns = mlp_axis(keys.size("intermediate_size"))

    def layer(number: int) -> Layer:
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: attention(writer, shape, number, x, qkv_bias=bias, neighbours=rope.size),
            lambda writer, x: mlp(writer, number, x, columns, mlp_bias),
        )

    return model("helium", shape, layer, {"main": rope}, context)
