"""Gemma 4's text model: wide heads where a layer sees everything, whose keys may be values, and experts beside an MLP.

Norms stand around every block as in Gemma 3, but their gains are whole. In the models for phones (E2B, E4B)
each layer is given rows of a second table, and the last layers attend to keys and values of earlier ones.
"""

from __future__ import annotations

from dataclasses import replace

from motley.daemon.models.blocks.attending.borrowing import Lenders, normed_attention
from motley.daemon.models.blocks.attending.windows import listed_windows
from motley.daemon.models.blocks.experts import expert_count, mixture, stacked_parts
from motley.daemon.models.blocks.layer_kinds import FULL, SLIDING
from motley.daemon.models.blocks.layers import begin, model, norm
from motley.daemon.models.blocks.mlp import gated_mlp, mlp_axis, usual_names
from motley.daemon.models.blocks.residuals.beside import GivenRows
from motley.daemon.models.blocks.shape import Shape, read_shape
from motley.daemon.models.description.axes import Axis, Heads, Kind, Value, W
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.experts import Routing
from motley.daemon.models.description.operations.rows import Activation
from motley.daemon.models.description.rope import Rope
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import rope_of

DEFAULTS = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131072,
    "eos_token_id": 1,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
}
"""What transformers takes where a config is silent."""
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
"""The same of rotary embeddings."""


def gemma4_unified(keys: Keys) -> Model:
    """Describe a model of type ``gemma4_unified_text``: no experts, no rows of a second table."""
    keys.only("hidden_size_per_layer_input", 0)
    keys.only("enable_moe_block", False)
    silent = {"sliding_window": 1024, "max_position_embeddings": 262144, "hidden_size_per_layer_input": 0}
    return gemma4(keys.filled(silent))


def gemma4(keys: Keys) -> Model:
    """Describe a model of type ``gemma4_text``."""
    keys = _told_by_layers(keys)
    none = keys.says("hidden_size_per_layer_input") and not keys.get("hidden_size_per_layer_input")
    keys = keys.filled(DEFAULTS).filled({"rope_parameters": ROPES})
    keys.only("use_bidirectional_attention", "vision")  # which text alone does not meet
    keys.only("attention_bias", False)
    keys.only("hidden_activation", "gelu_pytorch_tanh")
    shape = read_shape(keys, tied=True)
    wide = _wide_heads(keys, shape.heads)
    kinds = [SLIDING if (layer + 1) % 6 else FULL for layer in range(shape.layers - 1)] + [FULL]
    windows = listed_windows(keys, shape.layers, keys.size("sliding_window"), kinds)
    if windows[-1]:
        raise keys.refusal("layer_types", "a last layer of full_attention")
    ropes, context = _ropes(keys, shape.heads.size, wide.size)
    lenders = Lenders(keys, windows)
    keys_are_values = keys.flag("attention_k_eq_v", False)
    cap = keys.number("final_logit_softcapping") if keys.get("final_logit_softcapping") is not None else 0.0
    columns = keys.size("intermediate_size")
    wider = 2 if keys.flag("use_double_wide_mlp", False) else 1
    rows = None if none else GivenRows(keys, shape, keys.size("hidden_size_per_layer_input"))
    routed = _Routed(keys) if keys.flag("enable_moe_block", False) else None

    def layer(number: int) -> Layer:
        writer, module = begin(shape, number), f"model.layers.{number}"
        at, mlp_at, window = f"layers.{number}.attention", f"layers.{number}.dense", windows[number]
        x = norm(writer, shape, f"{at}.norm", writer.x, f"{module}.input_layernorm.weight")
        heads, borrows = shape.heads if window else wide, lenders.of(number)
        x = normed_attention(writer, shape, number, x, heads, window, borrows, keys_are_values and not window)
        x = norm(writer, shape, f"{at}.after", x, f"{module}.post_attention_layernorm.weight")
        residual = writer.add(writer.x, x)
        x = norm(writer, shape, f"{mlp_at}.norm", residual, f"{module}.pre_feedforward_layernorm.weight")
        own = mlp_axis(columns * (wider if number >= lenders.owners else 1))
        x = gated_mlp(writer, mlp_at, x, own, usual_names(f"{module}.mlp"), Activation.GELU_TANH)
        if routed is not None:
            x = norm(writer, shape, f"{mlp_at}.own", x, f"{module}.post_feedforward_layernorm_1.weight")
            x = writer.add(routed.write(writer, shape, number, residual), x)
        x = norm(writer, shape, f"layers.{number}.both.after", x, f"{module}.post_feedforward_layernorm.weight")
        residual = writer.add(residual, x)
        if rows is not None:
            residual = rows.write(writer, number, residual)
        scalar = W(f"{module}.layer_scalar", Axis(Kind.PLAIN, 1, "1"))
        written = writer.layer(writer.times(f"layers.{number}.mlp.residual", residual, scalar))
        return written if rows is None else replace(written, given=rows.given(number))

    scale, ignored = shape.hidden**0.5, lenders.unused
    made = model("gemma4", shape, layer, ropes, context, embedding_scale=scale, logits_cap=cap, ignored=ignored)
    return made if rows is None else replace(made, beside=rows.table)


