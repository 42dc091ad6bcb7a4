"""Mistral: Llama with a sliding window."""

from __future__ import annotations

from motley.daemon.models.blocks.attention import attention
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.blocks.windows import windows_everywhere
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope


def mistral(keys: Keys) -> Model:
    """Describe a model of type ``mistral``."""
    shape = read_shape(keys)
    rope, context = read_rope(keys, shape.heads.size)
    windows = windows_everywhere(keys, shape.layers)
    keys.only("attention_bias", False)
    columns = mlp_axis(keys.size("intermediate_size"))

    def layer(number: int) -> Layer:
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: attention(writer, shape, number, x, window=windows[number]),
            lambda writer, x: mlp(writer, number, x, columns),
        )

    return model("mistral", shape, layer, {"main": rope}, context)
