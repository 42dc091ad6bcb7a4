"""Apertus: Llama with norms of query and key heads, and an MLP without a gate whose activation is xIELU.

The head of Apertus 1.5 may know the first tokens alone, which are those of text: others stand for images and sounds.
"""

from __future__ import annotations

from dataclasses import replace

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import no_windows
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp_axis
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.blocks.spelling import spelled
from motley.daemon.models.description.axes import Axis, Kind, Value, W
from motley.daemon.models.description.model import EMBEDDING, Layer, Model
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope
from motley.daemon.weights.places import Part

THETA = 12000000.0
DEFAULTS = {
    "max_position_embeddings": 65536,
    "eos_token_id": 2,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": THETA,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}
"""What transformers takes where a config is silent."""
NORMS = {".input_layernorm.": ".attention_layernorm.", ".post_attention_layernorm.": ".feedforward_layernorm."}


def apertus(keys: Keys) -> Model:
    """Describe a model of type ``apertus``."""
    keys = keys.filled(DEFAULTS)
    shape = read_shape(keys, kv_heads=True, epsilon=1e-5)
    rope, context = read_rope(keys, shape.heads.size, theta=THETA)
    no_windows(keys, shape.layers)
    keys.only("hidden_act", "xielu")
    keys.only("qk_norm", True)
    keys.only("post_norm", False)
    bias = keys.flag("attention_bias", False)
    columns = mlp_axis(keys.size("intermediate_size"))

    def layer(number: int) -> Layer:
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: attention(writer, shape, number, x, qkv_bias=bias, output_bias=bias, qk_norm=True),
            lambda writer, x: _mlp(writer, number, x, columns),
        )

    # Files have two numbers of the activation that are the same in all: a half, and where rounding begins to matter.
    activations = [f"model.layers.{number}.mlp.act_fn" for number in range(shape.layers)]
    ignored = [f"{each}.{constant}" for each in activations for constant in ("beta", "eps")]
    return spelled(model("apertus", shape, layer, {"main": rope}, context, ignored=ignored), NORMS)


def apertus1p5(keys: Keys) -> Model:
    """Describe a model of type ``apertus1p5_text``."""
    words = keys.size("vocab_size")
    known = keys.size("output_vocab_size", words, most=words)
    if known == words:
        return apertus(keys)
    keys.only("tie_word_embeddings", False)
    keys.values["vocab_size"] = known
    model = apertus(keys)
    table, whole = model.embedding, Part(EMBEDDING, (words, model.hidden))
    return replace(model, embedding=replace(table, name="model.embed_words.weight", parts=(whole,)))


def _mlp(writer: Writer, number: int, x: Value, columns: Axis) -> Value:
    at, module, one = f"layers.{number}.mlp", f"model.layers.{number}.mlp", Axis(Kind.PLAIN, 1, "1")
    (made,) = writer.linear(f"{at}.up", x, W(f"{module}.up_proj.weight", columns, x.axis))
    bends = W(f"{module}.act_fn.alpha_p", one), W(f"{module}.act_fn.alpha_n", one)
    opened = writer.xielu(f"{at}.opened", made, *bends)
    return writer.linear(f"{at}.down", opened, W(f"{module}.down_proj.weight", x.axis, columns))[0]
