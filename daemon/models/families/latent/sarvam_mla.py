"""Sarvam 105B: DeepSeek V3's layers; its published config calls some keys otherwise."""

from __future__ import annotations

from motley.daemon.models.description.model import Model
from motley.daemon.models.families.latent.deepseek_v3 import deepseek_v3
from motley.daemon.models.keys import Keys

DEFAULTS = {"first_k_dense_replace": 1, "max_position_embeddings": 4096, "routed_scaling_factor": 2.5}
"""What transformers takes where a config is silent."""


def sarvam_mla(keys: Keys) -> Model:
    """Describe a model of type ``sarvam_mla``."""
    keys = keys.also({"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}).filled(DEFAULTS)
    rope = dict(keys.inner("rope_scaling").values)
    for key in ("type", "rope_type"):
        if rope.get(key) == "deepseek_yarn":  # which is YaRN as all have it
            rope[key] = "yarn"
            keys.values["rope_scaling"] = rope
    return deepseek_v3(keys)
