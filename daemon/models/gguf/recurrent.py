"""How llama.cpp's metadata of architectures with recurrent states or short convolutions become the keys of a family."""

from __future__ import annotations

from typing import Any

from motley.daemon.models.blocks.layer_kinds import FULL, LINEAR
from motley.daemon.models.blocks.recurrent.mamba import MAMBA
from motley.daemon.models.description.model import HEAD
from motley.daemon.models.families.recurrent.lfm2 import CONVOLUTION
from motley.daemon.models.families.recurrent.nemotron_h import EXPERTS, MLP
from motley.daemon.models.gguf.architecture import (
    attending,
    experts,
    grouped_experts,
    no_experts,
    no_window,
    only_sigmoids,
)
from motley.daemon.models.gguf.metadata import Metadata


def lfm2(metadata: Metadata) -> dict[str, Any]:
    """LFM2 with MLPs, whose width is told as it is."""
    no_experts(metadata)
    return _short_convolutions(metadata) | {"block_auto_adjust_ff_dim": False}


def lfm2_moe(metadata: Metadata) -> dict[str, Any]:
    """LFM2 with experts: no key tells that the weights of those of a row add up to 1, they always do."""
    own = metadata.own
    only_sigmoids(metadata)
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
    attends = attending(metadata)
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
    attends = attending(metadata)
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


def qwen35(metadata: Metadata) -> dict[str, Any]:
    """Qwen3.5 with MLPs."""
    no_experts(metadata)
    return _delta_net(metadata)


def qwen35_moe(metadata: Metadata) -> dict[str, Any]:
    """Qwen3.5 with experts, and Qwen3-Next."""
    shared = metadata.own.size("expert_shared_feed_forward_length")
    mixture = experts(metadata, normalised=True, own_width=True)
    return _delta_net(metadata) | mixture | {"shared_expert_intermediate_size": shared}


def granite_hybrid(metadata: Metadata) -> dict[str, Any]:
    """Granite 4 with Mamba2 layers: which layers attend, their tensors tell. An expert is as wide as an MLP is."""
    own, attends = metadata.own, attending(metadata)
    first, columns = attends.index(False) if not all(attends) else 0, own.size("feed_forward_length")
    if own.size("expert_feed_forward_length", columns) != columns:
        raise own.refusal("expert_feed_forward_length", f"only feed_forward_length = {columns}")
    heads, inner = _mamba_heads(metadata)
    count = own.size("expert_count", 0, least=0)
    wide = own.size("embedding_length")
    if inner % wide:
        raise own.refusal("ssm.inner_size", f"only multiples of embedding_length, {wide}")
    if count and not own.size("expert_shared_feed_forward_length", 0, least=0):
        raise own.refusal("expert_shared_feed_forward_length", "it, where there are experts")
    return {
        "layer_types": [FULL if each else MAMBA for each in attends],
        "position_embedding_type": "rope" if own.flag("rope.scaling.finetuned", True) else "nope",
        "attention_multiplier": own.number("attention.scale", metadata.head_size**-0.5),
        "attention_bias": metadata.has("self_attn.q_proj.bias", attends.index(True) if any(attends) else 0),
        "shared_intermediate_size": own.size("expert_shared_feed_forward_length", columns),
        "num_local_experts": count,
        **({"num_experts_per_tok": own.size("expert_used_count")} if count else {}),
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // wide,
        "mamba_d_state": own.size("ssm.state_size"),
        "mamba_n_groups": own.size("ssm.group_count"),
        "mamba_d_conv": own.size("ssm.conv_kernel"),
        "mamba_conv_bias": metadata.has("mamba.conv1d.bias", first),
        "mamba_proj_bias": metadata.has("mamba.in_proj.bias", first),
    }


def falcon_h1(metadata: Metadata) -> dict[str, Any]:
    """Falcon-H1: matrices have been multiplied by its multipliers, but no head that is the embeddings has."""
    no_window(metadata)
    no_experts(metadata)
    own = metadata.own
    if HEAD not in metadata.checkpoint:
        raise own.refusal(
            "vocab_size", f"it, with a tensor output.weight beside: no key tells what {HEAD} is multiplied by"
        )
    heads, inner = _mamba_heads(metadata)
    return {
        "attention_bias": metadata.has("self_attn.q_proj.bias"),
        "mamba_d_ssm": inner,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_d_state": own.size("ssm.state_size"),
        "mamba_n_groups": own.size("ssm.group_count"),
        "mamba_d_conv": own.size("ssm.conv_kernel"),
        "mamba_conv_bias": metadata.has("mamba.conv1d.bias"),
        "mamba_proj_bias": metadata.has("mamba.in_proj.bias"),
        "projectors_bias": metadata.has("mamba.out_proj.bias"),
        "mamba_rms_norm": metadata.has("mamba.norm.weight"),
        "mamba_norm_before_gate": False,
    }


