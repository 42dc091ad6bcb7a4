"""Llama 2 and 3, and the many models that have their config."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import no_windows
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope


def llama(keys: Keys) -> Model:
    """Describe a model of type ``llama``."""
    shape = read_shape(keys, kv_heads=True)
    rope, context = read_rope(keys, shape.heads.size)
    no_windows(keys, shape.layers)
    bias, mlp_bias = keys.flag("attention_bias", False), keys.flag("mlp_bias", False)
    columns = mlp_axis(keys.size("intermediate_size"))

    def layer(number: int) -> Layer:
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: attention(writer, shape, number, x, qkv_bias=bias, output_bias=bias),
            lambda writer, x: mlp(writer, number, x, columns, mlp_bias),
        )

    return model("llama", shape, layer, {"main": rope}, context)


def iquestcoder(keys: Keys) -> Model:
    """Describe a model of type ``iquestcoder``: Llama, with wider heads and fewer of keys where a config is silent."""
    return llama(keys.filled({"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}))


def internlm3(keys: Keys) -> Model:
    """Describe a model of type ``internlm3``: Llama, with other names of what has a bias."""
    biased = keys.flag("qkv_bias", keys.flag("attention_bias", False))
    if keys.flag("bias", keys.flag("mlp_bias", False)) != biased:
        raise keys.refusal("bias", f"only {str(biased).lower()}, as for queries, keys and values")
    silent = {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    return llama(keys.filled(silent | {"attention_bias": biased, "mlp_bias": biased}))
