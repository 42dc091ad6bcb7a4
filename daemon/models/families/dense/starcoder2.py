"""StarCoder 2: layer norms and biases everywhere, and an MLP without a gate, with GELU."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import windows_everywhere
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import gelu_mlp, mlp_axis
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope

DEFAULTS = {"num_key_value_heads": 2, "max_position_embeddings": 4096, "eos_token_id": 50256}
"""What transformers takes where a config is silent."""


def starcoder2(keys: Keys) -> Model:
    """Describe a model of type ``starcoder2``."""
    keys = keys.filled(DEFAULTS)
    shape = read_shape(keys, epsilon=1e-5, tied=True, layer_norm="norm_epsilon", norm_bias=True)
    rope, context = read_rope(keys, shape.heads.size)
    windows = windows_everywhere(keys, shape.layers, silent=0)
    keys.only("hidden_act", "gelu_pytorch_tanh")
    keys.only("mlp_type", "default")
    keys.only("norm_type", "layer_norm")
    bias = keys.flag("use_bias", True)
    columns = mlp_axis(keys.size("intermediate_size"))

    def layer(number: int) -> Layer:
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: attention(
                writer, shape, number, x, qkv_bias=bias, output_bias=bias, window=windows[number]
            ),
            lambda writer, x: gelu_mlp(
                writer, f"layers.{number}.mlp", x, columns, f"model.layers.{number}.mlp", ("c_fc", "c_proj"), bias
            ),
        )

    return model("starcoder2", shape, layer, {"main": rope}, context)
