"""How llama.cpp's metadata of Gemma's architectures become the keys of a family."""

from __future__ import annotations

from math import inf
from statistics import NormalDist
from typing import Any

from motley.daemon.models.blocks.layer_kinds import FULL, SLIDING
from motley.daemon.models.gguf.architecture import KV_HEADS, kinds, no_experts
from motley.daemon.models.gguf.metadata import Metadata, rope_keys
from motley.daemon.models.keys import ConfigError
from motley.daemon.weights.checkpoints.gguf.checkpoint import ROPE_FACTORS
from motley.daemon.weights.spec import Piece

TABLE_BESIDE = "model.embed_tokens_per_layer.weight"
STANDING = 1e29
"""What a rotary frequency is divided by at least that is to stand still: files have 1e30."""


def gemma2(metadata: Metadata) -> dict[str, Any]:
    """Every second layer has a window, as in the family; the scale of attention is told by the size."""
    no_experts(metadata)
    own, largest = metadata.own, metadata.layers == 46  # the model of 27 billion parameters
    size = own.size("embedding_length") / own.size("attention.head_count") if largest else metadata.head_size
    return {"query_pre_attn_scalar": size}


def gemma3(metadata: Metadata) -> dict[str, Any]:
    """Only layers that see everything have a scaled rotary embedding; the scale of attention is told by the size."""
    own = metadata.own
    no_experts(metadata)
    heads, size = own.size("attention.head_count"), metadata.head_size
    largest = metadata.layers == 62  # the model of 27 billion parameters
    windowed = own.size("attention.sliding_window", 0, least=0)
    return {
        "rope_parameters": {
            "full_attention": rope_keys(metadata)["rope_parameters"],
            "sliding_attention": {"rope_theta": own.number("rope.freq_base_swa", 10000.0)},
        },
        "query_pre_attn_scalar": own.size("embedding_length") / heads if largest else size,
        "sliding_window": windowed or None,
        "layer_types": kinds(metadata, period=6) if windowed else [FULL] * metadata.layers,
        "max_position_embeddings": own.size("context_length"),
    }


def gemma3n(metadata: Metadata) -> dict[str, Any]:
    """Files tell the part of each layer's gates that is closed as the standard deviations that open ones are above the
    mean; the first ones did not tell how many layers share keys, but 20 have their own."""
    own, layers = metadata.own, metadata.layers
    no_experts(metadata)
    own.only("altup.active_idx", 0)
    deviations = own.get("activation_sparsity_scale")
    if not isinstance(deviations, list) or not all(isinstance(each, float) and each < inf for each in deviations):
        raise own.refusal("activation_sparsity_scale", f"a list of {layers} numbers of standard deviations")
    return {
        "rope_parameters": {
            "full_attention": rope_keys(metadata)["rope_parameters"],
            "sliding_attention": {"rope_theta": own.number("rope.freq_base_swa", 10000.0)},
        },
        "layer_types": kinds(metadata, period=5),
        "num_kv_shared_layers": own.size("attention.shared_kv_layers", max(0, layers - 20), least=0),
        "activation_sparsity_pattern": [round(NormalDist().cdf(each), 6) for each in deviations],  # they are float32
        "laurel_rank": metadata.checkpoint.tensor("model.layers.0.laurel.linear_left.weight").shape[0],
        "vocab_size_per_layer_input": metadata.checkpoint.tensor(TABLE_BESIDE).shape[0],
    }


