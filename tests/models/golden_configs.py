"""The configs of the tiny models that the golden files are made of (see make_golden.py)."""

from __future__ import annotations

from typing import Any

PROMPT = 40
"""Tokens of every prompt."""

BASE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
}
_SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
}
_EXPERTS: dict[str, Any] = {
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 2,
}
_WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8}
ABSENT = object()
"""In place of a value: the config has no such key."""
_GEMMA3: dict[str, Any] = {
    "hidden_size": 80,  # its square root is no power of two, and it is not the heads' width
    "intermediate_size": 64,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "sliding_window": 8,
    "tie_word_embeddings": True,
}
_GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
}
_GPT_OSS_ROPE = {**_YARN_ROPE, "truncate": False}
_GLM4_MOE: dict[str, Any] = {
    "model_type": "glm4_moe",
    "num_key_value_heads": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "partial_rotary_factor": 0.5,
}
_DELTA: dict[str, Any] = {
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
"""Sizes of layers with a recurrent state, and of attention beside them."""
_PHI3: dict[str, Any] = {"model_type": "phi3", "num_key_value_heads": 2, "head_dim": ABSENT, "pad_token_id": None}
_LONG_ROPE: dict[str, Any] = {
    "partial_rotary_factor": 0.75,
    "rope_theta": 500.0,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.05, 1.1, 1.3, 1.6, 2.0],
        "long_factor": [1.1, 1.4, 2.0, 3.0, 4.5, 6.0],
    },
}
CASES: dict[str, dict[str, Any]] = {
    "llama-mha": {"model_type": "llama"},
    "llama-llama3-rope-tied": {
        "model_type": "llama",
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "rope_parameters": _LLAMA3_ROPE,
        "tie_word_embeddings": True,
        "eos_token_id": [2, 3],
    },
    "llama-biases-odd-sizes": {
        "model_type": "llama",
        "hidden_size": 60,
        "intermediate_size": 44,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 22,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "llama-mqa": {
        "model_type": "llama",
        "hidden_size": 80,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": None,
        "tie_word_embeddings": True,
    },
    "mistral-window": {
        "model_type": "mistral",
        "num_attention_heads": 10,
        "num_key_value_heads": 5,
        "sliding_window": 8,
    },
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 2},
    "qwen2-some-windows": {
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
        **_WINDOW,
    },
    "qwen3": {
        "model_type": "qwen3",
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "qwen3-biases-some-windows": {
        "model_type": "qwen3",
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        **_WINDOW,
    },
    "llama-linear-rope": {
        "model_type": "llama",
        "max_position_embeddings": 32,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0},
        **_SMALL,
    },
    "llama-dynamic-rope": {
        "model_type": "llama",
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
        **_SMALL,
    },
    "qwen2-yarn-rope": {
        "model_type": "qwen2",
        "max_position_embeddings": 32,
        "rope_parameters": _YARN_ROPE,
        **_SMALL,
    },
    "mixtral": {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2, **_EXPERTS},
    "mixtral-fused-window": {
        "model_type": "mixtral",
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        **_EXPERTS,
    },
    "olmoe": {"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 2, "pad_token_id": None, **_EXPERTS},
    "olmoe-clipped-normalised": {
        "model_type": "olmoe",
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "pad_token_id": None,
        "norm_topk_prob": True,
        "clip_qkv": 0.75,
        "attention_bias": True,
        **_EXPERTS,
        "num_attention_heads": 6,
        "hidden_size": 96,
    },
    "qwen2-moe": {
        "model_type": "qwen2_moe",
        "num_hidden_layers": 3,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "shared_expert_intermediate_size": 80,
        "mlp_only_layers": [1],
        **_EXPERTS,
    },
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        **_EXPERTS,
        "head_dim": 32,
    },
    "qwen3-moe-not-normalised": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 4,
        **_EXPERTS,
        "head_dim": 32,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **_GEMMA3,
        "num_hidden_layers": 3,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "gemma3-softcaps": {
        "model_type": "gemma3_text",
        **_GEMMA3,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 16,
        "sliding_window_pattern": 2,
        "final_logit_softcapping": 8.0,
    },
    "gemma3-with-vision": {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [2, 3],
        "text_config": {
            **BASE,
            "model_type": "gemma3_text",
            **_GEMMA3,
            "query_pre_attn_scalar": 20,
            "rope_theta": 5000.0,
            "rope_local_base_freq": 100.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "sliding_window_pattern": 2,
            "tie_word_embeddings": ABSENT,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        "mm_tokens_per_image": 4,
    },
    "gpt-oss": {**_GPT_OSS, "rope_parameters": _GPT_OSS_ROPE},
    "gpt-oss-mxfp4": {
        **_GPT_OSS,
        "architectures": ["GptOssForCausalLM"],
        "rope_theta": _GPT_OSS_ROPE["rope_theta"],
        "rope_scaling": {key: value for key, value in _GPT_OSS_ROPE.items() if key != "rope_theta"},
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
    },
    "glm4-moe": {
        **_GLM4_MOE,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "attention_bias": True,
    },
    "glm4-moe-qk-norm": {
        **_GLM4_MOE,
        "num_hidden_layers": 3,
        "head_dim": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": True,
    },
    "phi3": _PHI3,
    "phi3-longrope": {
        **_PHI3,
        **_LONG_ROPE,
        "architectures": ["Phi3ForCausalLM"],
        "original_max_position_embeddings": 32,
        "sliding_window": 12,
        "tie_word_embeddings": True,
    },
    "phi3-longrope-short": {
        **_PHI3,
        **_LONG_ROPE,
        "architectures": ["Phi3ForCausalLM"],
        "num_key_value_heads": 4,
        "original_max_position_embeddings": 64,
    },
    "olmo2": {
        "model_type": "olmo2",
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "attention_bias": True,
    },
    "olmo2-mha": {"model_type": "olmo2", **_SMALL, "head_dim": ABSENT, "num_hidden_layers": 3},
    "seed-oss": {
        "model_type": "seed_oss",
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "attention_out_bias": True,
        "mlp_bias": True,
    },
    "smollm3": {
        "model_type": "smollm3",
        "pad_token_id": None,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": ABSENT,
        "intermediate_size": 64,
        "tie_word_embeddings": True,
    },
    "smollm3-biases-some-windows": {
        "model_type": "smollm3",
        "pad_token_id": None,
        "num_hidden_layers": 3,
        "head_dim": ABSENT,
        "attention_bias": True,
        "mlp_bias": True,
        "no_rope_layers": [0, 1, 0],
        **_SMALL,
        **_WINDOW,
    },
    "olmo3": {
        "model_type": "olmo3",
        **_SMALL,
        "head_dim": ABSENT,
        "num_hidden_layers": 4,
        "attention_bias": True,
        "sliding_window": 8,
        "rope_parameters": {
            "full_attention": _YARN_ROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "granite": {
        "model_type": "granite",
        **_SMALL,
        "num_key_value_heads": 1,
        "head_dim": ABSENT,
        "attention_bias": True,
        "mlp_bias": True,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3125,
        "residual_multiplier": 0.375,
        "logits_scaling": 1.25,
    },
    "exaone4": {
        "model_type": "exaone4",
        **_SMALL,
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
        "rope_parameters": _LLAMA3_ROPE,
        "tie_word_embeddings": True,
    },
    "exaone4-no-window": {
        "model_type": "exaone4",
        **_SMALL,
        "sliding_window": None,
        "layer_types": ["full_attention"] * 2,
    },
    "qwen3-next": {
        "model_type": "qwen3_next",
        **_EXPERTS,
        **_DELTA,
        "num_hidden_layers": 4,
        "mlp_only_layers": [1],
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 48,
    },
    "qwen3-5": {
        "model_type": "qwen3_5_text",
        **_DELTA,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "attention_bias": True,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "tie_word_embeddings": True,
    },
    "qwen3-5-with-vision": {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": {
            **BASE,
            "model_type": "qwen3_5_text",
            **_DELTA,
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "num_hidden_layers": 2,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "full_attention_interval": 2,
            "attn_output_gate": True,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [2, 1, 1],
                "rope_type": "default",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.25,
            },
        },
        "vision_config": {"model_type": "qwen3_5", "depth": 1, "hidden_size": 16, "num_heads": 2},
    },
    "qwen3-5-moe": {
        "model_type": "qwen3_5_moe_text",
        **_EXPERTS,
        **_DELTA,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "linear_attention"],
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 64,
    },
}
"""By name. A config that names its ``architectures`` is written as it is here: as published models spell it, which may
be older than what transformers writes. A prompt and its continuation are longer than the 32 positions that
``phi3-longrope`` was trained on, and shorter than the 64 of ``phi3-longrope-short``."""

