"""How llama.cpp's metadata of architectures with latent attention become the keys of a family."""

from __future__ import annotations

from typing import Any

from motley.daemon.models.blocks.attending.indexer import FULL, SHARED
from motley.daemon.models.gguf.architecture import ROUTED, grouped_experts, no_experts, no_window, only_sigmoids
from motley.daemon.models.gguf.long_rope import long_rope
from motley.daemon.models.gguf.metadata import Metadata, rope_keys

LATENT = ROUTED | {
    *("attention.q_lora_rank", "attention.kv_lora_rank", "attention.key_length_mla", "attention.value_length_mla"),
    *("leading_dense_block_count", "nextn_predict_layers", "rope.scaling.yarn_log_multiplier"),
}
"""Keys of latent attention, and of experts behind it."""
WARMTH = frozenset({"attention.temperature_length", "attention.temperature_scale"})
"""Keys of how queries grow with their positions."""
INDEXER = frozenset(f"attention.indexer.{key}" for key in ("head_count", "key_length", "top_k", "types"))
"""Keys of what chooses the positions that a row sees."""


def deepseek2_family(metadata: Metadata) -> str:
    """V2 is of this architecture too: a softmax chooses its experts, which older files leave unsaid.

    So is Mistral Large 3, which is as Mistral Small 4: queries grow with their positions.
    """
    if "attention.temperature_scale" in metadata.own.values:
        return "mistral4"
    return "deepseek_v2" if metadata.own.size("expert_gating_func", 1, least=0) in (0, 1) else "deepseek_v3"


def deepseek2(metadata: Metadata) -> dict[str, Any]:
    """V2, V3 or Mistral Large 3."""
    family = deepseek2_family(metadata)
    if family == "mistral4":
        return mistral4(metadata)
    if family == "deepseek_v3":
        only_sigmoids(metadata)
        return _latent(metadata)
    # Where there are several groups, this is how V2 chooses.
    return _latent(metadata) | {"topk_method": "group_limited_greedy"}


def mistral4(metadata: Metadata) -> dict[str, Any]:
    """Where a file does not tell how queries grow, it is as in Mistral Small 4."""
    own, keys = metadata.own, _latent(metadata)
    if own.size("expert_gating_func", 1, least=0) not in (0, 1):
        raise own.refusal("expert_gating_func", "only 1, a softmax")
    rope = keys["rope_parameters"] | {"llama_4_scaling_beta": own.number("attention.temperature_scale", 0.1)}
    span = own.size("rope.scaling.original_context_length")
    if own.size("attention.temperature_length", span) != span:
        raise own.refusal("attention.temperature_length", f"only rope.scaling.original_context_length = {span}")
    return keys | {"rope_parameters": rope}


def _latent(metadata: Metadata) -> dict[str, Any]:
    """The keys of latent attention, and of experts.

    Only files of which each head's matrices are apart tell their sizes; in older ones heads have ``key_length``.
    """
    own = metadata.own
    apart = "attention.key_length_mla" in own.values
    turned = metadata.head_size
    length = own.size("attention.key_length_mla" if apart else "attention.key_length")
    rope = dict(rope_keys(metadata)["rope_parameters"])
    if rope.get("rope_type") == "yarn" and "rope.scaling.yarn_log_multiplier" in own.values:
        del rope["attention_factor"]
        stretch = 10 * own.number("rope.scaling.yarn_log_multiplier")
        rope |= {"mscale": stretch, "mscale_all_dim": stretch}
    return {
        "rope_parameters": rope,
        "num_hidden_layers": metadata.layers,
        "num_key_value_heads": own.size("attention.head_count"),
        "q_lora_rank": own.size("attention.q_lora_rank", 0, least=0) or None,
        "kv_lora_rank": own.size("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": length - turned,
        "v_head_dim": own.size("attention.value_length_mla" if apart else "attention.value_length"),
        "num_nextn_predict_layers": own.size("nextn_predict_layers", 0, least=0),
        "first_k_dense_replace": own.size("leading_dense_block_count", 0, least=0),
        "n_routed_experts": own.size("expert_count"),
        "n_shared_experts": own.size("expert_shared_count", 0, least=0),
    } | grouped_experts(metadata)


def minicpm3(metadata: Metadata) -> dict[str, Any]:
    """No key tells how embeddings, residuals and logits are scaled: as in MiniCPM3-4B, which llama.cpp knows alone."""
    own, turned = metadata.own, metadata.head_size
    no_experts(metadata)
    no_window(metadata)
    heads = own.size("attention.head_count")
    return {
        "num_key_value_heads": heads,
        "q_lora_rank": own.size("attention.q_lora_rank", 0, least=0) or None,
        "kv_lora_rank": own.size("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": own.size("attention.key_length") - turned,
        "v_head_dim": own.size("attention.value_length", own.size("embedding_length") // heads),
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    } | long_rope(metadata)


def glm_dsa(metadata: Metadata) -> dict[str, Any]:
    """GLM-5: DeepSeek V3's layers, and indexers, in those that have tensors of one."""
    own = metadata.own
    only_sigmoids(metadata)
    has_one = [metadata.has("self_attn.indexer.wk.weight", layer) for layer in range(metadata.layers)]
    if not has_one[0]:
        raise own.refusal(
            "attention.indexer.top_k", "a file with tensors of indexers (blk.0.indexer.attn_k.weight, ...)"
        )
    return _latent(metadata) | {
        "indexer_types": [FULL if has else SHARED for has in has_one],
        "index_topk": own.size("attention.indexer.top_k"),
        "index_n_heads": own.size("attention.indexer.head_count"),
        "index_head_dim": own.size("attention.indexer.key_length"),
    }
