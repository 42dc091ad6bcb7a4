"""How llama.cpp's metadata of architectures with recurrent states become the keys of a family."""

from __future__ import annotations

from typing import Any

from motley.daemon.models.blocks.windows import FULL
from motley.daemon.models.families.lfm2 import CONVOLUTION
from motley.daemon.models.gguf.architecture import experts, no_experts, no_window
from motley.daemon.models.gguf.metadata import Metadata


def lfm2(metadata: Metadata) -> dict[str, Any]:
    """LFM2 with MLPs, whose width is told as it is."""
    no_experts(metadata)
    return _short_convolutions(metadata) | {"block_auto_adjust_ff_dim": False}


def lfm2_moe(metadata: Metadata) -> dict[str, Any]:
    """LFM2 with experts: no key tells that the weights of those of a row add up to 1, they always do."""
    own = metadata.own
    if own.size("expert_gating_func", 2, least=0) != 2:
        raise own.refusal("expert_gating_func", "only 2, a sigmoid")
    return _short_convolutions(metadata) | {
        "num_experts": own.size("expert_count"),
        "num_experts_per_tok": own.size("expert_used_count"),
        "moe_intermediate_size": own.size("expert_feed_forward_length"),
        "num_dense_layers": own.size("leading_dense_block_count", 0, least=0),
        "use_expert_bias": metadata.has("feed_forward.expert_bias", metadata.layers - 1),
    }


def _short_convolutions(metadata: Metadata) -> dict[str, Any]:
    """Which layers attend, their tensors tell; the others convolve."""
    no_window(metadata)
    attends = [metadata.has("self_attn.q_proj.weight", layer) for layer in range(metadata.layers)]
    return {
        "layer_types": [FULL if each else CONVOLUTION for each in attends],
        "conv_L_cache": metadata.own.size("shortconv.l_cache"),
        "conv_bias": metadata.has("conv.in_proj.bias", attends.index(False) if not all(attends) else 0),
    }


def _delta_net(metadata: Metadata) -> dict[str, Any]:
    """Sizes of layers with a recurrent state; which layers attend, their tensors tell."""
    own = metadata.own
    values = own.size("ssm.time_step_rank")
    inner = own.size("ssm.inner_size")
    if inner % values:
        raise own.refusal("ssm.inner_size", f"a multiple of ssm.time_step_rank = {values}")
    attends = [metadata.has("self_attn.q_proj.weight", layer) for layer in range(metadata.layers)]
    return {
        "num_hidden_layers": metadata.layers,
        "attention_bias": metadata.has("self_attn.q_proj.bias", attends.index(True) if any(attends) else 0),
        "layer_types": [FULL if each else "linear_attention" for each in attends],
        "linear_conv_kernel_dim": own.size("ssm.conv_kernel"),
        "linear_key_head_dim": own.size("ssm.state_size"),
        "linear_value_head_dim": inner // values,
        "linear_num_key_heads": own.size("ssm.group_count"),
        "linear_num_value_heads": values,
    }


def qwen3_next(metadata: Metadata) -> dict[str, Any]:
    """Whose older files have the projections of a recurrent layer in one matrix."""
    own = metadata.own
    apart = metadata.has("linear_attn.in_proj_qkv.weight")
    return (
        _delta_net(metadata)
        | experts(metadata, normalised=True, own_width=True)
        | {
            "projections_are_apart": apart,
            "shared_expert_intermediate_size": own.size("expert_shared_feed_forward_length"),
        }
    )


def qwen35(metadata: Metadata) -> dict[str, Any]:
    """Qwen3.5 with MLPs."""
    no_experts(metadata)
    return _delta_net(metadata)


def qwen35_moe(metadata: Metadata) -> dict[str, Any]:
    """Qwen3.5 with experts."""
    shared = metadata.own.size("expert_shared_feed_forward_length")
    mixture = experts(metadata, normalised=True, own_width=True)
    return _delta_net(metadata) | mixture | {"shared_expert_intermediate_size": shared}


SSM = frozenset(
    {
        *("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size"),
        *("full_attention_interval", "rope.dimension_sections", "nextn_predict_layers"),
    }
)
"""Keys of layers with a recurrent state. Sections of the rotary embedding are of images; a text's are alike."""
CONVOLUTIONS = frozenset({"shortconv.l_cache", "leading_dense_block_count", "expert_gating_func"})
"""Keys of layers with short convolutions."""
