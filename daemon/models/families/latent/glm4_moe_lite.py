"""GLM-4.7 Flash: GLM-4.5's experts behind latent attention."""

from __future__ import annotations

from motley.daemon.models.blocks.layer_kinds import layers_with_experts
from motley.daemon.models.description.model import Model
from motley.daemon.models.families.latent.deepseek_v3 import latent_experts
from motley.daemon.models.keys import Keys


def glm4_moe_lite(keys: Keys) -> Model:
    """Describe a model of type ``glm4_moe_lite``."""
    return latent_experts("glm4_moe_lite", keys, layers_with_experts(keys), epsilon=1e-5)


def glm4_moe_lite_ahead(keys: Keys) -> Model:
    """Describe its head that predicts a token further ahead."""
    return latent_experts("glm4_moe_lite", keys, layers_with_experts(keys), epsilon=1e-5, ahead=True)
