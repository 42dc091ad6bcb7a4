"""What GGUF files of all architectures say alike, and what llama.cpp calls it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log
from typing import Any

from motley.daemon.models.keys import ConfigError, Keys
from motley.daemon.models.rope_keys import MAX_ROPE_FACTOR
from motley.daemon.weights.checkpoints.gguf.checkpoint import ROPE_FACTORS, GgufCheckpoint
from motley.daemon.weights.spec import Piece

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


@dataclass(frozen=True)
class Metadata:
    """The metadata of a file's architecture beside its tensors.

    Attributes:
        own: by llama.cpp's names, which messages use.
        layers: that are computed.
        partial: a part of each head may be rotated.
        latent: attention is latent: what is rotated of a head counts as all of it.
    """

    checkpoint: GgufCheckpoint
    architecture: str
    own: Keys
    layers: int
    partial: bool
    latent: bool = False

    def has(self, tensor: str, layer: int = 0) -> bool:
        """Whether a layer has a tensor, by Hugging Face's name within the layer."""
        return f"model.layers.{layer}.{tensor}" in self.checkpoint

    @property
    def head_size(self) -> int:
        """Elements of a head."""
        own, told = self.own, "attention.key_length"
        if self.latent:
            return own.size("rope.dimension_count")
        if own.values.get(told) is None:  # where heads may not be a list, of a number for each layer
            size = own.size("embedding_length") // own.size("attention.head_count")
        else:
            size = own.size(told)
        if own.size("attention.value_length", size) != size:
            raise own.refusal("attention.value_length", f"only the size of a head, {size}")
        return size


def rope_keys(metadata: Metadata) -> dict[str, Any]:
    """The keys of the rotary embedding."""
    own, checkpoint, head_size = metadata.own, metadata.checkpoint, metadata.head_size
    size = own.size("rope.dimension_count", head_size)
    if size != head_size and not metadata.partial:
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
