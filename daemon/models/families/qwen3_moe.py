"""Qwen3 MoE: Qwen3 with experts; some layers may have an MLP."""

from __future__ import annotations

from motley.daemon.models.blocks.attention import attention
from motley.daemon.models.blocks.experts import expert_count, experts, sparse_layers
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.blocks.windows import no_windows
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations import Routing
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope


def qwen3_moe(keys: Keys) -> Model:
    """Describe a model of type ``qwen3_moe``."""
    shape = read_shape(keys)
    rope, context = read_rope(keys, shape.heads.size)
    no_windows(keys, shape.layers)
    bias = keys.flag("attention_bias", False)
    count, columns = expert_count(keys), keys.size("moe_intermediate_size")
    sparse = sparse_layers(keys, shape.layers)
    plain = None if all(sparse) else mlp_axis(keys.size("intermediate_size"))
    routing = Routing(keys.size("num_experts_per_tok"), normalised=keys.flag("norm_topk_prob", False))

    def layer(number: int) -> Layer:
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: attention(writer, shape, number, x, qkv_bias=bias, output_bias=bias, qk_norm=True),
            lambda writer, x: (
                experts(writer, shape, number, x, count, columns, routing)
                if plain is None or sparse[number]
                else mlp(writer, number, x, plain)
            ),
        )

    return model("qwen3_moe", shape, layer, {"main": rope}, context)
