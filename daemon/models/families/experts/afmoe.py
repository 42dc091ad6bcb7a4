"""AFMoE (Arcee Trinity): gated attention between norms, which rotates where there are windows only, and experts."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import listed_windows, read_window
from motley.daemon.models.blocks.experts import SharedExpert, expert_count, experts
from motley.daemon.models.blocks.layer_kinds import FULL, SLIDING
from motley.daemon.models.blocks.layers import both_norms_layer, model
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.axes import Axis, Kind, W
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.experts import Routing
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope

NORMS = "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"
ALONE = ("n_group", "topk_group", "num_expert_groups", "num_limited_groups")
"""Keys of groups of experts, of which there is one."""


def afmoe(keys: Keys) -> Model:
    """Describe a model of type ``afmoe``."""
    shape = read_shape(keys, head_dim=128, kv_heads=True, epsilon=1e-5)
    rope, context = read_rope(keys, shape.heads.size)
    window, period = read_window(keys, 1024), keys.size("global_attn_every_n_layers", 4)
    kinds = [SLIDING if window and (number + 1) % period else FULL for number in range(shape.layers)]
    windows = listed_windows(keys, shape.layers, window, kinds)
    keys.only("score_func", "sigmoid")
    keys.only("route_norm", True)
    for key in ALONE:
        keys.only(key, 1)
    bias, dense = keys.flag("attention_bias", False), keys.size("num_dense_layers", 1, least=0)
    count, columns = expert_count(keys), keys.size("moe_intermediate_size")
    beside = keys.size("num_shared_experts", 2, least=0) * columns
    shared = SharedExpert(beside, "shared_experts", gated=False) if beside else None
    plain, chosen = mlp_axis(keys.size("intermediate_size")), keys.size("num_experts_per_tok")
    scaling = keys.number("route_scale", 1.0)

    def layer(number: int) -> Layer:
        correction = W(f"model.layers.{number}.mlp.expert_bias", Axis(Kind.PLAIN, count, "num_experts"))
        routing = Routing(chosen, "sigmoid", normalised=True, epsilon=1e-20, scaling=scaling, correction=correction)
        return both_norms_layer(
            shape,
            number,
            lambda writer, x: attention(
                writer,
                shape,
                number,
                x,
                qkv_bias=bias,
                output_bias=bias,
                qk_norm=True,
                gate="gate_proj",
                rope="main" if windows[number] else None,
                window=windows[number],
            ),
            lambda writer, x: (
                experts(writer, shape, number, x, count, columns, routing, router="router.gate", shared=shared)
                if number >= dense
                else mlp(writer, number, x, plain)
            ),
            NORMS,
        )

    scale = shape.hidden**0.5 if keys.flag("mup_enabled", False) else 1.0
    return model("afmoe", shape, layer, {"main": rope}, context, embedding_scale=scale)
