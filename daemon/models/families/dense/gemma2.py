"""Gemma 2: norms around every block, GELU, soft caps, and a window in every second layer.

VaultGemma has norms before blocks only.
"""

from __future__ import annotations

from collections.abc import Callable

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import listed_windows
from motley.daemon.models.blocks.layer_kinds import FULL, SLIDING
from motley.daemon.models.blocks.layers import Block, both_norms_layer, model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import Shape, read_shape
from motley.daemon.models.blocks.spelling import spelled
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.rows import Activation
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope

DEFAULTS = {"head_dim": 256, "max_position_embeddings": 8192, "eos_token_id": 1, "sliding_window": 4096}
"""What transformers takes where a config is silent."""


def gemma2(keys: Keys) -> Model:
    """Describe a model of type ``gemma2``."""
    return _described("gemma2", keys, both_norms_layer)


def vaultgemma(keys: Keys) -> Model:
    """Describe a model of type ``vaultgemma``."""
    described = _described("vaultgemma", keys, pre_norm_layer)
    return spelled(described, {".post_attention_layernorm.": ".pre_feedforward_layernorm."})


def _described(family: str, keys: Keys, norms: Callable[[Shape, int, Block, Block], Layer]) -> Model:
    """`norms`: writes a layer of attention and an MLP, with its norms."""
    keys = keys.filled(DEFAULTS)
    shape = read_shape(keys, tied=True, norm_offset=1.0)
    rope, context = read_rope(keys, shape.heads.size)
    kinds = [FULL if layer % 2 else SLIDING for layer in range(shape.layers)]
    windows = listed_windows(keys, shape.layers, keys.size("sliding_window"), kinds)
    for key in ("hidden_act", "hidden_activation"):
        keys.only(key, "gelu_pytorch_tanh")
    bias, scale = keys.flag("attention_bias", False), keys.number("query_pre_attn_scalar", 256.0) ** -0.5
    caps = [_cap(keys, "attn_logit_softcapping", 50.0), _cap(keys, "final_logit_softcapping", 30.0)]
    columns = mlp_axis(keys.size("intermediate_size"))

    def layer(number: int) -> Layer:
        return norms(
            shape,
            number,
            lambda writer, x: attention(
                writer,
                shape,
                number,
                x,
                qkv_bias=bias,
                output_bias=bias,
                window=windows[number],
                scale=scale,
                soft_cap=caps[0],
            ),
            lambda writer, x: mlp(writer, number, x, columns, activation=Activation.GELU_TANH),
        )

    return model(family, shape, layer, {"main": rope}, context, embedding_scale=shape.hidden**0.5, logits_cap=caps[1])


def _cap(keys: Keys, key: str, silent: float) -> float:
    """A soft cap; 0, which is none, where the key is null."""
    return 0.0 if keys.says(key) and keys.get(key) is None else keys.number(key, silent)
