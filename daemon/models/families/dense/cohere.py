"""Cohere's Command R, R7B and A: layer norms without biases, attention beside the MLP, and scaled logits; neighbouring
elements of a head turn together. Those of Cohere 2 have windows in most layers, and only there they rotate."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import listed_windows, no_windows, period_kinds
from motley.daemon.models.blocks.layers import model, parallel_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import Shape, read_shape
from motley.daemon.models.description.axes import Value
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope

DEFAULTS = {"max_position_embeddings": 8192, "logit_scale": 0.0625, "eos_token_id": 255001}
"""What transformers takes where a config is silent."""


def cohere(keys: Keys) -> Model:
    """Describe a model of type ``cohere``."""
    keys = keys.filled(DEFAULTS)
    if keys.get("model_max_length") is not None:  # what max_position_embeddings of published models leaves unsaid
        keys.values["max_position_embeddings"] = keys.values["model_max_length"]
    shape = read_cohere_shape(keys)
    norms = keys.flag("use_qk_norm", False)
    no_windows(keys, shape.layers)
    bias = keys.flag("attention_bias", False)

    def attend(writer: Writer, number: int, x: Value) -> Value:
        return attention(
            writer,
            shape,
            number,
            x,
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=norms,
            own_gains=True,
            neighbours=shape.heads.size,
        )

    return cohere_model("cohere", keys, shape, attend, _mlp(keys), theta=500000.0)


def cohere2(keys: Keys) -> Model:
    """Describe a model of type ``cohere2``."""
    keys = keys.filled(DEFAULTS)
    shape = read_cohere_shape(keys)
    kinds = period_kinds(shape.layers, keys.size(PERIOD, 4))
    attend = windowed_attention(keys, shape, listed_windows(keys, shape.layers, read_cohere_window(keys), kinds))
    return cohere_model("cohere2", keys, shape, attend, _mlp(keys))


Block = Callable[[Writer, int, Value], Value]
"""Writes a layer's attention or MLP, given its number: from normalised rows to what is added."""
PERIOD = "sliding_window_pattern"
"""The key that tells how often there is a layer without a window, where ``layer_types`` does not tell which."""


def read_cohere_shape(keys: Keys, rms_norms: bool = False) -> Shape:
    """The sizes that all of these models tell; layers that are otherwise than here are refused."""
    keys.only("use_parallel_block", True)
    keys.only("use_gated_activation", True)
    keys.only("rotary_pct", 1.0)
    return read_shape(keys, kv_heads=True, epsilon=1e-5, tied=True, layer_norm="" if rms_norms else "layer_norm_eps")


def read_cohere_window(keys: Keys) -> int:
    """The window of the layers that have one; there is no model without."""
    return keys.size("sliding_window", None if keys.says("sliding_window") else 4096)


def windowed_attention(keys: Keys, shape: Shape, windows: Sequence[int], rotated: Sequence[bool] = ()) -> Block:
    """What writes a layer's attention: those with windows rotate, and those that `rotated` says it of, by number."""
    bias = keys.flag("attention_bias", False)

    def write(writer: Writer, number: int, x: Value) -> Value:
        turns = bool(windows[number]) or (bool(rotated) and rotated[number])
        return attention(
            writer,
            shape,
            number,
            x,
            qkv_bias=bias,
            output_bias=bias,
            rope="main" if turns else None,
            window=windows[number],
            neighbours=shape.heads.size if turns else 0,
        )

    return write


def _mlp(keys: Keys) -> Block:
    columns = mlp_axis(keys.size("intermediate_size"))
    return lambda writer, number, x: mlp(writer, number, x, columns)


def cohere_model(family: str, keys: Keys, shape: Shape, attend: Block, think: Block, theta: float = 10000.0) -> Model:
    """A model of layers with attention beside something else, with scaled logits.

    Args:
        think: writes what stands beside attention.
        theta: of the rotary embedding, where the keys are silent.
    """
    rope, context = read_rope(keys, shape.heads.size, theta)

    def layer(number: int) -> Layer:
        return parallel_layer(
            shape,
            number,
            lambda writer, x: attend(writer, number, x),
            lambda writer, x: think(writer, number, x),
        )

    return model(family, shape, layer, {"main": rope}, context, logits_scale=keys.number("logit_scale"))
