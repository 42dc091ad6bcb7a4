"""A GGUF file's metadata as the model's config: what ``config.json`` says, in llama.cpp's words.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The file tells some traits by the tensors that it
has: biases, a head of its own, factors of the rotary frequencies (llama 3). Every key of the architecture is known
here or refused by name, and so is every tensor.
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
    FactorScaling,
    LinearScaling,
    ModelConfig,
    Rope,
    YarnScaling,
)
from motley.daemon.models.tensors import EMBEDDING, HEAD, expected_shapes
from motley.daemon.weights.checkpoint import MAX_PROBLEMS
from motley.daemon.weights.gguf_checkpoint import ROPE_FACTORS, GgufCheckpoint
from motley.daemon.weights.spec import Piece

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Mistral's files are of the architecture ``llama``."""

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
    "expert_count": (0,),
    "expert_used_count": (0,),
    "logit_scale": (0.0, 1.0),
    "pooling_type": (0,),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.finetuned": (True, False),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
    "tensor_data_layout": ("reference",),
    "use_parallel_residual": (False,),
}
"""Keys that change the maths in ways no family here has, with the values that change nothing."""


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

    config = ModelConfig(
        family="mistral" if window else keys.architecture,
        layers=layers,
        hidden=hidden,
        intermediate=keys.size("feed_forward_length"),
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
        qk_norm=FAMILIES[keys.architecture].qk_norm,
        tied=HEAD not in checkpoint,
        context=context,
        eos=(keys.end,) if keys.end is not None else (),
    )
    unknown = sorted(set(checkpoint.names()) - set(expected_shapes(config)) - {ROPE_FACTORS})
    if unknown:
        named = ", ".join(unknown[:MAX_PROBLEMS]) + (", ..." if len(unknown) > MAX_PROBLEMS else "")
        raise ConfigError(f"{checkpoint.file}: a {keys.architecture} model of this kind has no tensors {named}")
    return config


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
        if architecture not in ARCHITECTURES:
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
