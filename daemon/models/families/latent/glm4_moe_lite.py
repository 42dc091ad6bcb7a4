"""GLM-4.7 Flash: GLM-4.5's experts behind latent attention."""

from __future__ import annotations

from motley.daemon.models.description.model import Model
from motley.daemon.models.families.latent.deepseek_v3 import latent_experts
from motley.daemon.models.keys import Keys


def glm4_moe_lite(keys: Keys) -> Model:
    """Describe a model of type ``glm4_moe_lite``."""
    return latent_experts("glm4_moe_lite", keys, layers_with_experts(keys), epsilon=1e-5)


def glm4_moe_lite_ahead(keys: Keys) -> Model:
    """Describe its head that predicts a token further ahead."""
    return latent_experts("glm4_moe_lite", keys, layers_with_experts(keys), epsilon=1e-5, ahead=True)


def layers_with_experts(keys: Keys) -> list[bool]:
    """Which layers have experts: by ``mlp_layer_types``, or those after the first ``first_k_dense_replace``.

    Raises:
        ConfigError: none has.
    """
    layers = keys.layers()
    dense = keys.size("first_k_dense_replace", 1, least=0)
    kinds = keys.get("mlp_layer_types") or ["sparse" if number >= dense else "dense" for number in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= {"dense", "sparse"}:
        raise keys.refusal("mlp_layer_types", f"a list of {layers} times dense or sparse")
    if "sparse" not in kinds:
        raise keys.refusal("mlp_layer_types", "sparse for some layers")
    return [kind == "sparse" for kind in kinds]
