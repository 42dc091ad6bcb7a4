"""A GGUF file's metadata as the keys of a ``config.json``, so that the same families describe the model.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The file tells some traits by the tensors that it has:
biases, a head of its own, factors of the rotary frequencies, which layers have experts. Every key of the architecture
is known here or refused by name, and so is every tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil, log
from typing import Any

from motley.daemon.models.blocks import FULL, SLIDING
from motley.daemon.models.description import EMBEDDING, HEAD, Model, tensors
from motley.daemon.models.keys import ConfigError, Keys
from motley.daemon.models.reading import describe
from motley.daemon.models.rope_keys import MAX_ROPE_FACTOR
from motley.daemon.weights.checkpoint import MAX_PROBLEMS
from motley.daemon.weights.gguf_checkpoint import ROPE_FACTORS, GgufCheckpoint
from motley.daemon.weights.spec import Piece

ROUTER = "mlp.gate.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""What each rotary frequency is divided by, f32[r / 2], in long texts and in short ones (phi3)."""

COMMON: Mapping[str, str] = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "vocab_size": "vocab_size",
}
"""What llama.cpp calls the keys that nearly every architecture has."""

EXPERTS: Mapping[str, str] = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}

_READ = frozenset(
    {
        *COMMON.values(),
        *EXPERTS.values(),
        "attention.value_length",
        "expert_weights_norm",
        "rope.dimension_count",
        "rope.scale_linear",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    }
)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "expert_gating_func": (1,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_shared_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "pooling_type": (0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.finetuned": (True, False),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "tensor_data_layout": ("reference",),
    "use_parallel_residual": (False,),
}
"""Keys that change the maths in ways few architectures have, with the values that change nothing (1 is a softmax)."""


@dataclass(frozen=True)
class Metadata:
    """The metadata of a file's architecture beside its tensors.

    Attributes:
        own: by llama.cpp's names, which messages use.
        layers: that are computed.
    """

    checkpoint: GgufCheckpoint
    architecture: str
    own: Keys
    layers: int

    def has(self, tensor: str, layer: int = 0) -> bool:
        """Whether a layer has a tensor, by Hugging Face's name within the layer."""
        return f"model.layers.{layer}.{tensor}" in self.checkpoint

    @property
    def head_size(self) -> int:
        """Elements of a head."""
        own, heads = self.own, self.own.size("attention.head_count")
        size = own.size("attention.key_length", own.size("embedding_length") // heads)
        if own.size("attention.value_length", size) != size:
            raise own.refusal("attention.value_length", f"only the size of a head, {size}")
        return size


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp's metadata of an architecture become the keys of a family.

    Attributes:
        family: what it is, or what tells it.
        more: the family's keys that do not just have another name.
        read: llama.cpp's keys besides those that all architectures have.
        names: what llama.cpp calls keys of the family besides those of `COMMON`.
        partial: a part of each head may be rotated.
    """

    family: str | Callable[[Metadata], str]
    more: Callable[[Metadata], dict[str, Any]]
    read: frozenset[str] = frozenset()
    names: Mapping[str, str] = field(default_factory=dict)
    partial: bool = False


def gguf_model(checkpoint: GgufCheckpoint) -> Model:
    """Describe the model in a GGUF file.

    Raises:
        ConfigError: the file is of another architecture, or asks for something that is not supported.
        CheckpointError: the rope factors cannot be read.
    """
    metadata = _metadata(checkpoint)
    kind = ARCHITECTURES[metadata.architecture]
    family = kind.family if isinstance(kind.family, str) else kind.family(metadata)
    names = {**COMMON, **kind.names}
    values = {key: metadata.own.values[name] for key, name in names.items() if name in metadata.own.values}
    values = {
        "model_type": family,
        **values,
        **_facts(metadata),
        **kind.more(metadata),
    }
    keys = Keys(checkpoint.file, values, prefix=f"{metadata.architecture}.", spelled=names)
    model = describe(keys)
    unknown = sorted(
        name
        for name in set(checkpoint.names()) - _wanted(model) - {ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS}
        if not name.startswith(model.ignored or "\0")
    )
    if unknown:
        named = ", ".join(unknown[:MAX_PROBLEMS]) + (", ..." if len(unknown) > MAX_PROBLEMS else "")
        raise ConfigError(f"{checkpoint.file}: a {metadata.architecture} model of this kind has no tensors {named}")
    return model


def _wanted(model: Model) -> set[str]:
    """The tensors that a model wants, and those that these may be parts of."""
    return {name for tensor in tensors(model) for name in (tensor.name, *(part.tensor for part in tensor.parts))}


def _metadata(checkpoint: GgufCheckpoint) -> Metadata:
    architecture = checkpoint.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        shown = (
            f'"{architecture}"' if isinstance(architecture, str) else "null" if architecture is None else architecture
        )
        raise ConfigError(
            f"{checkpoint.file}: general.architecture = {shown} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    prefix = f"{architecture}."
    values = {key.removeprefix(prefix): each for key, each in checkpoint.metadata.items() if key.startswith(prefix)}
    own = Keys(checkpoint.file, {key: _short(value) for key, value in values.items()}, prefix)
    kind = ARCHITECTURES[architecture]
    known = _READ | kind.read | set(kind.names.values())
    for key, value in own.values.items():
        if key not in known and value not in _NEUTRAL.get(key, ()):
            neutral = _NEUTRAL.get(key)
            raise own.refusal(key, f"only {neutral[0]}" if neutral else "only its absence")
    layers = own.size("block_count") - own.size("nextn_predict_layers", 0, least=0)
    if not any(name.startswith(f"model.layers.{layers - 1}.") for name in checkpoint.names()):
        raise own.refusal("block_count", "the number of layers whose tensors are there")
    if EMBEDDING not in checkpoint:
        raise ConfigError(f"{checkpoint.file}: no tensor token_embd.weight; this file holds no language model")
    return Metadata(checkpoint, architecture, own, layers)


def _short(value: Any) -> Any:
    """Floats as they were meant: float32 keeps no more digits than seven."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _facts(metadata: Metadata) -> dict[str, Any]:
    """Keys that follow from the tensors, and those of the rotary embedding."""
    own, checkpoint = metadata.own, metadata.checkpoint
    vocabulary = checkpoint.tensor(EMBEDDING).shape[0]
    if own.size("vocab_size", vocabulary) != vocabulary:
        raise own.refusal("vocab_size", f"only the rows of token_embd.weight, {vocabulary}")
    own.number("attention.layer_norm_rms_epsilon")
    end = checkpoint.metadata.get("tokenizer.ggml.eos_token_id")
    if end is not None and (not isinstance(end, int) or isinstance(end, bool) or end < 0):
        raise ConfigError(
            f"{checkpoint.file}: tokenizer.ggml.eos_token_id = {end} is not supported; supported: a token id"
        )
    return {
        "vocab_size": vocabulary,
        "num_key_value_heads": own.size("attention.head_count_kv", own.size("attention.head_count")),
        "head_dim": metadata.head_size,
        "tie_word_embeddings": HEAD not in checkpoint,
        "eos_token_id": end,
        "norms_are_whole": True,
        **_rope(metadata),
    }


def _rope(metadata: Metadata) -> dict[str, Any]:
    """The keys of the rotary embedding."""
    own, checkpoint, head_size = metadata.own, metadata.checkpoint, metadata.head_size
    size = own.size("rope.dimension_count", head_size)
    if size != head_size and not ARCHITECTURES[metadata.architecture].partial:
        raise own.refusal("rope.dimension_count", f"only the size of a head, {head_size}")
    if size > head_size:
        raise own.refusal("rope.dimension_count", f"at most the size of a head, {head_size}")
    rope: dict[str, Any] = {
        "rope_theta": own.number("rope.freq_base", 10000.0),
        "partial_rotary_factor": size / head_size,
    }
    context = own.size("context_length")
    factor_key = "rope.scaling.factor" if "rope.scaling.factor" in own.values else "rope.scale_linear"
    kind = own.values.get("rope.scaling.type", "linear" if factor_key in own.values else "none")
    if kind not in ("none", "linear", "yarn"):
        raise own.refusal("rope.scaling.type", "none, linear, yarn")
    if ROPE_FACTORS in checkpoint:
        if kind != "none":
            raise own.refusal("rope.scaling.type", f"only none beside the tensor {ROPE_FACTORS}")
        checkpoint.expect({ROPE_FACTORS: (size // 2,)})
        factors = checkpoint.read(Piece(ROPE_FACTORS, range(size // 2))).tolist()
        if not all(0 < factor <= MAX_ROPE_FACTOR for factor in factors):
            raise ConfigError(f"{checkpoint.file}: {ROPE_FACTORS} should hold numbers from 0 to {MAX_ROPE_FACTOR}")
        return {"rope_parameters": rope | {"rope_type": "factors", "factors": factors}}
    if kind == "none":
        return {"rope_parameters": rope}
    factor = own.number(factor_key)
    if not 1.0 <= factor <= MAX_ROPE_FACTOR:
        raise own.refusal(factor_key, f"a number from 1 to {MAX_ROPE_FACTOR}")
    original = own.size("rope.scaling.original_context_length", context)
    if kind == "linear":
        return {
            "rope_parameters": rope | {"rope_type": "linear", "factor": factor},
            "max_position_embeddings": max(original, ceil(context / factor)),
        }
    fast, slow = own.number("rope.scaling.yarn_beta_fast", 32.0), own.number("rope.scaling.yarn_beta_slow", 1.0)
    if rope["rope_theta"] <= 1.0:
        raise own.refusal("rope.freq_base", "more than 1 with rope scaling yarn")
    if fast < slow:
        raise own.refusal("rope.scaling.yarn_beta_fast", f"at least yarn_beta_slow = {slow}")
    yarn = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": fast,
        "beta_slow": slow,
        "attention_factor": 0.1 * log(factor) + 1.0,
    }
    return {"rope_parameters": rope | yarn}


# -- architectures ---------------------------------------------------------------------------------------------------


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
        return biases | {"sliding_window": window} | _experts(metadata, normalised=True, own_width=False)
    _no_experts(metadata)
    return biases | {"sliding_window": window}


def _qwen(metadata: Metadata) -> dict[str, Any]:
    _no_experts(metadata)
    _no_window(metadata)
    return {"attention_bias": metadata.has("self_attn.q_proj.bias")}


def _olmoe(metadata: Metadata) -> dict[str, Any]:
    _no_window(metadata)
    bias = metadata.has("self_attn.q_proj.bias")
    return {"attention_bias": bias} | _experts(metadata, normalised=False, own_width=False)


def _qwen2_moe(metadata: Metadata) -> dict[str, Any]:
    _no_window(metadata)
    keys = _experts(metadata, normalised=False, own_width=True)
    shared = metadata.own.size("expert_shared_feed_forward_length", metadata.own.size("feed_forward_length"))
    return keys | {"qkv_bias": metadata.has("self_attn.q_proj.bias"), "shared_expert_intermediate_size": shared}


def _qwen3_moe(metadata: Metadata) -> dict[str, Any]:
    _no_window(metadata)
    bias = metadata.has("self_attn.q_proj.bias")
    return {"attention_bias": bias} | _experts(metadata, normalised=True, own_width=True)


def _no_window(metadata: Metadata) -> None:
    if metadata.own.size("attention.sliding_window", 0, least=0):
        raise metadata.own.refusal("attention.sliding_window", "only 0 in this architecture")


def _no_experts(metadata: Metadata) -> None:
    own = metadata.own
    for key in ("expert_count", "expert_used_count"):
        if own.size(key, 0, least=0):
            raise own.refusal(key, "only 0 in this architecture")
    for key in ("expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_weights_norm"):
        if key in own.values:
            raise own.refusal(key, "only its absence in this architecture")


def _experts(metadata: Metadata, *, normalised: bool, own_width: bool) -> dict[str, Any]:
    """The keys of experts.

    Args:
        normalised: the weights of a row's experts add up to 1: the architecture decides, and no key tells it.
        own_width: experts have a width of their own; else that of an MLP.
    """
    own = metadata.own
    count, chosen = own.size("expert_count"), own.size("expert_used_count")
    if chosen > count:
        raise own.refusal("expert_used_count", f"at most expert_count = {count}")
    sparse = [metadata.has(ROUTER, layer) for layer in range(metadata.layers)]
    if not any(sparse):
        raise own.refusal("expert_count", "experts in a layer: no tensor ffn_gate_inp.weight is there")
    if own.values.get("expert_weights_norm", normalised) != normalised:
        raise own.refusal("expert_weights_norm", f"only {str(normalised).lower()} in this architecture")
    if "expert_shared_feed_forward_length" in own.values and metadata.architecture != "qwen2moe":
        raise own.refusal("expert_shared_feed_forward_length", "only its absence in this architecture")
    columns = own.size("feed_forward_length")
    width = own.size("expert_feed_forward_length", columns // chosen if own_width else columns)
    if not own_width and width != columns:
        raise own.refusal("expert_feed_forward_length", f"only feed_forward_length = {columns}")
    return {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "norm_topk_prob": normalised,
        "moe_intermediate_size": width,
        "mlp_only_layers": [layer for layer, has in enumerate(sparse) if not has],
    }


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    """Only layers that see everything have a scaled rotary embedding; the scale of attention is told by the size."""
    own = metadata.own
    _no_experts(metadata)
    heads, size = own.size("attention.head_count"), metadata.head_size
    largest = metadata.layers == 62  # the model of 27 billion parameters
    period = own.get("attention.sliding_window_pattern") or 6
    windowed = own.size("attention.sliding_window", 0, least=0)
    sliding = period if isinstance(period, list) else [(layer + 1) % period != 0 for layer in range(metadata.layers)]
    kinds = [SLIDING if windowed and each else FULL for each in sliding]
    return {
        "rope_parameters": {
            "full_attention": _rope(metadata)["rope_parameters"],
            "sliding_attention": {"rope_theta": own.number("rope.freq_base_swa", 10000.0)},
        },
        "query_pre_attn_scalar": own.size("embedding_length") / heads if largest else size,
        "sliding_window": windowed or None,
        "layer_types": kinds,
        "max_position_embeddings": own.size("context_length"),
    }


def _gpt_oss(metadata: Metadata) -> dict[str, Any]:
    own = metadata.own
    period = own.get("attention.sliding_window_pattern") or 2
    sliding = period if isinstance(period, list) else [(layer + 1) % period != 0 for layer in range(metadata.layers)]
    rope = _rope(metadata)["rope_parameters"]
    return {
        "rope_parameters": rope | ({"truncate": False} if rope.get("rope_type") == "yarn" else {}),
        "layer_types": [SLIDING if each else FULL for each in sliding],
        "intermediate_size": own.size("expert_feed_forward_length"),
        "num_experts": own.size("expert_count"),
        "num_experts_per_tok": own.size("expert_used_count"),
        "attention_bias": metadata.has("self_attn.q_proj.bias"),
    }


def _glm4_moe(metadata: Metadata) -> dict[str, Any]:
    own = metadata.own
    if own.size("expert_gating_func", 2, least=0) not in (0, 2):
        raise own.refusal("expert_gating_func", "only 2, a sigmoid")
    normalised = own.flag("expert_weights_norm", True)
    return {
        "num_hidden_layers": metadata.layers,
        "num_nextn_predict_layers": own.size("nextn_predict_layers", 0, least=0),
        "attention_bias": metadata.has("self_attn.q_proj.bias"),
        "use_qk_norm": metadata.has("self_attn.q_norm.weight"),
        "first_k_dense_replace": own.size("leading_dense_block_count", 0, least=0),
        "n_routed_experts": own.size("expert_count"),
        "num_experts_per_tok": own.size("expert_used_count"),
        "moe_intermediate_size": own.size("expert_feed_forward_length"),
        "n_shared_experts": own.size("expert_shared_count", 0, least=0),
        "norm_topk_prob": normalised,
        "routed_scaling_factor": own.number("expert_weights_scale", 1.0),
        "n_group": max(1, own.size("expert_group_count", 1, least=0)),
        "topk_group": max(1, own.size("expert_group_used_count", 1, least=0)),
    }


def _phi3(metadata: Metadata) -> dict[str, Any]:
    """Factors of the rotary frequencies are tensors, for short texts and for long ones."""
    own, checkpoint = metadata.own, metadata.checkpoint
    _no_experts(metadata)
    keys: dict[str, Any] = {"sliding_window": own.size("attention.sliding_window", 0, least=0) or None}
    if LONG_FACTORS not in checkpoint:
        return keys
    size = own.size("rope.dimension_count", metadata.head_size) // 2
    checkpoint.expect({LONG_FACTORS: (size,), SHORT_FACTORS: (size,)})
    long, short = (checkpoint.read(Piece(name, range(size))).tolist() for name in (LONG_FACTORS, SHORT_FACTORS))
    rope = _rope(metadata)["rope_parameters"] | {
        "rope_type": "longrope",
        "long_factor": long,
        "short_factor": short,
        "attention_factor": own.number("rope.scaling.attn_factor", 1.0),
    }
    original = own.size("rope.scaling.original_context_length", own.size("context_length"))
    return keys | {"rope_parameters": rope, "original_max_position_embeddings": original}


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(_llama_family, _llama),
    "qwen2": Architecture("qwen2", _qwen),
    "qwen3": Architecture("qwen3", _qwen),
    "olmo2": Architecture("olmo2", _qwen),
    "olmoe": Architecture("olmoe", _olmoe),
    "qwen2moe": Architecture("qwen2_moe", _qwen2_moe),
    "qwen3moe": Architecture("qwen3_moe", _qwen3_moe),
    "gemma3": Architecture(
        "gemma3_text",
        _gemma3,
        frozenset({"attention.sliding_window_pattern", "rope.freq_base_swa"}),
        {"final_logit_softcapping": "final_logit_softcapping"},
    ),
    "gpt-oss": Architecture("gpt_oss", _gpt_oss, frozenset({"attention.sliding_window_pattern", "rope.freq_base_swa"})),
    "glm4moe": Architecture(
        "glm4_moe",
        _glm4_moe,
        frozenset(
            {
                "nextn_predict_layers",
                "leading_dense_block_count",
                "expert_gating_func",
                "expert_group_count",
                "expert_group_used_count",
                "expert_shared_count",
                "expert_weights_scale",
            }
        ),
        partial=True,
    ),
    "phi3": Architecture("phi3", _phi3, frozenset({"rope.scaling.attn_factor"}), partial=True),
}
"""By llama.cpp's name."""
