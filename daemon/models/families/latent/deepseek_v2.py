"""DeepSeek V2 Lite: latent attention, and experts that a softmax chooses from all, beside shared ones."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.latent import latent_attention, read_latent
from motley.daemon.models.blocks.experts import SharedExpert, expert_count, experts
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.experts import Routing
from motley.daemon.models.keys import Keys


def deepseek_v2(keys: Keys) -> Model:
    """Describe a model of type ``deepseek_v2``."""
    if not keys.says("q_lora_rank"):
        keys = keys.filled({"q_lora_rank": 1536})
    shape, sizes, rope, context = read_latent(keys)
    if keys.one_of("topk_method", ["greedy", "group_limited_greedy"], "greedy") == "greedy":
        keys.get("n_group")  # which says nothing then
    else:
        keys.only("n_group", 1)  # in V2 a group counts by its best expert, in V3 by its two best ones
    keys.only("norm_topk_prob", False)
    keys.only("moe_layer_freq", 1)
    count, columns = expert_count(keys, "n_routed_experts", "num_experts"), keys.size("moe_intermediate_size")
    routing = Routing(keys.size("num_experts_per_tok"), scaling=keys.number("routed_scaling_factor", 1.0))
    shared = SharedExpert(keys.size("n_shared_experts", 2) * columns, "shared_experts", gated=False)
    plain, dense = mlp_axis(keys.size("intermediate_size")), keys.size("first_k_dense_replace", 0, least=0)

    def layer(number: int) -> Layer:
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: latent_attention(writer, shape, sizes, number, x),
            lambda writer, x: (
                experts(writer, shape, number, x, count, columns, routing, shared=shared)
                if number >= dense
                else mlp(writer, number, x, plain)
            ),
        )

    return model("deepseek_v2", shape, layer, {"main": rope}, context)
