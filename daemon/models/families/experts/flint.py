"""Flint: Qwen3 MoE with sinks, sigmoid scores and a shared expert; only layers with windows rotate."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import listed_windows, read_window
from motley.daemon.models.blocks.experts import SharedExpert, expert_count, experts, sparse_layers
from motley.daemon.models.blocks.layer_kinds import FULL, SLIDING
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.experts import Routing
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope

DEFAULTS = {"mlp_only_layers": [0, 1], "num_experts_per_tok": 6, "moe_intermediate_size": 512}
"""What transformers takes where a config is silent."""


def flint(keys: Keys) -> Model:
    """Describe a model of type ``flint``."""
    keys = keys.filled(DEFAULTS)
    shape = read_shape(keys, head_dim=128)
    rope, context = read_rope(keys, shape.heads.size)
    full = {0, 1, *range(1, shape.layers, 4), shape.layers - 1}
    kinds = [FULL if number in full else SLIDING for number in range(shape.layers)]
    windows = listed_windows(keys, shape.layers, read_window(keys, 513), kinds)
    bias = keys.flag("attention_bias", False)
    count, columns = expert_count(keys), keys.size("moe_intermediate_size")
    routing = Routing(keys.size("num_experts_per_tok"), scores="sigmoid", normalised=keys.flag("norm_topk_prob", True))
    shared = SharedExpert(keys.size("shared_expert_intermediate_size", 1024), gated=False)
    sparse, plain = sparse_layers(keys, shape.layers), mlp_axis(keys.size("intermediate_size", 6144))

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
                sinks=True,
                rope="main" if windows[number] else None,
                window=windows[number],
            ),
            lambda writer, x: (
                experts(writer, shape, number, x, count, columns, routing, shared=shared)
                if sparse[number]
                else mlp(writer, number, x, plain)
            ),
        )

    return model("flint", shape, layer, {"main": rope}, context)
