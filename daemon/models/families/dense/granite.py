"""Granite: Llama, with scaled embeddings, products of attention, residuals and logits.

Granite SWA has windows in most layers, sinks in all, and a base of the rotary embedding for each layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from motley.daemon.models.blocks.attention import attention
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import Shape, read_shape
from motley.daemon.models.blocks.windows import FULL, SLIDING, listed_windows, no_windows, read_window
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.rope import Rope
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope, rope_of


def granite(keys: Keys) -> Model:
    """Describe a model of type ``granite``."""
    shape = read_shape(keys, kv_heads=True)
    rope, context = read_rope(keys, shape.heads.size)
    windows = no_windows(keys, shape.layers)
    return _described("granite", keys, shape, windows, {"main": rope}, ["main"] * shape.layers, context, sinks=False)


def granite_swa(keys: Keys) -> Model:
    """Describe a model of type ``granite_swa``."""
    shape = read_shape(keys, kv_heads=True, epsilon=1e-5, tied=True)
    windows = granite_windows(keys, shape.layers)
    ropes, turned, context = ropes_by_layers(keys, shape)
    return _described("granite_swa", keys, shape, windows, ropes, turned, context, sinks=True)


def granite_windows(keys: Keys, layers: int) -> list[int]:
    """The window of each layer, which all but every fourth have where a config is silent; 0: none."""
    kinds = [SLIDING if number % 4 else FULL for number in range(layers)]
    return listed_windows(keys, layers, read_window(keys, 128), kinds)


def ropes_by_layers(keys: Keys, shape: Shape) -> tuple[dict[str, Rope], list[str | None], int]:
    """The rotary embeddings, which one each layer has (None: none), and the longest context.

    ``layer_rope_theta`` has a base for each layer, 0 for those that do not rotate.
    """
    rope, context = read_rope(keys, shape.heads.size)
    bases = keys.get("layer_rope_theta")
    if bases is None:
        return {"main": rope}, ["main"] * shape.layers, context
    numbers = isinstance(bases, list) and all(type(base) in (int, float) and base >= 0 for base in bases)
    if not numbers or len(bases) != shape.layers:
        raise keys.refusal("layer_rope_theta", f"a list of {shape.layers} bases, 0 for layers that do not rotate")
    given = keys.inner("rope_scaling" if keys.get("rope_scaling") else "rope_parameters")
    names = {base: f"base{index}" for index, base in enumerate(sorted({*bases} - {0}))}
    ropes = {}
    for base, name in names.items():
        given.values["rope_theta"] = float(base)
        ropes[name], context = rope_of(keys, given, shape.heads.size, float(base))
    return ropes, [names.get(base) for base in bases], context


def _described(
    family: str,
    keys: Keys,
    shape: Shape,
    windows: Sequence[int],
    ropes: Mapping[str, Rope],
    turned: Sequence[str | None],
    context: int,
    *,
    sinks: bool,
) -> Model:
    """`windows` and `turned`, the names of rotary embeddings, are those of each layer."""
    bias, mlp_bias = keys.flag("attention_bias", False), keys.flag("mlp_bias", False)
    scale, by = keys.number("attention_multiplier", 1.0), keys.number("residual_multiplier", 1.0)
    columns = mlp_axis(keys.size("intermediate_size"))

    def layer(number: int) -> Layer:
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: writer.scaled(
                attention(
                    writer,
                    shape,
                    number,
                    x,
                    qkv_bias=bias,
                    output_bias=bias,
                    scale=scale,
                    rope=turned[number],
                    window=windows[number],
                    sinks=sinks,
                ),
                by,
            ),
            lambda writer, x: writer.scaled(mlp(writer, number, x, columns, mlp_bias), by),
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
