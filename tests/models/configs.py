"""Small configs of every family, as keys of a ``config.json``, and reading them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from motley.daemon.models.description.model import Model
from motley.daemon.models.reading import read_model


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != key}


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": 2,
}
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": 16}
QWEN2 = LLAMA | {"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": False, "max_window_layers": 1}
QWEN3 = QWEN2 | {"model_type": "qwen3", "head_dim": 32}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2}
QWEN2_MOE = (
    LLAMA
    | EXPERTS
    | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 48, "sliding_window": 16}
    | {"use_sliding_window": False, "max_window_layers": 1}
)
QWEN3_MOE = LLAMA | EXPERTS | {"model_type": "qwen3_moe", "use_sliding_window": False, "sliding_window": 16}
OLMO2 = LLAMA | {"model_type": "olmo2"}
OLMO3 = LLAMA | {"model_type": "olmo3"}
GRANITE = LLAMA | {"model_type": "granite"}
EXAONE4 = LLAMA | {"model_type": "exaone4"}
OLMOE = LLAMA | EXPERTS | {"model_type": "olmoe"}
SEED_OSS = LLAMA | {"model_type": "seed_oss"}
SMOLLM3 = LLAMA | {"model_type": "smollm3"}
PHI3 = LLAMA | {"model_type": "phi3"}
GLM4_MOE = (
    LLAMA | {"model_type": "glm4_moe", "n_routed_experts": 6} | {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
)
APERTUS_15 = LLAMA | {"model_type": "apertus1p5_text", "hidden_act": "xielu", "output_vocab_size": 80}
MUSE_GLIMMER = without(LLAMA, "hidden_act") | {"model_type": "muse_glimmer_text", "head_dim": 16}
NORTH_MICRO = LLAMA | {
    "model_type": "cohere_compass_text",
    "rope_parameters": {
        "full_attention": None,
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [4, 2, 2]},
    },
}
KOLIBRI = LLAMA | EXPERTS | {"model_type": "kolibri1", "head_dim": 16}
FLINT = LLAMA | EXPERTS | {"model_type": "flint", "head_dim": 16}
DOTS1 = GLM4_MOE | {"model_type": "dots1", "n_shared_experts": 1, "sliding_window": None}
MIMO = GLM4_MOE | {"model_type": "mimo_v2_flash", "head_dim": 24, "v_head_dim": 16, "num_key_value_heads": 1}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
LONGCAT = without(without(LLAMA, "num_hidden_layers"), "intermediate_size") | {
    "model_type": "longcat_flash",
    **_LATENT,
    "num_layers": 2,
    "ffn_hidden_size": 96,
    "n_routed_experts": 6,
    "moe_topk": 2,
    "zero_expert_num": 3,
    "expert_ffn_hidden_size": 32,
}
DEEPSEEK_V3 = GLM4_MOE | _LATENT | {"model_type": "deepseek_v3", "first_k_dense_replace": 1}
GLM4_MOE_LITE = GLM4_MOE | _LATENT | {"model_type": "glm4_moe_lite"}
ERNIE4_5 = LLAMA | {"model_type": "ernie4_5"}
ERNIE4_5_MOE = LLAMA | {"model_type": "ernie4_5_moe", "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32}
MINIMAX_M2 = LLAMA | {"model_type": "minimax_m2", "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16}
GPT_OSS = LLAMA | {"model_type": "gpt_oss", "num_local_experts": 6, "num_experts_per_tok": 2}
GEMMA3 = {key: value for key, value in LLAMA.items() if key != "hidden_act"} | {"model_type": "gemma3_text"}
GEMMA3N = GEMMA3 | {
    "model_type": "gemma3n_text",
    "vocab_size_per_layer_input": 90,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
    "num_kv_shared_layers": 1,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}
GEMMA4 = GEMMA3 | {
    "model_type": "gemma4_text",
    "hidden_size_per_layer_input": 0,
    "global_head_dim": 32,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
GEMMA = without(LLAMA, "hidden_act") | {"model_type": "gemma", "head_dim": 16}
ARCEE = LLAMA | {"model_type": "arcee", "hidden_act": "relu2"}
MINISTRAL = MISTRAL | {"model_type": "ministral"}
GRANITE_MOE = LLAMA | {"model_type": "granitemoe", "num_local_experts": 6, "num_experts_per_tok": 2}
GRANITE_SWA = LLAMA | {"model_type": "granite_swa"}
AFMOE = LLAMA | EXPERTS | {"model_type": "afmoe", "head_dim": 16}
DEEPSEEK_V2 = GLM4_MOE | _LATENT | {"model_type": "deepseek_v2"}
MINIMAX_M3 = MINIMAX_M2 | {
    "model_type": "minimax_m3_vl_text",
    "rotary_dim": 8,
    "moe_layer_freq": [0, 1, 1],
    "max_position_embeddings": 4096,
}
GLM = LLAMA | {"model_type": "glm"}
COHERE = without(LLAMA, "rms_norm_eps") | {"model_type": "cohere"}
STARCODER2 = without(without(LLAMA, "rms_norm_eps"), "hidden_act") | {"model_type": "starcoder2"}
NEMOTRON = STARCODER2 | {"model_type": "nemotron"}
STABLELM = STARCODER2 | {"model_type": "stablelm"}
LAGUNA = LLAMA | EXPERTS | {"model_type": "laguna", "head_dim": 16}
JAIS2 = STARCODER2 | {"model_type": "jais2"}
NANOCHAT = without(LLAMA, "hidden_act") | {"model_type": "nanochat"}
APERTUS = LLAMA | {"model_type": "apertus", "hidden_act": "xielu"}
PHIMOE = LLAMA | {"model_type": "phimoe", "num_local_experts": 6}
COHERE2_MOE = COHERE | EXPERTS | {"model_type": "cohere2_moe", "head_dim": 16}
COHERE2 = COHERE | {"model_type": "cohere2"}
CWM = LLAMA | {"model_type": "cwm"}
INTERNLM3 = LLAMA | {"model_type": "internlm3"}
YOUTU = LLAMA | _LATENT | {"model_type": "youtu"}
VAULTGEMMA = without(LLAMA, "hidden_act") | {"model_type": "vaultgemma"}
IQUESTCODER = LLAMA | {"model_type": "iquestcoder"}
EXAONE = LLAMA | {"model_type": "exaone"}
HYPERCLOVAX = LLAMA | {"model_type": "hyperclovax"}
HUNYUAN = LLAMA | {"model_type": "hunyuan_v1_dense"}
HELIUM = LLAMA | {"model_type": "helium"}
FLEX_OLMO = LLAMA | EXPERTS | {"model_type": "flex_olmo"}
STEP = LLAMA | {
    "model_type": "step3p5",
    "moe_num_experts": 6,
    "moe_top_k": 2,
    "moe_intermediate_size": 32,
    "moe_layers_enum": "1,2",
}
MELLUM = LLAMA | EXPERTS | {"model_type": "mellum"}
MINICPM3 = LLAMA | _LATENT | {"model_type": "minicpm3"}
SARVAM_MOE = GLM4_MOE | {"model_type": "sarvam_moe"}
SARVAM_MLA = GLM4_MOE | _LATENT | {"model_type": "sarvam_mla"}
AXK2 = GLM4_MOE | _LATENT | {"model_type": "axk2", "n_group": None, "topk_group": None, "index_n_heads": 4}
AXK1 = GLM4_MOE | _LATENT | {"model_type": "axk1", "n_group": 3, "topk_group": 2}
MISTRAL4 = GLM4_MOE | _LATENT | {"model_type": "mistral4"}
HY_V4 = GLM4_MOE | _LATENT | {"model_type": "hy_v4"}
GLM5_NEXT = (
    GLM4_MOE
    | _LATENT
    | {"model_type": "glm5_next_text", "qk_rope_head_dim": 0, "first_k_dense_replace": 1, "num_hidden_layers": 4}
)
QWEN4 = (
    LLAMA
    | EXPERTS
    | {"model_type": "qwen4_exp_text", "head_dim": 16, "num_hidden_layers": 4, "shared_expert_intermediate_size": 32}
    | {"hc_lowrank": 16, "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 32}
    | {"indexer_compress_ratio": 4, "ngram_vocab_size_base": 40}
)
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def read(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Model:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    return read_model(folder)
