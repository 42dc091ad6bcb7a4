"""Sarvam 30B: GLM-4.5's layers with heads that turn whole; its files have names of their own."""

from __future__ import annotations

from motley.daemon.models.blocks.spelling import also_spelled
from motley.daemon.models.description.model import Model
from motley.daemon.models.families.experts.glm4_moe import glm4_moe_like
from motley.daemon.models.keys import Keys

DEFAULTS = {"head_dim": 64, "rms_norm_eps": 1e-6, "use_qk_norm": True, "routed_scaling_factor": 2.5}
"""What transformers takes where a config is silent."""
ALSO = {
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "attention_bias": "use_qkv_bias",
}
"""What published configs call keys."""
NAMES = {
    "self_attn.query_key_value.": "attention.query_key_value.",
    "self_attn.o_proj.": "attention.dense.",
    "self_attn.q_norm.": "attention.query_layernorm.",
    "self_attn.k_norm.": "attention.key_layernorm.",
    "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
}
"""What published files call tensors of a layer."""


def sarvam_moe(keys: Keys) -> Model:
    """Describe a model of type ``sarvam_moe``."""
    described = glm4_moe_like("sarvam_moe", keys.also(ALSO).filled(DEFAULTS), 8e6, 1.0, fused="query_key_value")
    return also_spelled(described, {"model.embed_tokens.": "model.word_embeddings."}, NAMES)
