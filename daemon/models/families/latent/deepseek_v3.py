"""DeepSeek V3 and R1, Kimi K2: latent attention, and experts in groups, chosen by sigmoids with a correction."""

from __future__ import annotations

from motley.daemon.models.blocks.ahead import check_one_ahead, head_ahead
from motley.daemon.models.blocks.attending.indexer import Indexer
from motley.daemon.models.blocks.attending.latent import latent_attention, read_latent
from motley.daemon.models.blocks.layers import Block, further, model, pre_norm_layer
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.families.experts.glm4_moe import NEXTN, corrected_experts
from motley.daemon.models.keys import Keys


def deepseek_v3(keys: Keys) -> Model:
    """Describe a model of type ``deepseek_v3``."""
    return _described(keys)


def deepseek_v3_ahead(keys: Keys) -> Model:
    """Describe its head that predicts a token further ahead."""
    return _described(keys, ahead=True)


def _described(keys: Keys, ahead: bool = False) -> Model:
    dense = keys.size("first_k_dense_replace", 3, least=0)
    keys.only("moe_layer_freq", 1)
    sparse = [number >= dense for number in range(keys.layers())]
    return latent_experts("deepseek_v3", keys, sparse, ahead=ahead)


def latent_experts(
    family: str,
    keys: Keys,
    sparse: list[bool],
    epsilon: float = 1e-6,
    *,
    ahead: bool = False,
    indexer: Indexer | None = None,
) -> Model:
    """A model of latent attention and, in layers that are `sparse`, experts as GLM-4.5 has them; others have an MLP.

    Args:
        epsilon: of most norms, where the keys are silent.
        ahead: not the model but its head that predicts a token further ahead.
        indexer: what chooses the positions that rows see; None: they see all.
    """
    shape, sizes, rope, context = read_latent(keys, epsilon)
    mixture = corrected_experts(keys, shape, sparse)

    def layer(number: int, enter: Block | None = None) -> Layer:
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: latent_attention(writer, shape, sizes, number, x, indexer=indexer),
            lambda writer, x: mixture(writer, number, x),
            enter,
        )

    if ahead:
        check_one_ahead(keys, NEXTN)
        return head_ahead(family, shape, layer, {"main": rope}, context)
    ignored = further(shape, keys.size(NEXTN, 1, least=0))
    return model(family, shape, layer, {"main": rope}, context, ignored=ignored)
