"""Gemma 3's text model: norms around every block, GELU, and windows with a rotary embedding of their own."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import listed_windows
from motley.daemon.models.blocks.layer_kinds import FULL, SLIDING
from motley.daemon.models.blocks.layers import both_norms_layer, model
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.rows import Activation
from motley.daemon.models.description.rope import Rope
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import rope_keys_of_both_kinds, rope_of

DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "eos_token_id": 1,
    "sliding_window": 4096,
}
"""What transformers takes where a config is silent, as those of the published models are."""


def gemma3(keys: Keys) -> Model:
    """Describe a model of type ``gemma3_text``."""
    keys = keys.filled(DEFAULTS)
    shape = read_shape(keys, tied=True, norm_offset=1.0)
    ropes = ropes_by_windows(keys, shape.heads.size)
    period = keys.size("sliding_window_pattern", 6)
    kinds = [FULL if (layer + 1) % period == 0 else SLIDING for layer in range(shape.layers)]
    windows = listed_windows(keys, shape.layers, keys.size("sliding_window"), kinds)
    keys.only("hidden_activation", "gelu_pytorch_tanh")
    bias, scale = keys.flag("attention_bias", False), keys.number("query_pre_attn_scalar", 256.0) ** -0.5
    cap = keys.number("final_logit_softcapping") if keys.get("final_logit_softcapping") is not None else 0.0
    columns = mlp_axis(keys.size("intermediate_size"))

    def layer(number: int) -> Layer:
        return both_norms_layer(
            shape,
            number,
            lambda writer, x: attention(
                writer,
                shape,
                number,
                x,
                qkv_bias=bias,
                output_bias=bias,
                qk_norm=True,
                rope="sliding" if windows[number] else "full",
                window=windows[number],
                scale=scale,
            ),
            lambda writer, x: mlp(writer, number, x, columns, activation=Activation.GELU_TANH),
        )

    context = keys.size("max_position_embeddings")
    scaling = shape.hidden**0.5
    return model("gemma3", shape, layer, ropes, context, embedding_scale=scaling, logits_cap=cap)


def ropes_by_windows(keys: Keys, head_size: int) -> dict[str, Rope]:
    """Layers that see everything may have a scaled rotary embedding, those with windows have a faster one."""
    full, sliding = rope_keys_of_both_kinds(keys)
    theta, local = keys.number("rope_theta", 1e6), keys.number("rope_local_base_freq", 1e4)
    return {
        "full": rope_of(keys, full, head_size, theta)[0],
        "sliding": rope_of(keys, sliding, head_size, local)[0],
    }
