"""A model's ``config.json`` as the few facts that the graph needs; what it cannot compute is refused by name.

The families differ from Llama in a handful of traits, so a family is a row of a table (`FAMILIES`).
Both spellings of Hugging Face configs are read: the one before transformers 5 (``rope_theta``, ``rope_scaling``)
and the one since (``rope_parameters``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any, Literal

from motley.daemon.weights.packed import Packing


class ConfigError(ValueError):
    """A model that cannot be served; the message names the key, its value and what is supported."""


@dataclass(frozen=True)
class Family:
    """In what a family differs from Llama. A string names the config key that decides."""

    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    """RMS norm over each query and key head before the rotation."""
    window: Literal["never", "every layer", "some layers"] = "never"
    head_dim: int | None = None
    """When the config is silent; None: hidden size / heads."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"),
    "mistral": Family(window="every layer"),
    "qwen2": Family(qkv_bias=True, window="some layers"),
    "qwen3": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        window="some layers",
        head_dim=128,
    ),
}

DEFAULT_WINDOW = 4096
"""What transformers takes where a config with a window does not say how wide; null means none."""

MAX_ROPE_FACTOR = 1024
"""A context stretched further than this is taken for a mistake."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1.0,),
    "final_logit_softcapping": (),
    "is_causal": (True,),
    "layernorm_scale": (1.0,),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "no_rope_layers": ([],),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "partial_rotary_factor": (1.0,),
    "qk_layernorm": (False,),
    "residual_multiplier": (1.0,),
    "rope_interleaved": (False,),
    "scale_depth": (1.0,),
    "scale_emb": (1.0,),
    "use_bidirectional_attention": (False,),
    "use_qk_norm": (False,),
}
"""Keys that change the maths in ways no family here has, with the values (besides null) that change nothing."""


_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class LinearScaling:
    """Rotary frequencies all divided by the factor."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Rotary frequencies stretched for long contexts as Llama 3.1 does; wavelengths in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class YarnScaling:
    """Rotary frequencies stretched as YaRN does (Peng et al. 2023, https://arxiv.org/abs/2309.00071).

    What turns more than `beta_fast` times in the original context stays, what turns less than `beta_slow` times is
    divided by the factor.
    """

    factor: float
    original_context: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    """Whether the range that is blended over starts and ends at whole frequencies."""
    attention_factor: float
    """What rotated queries and keys are multiplied by."""


@dataclass(frozen=True)
class DynamicScaling:
    """Plain up to the original context; beyond, a base that grows with the sequence ("dynamic NTK").

    A prompt is rotated by the base of its whole length, each later token by that of the length with it, and cached
    keys keep their rotation: as transformers' ``generate()`` does, however the prompt is cut into steps here.
    """

    factor: float
    original_context: int


