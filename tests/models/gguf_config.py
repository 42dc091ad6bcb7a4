"""The metadata of GGUF files as llama.cpp's converter writes them from a ``config.json``, for tests."""

from __future__ import annotations

import json
from math import inf, log, sqrt, tau
from pathlib import Path
from statistics import NormalDist
from typing import Any

import gguf

from motley.daemon.models.families.recurrent.kimi_linear import KEYS as KIMI_KEYS

MAMBA = ("falcon-h1", "granitehybrid", "nemotron_h", "nemotron_h_moe")
"""Architectures with Mamba2 layers."""
LAYER_NORMS = ("command-r", "cohere2", "jais2", "nemotron", "stablelm", "starcoder2")
"""Those with layer norms."""
EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
OWN_WIDTH = (
    *("qwen2moe", "qwen3moe", "qwen3vlmoe", "qwen3next", "qwen35moe"),
    *("kimi-linear", "glm4moe", "deepseek2", "dots1", "glm-dsa", "exaone-moe", "gemma4", "lfm2moe", "mistral4"),
    *("bailingmoe3", "laguna", "nemotron_h_moe"),
)
"""Architectures whose experts have a width of their own."""
LEADING = ("bailingmoe3", "kimi-linear", "glm4moe", "deepseek2", "dots1", "glm-dsa", "exaone-moe", "mistral4")
"""Those with leading layers without experts, and keys of groups of these."""


