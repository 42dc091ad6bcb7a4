"""Gemma, the first: Llama with GELU, scaled embeddings and gains of norms that are stored less 1."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import no_windows
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.rows import Activation
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope

DEFAULTS = {"head_dim": 256, "max_position_embeddings": 8192, "eos_token_id": 1}
"""What transformers takes where a config is silent."""


def gemma(keys: Keys) -> Model:
    """Describe a model of type ``gemma``."""
    keys = keys.filled(DEFAULTS)
    shape = read_shape(keys, kv_heads=True, tied=True, norm_offset=1.0)
    rope, context = read_rope(keys, shape.heads.size)
    no_windows(keys, shape.layers)
    for key in ("hidden_act", "hidden_activation"):
        keys.only(key, "gelu_pytorch_tanh", "gelu")  # the first configs have the latter, and mean the former
    bias = keys.flag("attention_bias", False)
    columns = mlp_axis(keys.size("intermediate_size"))

    def layer(number: int) -> Layer:
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: attention(writer, shape, number, x, qkv_bias=bias, output_bias=bias),
            lambda writer, x: mlp(writer, number, x, columns, activation=Activation.GELU_TANH),
        )

    return model("gemma", shape, layer, {"main": rope}, context, embedding_scale=shape.hidden**0.5)
