"""How llama.cpp's metadata of Granite's architectures become the keys of a family; `recurrent` has the hybrid ones."""

from __future__ import annotations

from typing import Any

from motley.daemon.models.gguf.architecture import no_experts, no_window
from motley.daemon.models.gguf.metadata import Metadata


def granite(metadata: Metadata) -> dict[str, Any]:
    own, size = metadata.own, metadata.head_size
    if not own.flag("rope.scaling.finetuned", True):
        raise own.refusal("rope.scaling.finetuned", "only true: llama.cpp rotates nothing otherwise")
    no_experts(metadata)
    no_window(metadata)
    return {
        "attention_bias": metadata.has("self_attn.q_proj.bias"),
        "attention_multiplier": own.number("attention.scale", size**-0.5),
        "mlp_bias": metadata.has("mlp.down_proj.bias"),
    }


def granite_moe_family(metadata: Metadata) -> str:
    """Files of both are of one architecture: the latter's have an MLP for all rows."""
    shared = metadata.own.size("expert_shared_feed_forward_length", 0, least=0)
    return "granitemoeshared" if shared else "granitemoe"


def granite_moe(metadata: Metadata) -> dict[str, Any]:
    """An expert is as wide as an MLP is."""
    own, columns = metadata.own, metadata.own.size("feed_forward_length")
    no_window(metadata)
    if own.size("expert_feed_forward_length", columns) != columns:
        raise own.refusal("expert_feed_forward_length", f"only feed_forward_length = {columns}")
    return {
        "attention_bias": metadata.has("self_attn.q_proj.bias"),
        "attention_multiplier": own.number("attention.scale", metadata.head_size**-0.5),
        "num_local_experts": own.size("expert_count"),
        "num_experts_per_tok": own.size("expert_used_count"),
        "shared_intermediate_size": own.size("expert_shared_feed_forward_length", 0, least=0),
    }
