"""Phi-3.5-MoE: layer norms, biases in attention and in the head, LongRoPE, and two experts by a sparse mixer."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import windows_everywhere
from motley.daemon.models.blocks.experts import expert_count
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.experts import Routing
from motley.daemon.models.description.rope import Rope
from motley.daemon.models.families.experts.mixtral import mixtral_experts
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import rope_of

DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
    "eos_token_id": 2,
}
"""What transformers takes where a config is silent."""


def phimoe(keys: Keys) -> Model:
    """Describe a model of type ``phimoe``."""
    keys = keys.filled(DEFAULTS)
    shape = read_shape(keys, epsilon=1e-5, layer_norm="rms_norm_eps", norm_bias=True)
    rope, context = _rope(keys, shape.heads.size)
    windows = windows_everywhere(keys, shape.layers, silent=0)
    bias = keys.flag("attention_bias", False)
    count, columns = expert_count(keys), keys.size("intermediate_size")
    keys.only("num_experts_per_tok", 2)
    routing = Routing(2, "sparse mixer", tolerance=2 * keys.number("router_jitter_noise", 0.01))

    def layer(number: int) -> Layer:
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: attention(
                writer, shape, number, x, qkv_bias=bias, output_bias=bias, window=windows[number]
            ),
            lambda writer, x: mixtral_experts(writer, shape, number, x, count, columns, routing, "router"),
        )

    return model("phimoe", shape, layer, {"main": rope}, context, head_bias=keys.flag("lm_head_bias", False))


def _rope(keys: Keys, head_size: int) -> tuple[Rope, int]:
    """LongRoPE says what rotated queries and keys are multiplied by twice: in short texts, and in long ones."""
    given = keys.inner("rope_scaling" if keys.get("rope_scaling") else "rope_parameters")
    scales = [given.values.pop(key, None) for key in ("short_mscale", "long_mscale")]
    if given.get("rope_type" if given.says("rope_type") else "type") == "longrope":
        if scales[0] is None or scales[0] != scales[1]:
            raise given.refusal("long_mscale", "the same as short_mscale")
        given.values["attention_factor"] = scales[0]
    return rope_of(keys, given, head_size, keys.number("rope_theta", 1e6), None, ("default", "longrope"))
