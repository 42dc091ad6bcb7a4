"""Ministral 3: Mistral with queries that grow beyond the context that its rotary embedding was stretched from."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import windows_everywhere
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.attention import Warmth
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope

ROPE = {
    "type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""The rotary embedding where a config has none; one that has some has all of it."""


def ministral3(keys: Keys) -> Model:
    """Describe a model of type ``ministral3``."""
    keys = keys.filled({"rope_parameters": ROPE, "head_dim": 128})
    shape = read_shape(keys, epsilon=1e-5)
    own = ("llama_4_scaling_beta", "max_position_embeddings")
    rope, context = read_rope(keys, shape.heads.size, types=["yarn"], ignored=own)
    given = keys.inner("rope_parameters")
    warmth = Warmth(given.number("llama_4_scaling_beta"), given.size("original_max_position_embeddings"))
    windows = windows_everywhere(keys, shape.layers, silent=0)
    keys.only("attention_bias", False)
    columns = mlp_axis(keys.size("intermediate_size"))

    def layer(number: int) -> Layer:
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: attention(writer, shape, number, x, window=windows[number], warmth=warmth),
            lambda writer, x: mlp(writer, number, x, columns),
        )

    return model("ministral3", shape, layer, {"main": rope}, context)