def _told_by_layers(keys: Keys) -> Keys:
    """The same keys with those of wide heads where ``per_layer_config`` tells them, as transformers 5.24 writes it."""
    told, kinds = keys.inner("per_layer_config").values, keys.get("layer_types")
    if not told:
        return keys
    heads, *others = told.values()
    wide = {str(number) for number, kind in enumerate(kinds or []) if kind == FULL}
    known = isinstance(heads, dict) and heads.keys() <= {"head_dim", "num_key_value_heads"}
    if not known or any(each != heads for each in others) or told.keys() != wide:
        raise keys.refusal("per_layer_config", f"the same head_dim and num_key_value_heads for each layer of {FULL}")
    size, count = (heads.get(key, keys.get(key)) for key in ("head_dim", "num_key_value_heads"))
    return keys.filled({"global_head_dim": size, "num_global_key_value_heads": count})


def _wide_heads(keys: Keys, heads: Heads) -> Heads:
    """Of layers that see everything."""
    count = keys.size("num_global_key_value_heads", heads.keys) if keys.flag("attention_k_eq_v", False) else heads.keys
    if heads.queries % count:
        raise keys.refusal("num_global_key_value_heads", f"a divisor of num_attention_heads = {heads.queries}")
    size = keys.size("global_head_dim")
    if size % 2:
        raise keys.refusal("global_head_dim", "an even number")
    return Heads(heads.queries, count, size)


def _ropes(keys: Keys, size: int, wide: int) -> tuple[dict[str, Rope], int]:
    """The rotary embeddings of layers with windows and of others, and the longest context."""
    given = keys.inner("rope_parameters")
    full, context = rope_of(keys, given.inner("full_attention"), wide, 1e6, 1.0, ["default", "proportional"])
    sliding, _ = rope_of(keys, given.inner("sliding_attention"), size, 1e4)
    return {"full": full, "sliding": sliding}, context


class _Routed:
    """The experts of every layer, whose router reads a residual of its own norm."""

    def __init__(self, keys: Keys) -> None:
        self.count = expert_count(keys.filled({"num_experts_per_tok": keys.size("top_k_experts")}), "num_experts")
        self.chosen, self.columns = keys.size("top_k_experts"), keys.size("moe_intermediate_size")

    def write(self, writer: Writer, shape: Shape, number: int, residual: Value) -> Value:
        """f32[T, D] -> f32[T, D]: what they make of the residual before the MLP."""
        at, module = f"layers.{number}.mlp", f"model.layers.{number}"
        each = Axis(Kind.PLAIN, self.count, "num_experts")
        scale = W(f"{module}.router.scale", shape.residual)
        x = writer.norm(f"{at}.router.norm", residual, scale, shape.epsilon)
        gains = W(f"{module}.router.per_expert_scale", each)
        route = writer.route(
            f"{at}.router",
            writer.scaled(x, shape.hidden**-0.5),
            W(f"{module}.router.proj.weight", each, shape.residual, stays_float=True),
            Routing(self.chosen, normalised=True, gains=gains),
        )
        x = norm(writer, shape, f"{at}.norm", residual, f"{module}.pre_feedforward_layernorm_2.weight")
        parts = stacked_parts(f"{module}.experts", shape.hidden, self.columns)
        names = usual_names(f"{module}.experts.{{expert}}", parts=parts)
        activation = Activation.GELU_TANH
        mixed = mixture(writer, number, x, route, self.count, self.columns, names, activation=activation)
        return norm(writer, shape, f"{at}.after", mixed, f"{module}.post_feedforward_layernorm_2.weight")
