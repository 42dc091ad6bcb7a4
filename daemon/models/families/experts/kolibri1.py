"""Kolibri: attention of EXAONE 4, norms of GLM-4, and experts that a bias on their logits chooses."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.windows import period_kinds
from motley.daemon.models.blocks.experts import SharedExpert, expert_count, experts
from motley.daemon.models.blocks.layers import both_norms_layer, model
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.axes import Axis, Kind, W
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.experts import Routing
from motley.daemon.models.families.dense.exaone4 import exaone4_attention
from motley.daemon.models.families.dense.glm4 import NORMS
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope

DEFAULTS = {
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "sliding_window": 513,
}
"""What transformers takes where a config is silent."""


def kolibri1(keys: Keys) -> Model:
    """Describe a model of type ``kolibri1``."""
    keys = keys.filled(DEFAULTS)
    shape = read_shape(keys, head_dim=128)
    rope, context = read_rope(keys, shape.heads.size)
    attend = exaone4_attention(keys.filled({"layer_types": period_kinds(shape.layers, 5)}), shape)
    count, columns = expert_count(keys), keys.size("moe_intermediate_size")
    shared = SharedExpert(keys.size("shared_expert_intermediate_size"), "shared_experts", gated=False)
    chosen, normalised = keys.size("num_experts_per_tok"), keys.flag("norm_topk_prob", False)

    def layer(number: int) -> Layer:
        bias = W(f"model.layers.{number}.mlp.gate.e_score_correction_bias", Axis(Kind.PLAIN, count, "num_experts"))
        routing = Routing(chosen, "sigmoid of chosen", normalised=normalised, correction=bias)
        return both_norms_layer(
            shape,
            number,
            lambda writer, x: attend(writer, number, x),
            lambda writer, x: experts(writer, shape, number, x, count, columns, routing, shared=shared),
            NORMS,
        )

    return model("kolibri1", shape, layer, {"main": rope}, context)
