"""The sizes of well-known models, to write random ones of them."""

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
    "qwen3-moe-half": "Qwen3 30B-A3B at half of its widths and experts and a quarter of its layers",
}
"""What those of `SHAPES` are that were scaled down to fit small machines."""
