"""What configs of Step 3.5 and 3.7 say of each layer, as published and as transformers writes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from motley.daemon.models.blocks.layer_kinds import FULL, SLIDING, listed_sparse_layers
from motley.daemon.models.blocks.shape import Shape
from motley.daemon.models.description.axes import Heads
from motley.daemon.models.description.rope import Rope
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import rope_of

AHEAD = "num_nextn_predict_layers"


def listed_of(keys: Keys, key: str, layers: int) -> Any:
    """What a key lists for each layer; published configs add what is of the layers that predict further ahead."""
    value = keys.get(key)
    longer = isinstance(value, list) and len(value) == layers + keys.size(AHEAD, 0, least=0)
    return value[:layers] if longer else value


def heads_of_windows(keys: Keys, shape: Shape) -> Heads:
    """The heads of layers with windows: more of queries, in some models."""
    heads, other = shape.heads, keys.inner("attention_other_setting")
    other.only("attention_type", SLIDING)
    other.only("num_attention_groups", heads.keys)
    other.only("head_dim", heads.size)
    named = "num_sliding_attention_heads"
    count = keys.size(named, other.size("num_attention_heads", heads.queries))
    if count % heads.keys:
        raise keys.refusal(named, f"a multiple of num_key_value_heads = {heads.keys}")
    return replace(heads, queries=count)


def sparse_of(keys: Keys, layers: int) -> list[bool]:
    """Which layers have experts: by ``mlp_layer_types``, or by numbers in ``moe_layers_enum``, or all after three."""
    listed = keys.get("moe_layers_enum")
    numbers = listed.split(",") if isinstance(listed, str) else listed
    if numbers is None or keys.get("mlp_layer_types"):
        return listed_sparse_layers(keys, layers, 3)
    told = [str(each).strip() for each in numbers] if isinstance(numbers, list) else [""]
    if not all(each.isdecimal() for each in told) or not any(int(each) < layers for each in told):
        raise keys.refusal("moe_layers_enum", f"numbers of layers from 0 to {layers - 1}, with commas")
    return [number in set(map(int, told)) for number in range(layers)]


def limits_of(keys: Keys, key: str, layers: int) -> list[float]:
    """What bounds the gates of each layer; 0: nothing."""
    value = [0] * layers if keys.get(key) is None else listed_of(keys, key, layers)
    numbers = isinstance(value, list) and all(each is None or type(each) in (int, float) for each in value)
    if not numbers or len(value) != layers or any(each is not None and each < 0 for each in value):
        raise keys.refusal(key, f"a list of {layers} numbers, 0 or null for layers without")
    return [float(each or 0) for each in value]


def ropes_of(keys: Keys, shape: Shape, windows: list[int]) -> tuple[dict[str, Rope], int]:
    """The rotary embeddings of layers that see everything and of those with windows, and the longest context.

    ``rope_parameters`` has an object for each; or lists have the base and the part of a head that turns of each layer,
    and what stretches the context is of layers that see everything.
    """
    given, size = keys.inner("rope_parameters"), shape.heads.size
    bases, partials = (_numbers_of(keys, key, shape.layers) for key in ("rope_theta", "partial_rotary_factors"))
    found, context = dict[str, Rope](), keys.size("max_position_embeddings")
    for name, kind in (("full", FULL), ("sliding", SLIDING)):
        number = next((each for each, window in enumerate(windows) if bool(window) == (kind == SLIDING)), None)
        if number is None:
            continue
        own = given.inner(kind)
        if kind == FULL and not own.values and keys.get("rope_scaling"):
            own = keys.inner("rope_scaling")
        found[name], longest = rope_of(keys, own, size, bases[number] or 1e4, partials[number] or 1.0)
        context = max(context, longest)
    return found, context


def _numbers_of(keys: Keys, key: str, layers: int) -> list[float | None]:
    """A positive number for each layer; None: the key is silent. A number alone is that of all layers."""
    value = listed_of(keys, key, layers)
    each = value if isinstance(value, list) else [value] * layers
    known = all(one is None or (type(one) in (int, float) and one > 0) for one in each)
    if not known or len(each) != layers:
        raise keys.refusal(key, f"a positive number, or a list of {layers}")
    return each
