"""Arcee (AFM): Llama, with an MLP that has no gate and squares what is positive."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import no_windows
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp_axis, squared_mlp
from motley.daemon.models.blocks.shape import Shape, read_shape
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.rope import Rope
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope


def arcee(keys: Keys) -> Model:
    """Describe a model of type ``arcee``."""
    shape = read_shape(keys, kv_heads=True, epsilon=1e-5)
    return squared("arcee", keys, shape, read_rope(keys, shape.heads.size))


def squared(kind: str, keys: Keys, shape: Shape, turning: tuple[Rope, int], biased: bool = False) -> Model:
    """Describe a model of plain attention and MLPs that square what is positive.

    Args:
        kind: its type.
        turning: its rotary embedding and longest context.
        biased: whether products have biases where a config does not say.
    """
    rope, context = turning
    no_windows(keys, shape.layers)
    keys.only("hidden_act", "relu2")
    bias, mlp_bias = keys.flag("attention_bias", biased), keys.flag("mlp_bias", biased)
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

    return model(kind, shape, layer, {"main": rope}, context)
