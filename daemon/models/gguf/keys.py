"""A GGUF file's metadata as the keys of a ``config.json``, so that the same families describe the model.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The file tells some traits by the tensors that it has:
biases, a head of its own, factors of the rotary frequencies, which layers have experts. Every key of the architecture
is known here or refused by name, and so is every tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from motley.daemon.models.description.model import EMBEDDING, HEAD, Model, tensors
from motley.daemon.models.gguf.architecture import KV_HEADS
from motley.daemon.models.gguf.architectures import ARCHITECTURES
from motley.daemon.models.gguf.metadata import COMMON, Metadata, rope_keys
from motley.daemon.models.keys import ConfigError, Keys
from motley.daemon.models.reading import describe
from motley.daemon.weights.checkpoints.gguf.checkpoint import ROPE_FACTORS, GgufCheckpoint
from motley.daemon.weights.places import FLAT, WHOLE
from motley.protocol.wording import MAX_PROBLEMS

_READ = frozenset(
    {
        *COMMON.values(),
        "attention.value_length",
        "expert_count",
        "expert_feed_forward_length",
        "expert_shared_feed_forward_length",
        "expert_used_count",
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
        **_facts(metadata, kind.epsilon),
        **(rope_keys(metadata) if kind.rotates else {}),
        **kind.more(metadata),
    }
    keys = Keys(checkpoint.file, values, prefix=f"{metadata.architecture}.", spelled=names)
    model = describe(keys)
    # Layers beyond the last one predict tokens further ahead.
    layers = range(metadata.layers, metadata.own.size("block_count"))
    further = tuple(f"{prefix}.{number}." for number in layers for prefix in ("model.layers", "blk"))
    unknown = sorted(
        name
        for name in set(checkpoint.names()) - _wanted(model) - {ROPE_FACTORS} - kind.factors
        if not name.startswith((*further, *model.ignored))
    )
    if unknown:
        named = ", ".join(unknown[:MAX_PROBLEMS]) + (", ..." if len(unknown) > MAX_PROBLEMS else "")
        raise ConfigError(f"{checkpoint.file}: a {metadata.architecture} model of this kind has no tensors {named}")
    return model


def _wanted(model: Model) -> set[str]:
    """The tensors that a model wants, and those that these may be parts of."""
    places = (name for tensor in tensors(model) for name in (tensor.name, *(part.tensor for part in tensor.parts)))
    return {name.removesuffix(FLAT).removesuffix(WHOLE) for name in places}


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
    for key in kind.listed:
        if key in own.values:
            own.values[key] = _the_one(own, key)
    layers = own.size("block_count") - own.size("nextn_predict_layers", 0, least=0)
    if not any(name.startswith(f"model.layers.{layers - 1}.") for name in checkpoint.names()):
        raise own.refusal("block_count", "the number of layers whose tensors are there")
    if EMBEDDING not in checkpoint:
        raise ConfigError(f"{checkpoint.file}: no tensor token_embd.weight; this file holds no language model")
    return Metadata(checkpoint, architecture, own, layers, kind.partial, kind.latent)


def _the_one(own: Keys, key: str) -> int:
    """The number in a list that the layers have that have any."""
    listed = own.values[key]
    told = [each for each in listed if each != 0] if isinstance(listed, list) else [listed]
    if not told or any(type(each) is not int or each != told[0] for each in told):
        raise own.refusal(key, "one number, or a list of it and of 0 for layers without")
    return int(told[0])


def _short(value: Any) -> Any:
    """Floats as they were meant: float32 keeps no more digits than seven."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _facts(metadata: Metadata, epsilon: str) -> dict[str, Any]:
    """Keys that follow from the tensors."""
    own, checkpoint = metadata.own, metadata.checkpoint
    vocabulary = checkpoint.tensor(EMBEDDING).shape[0]
    if own.size("vocab_size", vocabulary) != vocabulary:
        raise own.refusal("vocab_size", f"only the rows of token_embd.weight, {vocabulary}")
    own.number(epsilon)
    end = checkpoint.metadata.get("tokenizer.ggml.eos_token_id")
    if end is not None and (not isinstance(end, int) or isinstance(end, bool) or end < 0):
        raise ConfigError(
            f"{checkpoint.file}: tokenizer.ggml.eos_token_id = {end} is not supported; supported: a token id"
        )
    return {
        "vocab_size": vocabulary,
        "num_key_value_heads": own.values.get(KV_HEADS, own.values.get("attention.head_count")),
        "head_dim": metadata.head_size,
        "tie_word_embeddings": HEAD not in checkpoint,
        "eos_token_id": end,
        "norms_are_whole": True,
    }
