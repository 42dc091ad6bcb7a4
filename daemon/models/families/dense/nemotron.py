"""Nemotron and Minitron: layer norms whose gains are stored less 1, an MLP without a gate that squares what is
positive, and a part of each head that turns."""

from __future__ import annotations

from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.model import Model
from motley.daemon.models.families.dense.arcee import squared
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope


def nemotron(keys: Keys) -> Model:
    """Describe a model of type ``nemotron``."""
    keys = keys.filled({"max_position_embeddings": 4096, "eos_token_id": 3})
    shape = read_shape(keys, kv_heads=True, epsilon=1e-5, norm_offset=1.0, layer_norm="norm_eps", norm_bias=True)
    return squared("nemotron", keys, shape, read_rope(keys, shape.heads.size, partial=0.5))