@dataclass(frozen=True)
class FactorScaling:
    """Each rotary frequency divided by a factor of its own (what GGUF files make of Llama 3.1's scaling)."""

    factors: tuple[float, ...]


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | DynamicScaling | FactorScaling


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding over whole heads, halves rotated against each other."""

    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class ModelConfig:
    """What the maths of a model depends on. Sizes in elements, `context` in tokens."""

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    norm_epsilon: float
    rope: Rope
    windows: tuple[int, ...]
    """Per layer: how many positions a row sees, itself included; 0: all."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    """The head is the embedding table."""
    context: int
    """The longest that the rotary embedding is for, see `_rope`."""
    eos: tuple[int, ...]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads


def read_config(folder: Path) -> ModelConfig:
    """Read ``config.json`` (and end-of-text tokens from ``generation_config.json`` where there is one).

    Raises:
        ConfigError: a file is absent or broken, or asks for something that is not supported.
    """
    config = _Keys(folder / "config.json")
    if "model_type" not in config.values:
        raise ConfigError(f"{config.path}: no model_type; supported: {', '.join(FAMILIES)}")
    family_name = config.one_of("model_type", FAMILIES)
    family = FAMILIES[family_name]
    config.one_of("hidden_act", ["silu"], default="silu")
    for key, neutral in NEUTRAL.items():
        value = config.values.get(key)
        if value is not None and value not in neutral:
            raise config.refusal(key, f"only {json.dumps(neutral[0])}" if neutral else "only its absence")

    hidden = config.size("hidden_size")
    heads = config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", heads if family_name == "llama" else None)
    if heads % kv_heads:
        raise config.refusal("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    head_dim = config.size("head_dim", family.head_dim or hidden // heads)
    derived = config.values.get("head_dim") is None and family.head_dim is None
    if head_dim % 2 or (derived and hidden % heads):
        raise config.refusal("head_dim", "an even number, by default hidden_size / num_attention_heads")
    layers = config.size("num_hidden_layers")
    rope, context = _rope(config)
    eos = list(config.tokens("eos_token_id"))
    if (folder / "generation_config.json").exists():
        eos = [*_Keys(folder / "generation_config.json").tokens("eos_token_id"), *eos]
    return ModelConfig(
        family=family_name,
        layers=layers,
        hidden=hidden,
        intermediate=config.size("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=config.size("vocab_size"),
        norm_epsilon=config.number("rms_norm_eps", 1e-6),
        rope=rope,
        windows=_windows(config, family, layers),
        qkv_bias=config.trait("attention_bias", family.qkv_bias),
        output_bias=family.output_bias is not False and config.trait("attention_bias", family.output_bias),
        mlp_bias=config.trait("mlp_bias", family.mlp_bias),
        qk_norm=family.qk_norm,
        tied=config.flag("tie_word_embeddings", False),
        context=context,
        eos=tuple(dict.fromkeys(eos)),
    )


def read_packing(folder: Path) -> Packing | None:
    """How a checkpoint that is quantised already is packed, from the ``quantization_config``; None: it is not.

    Raises:
        ConfigError: it is quantised in a way that cannot be read.
    """
    config = _Keys(folder / "config.json")
    given = config.values.get("quantization_config")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise config.refusal("quantization_config", "an object")
    keys = _Keys(config.path, given, prefix="quantization_config.")

    def only(key: str, *values: Any) -> None:
        """Refuse a key that would change what the tensors mean; absent or null, it says nothing."""
        if given.get(key) is not None and given[key] not in values:
            raise keys.refusal(key, f"only {' or '.join(map(json.dumps, values))}")

    method = given.get("quant_method")
    if method not in ("gptq", "awq"):
        raise keys.refusal(
            "quant_method", '"gptq" or "awq"; or take the model unquantised, it can be quantised while loading'
        )
    for key, also in (("bits", "w_bit"), ("group_size", "q_group_size")):
        if key not in given and also in given:
            given[key] = given[also]
    bits = keys.size("bits")
    group = given.get("group_size")
    if group != -1 and (group not in PACKED_GROUPS or isinstance(group, bool)):
        raise keys.refusal("group_size", f"{', '.join(map(str, PACKED_GROUPS))}, or -1 for whole rows")
    group = max(group, 0)
    only("pack_dtype", "int32")
    only("dynamic", {})
    only("is_marlin_format", False)
    if method == "awq":
        if bits != 4:
            raise keys.refusal("bits", "only 4 with AWQ")
        if not isinstance(version := given.get("version", "gemm"), str) or version.lower() != "gemm":
            raise keys.refusal("version", 'only "gemm"')
        only("zero_point", True)
        return Packing("awq", bits, group)
    if bits not in (4, 8):
        raise keys.refusal("bits", "4 or 8 with GPTQ")
    layouts = {"gptq": 1, "gptq_v2": 0}
    only("format", *layouts)
    layout = keys.one_of("checkpoint_format", layouts, default=given.get("format") or "gptq")
    return Packing("gptq", bits, group, zero_offset=layouts[layout], reordered=keys.flag("desc_act", False))


PACKED_GROUPS = (16, 32, 64, 128, 256)
"""Sizes of groups that packed checkpoints may have."""

_ROPE_KEYS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
"""The keys of each rope type, besides those that all have."""


def _rope(config: _Keys) -> tuple[Rope, int]:
    """The rotary embedding, and the longest context that it is for, tokens.

    ``linear``, ``dynamic`` and ``yarn`` configs commonly keep the unstretched length as ``max_position_embeddings``:
    their context is that (or the original) times the factor.
    """
    where = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    given = config.values.get(where) or {}
    if not isinstance(given, dict):
        raise config.refusal(where, "an object")
    rope = _Keys(config.path, given, prefix=f"{where}.")
    kind_key = "rope_type" if "rope_type" in given else "type"
    kind = rope.one_of(kind_key, _ROPE_KEYS, default="default")
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"} | _ROPE_KEYS[kind]
    for key in given:
        if key not in known and given[key] is not None:
            raise rope.refusal(key, f"{', '.join(sorted(known))} with rope type {kind}")
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.refusal("partial_rotary_factor", "only 1.0")

    theta = rope.number("rope_theta", config.number("rope_theta", 10000.0))
    context = config.size("max_position_embeddings")
    if kind == "default":
        return Rope(theta), context
    factor = rope.number("factor")
    if not 1.0 <= factor <= MAX_ROPE_FACTOR:
        raise rope.refusal("factor", f"a number from 1 to {MAX_ROPE_FACTOR}")
    if kind == "linear":
        return Rope(theta, LinearScaling(factor)), int(context * factor)
    if kind == "dynamic":
        return Rope(theta, DynamicScaling(factor, context)), int(context * factor)
    # Beside the object it comes first, as in transformers.
    original = config.size("original_max_position_embeddings", rope.size("original_max_position_embeddings", context))
    if kind == "llama3":
        return Rope(theta, _llama3(rope, factor, original)), context
    if theta <= 1.0:
        raise (rope if given.get("rope_theta") else config).refusal("rope_theta", "more than 1 with rope type yarn")
    return Rope(theta, _yarn(rope, factor, original)), max(context, int(original * factor))


def _llama3(rope: _Keys, factor: float, original: int) -> Llama3Scaling:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.refusal("high_freq_factor", f"more than low_freq_factor = {low}")
    return Llama3Scaling(factor, low, high, original)


def _yarn(rope: _Keys, factor: float, original: int) -> YarnScaling:
    fast, slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    if fast < slow:
        raise rope.refusal("beta_fast", f"at least beta_slow = {slow}")
    # Both or none count; zero is none.
    scales = [rope.number(key) for key in ("mscale", "mscale_all_dim") if rope.values.get(key)]
    above, below = scales if len(scales) == 2 else (1.0, 0.0)
    suggested = (0.1 * above * log(factor) + 1.0) / (0.1 * below * log(factor) + 1.0)
    return YarnScaling(
        factor=factor,
        original_context=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=rope.flag("truncate", "truncate" not in rope.values),  # null is false to transformers
        attention_factor=rope.number("attention_factor", suggested),
    )


def _windows(config: _Keys, family: Family, layers: int) -> tuple[int, ...]:
    on = family.window == "every layer" or config.flag("use_sliding_window", family.window == "never")
    silent = 0 if "sliding_window" in config.values or family.window == "never" else DEFAULT_WINDOW
    window = config.size("sliding_window", silent) if on else 0
    if window and family.window == "never":
        raise config.refusal("sliding_window", "only null in this family")
    first = config.size("max_window_layers", 28, least=0) if family.window == "some layers" else 0
    default = [_SLIDING if window and layer >= first else _FULL for layer in range(layers)]
    kinds = config.values.get("layer_types") or default
    allowed = {_FULL, _SLIDING} if window and family.window == "some layers" else set(default)
    if not isinstance(kinds, list) or len(kinds) != layers or not set(kinds) <= allowed:
        raise config.refusal("layer_types", f"a list of {layers} times {' or '.join(sorted(allowed))}")
    return tuple(window if kind == _SLIDING else 0 for kind in kinds)


class _Keys:
    """The keys of a JSON object, read with their types checked."""

    def __init__(self, path: Path, values: dict[str, Any] | None = None, prefix: str = "") -> None:
        self.path = path
        self.prefix = prefix
        self.values: dict[str, Any] = self._load() if values is None else values

    def _load(self) -> dict[str, Any]:
        try:
            values = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                f"{self.path}: no such file; a model folder has a config.json and *.safetensors"
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.path}: cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{self.path}: must hold one JSON object")
        return values

    def refusal(self, key: str, supported: str) -> ConfigError:
        if key not in self.values:
            return ConfigError(f"{self.path}: {self.prefix}{key} is absent; expected {supported}")
        value = json.dumps(self.values[key])
        return ConfigError(f"{self.path}: {self.prefix}{key} = {value} is not supported; supported: {supported}")

    def size(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.refusal(key, f"a whole number of at least {least}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.refusal(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false")
        return value

    def trait(self, key: str, trait: bool | str) -> bool:
        """A family's trait: fixed, or decided by the key it names; a fixed "no" may not be contradicted."""
        if isinstance(trait, str):
            return self.flag(trait, False)
        if not trait and self.flag(key, False):
            raise self.refusal(key, "only false in this family")
        return trait

    def one_of(self, key: str, supported: Mapping[str, Any] | list[str], default: str | None = None) -> str:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or value not in supported:
            raise self.refusal(key, ", ".join(supported))
        return value

    def tokens(self, key: str) -> list[int]:
        value = self.values.get(key)
        if value is None:
            return []
        tokens = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and token >= 0 for token in tokens):
            raise self.refusal(key, "a token id or a list of them")
        return tokens
