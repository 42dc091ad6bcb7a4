"""Mistral Small 4: latent attention whose queries grow with their positions, and experts that a softmax chooses."""

from __future__ import annotations

from dataclasses import replace

from motley.daemon.models.blocks.attending.latent import latent_attention, read_latent
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.attention import Warmth
from motley.daemon.models.families.experts.glm4_moe import grouped_routing, routed_experts
from motley.daemon.models.keys import Keys

ROPE = {
    "type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""The rotary embedding where a config has none; one that has some has all of it."""


def mistral4(keys: Keys) -> Model:
    """Describe a model of type ``mistral4``."""
    keys = keys.filled({"rope_parameters": ROPE})
    if not keys.says("q_lora_rank"):
        keys = keys.filled({"q_lora_rank": 1024})
    keys.only("rope_scaling")
    given = keys.inner("rope_parameters")
    given.one_of("rope_type" if given.says("rope_type") else "type", ["yarn"])
    # Which part of a head turns, sizes tell.
    own = ("llama_4_scaling_beta", "max_position_embeddings", "partial_rotary_factor")
    shape, sizes, rope, context = read_latent(keys, ignored=own)
    warmth = Warmth(given.number("llama_4_scaling_beta"), given.size("original_max_position_embeddings"))
    sizes, dense = replace(sizes, warmth=warmth), keys.size("first_k_dense_replace", 0, least=0)
    sparse = [number >= dense for number in range(shape.layers)]
    mixture = routed_experts(keys, shape, sparse, lambda number, count: grouped_routing(keys, count))

    def layer(number: int) -> Layer:
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: latent_attention(writer, shape, sizes, number, x),
            lambda writer, x: mixture(writer, number, x),
        )

    return model("mistral4", shape, layer, {"main": rope}, context)
