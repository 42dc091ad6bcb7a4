"""The rotary embedding that a model's keys ask for.

Both spellings of Hugging Face configs are read: the one before transformers 5 (``rope_theta``, ``rope_scaling``) and
the one since (``rope_parameters``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import log, sqrt
from typing import Any

from motley.daemon.models.description.rope import (
    DynamicScaling,
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    Rope,
    YarnScaling,
)
from motley.daemon.models.keys import Keys

MAX_ROPE_FACTOR = 1024
"""A context stretched further than this is taken for a mistake."""

_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_OWN: Mapping[str, frozenset[str]] = {
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
    "longrope": frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"}
    ),
    "factors": frozenset({"factors"}),
    "proportional": frozenset({"factor"}),
}
"""The keys of each rope type, besides those that all have. ``factors`` is what GGUF files make of ``llama3``."""

SECTIONS = frozenset({"mrope_section", "mrope_interleaved"})
"""Which frequencies turn by rows and columns of an image: a text's positions are the same in all of them."""
USUAL = ("default", "linear", "dynamic", "llama3", "yarn", "factors")
"""The rope types of a family that has no rule of its own."""


def read_rope(
    keys: Keys,
    head_size: int,
    theta: float = 10000.0,
    partial: float | None = None,
    types: Collection[str] = USUAL,
    ignored: Collection[str] = (),
) -> tuple[Rope, int]:
    """The rotary embedding of a model whose layers share one, and the longest context that it is for, tokens.

    Args:
        head_size: elements of a head.
        theta: the base where the keys are silent.
        partial: which part of a head turns where they are silent; None: all of it, and they may not say otherwise.
        types: the rope types that the family knows.
        ignored: keys of the object that change nothing in this family.

    Raises:
        ConfigError: naming the key that is missing, unknown or of no use.
    """
    where = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    theta = keys.number("rope_theta", theta)
    if partial is None:
        keys.only("partial_rotary_factor", 1.0)
    else:
        partial = keys.number("partial_rotary_factor", partial)
    rope = keys.inner(where)
    rope.values = {key: value for key, value in rope.values.items() if key not in ignored}
    return rope_of(keys, rope, head_size, theta, partial, types)


def rope_keys_of_both_kinds(keys: Keys) -> tuple[Keys, Keys]:
    """The objects of rope keys of layers that see everything, and of those with windows.

    Raises:
        ConfigError: there is one for all layers.
    """
    given = keys.inner("rope_parameters")
    if {"rope_type", "type", "rope_theta"} & given.values.keys():
        raise keys.refusal("rope_parameters", "an object with full_attention and sliding_attention")
    full = keys.inner("rope_scaling") if keys.get("rope_scaling") else given.inner("full_attention")
    return full, given.inner("sliding_attention")


def ropes_by_layers(keys: Keys, head_size: int, turns: Sequence[bool]) -> tuple[dict[str, Rope], list[str | None], int]:
    """The rotary embeddings, which one each layer has (None: none), and the longest context.

    ``layer_rope_theta`` has a base for each layer, 0 for those that do not rotate.

    Args:
        turns: which layers rotate where the keys are silent.
    """
    rope, context = read_rope(keys, head_size)
    bases, layers = keys.get("layer_rope_theta"), len(turns)
    if bases is None:
        return {"main": rope}, ["main" if turned else None for turned in turns], context
    numbers = isinstance(bases, list) and all(type(base) in (int, float) and base >= 0 for base in bases)
    if not numbers or len(bases) != layers:
        raise keys.refusal("layer_rope_theta", f"a list of {layers} bases, 0 for layers that do not rotate")
    given = keys.inner("rope_scaling" if keys.get("rope_scaling") else "rope_parameters")
    names = {base: f"base{index}" for index, base in enumerate(sorted({*bases} - {0}))}
    ropes = {}
    for base, name in names.items():
        given.values["rope_theta"] = float(base)
        ropes[name], context = rope_of(keys, given, head_size, float(base))
    return ropes, [names.get(base) for base in bases], context


