"""Sliding windows: how many positions the rows of each layer attend to, as a model's keys say."""

from __future__ import annotations

from collections.abc import Sequence

from motley.daemon.models.blocks.layer_kinds import FULL, SLIDING, layer_kinds
from motley.daemon.models.keys import Keys

INDEXED = ("indexed_attention", "deepseek_sparse_attention")
"""What configs call layers whose rows see as many positions as an indexer chooses."""


def read_window(keys: Keys, silent: int = 4096) -> int:
    """How many positions the rows of layers with a window see, as ``sliding_window`` says; 0 and null: there are none.

    Args:
        silent: where the keys do not say: as wide as transformers takes it then.
    """
    return keys.size("sliding_window", 0 if keys.says("sliding_window") else silent)


def no_windows(keys: Keys, layers: int) -> list[int]:
    """A window of 0, which is none, for each layer of a family that has none.

    Raises:
        ConfigError: the keys ask for one.
    """
    if keys.flag("use_sliding_window", True) and keys.size("sliding_window", 0):
        raise keys.refusal("sliding_window", "only null in this family")
    return listed_windows(keys, layers, 0, [FULL] * layers)


def windows_everywhere(keys: Keys, layers: int, silent: int = 4096) -> list[int]:
    """The same window for each layer; `silent` as for `read_window`."""
    window = read_window(keys, silent)
    kind = SLIDING if window else FULL
    return listed_windows(keys, layers, window, [kind] * layers, [kind])


def windows_from_a_layer(keys: Keys, layers: int) -> list[int]:
    """Windows from layer ``max_window_layers`` on, or where ``layer_types`` has them, if ``use_sliding_window``."""
    window = read_window(keys) if keys.flag("use_sliding_window", False) else 0
    first = keys.size("max_window_layers", 28, least=0)
    default = [SLIDING if window and layer >= first else FULL for layer in range(layers)]
    return listed_windows(keys, layers, window, default)


def period_kinds(layers: int, period: int) -> list[str]:
    """The kind of each layer where the last one of each period has no window, and the others have."""
    return [SLIDING if (number + 1) % period else FULL for number in range(layers)]


def listed_windows(
    keys: Keys, layers: int, window: int, default: Sequence[str], allowed: Sequence[str] = ()
) -> list[int]:
    """How many positions a row of each layer sees, itself included, by ``layer_types``; 0: all.

    Args:
        window: of the layers that have one; 0: none has.
        default: the kind of each layer where ``layer_types`` is silent.
        allowed: the kinds that it may name; empty: both, or only `FULL` without a window.

    Raises:
        ConfigError: ``layer_types`` is no list of them.
    """
    listed = keys.get("layer_types") or list(default)
    possible = sorted(set(allowed or ([FULL, SLIDING] if window else [FULL])))
    kinds = layer_kinds(keys, "layer_types", listed, layers, possible)
    return [window if kind == SLIDING else 0 for kind in kinds]
