"""A.X K1: DeepSeek V3, with a norm of what experts make, which sigmoids choose without a correction."""

from __future__ import annotations

from dataclasses import replace

from motley.daemon.models.blocks.attending.latent import latent_attention, read_latent
from motley.daemon.models.blocks.layer_kinds import layers_with_experts
from motley.daemon.models.blocks.layers import further, model, norm, pre_norm_layer
from motley.daemon.models.description.axes import Value
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.families.experts.glm4_moe import NEXTN, grouped_routing, routed_experts
from motley.daemon.models.keys import Keys

DEFAULTS = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 32768,
    "n_routed_experts": 192,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}
"""What transformers takes where a config is silent."""


def axk1(keys: Keys) -> Model:
    """Describe a model of type ``axk1``."""
    keys = keys.filled(DEFAULTS)
    keys.only("moe_layer_freq", 1)
    keys.only("scoring_func", "sigmoid")
    keys.only("topk_method", "noaux_tc")
    shape, sizes, rope, context = read_latent(keys)
    sparse = layers_with_experts(keys)
    mixture = routed_experts(
        keys, shape, sparse, lambda number, count: replace(grouped_routing(keys, count), scores="sigmoid")
    )

    def layer(number: int) -> Layer:
        def think(writer: Writer, x: Value) -> Value:
            y = mixture(writer, number, x)
            if not sparse[number]:
                return y
            at, module = f"layers.{number}.mlp.after", f"model.layers.{number}.post_mlp_layernorm.weight"
            return norm(writer, shape, at, y, module)

        return pre_norm_layer(shape, number, lambda writer, x: latent_attention(writer, shape, sizes, number, x), think)

    unused = [f"model.layers.{number}.post_mlp_layernorm." for number, its in enumerate(sparse) if not its]
    ahead = further(shape, keys.size(NEXTN, 1, least=0))
    return model("axk1", shape, layer, {"main": rope}, context, ignored=[*unused, *ahead])
