"""MiniCPM 3: latent attention and an MLP in every layer, with scaled embeddings, residuals and logits."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.latent import latent_attention, read_latent
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import USUAL

DEFAULTS = {
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "kv_lora_rank": 256,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
"""What transformers takes where a config is silent, or null."""


def minicpm3(keys: Keys) -> Model:
    """Describe a model of type ``minicpm3``."""
    keys = keys.filled(DEFAULTS)
    if not keys.says("q_lora_rank"):
        keys = keys.filled({"q_lora_rank": 768})
    keys.only("rope_interleave", False)
    hidden, layers = keys.size("hidden_size"), keys.layers()
    keys = keys.filled({"v_head_dim": hidden // keys.size("num_attention_heads"), "rope_interleave": False})
    shape, sizes, rope, context = read_latent(keys, epsilon=1e-5, types=(*USUAL, "longrope"))
    # Where a factor is null, nothing is scaled by it; where a config is silent, it is that of the published model.
    depth = keys.number("scale_depth", layers**0.5 if keys.says("scale_depth") else 1.4) / layers**0.5
    base = keys.size("dim_model_base", hidden if keys.says("dim_model_base") else 256)
    columns = mlp_axis(keys.size("intermediate_size"))

    def layer(number: int) -> Layer:
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: writer.scaled_sum(latent_attention(writer, shape, sizes, number, x), depth),
            lambda writer, x: writer.scaled_sum(mlp(writer, number, x, columns), depth),
        )

    return model(
        "minicpm3",
        shape,
        layer,
        {"main": rope},
        context,
        embedding_scale=keys.number("scale_emb", 12.0),
        logits_scale=base / hidden,
    )
