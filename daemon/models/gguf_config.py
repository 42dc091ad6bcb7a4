"""A GGUF file's metadata as the model's config: what ``config.json`` says, in llama.cpp's words.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The file tells some traits by the tensors that it
has: biases, a head of its own, factors of the rotary frequencies (llama 3), which layers have experts. Every key of the
architecture is known here or refused by name, and so is every tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import log
from typing import Any

from motley.daemon.models.config import (
    FAMILIES,
    MAX_ROPE_FACTOR,
    ConfigError,
    Experts,
    FactorScaling,
    LinearScaling,
    ModelConfig,
    Rope,
    YarnScaling,
)
from motley.daemon.models.tensors import EMBEDDING, HEAD, ROUTER, expected_shapes
from motley.daemon.weights.checkpoint import MAX_PROBLEMS
from motley.daemon.weights.gguf_checkpoint import ROPE_FACTORS, GgufCheckpoint
from motley.daemon.weights.spec import Piece

ARCHITECTURES: Mapping[str, str] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "olmoe": "olmoe",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
}
"""The family of each. Files of the families mistral and mixtral are of the architecture ``llama`` too."""

_NORMALISED = {"mixtral": True, "olmoe": False, "qwen2_moe": False, "qwen3_moe": True}
"""Whether the weights of a row's experts add up to 1: in llama.cpp the architecture decides, and no key tells it."""

_READ = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "expert_count",
        "expert_feed_forward_length",
        "expert_shared_feed_forward_length",
        "expert_used_count",
        "expert_weights_norm",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "vocab_size",
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
"""Keys that change the maths in ways no family here has, with the values that change nothing (1 is a softmax)."""


