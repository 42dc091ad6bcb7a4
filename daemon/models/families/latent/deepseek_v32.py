"""DeepSeek V3.2 and GLM-5: V3's layers, where each row sees so many positions as an indexer chooses.

Up to that many positions it chooses all, and this is what is computed here: the context ends there, and the tensors of
the indexers are not used.
"""

from __future__ import annotations

from dataclasses import replace

from motley.daemon.models.blocks.layers import indexers
from motley.daemon.models.description.model import Model
from motley.daemon.models.families.latent.deepseek_v3 import latent_experts
from motley.daemon.models.families.latent.glm4_moe_lite import layers_with_experts
from motley.daemon.models.keys import Keys


def deepseek_v32(keys: Keys) -> Model:
    """Describe a model of type ``deepseek_v32``."""
    return _indexed("deepseek_v32", keys, epsilon=1e-6)


def glm_moe_dsa(keys: Keys) -> Model:
    """Describe a model of type ``glm_moe_dsa``."""
    return _indexed("glm_moe_dsa", keys, epsilon=1e-5)


def _indexed(family: str, keys: Keys, epsilon: float) -> Model:
    keys.only("rope_interleave", True)
    keys = keys.filled({"first_k_dense_replace": 3})
    every = latent_experts(family, keys, layers_with_experts(keys), epsilon)
    context = min(every.context, keys.size("index_topk", 2048))
    return replace(every, context=context, ignored=(*every.ignored, *indexers(len(every.layers))))
