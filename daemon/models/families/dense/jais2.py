"""Jais 2: layer norms and biases everywhere, and an MLP without a gate that squares what is positive."""

from __future__ import annotations

from motley.daemon.models.blocks.attention import attention
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp_axis, squared_mlp
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.blocks.windows import no_windows
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope


def jais2(keys: Keys) -> Model:
    """Describe a model of type ``jais2``."""
    keys = keys.filled({"max_position_embeddings": 8192, "eos_token_id": 150024})
    shape = read_shape(keys, kv_heads=True, epsilon=1e-5, layer_norm="layer_norm_eps", norm_bias=True)
    rope, context = read_rope(keys, shape.heads.size)
    no_windows(keys, shape.layers)
    keys.only("hidden_act", "relu2")
    bias, mlp_bias = keys.flag("attention_bias", True), keys.flag("mlp_bias", True)
    columns = mlp_axis(keys.size("intermediate_size"))

    def layer(number: int) -> Layer:
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: attention(writer, shape, number, x, qkv_bias=bias, output_bias=bias),
            lambda writer, x: squared_mlp(
                writer, f"layers.{number}.mlp", x, columns, f"model.layers.{number}.mlp", mlp_bias
            ),
        )

    return model("jais2", shape, layer, {"main": rope}, context)
