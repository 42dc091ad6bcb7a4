"""SmolLM3: Llama, with layers that do not rotate queries and keys, by default every fourth."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.rotated import rotated_layers
from motley.daemon.models.blocks.attending.windows import listed_windows
from motley.daemon.models.blocks.layer_kinds import FULL, SLIDING
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope


def smollm3(keys: Keys) -> Model:
    """Describe a model of type ``smollm3``."""
    shape = read_shape(keys, tied=True)
    rope, context = read_rope(keys, shape.heads.size, theta=2000000.0)
    rotated = rotated_layers(keys, shape.layers)
    window = keys.size("sliding_window", 0) if keys.flag("use_sliding_window", False) else 0
    kinds = [SLIDING if window and not rotates else FULL for rotates in rotated]
    windows = listed_windows(keys, shape.layers, window, kinds)
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
