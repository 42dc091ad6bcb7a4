"""Granite: Llama, with scaled embeddings, products of attention, residuals and logits."""

from __future__ import annotations

from motley.daemon.models.blocks.attention import attention
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.blocks.windows import no_windows
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope


def granite(keys: Keys) -> Model:
    """Describe a model of type ``granite``."""
    shape = read_shape(keys, kv_heads=True)
    rope, context = read_rope(keys, shape.heads.size)
    no_windows(keys, shape.layers)
    bias, mlp_bias = keys.flag("attention_bias", False), keys.flag("mlp_bias", False)
    scale, by = keys.number("attention_multiplier", 1.0), keys.number("residual_multiplier", 1.0)
    columns = mlp_axis(keys.size("intermediate_size"))

    def layer(number: int) -> Layer:
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: writer.scaled(
                attention(writer, shape, number, x, qkv_bias=bias, output_bias=bias, scale=scale), by
            ),
            lambda writer, x: writer.scaled(mlp(writer, number, x, columns, mlp_bias), by),
        )

    return model(
        "granite",
        shape,
        layer,
        {"main": rope},
        context,
        embedding_scale=keys.number("embedding_multiplier", 1.0),
        logits_scale=1 / keys.number("logits_scaling", 1.0),
    )
