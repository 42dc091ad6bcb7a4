"""OLMoE: experts in every layer, norms over all query heads at once and over all key heads."""

from __future__ import annotations

from motley.daemon.models.blocks.attention import attention
from motley.daemon.models.blocks.experts import expert_count, experts
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.blocks.windows import no_windows
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations import Routing
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope


def olmoe(keys: Keys) -> Model:
    """Describe a model of type ``olmoe``."""
    shape = read_shape(keys, kv_heads=True, epsilon=1e-5)
    rope, context = read_rope(keys, shape.heads.size)
    no_windows(keys, shape.layers)
    bias = keys.flag("attention_bias", False)
    clip = keys.number("clip_qkv") if keys.get("clip_qkv") is not None else 0.0
    count, columns = expert_count(keys), keys.size("intermediate_size")
    routing = Routing(keys.size("num_experts_per_tok"), normalised=keys.flag("norm_topk_prob", False))

    def layer(number: int) -> Layer:
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: attention(
                writer, shape, number, x, qkv_bias=bias, output_bias=bias, whole_qk_norm=True, clip=clip
            ),
            lambda writer, x: experts(writer, shape, number, x, count, columns, routing),
        )

    return model("olmoe", shape, layer, {"main": rope}, context)
