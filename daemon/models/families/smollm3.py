"""SmolLM3: Llama, with layers that do not rotate queries and keys, by default every fourth."""

from __future__ import annotations

from motley.daemon.models.blocks.attention import attention
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.blocks.windows import FULL, SLIDING, listed_windows
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope


def smollm3(keys: Keys) -> Model:
    """Describe a model of type ``smollm3``."""
    shape = read_shape(keys, tied=True)
    rope, context = read_rope(keys, shape.heads.size, theta=2000000.0)
    rotated = _rotated_layers(keys, shape.layers)
    window = keys.size("sliding_window", 0) if keys.flag("use_sliding_window", False) else 0
    kinds = [SLIDING if window and not rotates else FULL for rotates in rotated]
    windows = listed_windows(keys, shape.layers, window, kinds, [FULL, SLIDING] if window else [FULL])
    bias, mlp_bias = keys.flag("attention_bias", False), keys.flag("mlp_bias", False)
    columns = mlp_axis(keys.size("intermediate_size"))

    def layer(number: int) -> Layer:
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: attention(
                writer,
                shape,
                number,
                x,
                qkv_bias=bias,
                output_bias=bias,
                rope="main" if rotated[number] else None,
                window=windows[number],
            ),
            lambda writer, x: mlp(writer, number, x, columns, mlp_bias),
        )

    return model("smollm3", shape, layer, {"main": rope}, context)


def _rotated_layers(keys: Keys, layers: int) -> list[bool]:
    """Which layers rotate queries and keys: 1 in ``no_rope_layers``, or all but the last one of each interval.

    Raises:
        ConfigError: ``no_rope_layers`` is no list of 0 and 1 for every layer.
    """
    interval = keys.size("no_rope_layer_interval", 4)
    listed = keys.get("no_rope_layers")
    if listed is None:
        return [(number + 1) % interval != 0 for number in range(layers)]
    if not isinstance(listed, list) or len(listed) != layers or not all(each in (0, 1) for each in listed):
        raise keys.refusal("no_rope_layers", f"a list of {layers} times 0 or 1")
    return [bool(each) for each in listed]
