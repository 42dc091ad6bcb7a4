"""DeepSeek V3.2 and GLM-5: V3's layers, where each row sees so many positions as an indexer chooses."""

from __future__ import annotations

from dataclasses import replace

from motley.daemon.models.blocks.attending.indexer import Indexer, indexer_types, read_indexer
from motley.daemon.models.blocks.layer_kinds import layers_with_experts
from motley.daemon.models.description.model import Model
from motley.daemon.models.families.latent.deepseek_v3 import latent_experts
from motley.daemon.models.keys import Keys


def deepseek_v32(keys: Keys) -> Model:
    """Describe a model of type ``deepseek_v32``."""
    keys.only("rope_interleave", True)
    keys = keys.filled({"index_n_heads": 64})
    return _indexed("deepseek_v32", keys, read_indexer(keys, keys.size("qk_rope_head_dim")), epsilon=1e-6)


def glm_moe_dsa(keys: Keys) -> Model:
    """Describe a model of type ``glm_moe_dsa``: elements that turn together are neighbours in its indexers, too, and
    several layers may share one."""
    keys.only("rope_interleave", True)
    keys = keys.filled({"index_n_heads": 32, "indexer_types": indexer_types(keys)})
    indexer = replace(read_indexer(keys, keys.size("qk_rope_head_dim")), neighbours=True)
    return _indexed("glm_moe_dsa", keys, indexer, epsilon=1e-5)


def _indexed(family: str, keys: Keys, indexer: Indexer, epsilon: float) -> Model:
    keys = keys.filled({"first_k_dense_replace": 3})
    keys.size("q_lora_rank")  # which the queries of indexers are made of, too
    return latent_experts(family, keys, layers_with_experts(keys), epsilon, indexer=indexer)
