"""Hy3: Qwen3's attention, and experts chosen by sigmoids with a correction, after a layer with an MLP."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import no_windows
from motley.daemon.models.blocks.experts import SharedExpert, expert_count, experts
from motley.daemon.models.blocks.layer_kinds import listed_sparse_layers
from motley.daemon.models.blocks.layers import further, model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.axes import Axis, Kind, W
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.experts import Routing
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope


def hy_v3(keys: Keys) -> Model:
    """Describe a model of type ``hy_v3``."""
    shape = read_shape(keys, head_dim=128, epsilon=1e-5)
    rope, context = read_rope(keys, shape.heads.size, theta=11158840.0)
    no_windows(keys, shape.layers)
    keys.only("attention_bias", False)
    count, columns = expert_count(keys), keys.size("moe_intermediate_size")
    shared = SharedExpert(keys.size("num_shared_experts", 1) * columns, "shared_mlp", gated=False)
    sparse = listed_sparse_layers(keys, shape.layers, 1)
    plain, chosen = mlp_axis(keys.size("intermediate_size")), keys.size("num_experts_per_tok")
    scaling = keys.number("router_scaling_factor", 2.826)

    def layer(number: int) -> Layer:
        correction = W(f"model.layers.{number}.mlp.expert_bias", Axis(Kind.PLAIN, count, "num_experts"))
        routing = Routing(chosen, "sigmoid", normalised=True, epsilon=1e-20, scaling=scaling, correction=correction)
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: attention(writer, shape, number, x, qk_norm=True),
            lambda writer, x: (
                experts(writer, shape, number, x, count, columns, routing, router="router.gate", shared=shared)
                if sparse[number]
                else mlp(writer, number, x, plain)
            ),
        )

    ignored = further(shape, keys.size("num_nextn_predict_layers", 1, least=0))
    return model("hy_v3", shape, layer, {"main": rope}, context, ignored=ignored)
