"""How llama.cpp's metadata of Laguna become the keys of the family."""

from __future__ import annotations

from typing import Any

from motley.daemon.models.blocks.layer_kinds import FULL, SLIDING
from motley.daemon.models.gguf.architecture import ROUTER, kinds, only_sigmoids
from motley.daemon.models.gguf.metadata import Metadata, rope_keys

HEADS, PATTERN, GATE = "attention.head_count", "attention.sliding_window_pattern", "self_attn.g_proj.weight"
YARN = "rope.scaling.yarn_attn_factor"
LAGUNA = frozenset(
    {
        *("expert_gating_func", "expert_shared_count", "expert_weights_scale", "leading_dense_block_count"),
        *(PATTERN, YARN),
        *("rope.dimension_count_swa", "rope.freq_base_swa"),
    }
)
"""llama.cpp's keys besides those that all architectures have."""


def laguna(metadata: Metadata) -> dict[str, Any]:
    """Which layers have experts, and whether a gate is of a head or of each of its elements, tensors tell."""
    own, layers = metadata.own, metadata.layers
    only_sigmoids(metadata, or_untold=True)
    own.only("expert_weights_norm", True)
    own.only("expert_shared_count", 1)
    heads = _heads(metadata)
    windowed = own.size("attention.sliding_window", 0, least=0)
    whole = metadata.has(GATE) and _rows(metadata, GATE) == heads[0] * metadata.head_size
    full = dict(rope_keys(metadata)["rope_parameters"])
    if YARN in own.values and "attention_factor" in full:
        full["attention_factor"] = own.number(YARN)
    size = metadata.head_size
    turning = own.size("rope.dimension_count_swa", size, most=size)
    sliding = {
        "rope_theta": own.number("rope.freq_base_swa", full["rope_theta"]),
        "partial_rotary_factor": turning / size,
    }
    return {
        "num_attention_heads": heads[0],
        "num_attention_heads_per_layer": heads,
        "sliding_window": windowed or None,
        "layer_types": _kinds(metadata) if windowed else [FULL] * layers,
        "gating": "per-element" if whole else "per-head",
        "mlp_layer_types": ["sparse" if metadata.has(ROUTER, layer) else "dense" for layer in range(layers)],
        "num_experts": own.size("expert_count"),
        "num_experts_per_tok": own.size("expert_used_count"),
        "moe_intermediate_size": own.size("expert_feed_forward_length"),
        "shared_expert_intermediate_size": own.size("expert_shared_feed_forward_length"),
        "moe_routed_scaling_factor": own.number("expert_weights_scale"),
        "max_position_embeddings": own.size("context_length"),
        "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
    }


def _heads(metadata: Metadata) -> list[int]:
    """How many query heads each layer has."""
    given, layers = metadata.own.get(HEADS), metadata.layers
    heads = given if isinstance(given, list) else [given] * layers
    if len(heads) != layers or not all(type(each) is int and each > 0 for each in heads):
        raise metadata.own.refusal(HEADS, f"a number, or a list of {layers} numbers")
    return heads


def _kinds(metadata: Metadata) -> list[str]:
    """Which layers have a window: by the file's list, or all but the first one of each period."""
    if isinstance(metadata.own.get(PATTERN), list):
        return kinds(metadata, period=4)
    period = metadata.own.size(PATTERN, 4)
    return [SLIDING if layer % period else FULL for layer in range(metadata.layers)]


def _rows(metadata: Metadata, tensor: str) -> int:
    """The rows of a tensor of the first layer."""
    return metadata.checkpoint.tensor(f"model.layers.0.{tensor}").shape[0]
