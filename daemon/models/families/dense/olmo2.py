"""OLMo 2: norms after each block and none before, and over all query heads at once and over all key heads."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import no_windows
from motley.daemon.models.blocks.layers import model, post_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope


def olmo2(keys: Keys) -> Model:
    """Describe a model of type ``olmo2``."""
    shape = read_shape(keys, kv_heads=True, epsilon=1e-5)
    rope, context = read_rope(keys, shape.heads.size)
    no_windows(keys, shape.layers)
    bias = keys.flag("attention_bias", False)
    columns = mlp_axis(keys.size("intermediate_size"))

    def layer(number: int) -> Layer:
        return post_norm_layer(
            shape,
            number,
            lambda writer, x: attention(writer, shape, number, x, qkv_bias=bias, output_bias=bias, whole_qk_norm=True),
            lambda writer, x: mlp(writer, number, x, columns),
        )

    return model("olmo2", shape, layer, {"main": rope}, context)
