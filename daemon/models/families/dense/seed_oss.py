"""Seed-OSS: Llama, with heads of their own size and biases of queries, keys and values apart from the output's."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import no_windows
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope


def seed_oss(keys: Keys) -> Model:
    """Describe a model of type ``seed_oss``."""
    shape = read_shape(keys, head_dim=None if keys.says("head_dim") else 128)
    rope, context = read_rope(keys, shape.heads.size)
    no_windows(keys, shape.layers)
    bias, output_bias = keys.flag("attention_bias", True), keys.flag("attention_out_bias", False)
    mlp_bias, columns = keys.flag("mlp_bias", False), mlp_axis(keys.size("intermediate_size"))

    def layer(number: int) -> Layer:
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: attention(writer, shape, number, x, qkv_bias=bias, output_bias=output_bias),
            lambda writer, x: mlp(writer, number, x, columns, mlp_bias),
        )

    return model("seed_oss", shape, layer, {"main": rope}, context)
