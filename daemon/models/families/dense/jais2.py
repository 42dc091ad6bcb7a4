"""Jais 2: layer norms and biases everywhere, and an MLP without a gate that squares what is positive."""

from __future__ import annotations

from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.model import Model
from motley.daemon.models.families.dense.arcee import squared
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope


def jais2(keys: Keys) -> Model:
    """Describe a model of type ``jais2``."""
    keys = keys.filled({"max_position_embeddings": 8192, "eos_token_id": 150024})
    shape = read_shape(keys, kv_heads=True, epsilon=1e-5, layer_norm="layer_norm_eps", norm_bias=True)
    return squared("jais2", keys, shape, read_rope(keys, shape.heads.size), biased=True)
