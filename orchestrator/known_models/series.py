"""``config.json`` of whole series of models: what all of a series have in common, and what a size adds."""

from __future__ import annotations

from typing import Any


def config_of(model_type: str, architecture: str, **values: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    } | values


def llama(**values: Any) -> dict[str, Any]:
    return config_of("llama", "LlamaForCausalLM", rms_norm_eps=1e-5, attention_bias=False, mlp_bias=False, **values)


def llama3(factor: float, **values: Any) -> dict[str, Any]:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return llama(
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


def qwen2(**values: Any) -> dict[str, Any]:
    return config_of(
        "qwen2",
        "Qwen2ForCausalLM",
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        use_sliding_window=False,
        bos_token_id=151643,
        eos_token_id=151645,
        **values,
    )


def qwen3(**values: Any) -> dict[str, Any]:
    return config_of(
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


def mixtral(**values: Any) -> dict[str, Any]:
    return config_of(
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


def qwen3_moe(**values: Any) -> dict[str, Any]:
    return qwen3(decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True, num_experts_per_tok=8, **values) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
    }


def hybrid(model_type: str, architecture: str, **values: Any) -> dict[str, Any]:
    """Three gated DeltaNet layers to one of attention."""
    return config_of(
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


def qwen3_5(model_type: str, architecture: str, **values: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25}
    return hybrid(
        model_type,
        architecture,
        rope_parameters=rope,
        attn_output_gate=True,
        vocab_size=248320,
        bos_token_id=None,
        eos_token_id=248044,
        **values,
    )


DEEPSEEK_YARN = {
    "type": "yarn",
    "original_max_position_embeddings": 4096,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def deepseek(**values: Any) -> dict[str, Any]:
    return config_of(
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


def gemma3n(**values: Any) -> dict[str, Any]:
    """Every fifth layer sees everything, and of the gates of the first ten 95 % are closed."""
    layers = len(values["intermediate_size"])
    config = config_of(
        "gemma3n_text",
        "Gemma3nForCausalLM",
        vocab_size=262400,
        vocab_size_per_layer_input=262144,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        sliding_window=512,
        layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * (layers // 5),
        hidden_size_per_layer_input=256,
        altup_num_inputs=4,
        laurel_rank=64,
        activation_sparsity_pattern=[0.95] * 10 + [0.0] * (layers - 10),
        final_logit_softcapping=30.0,
        max_position_embeddings=32768,
        rope_theta=1000000.0,
        rope_local_base_freq=10000.0,
        rms_norm_eps=1e-6,
        bos_token_id=2,
        eos_token_id=1,
        **values,
    )
    config.pop("hidden_act")
    return config | {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}


def gemma4(**values: Any) -> dict[str, Any]:
    config = config_of(
        "gemma4_text",
        "Gemma4ForCausalLM",
        vocab_size=262144,
        head_dim=256,
        global_head_dim=512,
        final_logit_softcapping=30.0,
        rms_norm_eps=1e-6,
        bos_token_id=2,
        eos_token_id=1,
        **{
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 1024,
            "max_position_embeddings": 262144,
        }
        | values,
    )
    config.pop("hidden_act")
    return config | {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}


def gemma4_of_phones(period: int, **values: Any) -> dict[str, Any]:
    """Those whose layers are given rows of a second table; every `period`-th layer sees everything."""
    kinds = ["full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in range(period)]
    return gemma4(
        attention_k_eq_v=False,
        hidden_size_per_layer_input=256,
        vocab_size_per_layer_input=262144,
        sliding_window=512,
        max_position_embeddings=131072,
        num_attention_heads=8,
        layer_types=kinds * (values["num_hidden_layers"] // period),
        **values,
    )


def hunyuan(model_type: str, architecture: str, **values: Any) -> dict[str, Any]:
    config = config_of(
        model_type,
        architecture,
        vocab_size=128167,
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        attention_bias=False,
        use_qk_norm=True,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1},
        bos_token_id=1,
        eos_token_id=127960,
        **values,
    )
    return config | {"tie_word_embeddings": True}


def lfm2(model_type: str, architecture: str, attends: tuple[int, ...], **values: Any) -> dict[str, Any]:
    """Short convolutions, but for the layers that attend."""
    config = config_of(
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
