"""Mellum 2: Qwen3 MoE's layers with windows in some, which have a rotary embedding of their own."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import listed_windows, read_window
from motley.daemon.models.blocks.experts import expert_count, experts
from motley.daemon.models.blocks.layer_kinds import FULL, listed_sparse_layers
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.experts import Routing
from motley.daemon.models.description.rope import Rope
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import rope_keys_of_both_kinds, rope_of

THETAS = 5e5, 1e4
"""The bases where a config is silent: of layers that see everything, and of those with windows."""


def mellum(keys: Keys) -> Model:
    """Describe a model of type ``mellum``."""
    shape = read_shape(keys, head_dim=128)
    ropes, context = _ropes(keys, shape.heads.size)
    windows = listed_windows(keys, shape.layers, read_window(keys, 1024), [FULL] * shape.layers)
    bias = keys.flag("attention_bias", False)
    count, columns = expert_count(keys), keys.size("moe_intermediate_size")
    sparse, plain = listed_sparse_layers(keys, shape.layers, 0), mlp_axis(keys.size("intermediate_size"))
    routing = Routing(keys.size("num_experts_per_tok"), normalised=keys.flag("norm_topk_prob", True))

    def layer(number: int) -> Layer:
        window = windows[number]
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
                rope="sliding" if window else "full",
                window=window,
            ),
            lambda writer, x: (
                experts(writer, shape, number, x, count, columns, routing)
                if sparse[number]
                else mlp(writer, number, x, plain)
            ),
        )

    return model("mellum", shape, layer, ropes, context, ignored=["mtp."])


def _ropes(keys: Keys, size: int) -> tuple[dict[str, Rope], int]:
    """The rotary embeddings of layers that see everything and of those with windows, and the longest context."""
    given, sliding = rope_keys_of_both_kinds(keys)
    full, context = rope_of(keys, given, size, THETAS[0])
    return {"full": full, "sliding": rope_of(keys, sliding, size, THETAS[1])[0]}, context