def text_config(folder: Path) -> dict[str, Any]:
    """A folder's config, or the text part of it, with the keys that follow from others."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    for usual, own in KIMI_KEYS.items():
        if own in config:
            config[usual] = config.pop(own)
    if "qk_rope_head_dim" in config:
        config.setdefault("linear_head_dim", config.get("head_dim"))
        config["head_dim"] = config["qk_rope_head_dim"]
    config |= config.pop("text_config", {}) | {key: config[key] for key in ("eos_token_id",) if key in config}
    for wide in config.get("per_layer_config", {}).values():
        config |= {"global_head_dim": wide["head_dim"], "num_global_key_value_heads": wide["num_key_value_heads"]}
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return config


def ropes(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The rotary embedding of layers that see everything, and that of those with windows if it is another: as
    transformers 5 spells them, whatever the config does."""
    given = config.get("rope_parameters")
    if given is None:
        given = {"rope_theta": config.get("rope_theta", 10000.0)} | (
            config.get("rope_scaling") or {"rope_type": "default"}
        )
        given.setdefault("rope_type", given.get("type"))
        local = config.get("rope_local_base_freq")
        return given, {"rope_theta": local} if local else {}
    return (given["full_attention"], given["sliding_attention"]) if "full_attention" in given else (given, {})


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    architecture = writer.arch
    writer.add_block_count(config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    columns = config.get("intermediate_size_mlp") or config["intermediate_size"]
    if not architecture.startswith("nemotron_h"):
        writer.add_feed_forward_length(columns * 2 // 3 if config.get("block_auto_adjust_ff_dim") else columns)
    writer.add_head_count(config.get("num_attention_heads_per_layer") or config["num_attention_heads"])
    heads = config["num_key_value_heads"]
    if architecture in ("lfm2", "lfm2moe"):
        writer.add_head_count_kv([heads * (kind == "full_attention") for kind in config["layer_types"]])
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    elif architecture == "kimi-linear":
        add_kda(writer, config["linear_attn_config"], config["num_hidden_layers"])
    elif architecture == "bailingmoe3":
        layers, period = config["num_hidden_layers"], config["layer_group_size"]
        sizes = {"head_dim": config["linear_head_dim"], "full_attn_layers": [*range(period, layers + 1, period)]}
        add_kda(writer, config | sizes, layers)
        writer.add_bool("bailingmoe3.kda.safe_gate", True)
        writer.add_float32("bailingmoe3.kda.gate_lower_bound", config["kda_lower_bound"])
    elif architecture in MAMBA:
        add_mamba(writer, config)
    else:
        writer.add_head_count_kv(heads)
    if architecture in LAYER_NORMS:
        keys = "layer_norm_eps", "norm_epsilon", "norm_eps"
        writer.add_layer_norm_eps(next(config[key] for key in keys if key in config))
    else:
        writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["norm_eps"])
    if architecture == "stablelm":
        writer.add_parallel_residual(config["use_parallel_residual"])
    if architecture in ("command-r", "cohere2"):
        writer.add_logit_scale(config["logit_scale"])
    if "kv_lora_rank" in config:
        add_latent(writer, config)
    elif architecture == "gemma4":
        add_wide_heads(writer, config)
    elif architecture != "phi3":
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("model_type") in ("cohere2", "exaone4", "exaone_moe", "olmo3"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if architecture == "laguna":
        writer.add_expert_weights_norm(True)
        writer.add_expert_weights_scale(config["moe_routed_scaling_factor"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))
        writer.add_rope_dimension_count_swa(config["head_dim"])
        if "sliding_attention" not in config["layer_types"]:
            writer.add_sliding_window_pattern([False] * config["num_hidden_layers"])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if architecture == "gemma3":
        if "layer_types" in config:
            writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
        else:
            writer.add_sliding_window_pattern(config["sliding_window_pattern"])
        if config.get("final_logit_softcapping"):
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if architecture == "gemma3n":
        writer.add_altup_active_idx(0)
        writer.add_altup_num_inputs(config["altup_num_inputs"])
        writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
        writer.add_shared_kv_layers(config["num_kv_shared_layers"])
        parts = config["activation_sparsity_pattern"]
        writer.add_activation_sparsity_scale([NormalDist().inv_cdf(part) if part else -inf for part in parts])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if architecture in ("granite", "granitehybrid", "granitemoe"):
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if "linear_num_key_heads" in config:
        writer.add_ssm_conv_kernel(config.get("linear_conv_kernel_dim", 4))
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
        writer.add_full_attention_interval(4)
    add_experts(writer, config)
    if not architecture.startswith(("gemma4", "nemotron_h")):
        add_rope(writer, config)
    ends = config["eos_token_id"]
    writer.add_eos_token_id(ends[0] if isinstance(ends, list) else ends)


def add_wide_heads(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Of Gemma 4: layers that see everything have other heads, and some layers share keys."""
    shared = config.get("num_kv_shared_layers", 0)
    windows = [kind == "sliding_attention" for kind in config["layer_types"]]
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.get("hidden_size_per_layer_input", 0))
    writer.add_sliding_window_pattern(windows)
    writer.add_key_length(config["global_head_dim"])
    writer.add_value_length(config["global_head_dim"])
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config.get("use_double_wide_mlp"):
        columns, owners = config["intermediate_size"], len(windows) - shared
        writer.add_feed_forward_length([columns * (1 + (layer >= owners)) for layer in range(len(windows))])
    if wide := config.get("num_global_key_value_heads"):
        writer.add_head_count_kv([config["num_key_value_heads"] if each else wide for each in windows])
    full, sliding = ropes(config)
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_rope_freq_base_swa(sliding["rope_theta"])
    writer.add_rope_dimension_count(config["global_head_dim"])
    writer.add_rope_dimension_count_swa(config["head_dim"])


def add_mamba(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Sizes of Mamba2 layers, and what other layers are, in lists with 0 for those that are something else."""
    heads = config.get("mamba_num_heads") or config["mamba_n_heads"]
    writer.add_ssm_conv_kernel(config.get("conv_kernel") or config.get("mamba_d_conv", 4))
    writer.add_ssm_state_size(config.get("ssm_state_size") or config["mamba_d_state"])
    writer.add_ssm_group_count(config.get("n_groups") or config["mamba_n_groups"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * (config.get("mamba_head_dim") or config["mamba_d_head"]))
    if writer.arch == "falcon-h1":
        writer.add_head_count_kv(config["num_key_value_heads"])
        return
    kinds = config.get("hybrid_override_pattern") or config["layer_types"]
    kv_heads = config["num_key_value_heads"]
    writer.add_head_count_kv([kv_heads * (kind in ("*", "full_attention")) for kind in kinds])
    if writer.arch == "granitehybrid":
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
        writer.add_rope_scaling_finetuned(config.get("position_embedding_type") == "rope")
        return
    sparse = writer.arch == "nemotron_h_moe"
    columns = config["moe_intermediate_size" if sparse else "intermediate_size"]
    writer.add_feed_forward_length([columns * (kind == ("E" if sparse else "-")) for kind in kinds])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_rope_scaling_finetuned(False)
    writer.add_rope_dimension_count(config["head_dim"] // 2)  # of no meaning: the model does not rotate


def add_kda(writer: gguf.GGUFWriter, config: dict[str, Any], layers: int) -> None:
    """Sizes of Kimi's DeltaNets, and which layers attend, in a list with 0 for those that do not."""
    writer.add_head_count_kv([int(number in config["full_attn_layers"]) for number in range(1, layers + 1)])
    writer.add_ssm_conv_kernel(config["short_conv_kernel_size"])
    writer.add_kda_head_dim(config["head_dim"])


def add_latent(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    if writer.arch == "minicpm3":
        writer.add_key_length(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
        return
    writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
    writer.add_value_length(config["kv_lora_rank"])
    writer.add_key_length_mla(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    writer.add_value_length_mla(config["v_head_dim"])


def add_experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    count = next((config[key] for key in EXPERT_COUNTS if key in config), 0)
    if not count:
        return
    writer.add_expert_count(count)
    if writer.arch == "hunyuan-moe":
        writer.add_expert_used_count(config["moe_topk"][0])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"][0])
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
        writer.add_expert_shared_count(config["num_shared_expert"][0])
        return
    writer.add_expert_used_count(config.get("num_experts_per_tok") or config.get("top_k_experts") or config["moe_k"])
    if writer.arch == "lfm2moe":
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if writer.arch in OWN_WIDTH:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if writer.arch == "gpt-oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if writer.arch == "minimax-m2":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if writer.arch == "ernie4_5-moe":
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_count(config["moe_num_shared_experts"])
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"] // config["num_key_value_heads"])
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])
        writer.add_interleave_moe_layer_step(1)
    of_granite = config.get("shared_intermediate_size") if writer.arch == "granitemoe" else 0
    if width := config.get("shared_expert_intermediate_size") or of_granite:
        writer.add_expert_shared_feed_forward_length(width)
    if writer.arch == "llama4":
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    if writer.arch == "nemotron_h_moe":
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_norm(config.get("norm_topk_prob", True))
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config.get("n_group", 1))
        writer.add_expert_group_used_count(config.get("topk_group", 1))
        if "moe_latent_size" in config:
            writer.add_moe_latent_size(config["moe_latent_size"])
    if writer.arch == "glm-dsa":
        writer.add_indexer_head_count(config["index_n_heads"])
        writer.add_indexer_key_length(config["index_head_dim"])
        writer.add_indexer_top_k(config["index_topk"])
    if writer.arch in ("glm4moe", "deepseek2", "glm-dsa", "exaone-moe"):
        writer.add_nextn_predict_layers(config.get("num_nextn_predict_layers", 0))
    if writer.arch in LEADING:
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        if config["model_type"] not in ("deepseek_v2", "mistral4"):  # of which files may say nothing
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_shared_count(config.get("n_shared_experts") or config["num_shared_experts"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config.get("norm_topk_prob", True))
        writer.add_expert_group_count(config.get("n_group", 1))
        writer.add_expert_group_used_count(config.get("topk_group", 1))


def add_rope(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope, local = ropes(config)
    usual = 0.25 if "linear_num_key_heads" in config else 1.0
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", usual))
    if "kv_lora_rank" in config:  # whose heads are what turns of them
        partial = 1.0
    writer.add_rope_dimension_count(config.get("rotary_dim") or int(config["head_dim"] * partial))
    stretched = rope.get("alpha", 1.0) ** (config["head_dim"] / (config["head_dim"] - 2))
    writer.add_rope_freq_base(rope["rope_theta"] * stretched)
    if "alpha" in rope:
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1.0)
    if local and local["rope_theta"] != rope["rope_theta"]:
        writer.add_rope_freq_base_swa(local["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        if "mscale_all_dim" in rope:
            by = 1.0 if writer.arch == "mistral3" else 0.1
            writer.add_rope_scaling_yarn_log_mul(by * rope["mscale_all_dim"])
        if writer.arch in ("mistral3", "mistral4"):
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if writer.arch in ("minicpm3", "phi3"):
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        original = config["original_max_position_embeddings"]
        stretched = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(sqrt(1 + log(stretched) / log(original)))


def rope_factors(config: dict[str, Any]) -> dict[str, list[float]]:
    """The tensors of what rotary frequencies are divided by."""
    rope, _ = ropes(config)
    if rope["rope_type"] == "longrope":
        return {f"rope_factors_{length}.weight": rope[f"{length}_factor"] for length in ("long", "short")}
    if rope["rope_type"] == "proportional":
        pairs = config["global_head_dim"] // 2
        turned = int(pairs * rope["partial_rotary_factor"])
        return {"rope_freqs.weight": [1.0] * turned + [1e30] * (pairs - turned)}
    if rope["rope_type"] != "llama3":
        return {}
    low, high, original = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    factors = []
    for index in range(0, config["head_dim"], 2):
        wavelength = tau * rope["rope_theta"] ** (index / config["head_dim"])
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": factors}


def add_byte_level(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    """A byte-level BPE ``tokenizer.json``, cut into words as GPT-2 does."""
    special = {token["id"] for token in tokenizer["added_tokens"]}
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if index in special else 1 for index in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_add_bos_token(False)
