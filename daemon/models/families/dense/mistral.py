"""Mistral: Llama with a sliding window; Ministral and CWM have one in some layers only."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import listed_windows, read_window, windows_everywhere
from motley.daemon.models.blocks.layer_kinds import FULL, SLIDING
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope

CWM_ROPE = {
    "rope_type": "llama3",
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The rotary embedding of CWM where a config is silent."""


def mistral(keys: Keys) -> Model:
    """Describe a model of type ``mistral``."""
    return _described("mistral", keys, windows_everywhere(keys, keys.layers()))


def ministral(keys: Keys) -> Model:
    """Describe a model of type ``ministral``."""
    layers, window = keys.layers(), read_window(keys)
    return _described("ministral", keys, listed_windows(keys, layers, window, [SLIDING if window else FULL] * layers))


def cwm(keys: Keys) -> Model:
    """Describe a model of type ``cwm``."""
    keys = keys.filled({"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 131072})
    if not keys.get("rope_parameters") and not keys.get("rope_scaling"):
        keys = keys.filled({"rope_parameters": CWM_ROPE | {"rope_theta": keys.number("rope_theta", 1e6)}})
    keys = keys.filled({"rope_theta": 1e6, "rms_norm_eps": 1e-5})
    layers, window = keys.layers(), read_window(keys, 8192)
    kinds = [SLIDING if window and number % 4 else FULL for number in range(layers)]
    return _described("cwm", keys, listed_windows(keys, layers, window, kinds))


def _described(family: str, keys: Keys, windows: list[int]) -> Model:
    shape = read_shape(keys)
    rope, context = read_rope(keys, shape.heads.size)
    keys.only("attention_bias", False)
    columns = mlp_axis(keys.size("intermediate_size"))

    def layer(number: int) -> Layer:
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: attention(writer, shape, number, x, window=windows[number]),
            lambda writer, x: mlp(writer, number, x, columns),
        )

    return model(family, shape, layer, {"main": rope}, context)
