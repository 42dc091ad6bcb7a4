"""dots.llm1: Qwen3's attention, and DeepSeek V3's experts after some layers with an MLP."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import listed_windows, read_window
from motley.daemon.models.blocks.layer_kinds import FULL, SLIDING
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.families.experts.glm4_moe import corrected_experts
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope


def dots1(keys: Keys) -> Model:
    """Describe a model of type ``dots1``."""
    keys = keys.filled({"norm_topk_prob": False})
    shape = read_shape(keys, kv_heads=True)
    rope, context = read_rope(keys, shape.heads.size)
    window, first = read_window(keys), keys.size("max_window_layers", 62, least=0)
    kinds = [SLIDING if window and number >= first else FULL for number in range(shape.layers)]
    windows = listed_windows(keys, shape.layers, window, kinds)
    bias = keys.flag("attention_bias", False)
    dense = keys.size("first_k_dense_replace", 0, least=0)
    mixture = corrected_experts(keys, shape, [number >= dense for number in range(shape.layers)])

    def layer(number: int) -> Layer:
        return pre_norm_layer(
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
                window=windows[number],
            ),
            lambda writer, x: mixture(writer, number, x),
        )

    return model("dots1", shape, layer, {"main": rope}, context)
