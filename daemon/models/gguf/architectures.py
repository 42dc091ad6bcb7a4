"""How llama.cpp's metadata of each architecture become the keys of a family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from motley.daemon.models.blocks.layer_kinds import FULL
from motley.daemon.models.gguf.architecture import (
    KV_HEADS,
    ROUTED,
    ROUTER,
    Architecture,
    experts,
    grouped_experts,
    kinds,
    no_experts,
    no_window,
    only_sigmoids,
)
from motley.daemon.models.gguf.gemma import gemma2, gemma3, gemma3n, gemma4
from motley.daemon.models.gguf.granite import granite, granite_moe, granite_moe_family
from motley.daemon.models.gguf.laguna import LAGUNA, laguna
from motley.daemon.models.gguf.latent import (
    INDEXER,
    LATENT,
    WARMTH,
    deepseek2,
    deepseek2_family,
    glm_dsa,
    minicpm3,
    mistral4,
)
from motley.daemon.models.gguf.long_rope import LONG_FACTORS, long_rope
from motley.daemon.models.gguf.metadata import Metadata, rope_keys
from motley.daemon.models.gguf.recurrent import (
    CONVOLUTIONS,
    KDA,
    LING,
    SSM,
    bailingmoe3,
    falcon_h1,
    granite_hybrid,
    kimi_linear,
    lfm2,
    lfm2_moe,
    nemotron_h,
    qwen35,
    qwen35_moe,
)


def _llama_family(metadata: Metadata) -> str:
    """Files of Llama, Mistral and Mixtral are of one architecture."""
    if metadata.own.size("expert_count", 0, least=0):
        return "mixtral"
    return "mistral" if metadata.own.size("attention.sliding_window", 0, least=0) else "llama"


def _llama(metadata: Metadata) -> dict[str, Any]:
    family = _llama_family(metadata)
    biases = {
        "attention_bias": metadata.has("self_attn.q_proj.bias"),
        "mlp_bias": metadata.has("mlp.down_proj.bias"),
    }
    window = metadata.own.size("attention.sliding_window", 0, least=0) or None
    if family == "mixtral":
        return biases | {"sliding_window": window} | experts(metadata, normalised=True, own_width=False)
    no_experts(metadata)
    return biases | {"sliding_window": window}


def _mistral3_family(metadata: Metadata) -> str:
    """Only those whose queries grow tell by how much; the others are Mistrals."""
    return "ministral3" if "attention.temperature_scale" in metadata.own.values else _llama_family(metadata)


def _mistral3(metadata: Metadata) -> dict[str, Any]:
    """Of YaRN's two scales a file tells one, which is both: they cancel each other."""
    if _mistral3_family(metadata) != "ministral3":
        return _llama(metadata)
    no_experts(metadata)
    own, rope = metadata.own, dict(rope_keys(metadata)["rope_parameters"])
    if scale := own.number("rope.scaling.yarn_log_multiplier", 0.0):
        rope.pop("attention_factor", None)
        rope |= {"mscale": scale, "mscale_all_dim": scale}
    return {"rope_parameters": rope | {"llama_4_scaling_beta": own.number("attention.temperature_scale")}}


def _qwen(metadata: Metadata) -> dict[str, Any]:
    no_experts(metadata)
    no_window(metadata)
    return {"attention_bias": metadata.has("self_attn.q_proj.bias")}


def _olmoe(metadata: Metadata) -> dict[str, Any]:
    no_window(metadata)
    bias = metadata.has("self_attn.q_proj.bias")
    return {"attention_bias": bias} | experts(metadata, normalised=False, own_width=False)


def _qwen2_moe(metadata: Metadata) -> dict[str, Any]:
    no_window(metadata)
    keys = experts(metadata, normalised=False, own_width=True)
    shared = metadata.own.size("expert_shared_feed_forward_length", metadata.own.size("feed_forward_length"))
    return keys | {"qkv_bias": metadata.has("self_attn.q_proj.bias"), "shared_expert_intermediate_size": shared}


def _qwen3_moe(metadata: Metadata) -> dict[str, Any]:
    no_window(metadata)
    bias = metadata.has("self_attn.q_proj.bias")
    return {"attention_bias": bias} | experts(metadata, normalised=True, own_width=True)