def kimi_linear(metadata: Metadata) -> dict[str, Any]:
    """Kimi Linear: which layers attend, their tensors tell; the others have as many heads as these."""
    own, heads = metadata.own, metadata.own.size("attention.head_count")
    only_sigmoids(metadata, or_untold=True)
    attends = [metadata.has("self_attn.kv_a_proj_with_mqa.weight", layer) for layer in range(metadata.layers)]
    turned = metadata.head_size
    return grouped_experts(metadata, normalised=True) | {
        "layer_types": [FULL if each else LINEAR for each in attends],
        "num_key_value_heads": heads,
        "q_lora_rank": own.size("attention.q_lora_rank", 0, least=0) or None,
        "kv_lora_rank": own.size("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": own.size("attention.key_length_mla", least=turned + 1) - turned,
        "v_head_dim": own.size("attention.value_length_mla"),
        "linear_num_heads": heads,
        "linear_head_dim": own.size("kda.head_dim"),
        "linear_conv_kernel_dim": own.size("ssm.conv_kernel"),
        "first_k_dense_replace": own.size("leading_dense_block_count", 0, least=0),
        "n_routed_experts": own.size("expert_count"),
        "n_shared_experts": own.size("expert_shared_count", 0, least=0),
    }


KDA = frozenset({"ssm.conv_kernel", "kda.head_dim"})
"""Keys of Kimi's DeltaNets."""
BOUND, CLAMPS = "kda.gate_lower_bound", ("swiglu_clamp_exp", "swiglu_clamp_shexp")
LING = KDA | {BOUND, "kda.safe_gate", *CLAMPS}
"""The same, of how much is left of a state at least, and of what bounds the gates of experts."""


def bailingmoe3(metadata: Metadata) -> dict[str, Any]:
    """Ling 3: as Kimi Linear, but for how states decay."""
    own = metadata.own
    own.only("kda.safe_gate", True)
    if own.get(BOUND) is None:
        raise own.refusal(BOUND, "a negative number")
    for key in CLAMPS:
        limits = own.get(key)
        if any(limits if isinstance(limits, list) else [limits]):
            raise own.refusal(key, "only 0 for each layer")
    shared = own.size("expert_shared_count", 1, least=0)
    width = shared * own.size("expert_feed_forward_length")
    if own.size("expert_shared_feed_forward_length", width) != width:
        raise own.refusal("expert_shared_feed_forward_length", f"only that of {shared} experts, {width}")
    return kimi_linear(metadata) | {
        "kda_lower_bound": own.get(BOUND),
        "num_hidden_layers": metadata.layers,
        "num_nextn_predict_layers": own.size("nextn_predict_layers", 0, least=0),
    }


def nemotron_h(metadata: Metadata) -> dict[str, Any]:
    """Nemotron-H and Nemotron 3; what the one block of a layer is, its tensors tell."""
    own, kinds = metadata.own, [_nemotron_kind(metadata, layer) for layer in range(metadata.layers)]
    first = kinds.index(MAMBA) if MAMBA in kinds else 0
    heads, inner = _mamba_heads(metadata)
    keys: dict[str, Any] = {
        "num_hidden_layers": metadata.layers,
        "layers_block_type": kinds,
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
        "ssm_state_size": own.size("ssm.state_size"),
        "n_groups": own.size("ssm.group_count"),
        "conv_kernel": own.size("ssm.conv_kernel"),
        "use_conv_bias": metadata.has("mixer.conv1d.bias", first),
        "use_bias": metadata.has("mixer.in_proj.bias", first),
    }
    if EXPERTS not in kinds:
        no_experts(metadata)
        return keys
    only_sigmoids(metadata, or_untold=True)
    return (
        keys
        | grouped_experts(metadata)
        | {
            "n_routed_experts": own.size("expert_count"),
            "n_shared_experts": own.size("expert_shared_count", 1),
            "moe_shared_expert_intermediate_size": own.size("expert_shared_feed_forward_length"),
            "moe_latent_size": own.size("moe_latent_size", 0, least=0),
        }
    )


def _nemotron_kind(metadata: Metadata, layer: int) -> str:
    """The one of whose tensors a layer has the first."""
    telling = {"in_proj": MAMBA, "q_proj": FULL, "gate": EXPERTS, "up_proj": MLP}
    kind = next((kind for part, kind in telling.items() if metadata.has(f"mixer.{part}.weight", layer)), None)
    if kind is None:
        raise metadata.own.refusal(
            "block_count", f"layers that are one block each; of layer {layer} no tensor tells it"
        )
    return kind


def _mamba_heads(metadata: Metadata) -> tuple[int, int]:
    """How many heads Mamba2 layers have, and how many elements all of them together."""
    own = metadata.own
    heads, inner = own.size("ssm.time_step_rank"), own.size("ssm.inner_size")
    if inner % heads:
        raise own.refusal("ssm.inner_size", f"a multiple of ssm.time_step_rank = {heads}")
    return heads, inner


SSM = frozenset(
    {
        *("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size"),
        *("full_attention_interval", "rope.dimension_sections", "nextn_predict_layers"),
    }
)
"""Keys of layers with a recurrent state. Sections of the rotary embedding are of images; a text's are alike."""
CONVOLUTIONS = frozenset({"shortconv.l_cache", "leading_dense_block_count", "expert_gating_func"})
"""Keys of layers with short convolutions."""
