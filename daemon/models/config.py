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
    whole_qk_norm: bool = False
    """That norm is over all query heads at once, and over all key heads."""
    clips_qkv: bool = False
    """Queries, keys and values may be clipped (``clip_qkv``)."""
    window: Literal["never", "every layer", "some layers"] = "never"
    head_dim: int | None = None
    """When the config is silent; None: hidden size / heads."""
    kv_heads: Literal["heads"] | None = None
    """When the config is silent: as many as query heads; None: it may not be."""
    theta: float = 10000.0
    """When the config is silent, as the next one."""
    norm_epsilon: float = 1e-6
    experts: ExpertKeys | None = None


@dataclass(frozen=True)
class ExpertKeys:
    """How the config of a family with experts spells them, and how a router's weights are made."""

    intermediate: str
    normalised: bool | str
    """Whether the weights of a row's experts add up to 1. A string names the config key that decides."""
    some_layers: bool = False
    """Layers may have a plain MLP (``mlp_only_layers``, ``decoder_sparse_step``)."""
    shared: bool = False
    """All rows go through a shared expert too (``shared_expert_intermediate_size``)."""


FAMILIES: Mapping[str, Family] = {
    "llama": Family(qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias", kv_heads="heads"),
    "mistral": Family(window="every layer"),
    "qwen2": Family(qkv_bias=True, window="some layers"),
    "qwen3": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        window="some layers",
        head_dim=128,
    ),
    "mixtral": Family(
        window="every layer",
        theta=1e6,
        norm_epsilon=1e-5,
        experts=ExpertKeys("intermediate_size", normalised=True),
    ),
    "olmoe": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        whole_qk_norm=True,
        clips_qkv=True,
        kv_heads="heads",
        norm_epsilon=1e-5,
        experts=ExpertKeys("intermediate_size", normalised="norm_topk_prob"),
    ),
    "qwen2_moe": Family(
        qkv_bias="qkv_bias",
        experts=ExpertKeys("moe_intermediate_size", normalised="norm_topk_prob", some_layers=True, shared=True),
    ),
    "qwen3_moe": Family(
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        qk_norm=True,
        experts=ExpertKeys("moe_intermediate_size", normalised="norm_topk_prob", some_layers=True),
    ),
}

ON_WHEN_SILENT = ("qkv_bias",)
"""Keys that decide a trait; others are off where the config is silent."""

EXPERT_COUNTS = ("num_experts", "num_local_experts")
"""Both spellings are read in every family with experts, as transformers does."""

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
    "n_group": (1,),
    "n_shared_experts": (0,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "partial_rotary_factor": (1.0,),
    "qk_layernorm": (False,),
    "residual_multiplier": (1.0,),
    "rope_interleaved": (False,),
    "routed_scaling_factor": (1.0,),
    "scale_depth": (1.0,),
    "scale_emb": (1.0,),
    "scoring_func": ("softmax",),
    "shared_expert_intermediate_size": (0,),
    "use_bidirectional_attention": (False,),
    "use_qk_norm": (False,),
}
"""Keys that change the maths in ways few families have, with the values (besides null) that change nothing."""


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
class Experts:
    """A mixture of experts in the place of an MLP: a router sends each row to a few of them, and to the shared one.

    The router's logits become probabilities by a softmax over all experts, of which the largest are kept.

    Attributes:
        chosen: experts per row.
        intermediate: columns of an expert.
        shared: columns of the expert that all rows go through; 0: there is none.
        normalised: what is kept of the probabilities is scaled to add up to 1.
        layers: per layer, whether it has experts; else it has an MLP.
    """

    count: int
    chosen: int
    intermediate: int
    shared: int
    normalised: bool
    layers: tuple[bool, ...]