LONG_BASE: dict[str, Any] = {
    **BASE,
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
LONG_CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "dynamic-rope-150": (
        150,
        10,
        {
            "model_type": "llama",
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
        },
    ),
    "llama3-rope-9000": (
        9000,
        0,
        {
            "model_type": "llama",
            "max_position_embeddings": 16384,
            "rope_parameters": {**_LLAMA3_ROPE, "rope_theta": 10000.0, "original_max_position_embeddings": 8192},
        },
    ),
    "yarn-rope-and-windows-33000": (
        33000,
        0,
        {
            "model_type": "qwen2",
            "max_position_embeddings": 32768,
            "rope_parameters": {**_YARN_ROPE, "rope_theta": 10000.0, "original_max_position_embeddings": 32768},
            "layer_types": ["full_attention", "sliding_attention"],
            "use_sliding_window": True,
            "sliding_window": 4096,
        },
    ),
}
"""By name: a prompt longer than the usual powers of two or than what the model is for without scaling, and tokens
that follow it one by one."""


def settings_of(changes: dict[str, Any]) -> dict[str, Any]:
    """The whole config of one of `CASES`."""
    return _present(changes if "text_config" in changes else {**BASE, **changes})


def _present(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings, without those that are absent."""
    nested = {key: _present(value) if isinstance(value, dict) else value for key, value in settings.items()}
    return {key: value for key, value in nested.items() if value is not ABSENT}