def _exaone4(metadata: Metadata) -> dict[str, Any]:
    own = metadata.own
    no_experts(metadata)
    windowed = own.size("attention.sliding_window", 0, least=0)
    return {
        "sliding_window": windowed or None,
        "layer_types": kinds(metadata, period=4) if windowed else [FULL] * metadata.layers,
    }


def _olmo_family(metadata: Metadata) -> str:
    """Files of OLMo 2 and OLMo 3 are of one architecture: the latter's have windows."""
    return "olmo3" if metadata.own.size("attention.sliding_window", 0, least=0) else "olmo2"


def _olmo(metadata: Metadata) -> dict[str, Any]:
    """Only layers that see everything have a scaled rotary embedding; all have one base."""
    if _olmo_family(metadata) == "olmo2":
        return _qwen(metadata)
    no_experts(metadata)
    full = rope_keys(metadata)["rope_parameters"]
    return {
        "attention_bias": metadata.has("self_attn.q_proj.bias"),
        "layer_types": kinds(metadata, period=4),
        "rope_parameters": {"full_attention": full, "sliding_attention": {"rope_theta": full["rope_theta"]}},
    }


def _seed_oss(metadata: Metadata) -> dict[str, Any]:
    return _qwen(metadata) | {
        "attention_out_bias": metadata.has("self_attn.o_proj.bias"),
        "mlp_bias": metadata.has("mlp.down_proj.bias"),
    }


def _arcee(metadata: Metadata) -> dict[str, Any]:
    return _qwen(metadata) | {"mlp_bias": metadata.has("mlp.down_proj.bias")}


def _smollm3(metadata: Metadata) -> dict[str, Any]:
    """No key tells which layers do not rotate: every fourth."""
    return _arcee(metadata) | {"no_rope_layer_interval": 4}


def _hunyuan_moe(metadata: Metadata) -> dict[str, Any]:
    """The shared expert is as wide as an MLP would be, and each of the others is."""
    own = metadata.own
    no_window(metadata)
    columns = own.size("feed_forward_length")
    if own.size("expert_shared_feed_forward_length", columns) != columns:
        raise own.refusal("expert_shared_feed_forward_length", f"only feed_forward_length = {columns}")
    return {
        "attention_bias": metadata.has("self_attn.q_proj.bias"),
        "num_experts": own.size("expert_count"),
        "moe_topk": own.size("expert_used_count"),
        "moe_intermediate_size": own.size("expert_feed_forward_length", columns),
        "num_shared_expert": own.size("expert_shared_count", 1),
    }


def _gpt_oss(metadata: Metadata) -> dict[str, Any]:
    own = metadata.own
    rope = rope_keys(metadata)["rope_parameters"]
    return {
        "rope_parameters": rope | ({"truncate": False} if rope.get("rope_type") == "yarn" else {}),
        "layer_types": kinds(metadata, period=2),
        "intermediate_size": own.size("expert_feed_forward_length"),
        "num_experts": own.size("expert_count"),
        "num_experts_per_tok": own.size("expert_used_count"),
        "attention_bias": metadata.has("self_attn.q_proj.bias"),
    }


def _glm4_moe(metadata: Metadata) -> dict[str, Any]:
    own = metadata.own
    only_sigmoids(metadata, or_untold=True)
    return {
        "num_hidden_layers": metadata.layers,
        "num_nextn_predict_layers": own.size("nextn_predict_layers", 0, least=0),
        "attention_bias": metadata.has("self_attn.q_proj.bias"),
        "use_qk_norm": metadata.has("self_attn.q_norm.weight"),
        "first_k_dense_replace": own.size("leading_dense_block_count", 0, least=0),
        "n_routed_experts": own.size("expert_count"),
        "n_shared_experts": own.size("expert_shared_count", 0, least=0),
    } | grouped_experts(metadata, normalised=True)


def _dots1(metadata: Metadata) -> dict[str, Any]:
    own = metadata.own
    no_window(metadata)
    only_sigmoids(metadata, or_untold=True)
    return {
        "attention_bias": metadata.has("self_attn.q_proj.bias"),
        "first_k_dense_replace": own.size("leading_dense_block_count", 0, least=0),
        "n_routed_experts": own.size("expert_count"),
        "n_shared_experts": own.size("expert_shared_count", 0, least=0),
        "sliding_window": None,
    } | grouped_experts(metadata)


def _phi3(metadata: Metadata) -> dict[str, Any]:
    no_experts(metadata)
    window = metadata.own.size("attention.sliding_window", 0, least=0) or None
    return {"sliding_window": window} | long_rope(metadata)