def rope_of(
    keys: Keys, rope: Keys, head_size: int, theta: float, partial: float | None = None, types: Collection[str] = USUAL
) -> tuple[Rope, int]:
    """The rotary embedding that an object of rope keys asks for, as `read_rope`.

    ``linear``, ``dynamic`` and ``yarn`` configs commonly keep the unstretched length as ``max_position_embeddings``:
    their context is that (or the original) times the factor.

    Args:
        keys: of the model.
        rope: the object; `theta` and `partial` hold where it is silent.
    """
    named = "rope_type" if rope.says("rope_type") else "type"
    kind = "default" if rope.get(named) == "mrope" else rope.one_of(named, types, default="default")
    known = _COMMON | SECTIONS | _OWN[kind]
    for key, value in rope.values.items():
        if key not in known and value is not None:
            raise rope.refusal(key, f"{', '.join(sorted(known))} with rope type {kind}")
    if partial is None:
        rope.only("partial_rotary_factor", 1.0)
        partial = 1.0
    if kind == "proportional":
        return _proportional(rope, head_size, theta, partial), keys.size("max_position_embeddings")
    size = int(head_size * rope.number("partial_rotary_factor", partial))
    if not 0 < size <= head_size or size % 2:
        raise (rope if rope.values.get("partial_rotary_factor") else keys).refusal(
            "partial_rotary_factor", f"a part of head_dim = {head_size} that is an even number of elements"
        )
    own_theta = rope.get("rope_theta") is not None
    theta = rope.number("rope_theta", theta)
    context = keys.size("max_position_embeddings")
    if kind == "default":
        return Rope(theta, size), context
    if kind == "factors":
        return Rope(theta, size, FactorScaling(_factors(rope, "factors", size))), context
    # Beside the object it comes first, as in transformers.
    original = keys.size("original_max_position_embeddings", rope.size("original_max_position_embeddings", context))
    if kind == "longrope":
        return Rope(theta, size, _long(rope, size, context, original)), context
    factor = rope.number("factor")
    if not 1.0 <= factor <= MAX_ROPE_FACTOR:
        raise rope.refusal("factor", f"a number from 1 to {MAX_ROPE_FACTOR}")
    if kind == "linear":
        return Rope(theta, size, LinearScaling(factor)), int(context * factor)
    if kind == "dynamic":
        return Rope(theta, size, DynamicScaling(factor, context)), int(context * factor)
    if kind == "llama3":
        return Rope(theta, size, _llama3(rope, factor, original)), context
    if theta <= 1.0:
        raise (rope if own_theta else keys).refusal("rope_theta", "more than 1 with rope type yarn")
    return Rope(theta, size, _yarn(rope, factor, original)), max(context, int(original * factor))


def _proportional(rope: Keys, head_size: int, theta: float, partial: float) -> Rope:
    """A rotary embedding of a whole head, of whose frequencies a part turns."""
    turned = int(rope.number("partial_rotary_factor", partial) * head_size // 2)
    if not 0 < turned <= head_size // 2:
        raise rope.refusal("partial_rotary_factor", f"a part of head_dim = {head_size}")
    scaling = ProportionalScaling(turned, rope.number("factor", 1.0))
    return Rope(rope.number("rope_theta", theta), head_size, scaling)


def _llama3(rope: Keys, factor: float, original: int) -> Llama3Scaling:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high < low:
        raise rope.refusal("high_freq_factor", f"at least low_freq_factor = {low}")
    return Llama3Scaling(factor, low, high, original)


def _yarn(rope: Keys, factor: float, original: int) -> YarnScaling:
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


def _long(rope: Keys, size: int, context: int, original: int) -> LongScaling:
    factor = rope.number("factor", context / original)
    suggested = 1.0 if factor <= 1.0 or original <= 1 else sqrt(1 + log(factor) / log(original))
    return LongScaling(
        short=_factors(rope, "short_factor", size),
        long=_factors(rope, "long_factor", size),
        original_context=original,
        attention_factor=rope.number("attention_factor", suggested),
    )


def _factors(rope: Keys, key: str, size: int) -> tuple[float, ...]:
    """A list of what each rotary frequency is divided by."""
    values: Any = rope.get(key)
    numbers = isinstance(values, list) and all(
        isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_ROPE_FACTOR
        for value in values
    )
    if not numbers or len(values) != size // 2:
        raise rope.refusal(key, f"a list of {size // 2} numbers from 0 to {MAX_ROPE_FACTOR}")
    return tuple(map(float, values))
