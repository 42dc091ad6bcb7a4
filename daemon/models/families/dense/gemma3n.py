"""Gemma 3n's text model: residual streams with alternating updates, gates that are mostly closed, rows for each layer.

Each layer computes with the first of its streams (`motley.daemon.models.blocks.residuals.altup`). Beside attention
there is a narrow product (a learned augmented residual, https://arxiv.org/abs/2411.07501); of the MLPs of the first
layers only gates far above their mean open. As in Gemma 4's models for phones, each layer is given rows by token, and
the last layers attend to keys and values of earlier ones.
"""

from __future__ import annotations

from dataclasses import replace

from motley.daemon.models.blocks.attending.borrowing import Lenders, normed_attention
from motley.daemon.models.blocks.attending.windows import listed_windows, period_kinds
from motley.daemon.models.blocks.layers import begin, model, norm
from motley.daemon.models.blocks.mlp import gated_mlp, mlp_axis, usual_names
from motley.daemon.models.blocks.residuals.altup import AltUp
from motley.daemon.models.blocks.residuals.beside import GivenRows
from motley.daemon.models.blocks.shape import Shape, read_shape
from motley.daemon.models.description.axes import Axis, Kind, Value, W
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.rows import Activation
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.families.dense.gemma3 import ropes_by_windows
from motley.daemon.models.keys import Keys

DEFAULTS = {
    "vocab_size": 262400,
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "eos_token_id": 1,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "altup_num_inputs": 4,
    "num_kv_shared_layers": 15,
    "laurel_rank": 64,
}
"""What transformers takes where a config is silent."""
SPARSE_LAYERS, SPARSITY = 10, 0.95
"""The same: of so many first layers of a model that has more of them, this part of the gates is closed."""


def gemma3n(keys: Keys) -> Model:
    """Describe a model of type ``gemma3n_text``."""
    cap = keys.number("final_logit_softcapping", 0.0 if keys.says("final_logit_softcapping") else 30.0)
    keys = keys.filled(DEFAULTS)
    keys.only("attention_bias", False)
    keys.only("hidden_activation", "gelu_pytorch_tanh")
    shape = read_shape(keys, tied=True)
    windows = listed_windows(keys, shape.layers, keys.size("sliding_window"), period_kinds(shape.layers, 5))
    lenders, altup = Lenders(keys, windows), AltUp(keys, shape)
    rows = GivenRows(keys, shape, keys.size("hidden_size_per_layer_input"), fewer=True)
    columns, sparsity = _columns(keys, shape.layers), _sparsity(keys, shape.layers)
    narrow = Axis(Kind.PLAIN, keys.size("laurel_rank"), "laurel_rank")

    def layer(number: int) -> Layer:
        at, module = f"layers.{number}", f"model.layers.{number}"
        writer = begin(shape, number, altup.along)
        streams = writer.x if number else altup.begin(writer, writer.x)
        predicted, first = altup.predict(writer, number, streams)
        x = norm(writer, shape, f"{at}.attention.norm", first, f"{module}.input_layernorm.weight")
        augmented = _augmented(writer, shape, number, x, narrow)
        x = normed_attention(writer, shape, number, x, shape.heads, windows[number], lenders.of(number))
        x = norm(writer, shape, f"{at}.attention.after", x, f"{module}.post_attention_layernorm.weight")
        both = writer.add(writer.add(first, x), augmented, name=f"{at}.attention.both")
        residual = writer.scaled(both, 2**-0.5)
        x = norm(writer, shape, f"{at}.dense.norm", residual, f"{module}.pre_feedforward_layernorm.weight")
        names, activation = usual_names(f"{module}.mlp"), Activation.GELU_TANH
        own = mlp_axis(columns[number])
        x = gated_mlp(writer, f"{at}.dense", x, own, names, activation, sparsity=sparsity[number])
        x = norm(writer, shape, f"{at}.dense.after", x, f"{module}.post_feedforward_layernorm.weight")
        corrected, row = altup.correct(writer, number, predicted, first, writer.add(residual, x))
        streams = altup.give_others(writer, number, corrected, rows.made(writer, number, row))
        end = altup.end(writer, number, streams) if number == shape.layers - 1 else streams
        return replace(writer.layer(end), given=rows.given(number))

    ropes, context = ropes_by_windows(keys, shape.heads.size), keys.size("max_position_embeddings")
    scale, ignored = shape.hidden**0.5, lenders.unused
    made = model("gemma3n", shape, layer, ropes, context, embedding_scale=scale, logits_cap=cap, ignored=ignored)
    return replace(made, beside=rows.table)


def _augmented(writer: Writer, shape: Shape, number: int, x: Value, narrow: Axis) -> Value:
    """f32[T, D] -> f32[T, D]: rows, and what a product of two narrow matrices makes of them, normalised."""
    at, module = f"layers.{number}.laurel", f"model.layers.{number}.laurel"
    (made,) = writer.linear(f"{at}.left", x, W(f"{module}.linear_left.weight", narrow, shape.residual))
    (made,) = writer.linear(f"{at}.right", made, W(f"{module}.linear_right.weight", shape.residual, narrow))
    return writer.add(x, norm(writer, shape, f"{at}.after", made, f"{module}.post_laurel_norm.weight"))


def _columns(keys: Keys, layers: int) -> list[int]:
    """The width of each layer's MLP: one of all, or a list."""
    listed = keys.get("intermediate_size")
    if not isinstance(listed, list):
        return [keys.size("intermediate_size")] * layers
    if len(listed) != layers or not all(type(each) is int and each > 0 for each in listed):
        raise keys.refusal("intermediate_size", f"a whole number of at least 1, or a list of {layers}")
    return listed


def _sparsity(keys: Keys, layers: int) -> list[float]:
    """The part of each layer's gates that is closed."""
    sparse = SPARSE_LAYERS if layers > SPARSE_LAYERS else 0
    listed = keys.get("activation_sparsity_pattern")
    if listed is None:
        return [SPARSITY] * sparse + [0.0] * (layers - sparse)
    parts = isinstance(listed, list) and all(type(each) in (int, float) and 0 <= each < 1 for each in listed)
    if not parts or len(listed) != layers:
        raise keys.refusal("activation_sparsity_pattern", f"a list of {layers} parts of 1, each less than that")
    return [float(each) for each in listed]
