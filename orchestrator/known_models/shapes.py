"""The sizes of well-known models, as their config.json tells them: one table, by name."""

from __future__ import annotations

from typing import Any


def _config(model_type: str, architecture: str, **values: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    } | values


def _llama(**values: Any) -> dict[str, Any]:
    return _config("llama", "LlamaForCausalLM", rms_norm_eps=1e-5, attention_bias=False, mlp_bias=False, **values)


def _llama3(factor: float, **values: Any) -> dict[str, Any]:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return _llama(
        num_key_value_heads=8,
        num_attention_heads=32,
        vocab_size=128256,
        max_position_embeddings=131072,
        rope_theta=500000.0,
        rope_scaling=scaling,
        bos_token_id=128000,
        eos_token_id=128001,
        **values,
    )


def _qwen2(**values: Any) -> dict[str, Any]:
    return _config(
        "qwen2",
        "Qwen2ForCausalLM",
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        use_sliding_window=False,
        bos_token_id=151643,
        eos_token_id=151645,
        **values,
    )


def _qwen3(**values: Any) -> dict[str, Any]:
    return _config(
        "qwen3",
        "Qwen3ForCausalLM",
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        rope_scaling=None,
        attention_bias=False,
        use_sliding_window=False,
        sliding_window=None,
        head_dim=128,
        num_key_value_heads=8,
        vocab_size=151936,
        max_position_embeddings=40960,
        bos_token_id=151643,
        eos_token_id=151645,
        **values,
    )


def _mixtral(**values: Any) -> dict[str, Any]:
    return _config(
        "mixtral",
        "MixtralForCausalLM",
        vocab_size=32000,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        rope_theta=1000000.0,
        sliding_window=None,
        num_local_experts=8,
        num_experts_per_tok=2,
        bos_token_id=1,
        eos_token_id=2,
        **values,
    )


def _qwen3_moe(**values: Any) -> dict[str, Any]:
    return _qwen3(decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True, num_experts_per_tok=8, **values) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
    }


def _hybrid(model_type: str, architecture: str, **values: Any) -> dict[str, Any]:
    """Three gated DeltaNet layers to one of attention."""
    return _config(
        model_type,
        architecture,
        rms_norm_eps=1e-6,
        attention_bias=False,
        head_dim=256,
        full_attention_interval=4,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        num_attention_heads=16,
        max_position_embeddings=262144,
        **values,
    )


def _qwen3_5(model_type: str, architecture: str, **values: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25}
    return _hybrid(
        model_type,
        architecture,
        rope_parameters=rope,
        attn_output_gate=True,
        vocab_size=248320,
        bos_token_id=None,
        eos_token_id=248044,
        **values,
    )


