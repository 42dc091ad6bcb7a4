"""OLMo 3: OLMo 2, with windows in three layers of four, where a scaling of the rotary embedding does not apply."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import listed_windows, read_window
from motley.daemon.models.blocks.layer_kinds import FULL, SLIDING
from motley.daemon.models.blocks.layers import model, post_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.rope import Rope
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import rope_keys_of_both_kinds, rope_of

THETA = 500000.0
"""The base of a rotary embedding that names none."""


def olmo3(keys: Keys) -> Model:
    """Describe a model of type ``olmo3``."""
    shape = read_shape(keys, kv_heads=True, epsilon=1e-5)
    ropes, context = _ropes(keys, shape.heads.size)
    window = read_window(keys)
    kinds = [SLIDING if (number + 1) % 4 else FULL for number in range(shape.layers)]
    windows = listed_windows(keys, shape.layers, window, kinds)
    bias = keys.flag("attention_bias", False)
    columns = mlp_axis(keys.size("intermediate_size"))

    def layer(number: int) -> Layer:
        return post_norm_layer(
            shape,
            number,
            lambda writer, x: attention(
                writer,
                shape,
                number,
                x,
                qkv_bias=bias,
                output_bias=bias,
                whole_qk_norm=True,
                rope="sliding" if windows[number] else "full",
                window=windows[number],
            ),
            lambda writer, x: mlp(writer, number, x, columns),
        )

    return model("olmo3", shape, layer, ropes, context)


def _ropes(keys: Keys, head_size: int) -> tuple[dict[str, Rope], int]:
    """The rotary embeddings of layers that see everything and of those with windows, and the longest context.

    Where an object names no base, one beside the objects other than `THETA` is refused: older versions of
    transformers take it for all layers, newer ones for those that see everything.
    """
    scaled, sliding = rope_keys_of_both_kinds(keys)
    if any(each.get("rope_theta") is None for each in (scaled, sliding)):
        keys.only("rope_theta", THETA)
    full, context = rope_of(keys, scaled, head_size, THETA)
    return {"full": full, "sliding": rope_of(keys, sliding, head_size, THETA)[0]}, context
