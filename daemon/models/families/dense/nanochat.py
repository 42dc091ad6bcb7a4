"""nanochat: norms without gains, of embeddings too, heads that turn backwards, and an MLP without a gate that squares
what is positive."""

from __future__ import annotations

from dataclasses import replace

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import no_windows
from motley.daemon.models.blocks.layers import model, norm, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp_axis, squared_mlp
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.axes import Value
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope

DEFAULTS = {"max_position_embeddings": 2048, "eos_token_id": 1}
"""What transformers takes where a config is silent."""


def nanochat(keys: Keys) -> Model:
    """Describe a model of type ``nanochat``."""
    keys = keys.filled(DEFAULTS)
    shape = replace(read_shape(keys, kv_heads=True), gains=False)
    rope, context = read_rope(keys, shape.heads.size)
    no_windows(keys, shape.layers)
    keys.only("hidden_act", "relu2")
    bias = keys.flag("attention_bias", False)
    capped = not keys.says("final_logit_softcapping") or keys.get("final_logit_softcapping") is not None
    columns = mlp_axis(keys.size("intermediate_size"))

    def enter(writer: Writer, x: Value) -> Value:
        return norm(writer, shape, "layers.0.attention.entered", x, "")

    def layer(number: int) -> Layer:
        return pre_norm_layer(
            shape,
            number,
            # Norms of heads come after the rotation, which leaves the length of a head as it is.
            lambda writer, x: attention(writer, shape, number, x, qkv_bias=bias, output_bias=bias, plain_qk_norm=True),
            lambda writer, x: squared_mlp(
                writer, f"layers.{number}.mlp", x, columns, f"model.layers.{number}.mlp", names=("fc1", "fc2")
            ),
            enter=None if number else enter,
        )

    cap = keys.number("final_logit_softcapping", 15.0) if capped else 0.0
    return model("nanochat", shape, layer, {"main": replace(rope, backwards=True)}, context, logits_cap=cap)