def gguf_config(checkpoint: GgufCheckpoint) -> ModelConfig:
    """What the maths of a model in a GGUF file depends on.

    Raises:
        ConfigError: the file is of another architecture, or asks for something that is not supported.
        CheckpointError: the rope factors cannot be read.
    """
    keys = _Keys(checkpoint)
    layers = keys.size("block_count")
    if f"model.layers.{layers - 1}.input_layernorm.weight" not in checkpoint:
        raise keys.refusal("block_count", "the number of layers whose tensors are there")
    hidden = keys.size("embedding_length")
    heads = keys.size("attention.head_count")
    kv_heads = keys.size("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise keys.refusal("attention.head_count_kv", f"a divisor of attention.head_count = {heads}")
    head_dim = keys.size("attention.key_length", keys.size("rope.dimension_count", hidden // heads))
    if head_dim % 2:
        raise keys.refusal("attention.key_length", "an even number, by default embedding_length / head_count")
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        if keys.size(key, head_dim) != head_dim:
            raise keys.refusal(key, f"only the size of a head, {head_dim}")
    window = keys.size("attention.sliding_window", 0, least=0)
    if window and keys.architecture != "llama":
        raise keys.refusal("attention.sliding_window", "only 0 in this architecture")
    if EMBEDDING not in checkpoint:
        raise ConfigError(f"{checkpoint.file}: no tensor token_embd.weight; this file holds no language model")
    vocabulary = checkpoint.tensor(EMBEDDING).shape[0]
    if keys.size("vocab_size", vocabulary) != vocabulary:
        raise keys.refusal("vocab_size", f"only the rows of token_embd.weight, {vocabulary}")
    rope, context = _rope(keys, checkpoint, head_dim)

    def has(name: str) -> bool:
        return f"model.layers.0.{name}" in checkpoint

    family = ARCHITECTURES[keys.architecture]
    if keys.architecture == "llama" and keys.size("expert_count", 0, least=0):
        family = "mixtral"
    elif window:
        family = "mistral"
    intermediate = keys.size("feed_forward_length")
    sparse = tuple(f"model.layers.{layer}.{ROUTER}" in checkpoint for layer in range(layers))
    experts = _experts(keys, family, intermediate, sparse)
    config = ModelConfig(
        family=family,
        layers=layers,
        hidden=hidden,
        intermediate=experts.intermediate if experts and all(sparse) else intermediate,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=vocabulary,
        norm_epsilon=keys.number("attention.layer_norm_rms_epsilon"),
        rope=rope,
        windows=(window,) * layers,
        qkv_bias=has("self_attn.q_proj.bias"),
        output_bias=has("self_attn.o_proj.bias"),
        mlp_bias=has("mlp.down_proj.bias"),
        qk_norm=FAMILIES[family].qk_norm,
        tied=HEAD not in checkpoint,
        context=context,
        eos=(keys.end,) if keys.end is not None else (),
        whole_qk_norm=FAMILIES[family].whole_qk_norm,
        experts=experts,
    )
    unknown = sorted(set(checkpoint.names()) - set(expected_shapes(config)) - {ROPE_FACTORS})
    if unknown:
        named = ", ".join(unknown[:MAX_PROBLEMS]) + (", ..." if len(unknown) > MAX_PROBLEMS else "")
        raise ConfigError(f"{checkpoint.file}: a {keys.architecture} model of this kind has no tensors {named}")
    return config


def _experts(keys: _Keys, family: str, intermediate: int, sparse: tuple[bool, ...]) -> Experts | None:
    """The experts of a family that has some; `sparse` are the layers with a router, `intermediate` is that of MLPs."""
    spelled = FAMILIES[family].experts
    if spelled is None:
        for key in ("expert_count", "expert_used_count"):
            if keys.size(key, 0, least=0):
                raise keys.refusal(key, "only 0 in this architecture")
        for key in ("expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_weights_norm"):
            if key in keys.values:
                raise keys.refusal(key, "only its absence in this architecture")
        return None
    count, chosen = keys.size("expert_count"), keys.size("expert_used_count")
    if chosen > count:
        raise keys.refusal("expert_used_count", f"at most expert_count = {count}")
    if not any(sparse):
        raise keys.refusal("expert_count", "experts in a layer: no tensor ffn_gate_inp.weight is there")
    if "expert_shared_feed_forward_length" in keys.values and not spelled.shared:
        raise keys.refusal("expert_shared_feed_forward_length", "only its absence in this architecture")
    normalised = _NORMALISED[family]
    if keys.values.get("expert_weights_norm", normalised) != normalised:
        raise keys.refusal("expert_weights_norm", f"only {json.dumps(normalised)} in this architecture")
    own_width = spelled.intermediate != "intermediate_size"
    width = keys.size("expert_feed_forward_length", intermediate // chosen if own_width else intermediate)
    if not own_width and width != intermediate:
        raise keys.refusal("expert_feed_forward_length", f"only feed_forward_length = {intermediate}")
    return Experts(
        count=count,
        chosen=chosen,
        intermediate=width,
        shared=keys.size("expert_shared_feed_forward_length", intermediate) if spelled.shared else 0,
        normalised=normalised,
        layers=sparse,
    )


def _rope(keys: _Keys, checkpoint: GgufCheckpoint, head_dim: int) -> tuple[Rope, int]:
    """The rotary embedding, and the longest context that it is for, tokens; see `config._rope`."""
    theta = keys.number("rope.freq_base", 10000.0)
    context = keys.size("context_length")
    factor_key = "rope.scaling.factor" if "rope.scaling.factor" in keys.values else "rope.scale_linear"
    kind = keys.values.get("rope.scaling.type", "linear" if factor_key in keys.values else "none")
    if kind not in ("none", "linear", "yarn"):
        raise keys.refusal("rope.scaling.type", "none, linear, yarn")
    if ROPE_FACTORS in checkpoint:
        if kind != "none":
            raise keys.refusal("rope.scaling.type", f"only none beside the tensor {ROPE_FACTORS}")
        checkpoint.expect({ROPE_FACTORS: (head_dim // 2,)})
        factors = checkpoint.read(Piece(ROPE_FACTORS, range(head_dim // 2))).tolist()
        if not all(0 < factor <= MAX_ROPE_FACTOR for factor in factors):
            raise ConfigError(f"{checkpoint.file}: {ROPE_FACTORS} should hold numbers from 0 to {MAX_ROPE_FACTOR}")
        return Rope(theta, FactorScaling(tuple(factors))), context
    if kind == "none":
        return Rope(theta), context
    factor = keys.number(factor_key)
    if not 1.0 <= factor <= MAX_ROPE_FACTOR:
        raise keys.refusal(factor_key, f"a number from 1 to {MAX_ROPE_FACTOR}")
    original = keys.size("rope.scaling.original_context_length", context)
    context = max(context, int(original * factor))
    if kind == "linear":
        return Rope(theta, LinearScaling(factor)), context
    if theta <= 1.0:
        raise keys.refusal("rope.freq_base", "more than 1 with rope scaling yarn")
    fast, slow = keys.number("rope.scaling.yarn_beta_fast", 32.0), keys.number("rope.scaling.yarn_beta_slow", 1.0)
    if fast < slow:
        raise keys.refusal("rope.scaling.yarn_beta_fast", f"at least yarn_beta_slow = {slow}")
    scaling = YarnScaling(
        factor=factor,
        original_context=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=True,
        attention_factor=0.1 * log(factor) + 1.0,
    )
    return Rope(theta, scaling), context


class _Keys:
    """The metadata of the file's architecture, read with its types checked."""

    def __init__(self, checkpoint: GgufCheckpoint) -> None:
        self._file = checkpoint.file
        metadata = checkpoint.metadata
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
            raise ConfigError(
                f"{self._file}: general.architecture = {json.dumps(architecture)} is not supported; "
                f"supported: {', '.join(ARCHITECTURES)}"
            )
        self.architecture: str = architecture
        prefix = f"{self.architecture}."
        self.values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
        for key, value in self.values.items():
            if key not in _READ and value not in _NEUTRAL.get(key, ()):
                neutral = _NEUTRAL.get(key)
                raise self.refusal(key, f"only {json.dumps(neutral[0])}" if neutral else "only its absence")
        self.end = self._token(metadata, "tokenizer.ggml.eos_token_id")

    def refusal(self, key: str, supported: str) -> ConfigError:
        name = f"{self.architecture}.{key}"
        if key not in self.values:
            return ConfigError(f"{self._file}: {name} is absent; expected {supported}")
        value = str(self.values[key])[:200]
        return ConfigError(f"{self._file}: {name} = {value} is not supported; supported: {supported}")

    def size(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.refusal(key, f"a whole number of at least {least}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.refusal(key, "a positive number")
        return float(f"{value:.7g}")  # what was meant: float32 keeps no more digits

    def _token(self, metadata: Mapping[str, Any], key: str) -> int | None:
        value = metadata.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            raise ConfigError(f"{self._file}: {key} = {value} is not supported; supported: a token id")
        return value
