"""K-EXAONE: EXAONE 4's attention between norms as Llama has them, and experts as GLM 4.5 has them."""

from __future__ import annotations

from dataclasses import replace

from motley.daemon.models.blocks.experts import SharedExpert, expert_count, experts
from motley.daemon.models.blocks.layer_kinds import listed_sparse_layers
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.families.dense.exaone4 import exaone4_attention
from motley.daemon.models.families.experts.glm4_moe import corrected_routing
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope
from motley.daemon.weights.places import Part


def exaone_moe(keys: Keys) -> Model:
    """Describe a model of type ``exaone_moe``."""
    keys = keys.filled({"routed_scaling_factor": 2.5})
    shape = read_shape(keys, epsilon=1e-5)
    rope, context = read_rope(keys, shape.heads.size)
    attend = exaone4_attention(keys, shape)
    keys.only("scoring_func", "sigmoid")
    count, columns = expert_count(keys), keys.size("moe_intermediate_size")
    sparse = listed_sparse_layers(keys, shape.layers, keys.size("first_k_dense_replace", 1, least=0))
    plain = mlp_axis(keys.size("intermediate_size"))
    shared = SharedExpert(keys.size("num_shared_experts", 1) * columns, "shared_experts", gated=False)

    def layer(number: int) -> Layer:
        routing = corrected_routing(keys, number, count)
        assert routing.correction is not None, "it is what this routing has"
        beside = Part(f"model.layers.{number}.mlp.e_score_correction_bias", (count,))
        routing = replace(routing, correction=replace(routing.correction, parts=(beside,)))
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: attend(writer, number, x),
            lambda writer, x: (
                experts(writer, shape, number, x, count, columns, routing, shared=shared)
                if sparse[number]
                else mlp(writer, number, x, plain)
            ),
        )

    return model("exaone_moe", shape, layer, {"main": rope}, context, ignored=["mtp."])