def _ernie(metadata: Metadata) -> dict[str, Any]:
    no_window(metadata)
    no_experts(metadata)
    return {"use_bias": metadata.has("self_attn.q_proj.bias")}


def _ernie_moe(metadata: Metadata) -> dict[str, Any]:
    """``expert_shared_feed_forward_length`` is not read: converters make it of keys that have nothing to do with it."""
    own = metadata.own
    no_window(metadata)
    return {
        "moe_num_experts": own.size("expert_count"),
        "moe_k": own.size("expert_used_count"),
        "moe_intermediate_size": own.size("expert_feed_forward_length"),
        "moe_num_shared_experts": own.size("expert_shared_count", 0, least=0),
        "moe_layer_start_index": own.size("leading_dense_block_count", 0, least=0),
        "moe_layer_interval": own.size("interleave_moe_layer_step", 1),
    }


def _minimax_m2(metadata: Metadata) -> dict[str, Any]:
    own = metadata.own
    no_window(metadata)
    only_sigmoids(metadata)
    return {
        "intermediate_size": own.size("expert_feed_forward_length"),
        "num_local_experts": own.size("expert_count"),
        "num_experts_per_tok": own.size("expert_used_count"),
        "rotary_dim": own.size("rope.dimension_count", metadata.head_size),
    }


def _exaone_moe(metadata: Metadata) -> dict[str, Any]:
    """K-EXAONE; layers beside those with windows do not rotate."""
    own, layers = metadata.own, metadata.layers
    only_sigmoids(metadata, or_untold=True)
    width, shared = own.size("expert_feed_forward_length"), own.size("expert_shared_count")
    if own.size("expert_shared_feed_forward_length", width * shared) != width * shared:
        raise own.refusal("expert_shared_feed_forward_length", f"only that of {shared} experts, {width * shared}")
    windowed = own.size("attention.sliding_window", 0, least=0)
    return {
        "num_hidden_layers": layers,
        "sliding_window": windowed or None,
        "layer_types": kinds(metadata, period=4) if windowed else [FULL] * layers,
        "mlp_layer_types": ["sparse" if metadata.has(ROUTER, layer) else "dense" for layer in range(layers)],
        "num_experts": own.size("expert_count"),
        "num_shared_experts": shared,
    } | grouped_experts(metadata)


def _llama4(metadata: Metadata) -> dict[str, Any]:
    """No key tells of chunks, of layers that do not rotate, or of how queries grow in these; llama.cpp has one of each.

    Queries and keys have norms but in the model of 128 experts.
    """
    own, count = metadata.own, metadata.own.size("expert_count")
    if "attention.sliding_window" in own.values:
        raise own.refusal(
            "attention.sliding_window", "only its absence: chunks of 8192, and every fourth layer without"
        )
    return {
        "attention_chunk_size": 8192,
        "no_rope_layer_interval": 4,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "use_qk_norm": count != 128,
        "intermediate_size_mlp": own.size("feed_forward_length"),
        "intermediate_size": own.size("expert_feed_forward_length"),
        "num_local_experts": count,
        "num_experts_per_tok": own.size("expert_used_count"),
        "interleave_moe_layer_step": own.size("interleave_moe_layer_step"),
        "attention_bias": metadata.has("self_attn.q_proj.bias"),
    }


def _cohere(metadata: Metadata) -> dict[str, Any]:
    return _qwen(metadata) | {"use_qk_norm": metadata.has("self_attn.q_norm.weight")}


def _cohere2(metadata: Metadata) -> dict[str, Any]:
    no_experts(metadata)
    bias = metadata.has("self_attn.q_proj.bias")
    return {"attention_bias": bias, "layer_types": kinds(metadata, period=4)}


def _starcoder2(metadata: Metadata) -> dict[str, Any]:
    no_experts(metadata)
    window = metadata.own.size("attention.sliding_window", 0, least=0) or None
    return {"use_bias": metadata.has("self_attn.q_proj.bias"), "sliding_window": window}


def _stablelm(metadata: Metadata) -> dict[str, Any]:
    """Whether there is a second norm tells which kind of layer it is; the key of it may be wrong."""
    no_experts(metadata)
    no_window(metadata)
    return {
        "use_qkv_bias": metadata.has("self_attn.q_proj.bias"),
        "use_parallel_residual": not metadata.has("post_attention_layernorm.weight"),
    }


