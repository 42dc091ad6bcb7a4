"""EXAONE 4: norms after each block and none before; beside layers with windows, those without do not rotate."""

from __future__ import annotations

from collections.abc import Callable

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import listed_windows, period_kinds, read_window
from motley.daemon.models.blocks.layer_kinds import FULL
from motley.daemon.models.blocks.layers import model, post_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import Shape, read_shape
from motley.daemon.models.description.axes import Value
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope


def exaone4(keys: Keys) -> Model:
    """Describe a model of type ``exaone4``."""
    shape = read_shape(keys, epsilon=1e-5)
    rope, context = read_rope(keys, shape.heads.size)
    attend = exaone4_attention(keys, shape)
    columns = mlp_axis(keys.size("intermediate_size"))

    def layer(number: int) -> Layer:
        return post_norm_layer(
            shape,
            number,
            lambda writer, x: attend(writer, number, x),
            lambda writer, x: mlp(writer, number, x, columns),
        )

    return model("exaone4", shape, layer, {"main": rope}, context, ignored=["mtp."])


def exaone4_attention(keys: Keys, shape: Shape) -> Callable[[Writer, int, Value], Value]:
    """What writes a layer's attention: with a window or without, and where others have one, only those rotate."""
    window = read_window(keys)
    windows = _windows(keys, shape.layers, window)

    def write(writer: Writer, number: int, x: Value) -> Value:
        own = windows[number]
        rope = None if window and not own else "main"
        return attention(writer, shape, number, x, qk_norm=True, rope=rope, window=own)

    return write


def _windows(keys: Keys, layers: int, window: int) -> list[int]:
    """The window of each layer: by ``layer_types``, or of all but the last one of each ``sliding_window_pattern``.

    Where the former is there the latter says nothing: published configs have it in letters, ``LLLG``.
    """
    if keys.get("layer_types") or not window:
        default = [FULL] * layers
    else:
        period = keys.size("sliding_window_pattern", None if keys.says("sliding_window_pattern") else 4)
        default = period_kinds(layers, period)
    return listed_windows(keys, layers, window, default)
