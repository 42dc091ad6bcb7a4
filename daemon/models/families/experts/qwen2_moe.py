"""Qwen2 MoE: experts and a shared one, gated by row; some layers may have an MLP."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import no_windows
from motley.daemon.models.blocks.experts import SharedExpert, expert_count, experts, sparse_layers
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.experts import Routing
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope


def qwen2_moe(keys: Keys) -> Model:
    """Describe a model of type ``qwen2_moe``."""
    shape = read_shape(keys)
    rope, context = read_rope(keys, shape.heads.size)
    no_windows(keys, shape.layers)
    bias = keys.flag("qkv_bias", True)
    count, columns = expert_count(keys), keys.size("moe_intermediate_size")
    sparse = sparse_layers(keys, shape.layers)
    plain = None if all(sparse) else mlp_axis(keys.size("intermediate_size"))
    shared = SharedExpert(keys.size("shared_expert_intermediate_size"))
    routing = Routing(keys.size("num_experts_per_tok"), normalised=keys.flag("norm_topk_prob", False))

    def layer(number: int) -> Layer:
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: attention(writer, shape, number, x, qkv_bias=bias),
            lambda writer, x: (
                experts(writer, shape, number, x, count, columns, routing, shared=shared)
                if plain is None or sparse[number]
                else mlp(writer, number, x, plain)
            ),
        )

    return model("qwen2_moe", shape, layer, {"main": rope}, context)
