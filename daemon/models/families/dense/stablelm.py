"""StableLM: Llama with layer norms and a part of each head that turns; attention may stand beside the MLP."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import no_windows
from motley.daemon.models.blocks.layers import model, parallel_layer, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope


def stablelm(keys: Keys) -> Model:
    """Describe a model of type ``stablelm``."""
    keys = keys.filled({"num_key_value_heads": 32, "max_position_embeddings": 4096, "eos_token_id": 0})
    shape = read_shape(keys, epsilon=1e-5, layer_norm="layer_norm_eps", norm_bias=True)
    rope, context = read_rope(keys, shape.heads.size, partial=0.25)
    no_windows(keys, shape.layers)
    keys.only("qk_layernorm", False)  # whose gains are a tensor for each head
    bias = keys.flag("use_qkv_bias", False)
    written = parallel_layer if keys.flag("use_parallel_residual", False) else pre_norm_layer
    columns = mlp_axis(keys.size("intermediate_size"))

    def layer(number: int) -> Layer:
        return written(
            shape,
            number,
            lambda writer, x: attention(writer, shape, number, x, qkv_bias=bias),
            lambda writer, x: mlp(writer, number, x, columns),
        )

    return model("stablelm", shape, layer, {"main": rope}, context)
