"""GLM-4: half of each head turns, by neighbours; in those of 0414 norms stand after each block, too."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import no_windows
from motley.daemon.models.blocks.layers import both_norms_layer, model, pre_norm_layer
from motley.daemon.models.blocks.mlp import fused_names, gated_mlp, mlp_axis
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.axes import Value
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope

NORMS = "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"


def glm(keys: Keys) -> Model:
    """Describe a model of type ``glm``."""
    return _described("glm", keys)


def glm4(keys: Keys) -> Model:
    """Describe a model of type ``glm4``."""
    return _described("glm4", keys)


def _described(family: str, keys: Keys) -> Model:
    shape = read_shape(keys, head_dim=128, epsilon=1.5625e-7)
    rope, context = read_rope(keys, shape.heads.size, partial=0.5)
    no_windows(keys, shape.layers)
    bias, columns = keys.flag("attention_bias", True), keys.size("intermediate_size")

    def layer(number: int) -> Layer:
        names = fused_names(f"model.layers.{number}.mlp", shape.hidden, columns)

        def attend(writer: Writer, x: Value) -> Value:
            return attention(writer, shape, number, x, qkv_bias=bias, neighbours=rope.size)

        def feed(writer: Writer, x: Value) -> Value:
            return gated_mlp(writer, f"layers.{number}.mlp", x, mlp_axis(columns), names)

        if family == "glm":
            return pre_norm_layer(shape, number, attend, feed)
        return both_norms_layer(shape, number, attend, feed, NORMS)

    return model(family, shape, layer, {"main": rope}, context)
