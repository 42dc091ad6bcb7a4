"""GLM-5: GLM-4.7 Flash's layers, where each row sees so many positions as an indexer chooses.

Up to that many positions it chooses all, and this is what is computed here: the context ends there, and the tensors of
the indexers are not used.
"""

from __future__ import annotations

from dataclasses import replace

from motley.daemon.models.description.model import Model
from motley.daemon.models.families.deepseek_v3 import latent_experts
from motley.daemon.models.families.glm4_moe_lite import layers_with_experts
from motley.daemon.models.keys import Keys


def glm_moe_dsa(keys: Keys) -> Model:
    """Describe a model of type ``glm_moe_dsa``."""
    keys.only("rope_interleave", True)
    keys = keys.filled({"first_k_dense_replace": 3})
    every = latent_experts("glm_moe_dsa", keys, layers_with_experts(keys), epsilon=1e-5)
    indexers = (f"model.layers.{number}.self_attn.indexer." for number in range(len(every.layers)))
    context = min(every.context, keys.size("index_topk", 2048))
    return replace(every, context=context, ignored=(*every.ignored, *indexers))
