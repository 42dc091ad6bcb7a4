"""Arcee (AFM): Llama, with an MLP that has no gate and squares what is positive."""

from __future__ import annotations

from motley.daemon.models.blocks.attention import attention
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp_axis, squared_mlp
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.blocks.windows import no_windows
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope


def arcee(keys: Keys) -> Model:
    """Describe a model of type ``arcee``."""
    shape = read_shape(keys, kv_heads=True, epsilon=1e-5)
    rope, context = read_rope(keys, shape.heads.size)
    no_windows(keys, shape.layers)
    keys.only("hidden_act", "relu2")
    bias, mlp_bias = keys.flag("attention_bias", False), keys.flag("mlp_bias", False)
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

    return model("arcee", shape, layer, {"main": rope}, context)
