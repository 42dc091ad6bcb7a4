"""Which layers have a rotary embedding, in models some of whose layers have none."""

from __future__ import annotations

from motley.daemon.models.blocks.layer_kinds import flags_of_layers
from motley.daemon.models.keys import Keys


def rotated_layers(keys: Keys, layers: int) -> list[bool]:
    """Which layers rotate queries and keys: 1 in ``no_rope_layers``, or all but the last one of each interval.

    Raises:
        ConfigError: ``no_rope_layers`` is no list of 0 and 1 for every layer.
    """
    interval = keys.size("no_rope_layer_interval", 4)
    listed = None if keys.get("no_rope_layers") == [] else flags_of_layers(keys, "no_rope_layers", layers)
    return [(number + 1) % interval != 0 for number in range(layers)] if listed is None else listed
