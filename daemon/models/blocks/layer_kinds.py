"""What kind each layer of a model is, as lists of its keys tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from motley.daemon.models.keys import Keys

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
DENSE, SPARSE = "dense", "sparse"


def layer_kinds(
    keys: Keys,
    key: str,
    listed: object,
    layers: int,
    allowed: Sequence[str],
    *,
    some: str = "",
    legacy: Mapping[str, str] | None = None,
) -> list[str]:
    """The kind of each layer.

    Args:
        key: of the list that tells it, to be named where that is wrong.
        listed: what it tells, or whatever is meant where it is silent.
        allowed: the kinds that it may name.
        some: a kind that a layer has at least; empty: any may be missing.
        legacy: other words for kinds.

    Raises:
        ConfigError: it is no list of them.
    """
    kinds = [(legacy or {}).get(str(each), each) for each in listed] if isinstance(listed, list) else []
    if len(kinds) != layers or not all(each in allowed for each in kinds) or (some and some not in kinds):
        at_least = f", {some} at least once" if some else ""
        raise keys.refusal(key, f"a list of {layers} times {' or '.join(allowed)}{at_least}")
    return kinds


def attending_layers(keys: Keys, layers: int, default: list[str], other: str = LINEAR) -> list[bool]:
    """Which layers attend, by ``layer_types``, or by `default` where that is silent; those of the `other` kind do not.

    Raises:
        ConfigError: as `layer_kinds`, or none attends.
    """
    listed = keys.get("layer_types") or default
    return [kind == FULL for kind in layer_kinds(keys, "layer_types", listed, layers, [FULL, other], some=FULL)]


def listed_sparse_layers(keys: Keys, layers: int, dense: int) -> list[bool]:
    """Which layers have experts, by ``mlp_layer_types``; where that is silent, all after `dense` of them.

    Raises:
        ConfigError: as `layer_kinds`, or none has experts.
    """
    listed = keys.get("mlp_layer_types") or [DENSE if number < dense else SPARSE for number in range(layers)]
    kinds = layer_kinds(keys, "mlp_layer_types", listed, layers, [DENSE, SPARSE], some=SPARSE)
    return [kind == SPARSE for kind in kinds]


def layers_with_experts(keys: Keys) -> list[bool]:
    """Which layers have experts, by ``mlp_layer_types``, or those after the first ``first_k_dense_replace``.

    Raises:
        ConfigError: as `listed_sparse_layers`.
    """
    return listed_sparse_layers(keys, keys.layers(), keys.size("first_k_dense_replace", 1, least=0))


def flags_of_layers(keys: Keys, key: str, layers: int) -> list[bool] | None:
    """A list of 0 and 1 for every layer; None where the key is silent.

    Raises:
        ConfigError: it is another list, or none.
    """
    listed = keys.get(key)
    if listed is None:
        return None
    if not isinstance(listed, list) or len(listed) != layers or not all(each in (0, 1) for each in listed):
        raise keys.refusal(key, f"a list of {layers} times 0 or 1")
    return [bool(each) for each in listed]