_IMAGES = frozenset({"rope.dimension_sections", "n_deepstack_layers"})
"""Keys of models that see images: sections of the rotary embedding, which are alike in a text, and layers that images
are added to."""
_CAPS = {key: key for key in ("attn_logit_softcapping", "final_logit_softcapping")}
_MULTIPLIERS = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
_LAYER_NORM = "attention.layer_norm_epsilon"
_COHERE = {"layer_norm_eps": _LAYER_NORM, "logit_scale": "logit_scale"}
_EPSILON = {"norm_eps": "attention.layer_norm_rms_epsilon"}
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(_llama_family, _llama),
    "mistral3": Architecture(
        _mistral3_family,
        _mistral3,
        frozenset({"attention.temperature_scale", "rope.scaling.yarn_log_multiplier"}),
    ),
    "qwen2": Architecture("qwen2", _qwen),
    "qwen3": Architecture("qwen3", _qwen),
    "olmo2": Architecture(_olmo_family, _olmo, frozenset({"attention.sliding_window_pattern"})),
    "olmoe": Architecture("olmoe", _olmoe),
    "qwen2moe": Architecture("qwen2_moe", _qwen2_moe),
    "qwen3moe": Architecture("qwen3_moe", _qwen3_moe),
    "qwen2vl": Architecture("qwen2_5_vl_text", _qwen, _IMAGES),
    "qwen3vl": Architecture("qwen3_vl_text", _qwen, _IMAGES),
    "qwen3vlmoe": Architecture("qwen3_vl_moe_text", _qwen3_moe, _IMAGES),
    "gemma": Architecture("gemma", _qwen),
    "gemma2": Architecture("gemma2", gemma2, names=_CAPS),
    "gemma3": Architecture(
        "gemma3_text",
        gemma3,
        frozenset({"attention.sliding_window_pattern", "rope.freq_base_swa"}),
        {"final_logit_softcapping": "final_logit_softcapping"},
    ),
    "gemma3n": Architecture(
        "gemma3n_text",
        gemma3n,
        frozenset(
            {
                *("activation_sparsity_scale", "altup.active_idx", "attention.shared_kv_layers"),
                *("attention.sliding_window_pattern", "rope.freq_base_swa"),
            }
        ),
        {
            "altup_num_inputs": "altup.num_inputs",
            "final_logit_softcapping": "final_logit_softcapping",
            "hidden_size_per_layer_input": "embedding_length_per_layer_input",
        },
    ),
    "gemma4": Architecture(
        "gemma4_text",
        gemma4,
        frozenset(
            {
                *("attention.key_length_swa", "attention.value_length_swa", "attention.shared_kv_layers"),
                *("attention.sliding_window_pattern", "rope.freq_base_swa", "rope.dimension_count_swa"),
                "embedding_length_per_layer_input",
            }
        ),
        {"final_logit_softcapping": "final_logit_softcapping"},
        rotates=False,
    ),
    "arcee": Architecture("arcee", _arcee),
    "command-r": Architecture("cohere", _cohere, names=_COHERE, epsilon=_LAYER_NORM),
    "cohere2": Architecture(
        "cohere2",
        _cohere2,
        frozenset({"attention.sliding_window_pattern"}),
        _COHERE,
        epsilon=_LAYER_NORM,
    ),
    "gpt-oss": Architecture("gpt_oss", _gpt_oss, frozenset({"attention.sliding_window_pattern", "rope.freq_base_swa"})),
    "glm4": Architecture("glm4", _qwen, partial=True),
    "glm4moe": Architecture(
        "glm4_moe",
        _glm4_moe,
        ROUTED | {"nextn_predict_layers", "leading_dense_block_count"},
        partial=True,
    ),
    "dots1": Architecture("dots1", _dots1, ROUTED | {"leading_dense_block_count"}),
    "phi3": Architecture(
        "phi3",
        _phi3,
        frozenset({"rope.scaling.attn_factor"}),
        partial=True,
        factors=LONG_FACTORS,
    ),
    "deepseek2": Architecture(
        deepseek2_family,
        deepseek2,
        LATENT | WARMTH,
        latent=True,
    ),
    "minicpm3": Architecture(
        "minicpm3",
        minicpm3,
        frozenset({"attention.q_lora_rank", "attention.kv_lora_rank", "rope.scaling.attn_factor"}),
        latent=True,
        factors=LONG_FACTORS,
    ),
    "mistral4": Architecture("mistral4", mistral4, LATENT | WARMTH, latent=True),
    "glm-dsa": Architecture("glm_moe_dsa", glm_dsa, LATENT | INDEXER, latent=True),
    "falcon-h1": Architecture("falcon_h1", falcon_h1, SSM),
    "kimi-linear": Architecture(
        "kimi_linear",
        kimi_linear,
        LATENT | KDA,
        latent=True,
        listed=(KV_HEADS,),
        rotates=False,
    ),
    "bailingmoe3": Architecture("bailing_hybrid", bailingmoe3, LATENT | LING, latent=True, listed=(KV_HEADS,)),
    "qwen3next": Architecture("qwen3_next", qwen35_moe, SSM, partial=True),
    "qwen35": Architecture("qwen3_5_text", qwen35, SSM, partial=True),
    "qwen35moe": Architecture("qwen3_5_moe_text", qwen35_moe, SSM, partial=True),
    "ernie4_5": Architecture("ernie4_5", _ernie),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        _ernie_moe,
        frozenset({"expert_shared_count", "interleave_moe_layer_step", "leading_dense_block_count"}),
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", _qwen),
    "hunyuan-moe": Architecture("hunyuan_v1_moe", _hunyuan_moe, frozenset({"expert_shared_count"})),
    "laguna": Architecture(
        "laguna",
        laguna,
        LAGUNA,
        {"num_attention_heads_per_layer": "attention.head_count"},
        partial=True,
        rotates=False,
    ),
    "lfm2": Architecture("lfm2", lfm2, CONVOLUTIONS, _EPSILON, listed=(KV_HEADS,)),
    "lfm2moe": Architecture("lfm2_moe", lfm2_moe, CONVOLUTIONS, _EPSILON, listed=(KV_HEADS,)),
    "minimax-m2": Architecture("minimax_m2", _minimax_m2, frozenset({"expert_gating_func"}), partial=True),
    "exaone": Architecture("exaone", _arcee),
    "exaone4": Architecture("exaone4", _exaone4, frozenset({"attention.sliding_window_pattern"})),
    "exaone-moe": Architecture(
        "exaone_moe",
        _exaone_moe,
        ROUTED | {"attention.sliding_window_pattern", "leading_dense_block_count", "nextn_predict_layers"},
    ),
    "llama4": Architecture("llama4_text", _llama4, frozenset({"interleave_moe_layer_step"})),
    "granite": Architecture(
        "granite",
        granite,
        frozenset({"attention.scale"}),
        _MULTIPLIERS,
    ),
    "granitemoe": Architecture(
        granite_moe_family,
        granite_moe,
        frozenset({"attention.scale", "rope.scaling.finetuned"}),
        _MULTIPLIERS,
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        granite_hybrid,
        SSM | {"attention.scale", "rope.scaling.finetuned"},
        _MULTIPLIERS,
        listed=(KV_HEADS,),
    ),
    **{
        name: Architecture(
            "nemotron_h",
            nemotron_h,
            SSM | ROUTED | {"attention.layer_norm_epsilon", "moe_latent_size"},
            {"layer_norm_epsilon": "attention.layer_norm_rms_epsilon"},
            listed=(KV_HEADS, "feed_forward_length"),
            rotates=False,
        )
        for name in ("nemotron_h", "nemotron_h_moe")
    },
    "jais2": Architecture("jais2", _arcee, names={"layer_norm_eps": _LAYER_NORM}, epsilon=_LAYER_NORM),
    "nemotron": Architecture("nemotron", _arcee, names={"norm_eps": _LAYER_NORM}, partial=True, epsilon=_LAYER_NORM),
    "seed_oss": Architecture("seed_oss", _seed_oss),
    "smollm3": Architecture("smollm3", _smollm3),
    "stablelm": Architecture(
        "stablelm",
        _stablelm,
        frozenset({"use_parallel_residual"}),
        {"layer_norm_eps": _LAYER_NORM},
        partial=True,
        epsilon=_LAYER_NORM,
    ),
    "starcoder2": Architecture("starcoder2", _starcoder2, names={"norm_epsilon": _LAYER_NORM}, epsilon=_LAYER_NORM),
}
"""By llama.cpp's name."""