def gemma4(metadata: Metadata) -> dict[str, Any]:
    """Heads of layers that see everything are wider; where these have no values of their own, tensors tell."""
    own, layers = metadata.own, metadata.layers
    windows = kinds(metadata, period=6)
    shared = own.size("attention.shared_kv_layers", 0, least=0)
    columns, doubled = _columns(metadata, layers - shared)
    narrow, wide = _kv_heads(metadata, windows)
    owned = windows[: layers - shared]
    keys_are_values = FULL in owned and not metadata.has("self_attn.v_proj.weight", owned.index(FULL))
    if wide != narrow and not keys_are_values:
        raise own.refusal(KV_HEADS, "only one number where layers that see everything have values of their own")
    size, beside = own.size("attention.key_length_swa"), own.size("embedding_length_per_layer_input", 0, least=0)
    for key, turned in (("attention.value_length_swa", size), ("rope.dimension_count_swa", size)):
        if own.size(key, turned) != turned:
            raise own.refusal(key, f"only attention.key_length_swa = {size}")
    if own.size("rope.dimension_count", metadata.head_size) != metadata.head_size:
        raise own.refusal("rope.dimension_count", f"only the size of a head, {metadata.head_size}")
    count = own.size("expert_count", 0, least=0)
    mixture = {}
    if count:
        mixture = {
            "num_experts": count,
            "top_k_experts": own.size("expert_used_count"),
            "moe_intermediate_size": own.size("expert_feed_forward_length"),
        }
    return mixture | {
        "head_dim": size,
        "global_head_dim": metadata.head_size,
        "num_key_value_heads": narrow,
        "num_global_key_value_heads": wide,
        "attention_k_eq_v": keys_are_values,
        "num_kv_shared_layers": shared,
        "layer_types": windows,
        "intermediate_size": columns,
        "use_double_wide_mlp": doubled,
        "hidden_size_per_layer_input": beside,
        "vocab_size_per_layer_input": metadata.checkpoint.tensor(TABLE_BESIDE).shape[0] if beside else None,
        "enable_moe_block": bool(count),
        "rope_parameters": {
            "sliding_attention": {"rope_theta": own.number("rope.freq_base_swa", 10000.0)},
            "full_attention": {"rope_theta": own.number("rope.freq_base", 1e6), **_proportion(metadata)},
        },
    }


def _columns(metadata: Metadata, owners: int) -> tuple[int, bool]:
    """The width of MLPs, and whether those of layers beyond the `owners`, which have own keys, are twice as wide."""
    own, key = metadata.own, "feed_forward_length"
    listed = own.values.get(key)
    if not isinstance(listed, list):
        return own.size(key), False
    further = metadata.layers - owners
    for by in (1, 2):
        if listed and type(listed[0]) is int and listed == [listed[0]] * owners + [by * listed[0]] * further:
            return listed[0], by == 2
    raise own.refusal(key, f"a number, or a list of it for {owners} layers and twice as much for {further}")


def _kv_heads(metadata: Metadata, windows: list[str]) -> tuple[int, int]:
    """How many KV heads layers with windows have, and how many the others."""
    own, listed = metadata.own, metadata.own.values.get(KV_HEADS)
    if not isinstance(listed, list):
        return (own.size(KV_HEADS, own.size("attention.head_count")),) * 2
    by_kind = [[each for each, its in zip(listed, windows, strict=False) if its == kind] for kind in (SLIDING, FULL)]
    alike = all(all(type(each) is int and each == of[0] for each in of) for of in by_kind)
    if len(listed) != len(windows) or not alike:
        raise own.refusal(KV_HEADS, "a number, or a list of one for layers with windows and one for the others")
    narrow, wide = by_kind
    return (narrow or wide)[0], (wide or narrow)[0]


def _proportion(metadata: Metadata) -> dict[str, Any]:
    """Which part of the frequencies turns: the others are divided by so much that they stand still."""
    checkpoint, pairs = metadata.checkpoint, metadata.head_size // 2
    if ROPE_FACTORS not in checkpoint:
        return {}
    checkpoint.expect({ROPE_FACTORS: (pairs,)})
    factors = checkpoint.read(Piece(ROPE_FACTORS, range(pairs))).tolist()
    turned = factors.count(1.0)
    if not turned or any(each != 1.0 for each in factors[:turned]) or any(each < STANDING for each in factors[turned:]):
        raise ConfigError(
            f"{checkpoint.file}: {ROPE_FACTORS} should hold 1 for frequencies that turn, and then 1e30 for the others"
        )
    # Half a frequency more, so that what is rounded down to whole ones are as many.
    return {"rope_type": "proportional", "partial_rotary_factor": (turned + 0.5) / pairs}
