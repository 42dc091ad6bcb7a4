"""What an architecture of llama.cpp is here, and what several of them say alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from motley.daemon.models.blocks.layer_kinds import FULL, SLIDING
from motley.daemon.models.gguf.metadata import Metadata

KV_HEADS = "attention.head_count_kv"
ROUTER = "mlp.gate.weight"
ROUTED = frozenset(
    {
        *("expert_gating_func", "expert_group_count", "expert_group_used_count", "expert_shared_count"),
        "expert_weights_scale",
    }
)
"""Keys of experts in groups, which sigmoids choose."""
SHARING = ("qwen2moe", "qwen3next", "qwen35moe")
"""Architectures whose rows all have an expert besides, of a width of its own."""


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp's metadata of an architecture become the keys of a family.

    Attributes:
        family: what it is, or what tells it.
        more: the family's keys that do not just have another name.
        read: llama.cpp's keys besides those that all architectures have.
        names: what llama.cpp calls keys of the family besides those of `COMMON`.
        partial: a part of each head may be rotated.
        latent: attention is latent.
        listed: keys that may be lists of one number, with 0 for layers that have nothing of the kind.
        rotates: all layers have one rotary embedding, of which the usual keys tell.
        factors: tensors that `more` reads, by llama.cpp's names; no weights of the model.
        epsilon: the key of what norms add before their roots.
    """

    family: str | Callable[[Metadata], str]
    more: Callable[[Metadata], dict[str, Any]]
    read: frozenset[str] = frozenset()
    names: Mapping[str, str] = field(default_factory=dict)
    partial: bool = False
    latent: bool = False
    listed: tuple[str, ...] = ()
    rotates: bool = True
    factors: frozenset[str] = frozenset()
    epsilon: str = "attention.layer_norm_rms_epsilon"


def no_window(metadata: Metadata) -> None:
    if metadata.own.size("attention.sliding_window", 0, least=0):
        raise metadata.own.refusal("attention.sliding_window", "only 0 in this architecture")


def no_experts(metadata: Metadata) -> None:
    own = metadata.own
    for key in ("expert_count", "expert_used_count"):
        if own.size(key, 0, least=0):
            raise own.refusal(key, "only 0 in this architecture")
    for key in ("expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_weights_norm"):
        if key in own.values:
            raise own.refusal(key, "only its absence in this architecture")


def experts(metadata: Metadata, *, normalised: bool, own_width: bool) -> dict[str, Any]:
    """The keys of experts.

    Args:
        normalised: the weights of a row's experts add up to 1: the architecture decides, and no key tells it.
        own_width: experts have a width of their own; else that of an MLP.
    """
    own = metadata.own
    count, chosen = own.size("expert_count"), own.size("expert_used_count")
    if chosen > count:
        raise own.refusal("expert_used_count", f"at most expert_count = {count}")
    sparse = [metadata.has(ROUTER, layer) for layer in range(metadata.layers)]
    if not any(sparse):
        raise own.refusal("expert_count", "experts in a layer: no tensor ffn_gate_inp.weight is there")
    if own.values.get("expert_weights_norm", normalised) != normalised:
        raise own.refusal("expert_weights_norm", f"only {str(normalised).lower()} in this architecture")
    if "expert_shared_feed_forward_length" in own.values and metadata.architecture not in SHARING:
        raise own.refusal("expert_shared_feed_forward_length", "only its absence in this architecture")
    columns = own.size("feed_forward_length")
    width = own.size("expert_feed_forward_length", columns // chosen if own_width else columns)
    if not own_width and width != columns:
        raise own.refusal("expert_feed_forward_length", f"only feed_forward_length = {columns}")
    return {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "norm_topk_prob": normalised,
        "moe_intermediate_size": width,
        "mlp_only_layers": [layer for layer, has in enumerate(sparse) if not has],
    }


def only_sigmoids(metadata: Metadata, *, or_untold: bool = False) -> None:
    """Refuse experts that are chosen otherwise; 0 tells nothing, which some architectures take for a sigmoid."""
    if metadata.own.size("expert_gating_func", 2, least=0) not in ((0, 2) if or_untold else (2,)):
        raise metadata.own.refusal("expert_gating_func", "only 2, a sigmoid")


def grouped_experts(metadata: Metadata, *, normalised: bool = False) -> dict[str, Any]:
    """The keys of experts in groups, but their number and that of shared ones, which families call differently.

    Args:
        normalised: the weights of a row's experts add up to 1 where no key tells it.
    """
    own = metadata.own
    return {
        "num_experts_per_tok": own.size("expert_used_count"),
        "moe_intermediate_size": own.size("expert_feed_forward_length"),
        "norm_topk_prob": own.flag("expert_weights_norm", normalised),
        "routed_scaling_factor": own.number("expert_weights_scale", 1.0),
        "n_group": max(1, own.size("expert_group_count", 1, least=0)),
        "topk_group": max(1, own.size("expert_group_used_count", 1, least=0)),
    }


def attending(metadata: Metadata) -> list[bool]:
    """By layer, whether it attends, which the tensors tell."""
    return [metadata.has("self_attn.q_proj.weight", layer) for layer in range(metadata.layers)]


def kinds(metadata: Metadata, period: int) -> list[str]:
    """Which layers have a window: by the file's list, or all but the last one of each period.

    Args:
        period: in layers, where the file does not say.
    """
    own, layers, key = metadata.own, metadata.layers, "attention.sliding_window_pattern"
    given = own.get(key)
    if not isinstance(given, list):
        period = own.size(key, period)
        given = [(layer + 1) % period != 0 for layer in range(layers)]
    if len(given) != layers or not all(isinstance(each, bool) for each in given):
        raise own.refusal(key, f"a number, or a list of {layers} times true or false")
    return [SLIDING if each else FULL for each in given]