@dataclass(frozen=True)
class ModelConfig:
    """What the maths of a model depends on. Sizes in elements, `context` in tokens."""

    family: str
    layers: int
    hidden: int
    intermediate: int
    """Columns of an MLP; of an expert if no layer has an MLP."""
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
    whole_qk_norm: bool = False
    """The norm is over all query heads at once, and over all key heads."""
    clip_qkv: float = 0.0
    """The largest magnitude of queries, keys and values before the rotation; 0: any."""
    experts: Experts | None = None

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    def experts_of(self, layer: int) -> Experts | None:
        """The experts of a layer; None: it has an MLP."""
        return self.experts if self.experts is not None and self.experts.layers[layer] else None


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
    own_keys = _own_keys(family)
    for key, neutral in NEUTRAL.items():
        value = config.values.get(key)
        if key not in own_keys and value is not None and value not in neutral:
            raise config.refusal(key, f"only {json.dumps(neutral[0])}" if neutral else "only its absence")

    hidden = config.size("hidden_size")
    heads = config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", heads if family.kv_heads == "heads" else None)
    if heads % kv_heads:
        raise config.refusal("num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    head_dim = config.size("head_dim", family.head_dim or hidden // heads)
    derived = config.values.get("head_dim") is None and family.head_dim is None
    if head_dim % 2 or (derived and hidden % heads):
        raise config.refusal("head_dim", "an even number, by default hidden_size / num_attention_heads")
    layers = config.size("num_hidden_layers")
    rope, context = _rope(config, family.theta)
    experts = _experts(config, family.experts, layers) if family.experts else None
    eos = list(config.tokens("eos_token_id"))
    if (folder / "generation_config.json").exists():
        eos = [*_Keys(folder / "generation_config.json").tokens("eos_token_id"), *eos]
    return ModelConfig(
        family=family_name,
        layers=layers,
        hidden=hidden,
        intermediate=experts.intermediate if experts and all(experts.layers) else config.size("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=config.size("vocab_size"),
        norm_epsilon=config.number("rms_norm_eps", family.norm_epsilon),
        rope=rope,
        windows=_windows(config, family, layers),
        qkv_bias=config.trait("attention_bias", family.qkv_bias),
        output_bias=family.output_bias is not False and config.trait("attention_bias", family.output_bias),
        mlp_bias=config.trait("mlp_bias", family.mlp_bias),
        qk_norm=family.qk_norm,
        tied=config.flag("tie_word_embeddings", False),
        context=context,
        eos=tuple(dict.fromkeys(eos)),
        whole_qk_norm=family.whole_qk_norm,
        clip_qkv=config.number("clip_qkv") if family.clips_qkv and config.values.get("clip_qkv") is not None else 0.0,
        experts=experts,
    )


def _own_keys(family: Family) -> set[str]:
    """Those of `NEUTRAL` that a family reads."""
    keys = {"clip_qkv"} if family.clips_qkv else set()
    if family.experts:
        keys |= {*EXPERT_COUNTS}
        keys |= {"shared_expert_intermediate_size"} if family.experts.shared else set()
    return keys


def _experts(config: _Keys, keys: ExpertKeys, layers: int) -> Experts:
    spelled = next((key for key in EXPERT_COUNTS if config.values.get(key) is not None), EXPERT_COUNTS[0])
    count = config.size(spelled)
    for key in EXPERT_COUNTS:
        if config.size(key, count) != count:
            raise config.refusal(key, f"only the same as {spelled} = {count}")
    chosen = config.size("num_experts_per_tok")
    if chosen > count:
        raise config.refusal("num_experts_per_tok", f"at most {spelled} = {count}")
    sparse = [True] * layers
    if keys.some_layers:
        plain = config.values.get("mlp_only_layers") or []
        if not isinstance(plain, list) or not all(layer in range(layers) for layer in plain):
            raise config.refusal("mlp_only_layers", f"a list of layers from 0 to {layers - 1}")
        step = config.size("decoder_sparse_step", 1)
        sparse = [layer not in plain and (layer + 1) % step == 0 for layer in range(layers)]
        if not any(sparse):
            raise config.refusal(
                "decoder_sparse_step", f"at most num_hidden_layers = {layers}, or mlp_only_layers less"
            )
    return Experts(
        count=count,
        chosen=chosen,
        intermediate=config.size(keys.intermediate),
        shared=config.size("shared_expert_intermediate_size") if keys.shared else 0,
        normalised=config.flag(keys.normalised, False) if isinstance(keys.normalised, str) else keys.normalised,
        layers=tuple(sparse),
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


def _rope(config: _Keys, silent_theta: float) -> tuple[Rope, int]:
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

    theta = rope.number("rope_theta", config.number("rope_theta", silent_theta))
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
    says = "sliding_window" in config.values or family.window == "never" or family.experts
    silent = 0 if says else DEFAULT_WINDOW
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
            return self.flag(trait, trait in ON_WHEN_SILENT)
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
