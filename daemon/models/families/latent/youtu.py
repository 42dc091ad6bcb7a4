"""Youtu-LLM: DeepSeek V3's latent attention, and an MLP in every layer."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.latent import latent_attention, read_latent
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.keys import Keys


def youtu(keys: Keys) -> Model:
    """Describe a model of type ``youtu``."""
    if not keys.says("q_lora_rank"):
        keys = keys.filled({"q_lora_rank": 1536})
    shape, sizes, rope, context = read_latent(keys.filled({"tie_word_embeddings": True}))
    columns = mlp_axis(keys.size("intermediate_size"))

    def layer(number: int) -> Layer:
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: latent_attention(writer, shape, sizes, number, x),
            lambda writer, x: mlp(writer, number, x, columns),
        )

    return model("youtu", shape, layer, {"main": rope}, context)
