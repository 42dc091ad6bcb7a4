"""Granite: Llama, with scaled embeddings, products of attention, residuals and logits.

Granite SWA has windows in most layers, sinks in all, and a base of the rotary embedding for each layer. HyperCLOVA X
has norms after its blocks, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import listed_windows, no_windows, read_window
from motley.daemon.models.blocks.layer_kinds import FULL, SLIDING
from motley.daemon.models.blocks.layers import model, norm, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import Shape, read_shape
from motley.daemon.models.description.axes import Value
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.rope import Rope
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope, ropes_by_layers

Feed = Callable[[Writer, int, Value], Value]
"""What a layer's MLP or experts make of rows, given the layer's number: f32[T, D] -> f32[T, D]{U_tp}."""


def granite(keys: Keys) -> Model:
    """Describe a model of type ``granite``."""
    shape = read_shape(keys, kv_heads=True)
    return granite_like("granite", keys, shape, _mlp(keys))


def granite_swa(keys: Keys) -> Model:
    """Describe a model of type ``granite_swa``."""
    shape = read_shape(keys, kv_heads=True, epsilon=1e-5, tied=True)
    return granite_like("granite_swa", keys, shape, _mlp(keys), by_layers=True)


def hyperclovax(keys: Keys) -> Model:
    """Describe a model of type ``hyperclovax``: its logits are multiplied by what Granite's are divided by."""
    shape = read_shape(keys, kv_heads=True)
    keys = keys.filled({"attention_multiplier": shape.heads.size**-0.5})
    keys.values["logits_scaling"] = 1 / keys.number("logits_scaling", 1.0)
    after = ("post_norm1", "post_norm2") if keys.flag("use_post_norm", True) else ("", "")
    return granite_like("hyperclovax", keys, shape, _mlp(keys), after=after)


def _mlp(keys: Keys) -> Feed:
    columns, bias = mlp_axis(keys.size("intermediate_size")), keys.flag("mlp_bias", False)
    return lambda writer, number, x: mlp(writer, number, x, columns, bias)


def granite_like(
    family: str,
    keys: Keys,
    shape: Shape,
    feed: Feed,
    *,
    by_layers: bool = False,
    after: tuple[str, str] = ("", ""),
) -> Model:
    """Describe a model of Granite's layers.

    Args:
        feed: what follows attention; it is scaled as that is.
        by_layers: with Granite SWA's windows, sinks and rotary embeddings.
        after: the norms of what attention makes, and of what follows it; empty: none.
    """
    ropes: Mapping[str, Rope]
    turned: Sequence[str | None]
    if by_layers:
        windows = _windows(keys, shape.layers)
        ropes, turned, context = ropes_by_layers(keys, shape.heads.size, [True] * shape.layers)
    else:
        windows, (rope, context) = no_windows(keys, shape.layers), read_rope(keys, shape.heads.size)
        ropes, turned = {"main": rope}, ["main"] * shape.layers
    bias = keys.flag("attention_bias", False)
    scale, by = keys.number("attention_multiplier", 1.0), keys.number("residual_multiplier", 1.0)

    def scaled(writer: Writer, number: int, block: int, x: Value) -> Value:
        if after[block]:
            name = f"layers.{number}.{('attention', 'mlp')[block]}.after"
            x = norm(writer, shape, name, x, f"model.layers.{number}.{after[block]}.weight")
        return writer.scaled_sum(x, by)

    def layer(number: int) -> Layer:
        def attend(writer: Writer, x: Value) -> Value:
            return attention(
                writer,
                shape,
                number,
                x,
                qkv_bias=bias,
                output_bias=bias,
                scale=scale,
                rope=turned[number],
                window=windows[number],
                sinks=by_layers,
            )

        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: scaled(writer, number, 0, attend(writer, x)),
            lambda writer, x: scaled(writer, number, 1, feed(writer, number, x)),
        )

    return model(
        family,
        shape,
        layer,
        ropes,
        context,
        embedding_scale=keys.number("embedding_multiplier", 1.0),
        logits_scale=1 / keys.number("logits_scaling", 1.0),
    )


def _windows(keys: Keys, layers: int) -> list[int]:
    """The window of each layer, which all but every fourth have where a config is silent; 0: none."""
    kinds = [SLIDING if number % 4 else FULL for number in range(layers)]
    return listed_windows(keys, layers, read_window(keys, 128), kinds)
