"""OLMoE: experts in every layer, norms over all query heads at once and over all key heads.

FlexOlmo has norms after each block and none before, as OLMo 2.
"""

from __future__ import annotations

from collections.abc import Callable

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import no_windows
from motley.daemon.models.blocks.experts import expert_count, experts
from motley.daemon.models.blocks.layers import Block, model, post_norm_layer, pre_norm_layer
from motley.daemon.models.blocks.shape import Shape, read_shape
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.experts import Routing
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope


def olmoe(keys: Keys) -> Model:
    """Describe a model of type ``olmoe``."""
    return _described("olmoe", keys, pre_norm_layer, 10000.0, 1e-5)


def flex_olmo(keys: Keys) -> Model:
    """Describe a model of type ``flex_olmo``."""
    keys.only("clip_qkv")
    return _described("flex_olmo", keys, post_norm_layer, 5e5, 1e-6)


def _described(
    family: str, keys: Keys, norms: Callable[[Shape, int, Block, Block], Layer], theta: float, epsilon: float
) -> Model:
    """`norms`: writes a layer of attention and experts, with its norms; `theta`, `epsilon`: where keys are silent."""
    shape = read_shape(keys, kv_heads=True, epsilon=epsilon)
    rope, context = read_rope(keys, shape.heads.size, theta)
    no_windows(keys, shape.layers)
    bias = keys.flag("attention_bias", False)
    clip = keys.number("clip_qkv") if keys.get("clip_qkv") is not None else 0.0
    count, columns = expert_count(keys), keys.size("intermediate_size")
    routing = Routing(keys.size("num_experts_per_tok"), normalised=keys.flag("norm_topk_prob", False))

    def layer(number: int) -> Layer:
        return norms(
            shape,
            number,
            lambda writer, x: attention(
                writer, shape, number, x, qkv_bias=bias, output_bias=bias, whole_qk_norm=True, clip=clip
            ),
            lambda writer, x: experts(writer, shape, number, x, count, columns, routing),
        )

    return model(family, shape, layer, {"main": rope}, context)