_DEEPSEEK_YARN = {
    "type": "yarn",
    "original_max_position_embeddings": 4096,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def _deepseek(**values: Any) -> dict[str, Any]:
    return _config(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        rms_norm_eps=1e-6,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        num_experts_per_tok=8,
        n_shared_experts=1,
        num_nextn_predict_layers=0,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        **values,
    )


def _gemma4(**values: Any) -> dict[str, Any]:
    config = _config(
        "gemma4_text",
        "Gemma4ForCausalLM",
        vocab_size=262144,
        head_dim=256,
        global_head_dim=512,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        sliding_window=1024,
        final_logit_softcapping=30.0,
        max_position_embeddings=262144,
        rms_norm_eps=1e-6,
        bos_token_id=2,
        eos_token_id=1,
        **values,
    )
    config.pop("hidden_act")
    return config | {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}


def _lfm2(model_type: str, architecture: str, attends: tuple[int, ...], **values: Any) -> dict[str, Any]:
    """Short convolutions, but for the layers that attend."""
    config = _config(
        model_type,
        architecture,
        hidden_size=2048,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=65536,
        max_position_embeddings=128000,
        norm_eps=1e-5,
        rope_theta=1000000.0,
        conv_L_cache=3,
        conv_bias=False,
        bos_token_id=1,
        eos_token_id=7,
        **values,
    )
    layers = range(config["num_hidden_layers"])
    kinds = ["full_attention" if layer in attends else "conv" for layer in layers]
    return config | {"layer_types": kinds, "tie_word_embeddings": True}


SHAPES: dict[str, dict[str, Any]] = {
    "tinyllama-1.1b": _llama(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
        max_position_embeddings=2048,
        rope_theta=10000.0,
        rope_scaling=None,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "llama-3.2-1b": _llama3(
        32.0,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        head_dim=64,
    )
    | {"tie_word_embeddings": True},
    "llama-3.1-8b": _llama3(8.0, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32),
    "mistral-7b": _config(
        "mistral",
        "MistralForCausalLM",
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        sliding_window=4096,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "qwen2.5-0.5b": _qwen2(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        max_position_embeddings=32768,
        sliding_window=32768,
        max_window_layers=21,
    )
    | {"tie_word_embeddings": True},
    "qwen2.5-7b": _qwen2(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
        max_position_embeddings=32768,
        sliding_window=131072,
        max_window_layers=28,
    ),
    "qwen3-0.6b": _qwen3(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, max_window_layers=28
    )
    | {"tie_word_embeddings": True},
    "qwen3-8b": _qwen3(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        max_window_layers=36,
    ),
    "mixtral-8x7b": _mixtral(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "mixtral-quarter": _mixtral(
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
    ),
    "qwen3-30b-a3b": _qwen3_moe(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_hidden_layers=48,
        num_attention_heads=32,
        max_window_layers=48,
    ),
    "qwen3-moe-half": _qwen3_moe(
        hidden_size=1024,
        intermediate_size=3072,
        moe_intermediate_size=384,
        num_experts=64,
        num_hidden_layers=12,
        num_attention_heads=16,
        max_window_layers=12,
    ),
    "qwen3-next-80b-a3b": _hybrid(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        hidden_size=2048,
        intermediate_size=5120,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        num_experts=512,
        num_experts_per_tok=10,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        num_hidden_layers=48,
        num_key_value_heads=2,
        vocab_size=151936,
        rope_theta=10000000,
        rope_scaling=None,
        partial_rotary_factor=0.25,
        bos_token_id=151643,
        eos_token_id=151645,
    ),
    "qwen3.5-9b": _qwen3_5(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=32,
        num_key_value_heads=4,
    ),
    "qwen3.5-35b-a3b": _qwen3_5(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        hidden_size=2048,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        num_experts=256,
        num_experts_per_tok=8,
        num_hidden_layers=40,
        num_key_value_heads=2,
    ),
    "smollm3-3b": _config(
        "smollm3",
        "SmolLM3ForCausalLM",
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=36,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=128256,
        max_position_embeddings=65536,
        rms_norm_eps=1e-6,
        rope_theta=5000000.0,
        no_rope_layer_interval=4,
        use_sliding_window=False,
        bos_token_id=128000,
        eos_token_id=128012,
    )
    | {"tie_word_embeddings": True},
    "seed-oss-36b": _config(
        "seed_oss",
        "SeedOssForCausalLM",
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=80,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=155136,
        max_position_embeddings=524288,
        rms_norm_eps=1e-6,
        rope_theta=10000000.0,
        attention_bias=True,
        attention_out_bias=False,
        mlp_bias=False,
        bos_token_id=0,
        eos_token_id=2,
    ),
    "deepseek-v3": _deepseek(
        vocab_size=129280,
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        num_hidden_layers=61,
        num_attention_heads=128,
        num_key_value_heads=128,
        n_routed_experts=256,
        n_group=8,
        topk_group=4,
        first_k_dense_replace=3,
        routed_scaling_factor=2.5,
        max_position_embeddings=163840,
        rope_theta=10000.0,
        rope_scaling={**_DEEPSEEK_YARN, "factor": 40.0, "beta_fast": 32.0},
        bos_token_id=0,
        eos_token_id=1,
    ),
    "kimi-k2": _deepseek(
        vocab_size=163840,
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        num_hidden_layers=61,
        num_attention_heads=64,
        num_key_value_heads=64,
        n_routed_experts=384,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        routed_scaling_factor=2.827,
        max_position_embeddings=131072,
        rope_theta=50000.0,
        rope_scaling={**_DEEPSEEK_YARN, "factor": 32.0, "beta_fast": 1.0},
        bos_token_id=163584,
        eos_token_id=163586,
    ),
    "glm-4.7-flash": _deepseek(
        vocab_size=154880,
        hidden_size=2048,
        intermediate_size=10240,
        moe_intermediate_size=1536,
        num_hidden_layers=47,
        num_attention_heads=20,
        num_key_value_heads=20,
        n_routed_experts=64,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.8,
        max_position_embeddings=202752,
        rope_theta=1000000.0,
        bos_token_id=0,
        eos_token_id=154820,
    )
    | {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "num_experts_per_tok": 4,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
    },
    "glm-flash-quarter": _deepseek(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=5120,
        moe_intermediate_size=768,
        num_hidden_layers=12,
        num_attention_heads=10,
        num_key_value_heads=10,
        n_routed_experts=32,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.8,
        max_position_embeddings=202752,
        rope_theta=1000000.0,
        bos_token_id=0,
        eos_token_id=1,
    )
    | {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "num_experts_per_tok": 4,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
    },
    "minimax-m2": _config(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        vocab_size=200064,
        hidden_size=3072,
        intermediate_size=1536,
        num_hidden_layers=62,
        num_attention_heads=48,
        num_key_value_heads=8,
        head_dim=128,
        rotary_dim=64,
        num_local_experts=256,
        num_experts_per_tok=8,
        max_position_embeddings=196608,
        rms_norm_eps=1e-6,
        rope_theta=5000000.0,
        bos_token_id=200034,
        eos_token_id=200020,
    ),
    "gemma-4-31b": _gemma4(
        hidden_size=5376,
        intermediate_size=21504,
        num_hidden_layers=60,
        num_attention_heads=32,
        num_key_value_heads=16,
        num_global_key_value_heads=4,
    ),
    "gemma-4-26b-a4b": _gemma4(
        hidden_size=2816,
        intermediate_size=2112,
        num_hidden_layers=30,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_global_key_value_heads=2,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "lfm2-1.2b": _lfm2(
        "lfm2",
        "Lfm2ForCausalLM",
        (2, 5, 8, 10, 12, 14),
        intermediate_size=12288,
        num_hidden_layers=16,
        block_auto_adjust_ff_dim=True,
        block_ffn_dim_multiplier=1.0,
        block_multiple_of=256,
    ),
    "lfm2-8b-a1b": _lfm2(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        (2, 6, 10, 14, 18, 21),
        intermediate_size=7168,
        num_hidden_layers=24,
        moe_intermediate_size=1792,
        num_dense_layers=2,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        use_expert_bias=True,
    ),
    "nemotron-3-nano-30b-a3b": _config(
        "nemotron_h",
        "NemotronHForCausalLM",
        hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        hidden_size=2688,
        intermediate_size=1856,
        num_hidden_layers=52,
        num_attention_heads=32,
        num_key_value_heads=2,
        head_dim=128,
        vocab_size=131072,
        max_position_embeddings=262144,
        layer_norm_epsilon=1e-5,
        mlp_hidden_act="relu2",
        mamba_num_heads=64,
        mamba_head_dim=64,
        ssm_state_size=128,
        n_groups=8,
        conv_kernel=4,
        n_routed_experts=128,
        n_shared_experts=1,
        num_experts_per_tok=6,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
        routed_scaling_factor=2.5,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "granite-4.0-h-tiny": _config(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        hidden_size=1536,
        intermediate_size=512,
        shared_intermediate_size=1024,
        num_hidden_layers=40,
        layer_types=["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
        num_attention_heads=12,
        num_key_value_heads=4,
        num_local_experts=64,
        num_experts_per_tok=6,
        mamba_n_heads=48,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        mamba_d_conv=4,
        mamba_expand=2,
        vocab_size=100352,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        position_embedding_type="nope",
        attention_multiplier=0.0078125,
        embedding_multiplier=12,
        logits_scaling=6,
        residual_multiplier=0.22,
        bos_token_id=100257,
        eos_token_id=100257,
    )
    | {"tie_word_embeddings": True},
    "llama-7m": _llama(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=1024,
        max_position_embeddings=2048,
        rope_theta=10000.0,
        rope_scaling=None,
        bos_token_id=1,
        eos_token_id=2,
    ),
}
"""``config.json`` of well-known models, as published; their dtype is added when weights are written."""

SCALED = {
    "mixtral-quarter": "Mixtral 8x7B at a quarter of its widths and half of its layers",
    "glm-flash-quarter": "GLM 4.7 Flash at half of its widths and experts, heads and all, and a quarter of its layers",
    "qwen3-moe-half": "Qwen3 30B-A3B at half of its widths and experts and a quarter of its layers",
}
"""What those of `SHAPES` are that were scaled down to fit small machines."""
