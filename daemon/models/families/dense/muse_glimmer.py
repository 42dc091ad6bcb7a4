"""Muse Glimmer: norms around every block, gated attention of heads of length one, and embeddings that have a norm."""

from __future__ import annotations

from dataclasses import replace

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import listed_windows, read_window
from motley.daemon.models.blocks.layer_kinds import FULL, SLIDING
from motley.daemon.models.blocks.layers import both_norms_layer, model, norm
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.axes import Value
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope, ropes_by_layers

DEFAULTS = {
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 202048,
    "max_position_embeddings": 131072,
    "eos_token_id": 200001,
}
"""What transformers takes where a config is silent."""


def muse_glimmer(keys: Keys) -> Model:
    """Describe a model of type ``muse_glimmer_text``."""
    keys = keys.filled(DEFAULTS)
    shape = read_shape(keys, epsilon=1e-5, norm_offset=1.0)
    plain = replace(shape, norm_offset=0.0)
    after = replace(shape, epsilon=keys.number("post_norm_eps", 1e-8))
    sees_all = [(shape.layers - 1 - number) % 4 == 0 for number in range(shape.layers)]
    kinds = [FULL if every else SLIDING for every in sees_all]
    windows = listed_windows(keys, shape.layers, read_window(keys, 2048), kinds)
    rope, context = read_rope(keys, shape.heads.size)
    ropes, turned, _ = ropes_by_layers(keys, shape.heads.size, [not every for every in sees_all])
    if any(each.theta != rope.theta for each in ropes.values()):
        raise keys.refusal("layer_rope_theta", f"0 or rope_theta = {rope.theta:g} for each layer")
    keys.only("hidden_activation", "silu")
    keys.only("attention_bias", False)
    columns = mlp_axis(keys.size("intermediate_size"))
    scale = keys.number("qk_scale_factor", 3.87) * shape.heads.size**-0.5

    def enter(writer: Writer, x: Value) -> Value:
        return norm(writer, replace(shape, gains=False), "layers.0.attention.entered", x, "")

    def layer(number: int) -> Layer:
        return both_norms_layer(
            shape,
            number,
            lambda writer, x: attention(
                writer,
                shape,
                number,
                x,
                plain_qk_norm=True,
                gate="gate_proj",
                rope=turned[number],
                window=windows[number],
                scale=scale,
            ),
            lambda writer, x: mlp(writer, number, x, columns),
            enter=None if number else enter,
            after=after,
        )

    return model(
        "muse_glimmer",
        plain,
        layer,
        ropes,
        context,
        logits_scale=keys.number("output_multiplier", 0.19611613513818404),
        logits_cap=keys.number("final_logit_softcapping", 20.0),
    )
