"""Phi-3, Phi-3.5 and Phi-4: Llama with fused projections, and long contexts by LongRoPE."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import windows_everywhere
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import fused_names, gated_mlp, mlp_axis
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.rope import Rope
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import rope_of


def phi3(keys: Keys) -> Model:
    """Describe a model of type ``phi3``."""
    keys = keys.filled({"original_max_position_embeddings": 4096, "eos_token_id": 32000})
    shape = read_shape(keys, kv_heads=True, epsilon=1e-5)
    windows = windows_everywhere(keys, shape.layers, silent=0)
    keys.only("attention_bias", False)
    width = keys.size("intermediate_size")

    def layer(number: int) -> Layer:
        names = fused_names(f"model.layers.{number}.mlp", shape.hidden, width)
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: attention(writer, shape, number, x, window=windows[number], fused="qkv_proj"),
            lambda writer, x: gated_mlp(writer, f"layers.{number}.mlp", x, mlp_axis(width), names),
        )

    rope = _rope(keys, shape.heads.size)
    return model("phi3", shape, layer, {"main": rope}, keys.size("max_position_embeddings"))


def _rope(keys: Keys, head_size: int) -> Rope:
    """The first configs call LongRoPE ``su`` or ``yarn``."""
    given = keys.inner("rope_scaling" if keys.get("rope_scaling") else "rope_parameters")
    kind = given.get("rope_type" if given.says("rope_type") else "type")
    if kind in ("su", "yarn"):
        given = given.filled({})
        given.values |= {"rope_type": "longrope"}
    theta, partial = keys.number("rope_theta", 10000.0), keys.number("partial_rotary_factor", 1.0)
    return rope_of(keys, given, head_size, theta, partial, ("default", "longrope"))[0]
