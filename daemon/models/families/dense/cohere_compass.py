"""Cohere's North Micro: layers of Command R7B, with a rotary embedding, or none, for each kind of layer.

Unlike in other models of Cohere, halves of a head turn together.
"""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import listed_windows
from motley.daemon.models.blocks.layer_kinds import FULL, SLIDING
from motley.daemon.models.blocks.layers import model, parallel_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.rope import Rope
from motley.daemon.models.families.dense.cohere import read_cohere_shape, read_cohere_window
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import rope_of

DEFAULTS = {"max_position_embeddings": 8192, "logit_scale": 1.0, "eos_token_id": 255001}
"""What transformers takes where a config is silent."""


def cohere_compass(keys: Keys) -> Model:
    """Describe a model of type ``cohere_compass_text``."""
    keys = keys.filled(DEFAULTS)
    shape = read_cohere_shape(keys)
    windows = listed_windows(keys, shape.layers, read_cohere_window(keys), [FULL] * shape.layers)
    ropes, context = _ropes(keys, shape.heads.size, {SLIDING if window else FULL for window in windows})
    bias, columns = keys.flag("attention_bias", False), mlp_axis(keys.size("intermediate_size"))

    def layer(number: int) -> Layer:
        kind = SLIDING if windows[number] else FULL
        return parallel_layer(
            shape,
            number,
            lambda writer, x: attention(
                writer,
                shape,
                number,
                x,
                qkv_bias=bias,
                output_bias=bias,
                rope=kind if kind in ropes else None,
                window=windows[number],
            ),
            lambda writer, x: mlp(writer, number, x, columns),
        )

    return model("cohere_compass", shape, layer, ropes, context, logits_scale=keys.number("logit_scale"))


def _ropes(keys: Keys, size: int, kinds: set[str]) -> tuple[dict[str, Rope], int]:
    """The rotary embeddings by kinds of layers, of those that rotate, and the longest context.

    Raises:
        ConfigError: a kind of layer that the model has is not told of.
    """
    given = keys.inner("rope_parameters")
    if untold := sorted(kind for kind in kinds if not given.says(kind)):
        raise keys.refusal("rope_parameters", f"an object with {' and '.join(untold)}, null where layers do not rotate")
    each = {kind: rope_of(keys, given.inner(kind), size, 10000.0) for kind in kinds if given.get(kind) is not None}
    context = max((reach for _, reach in each.values()), default=keys.size("max_position_embeddings"))
    return {kind: rope for kind, (rope, _) in each.items()}, context
