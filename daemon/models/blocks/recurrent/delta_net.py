"""What the families have in common that mix gated DeltaNet layers, which keep a recurrent state, with attention.

Source: Yang et al. 2024, Gated Delta Networks, https://arxiv.org/abs/2412.06464.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from motley.daemon.models.blocks.ahead import check_one_ahead, head_ahead
from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.layer_kinds import FULL, LINEAR, attending_layers
from motley.daemon.models.blocks.layers import Block, model, pre_norm_layer
from motley.daemon.models.blocks.recurrent.gated_delta import REACH, gated_delta_net
from motley.daemon.models.blocks.shape import Shape, read_shape
from motley.daemon.models.description.axes import Axis, RecurrentHeads, Value, W
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope
from motley.daemon.weights.places import Part
from motley.plugins.recurrent import WIDEST_HEAD

DEFAULTS: Mapping[str, Any] = {
    "num_attention_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
"""What transformers takes in all of these families where a config is silent, as those of the published models are."""

AHEAD: Mapping[str, str] = {
    "enorm.": "mtp.pre_fc_norm_embedding.",
    "hnorm.": "mtp.pre_fc_norm_hidden.",
    "eh_proj.": "mtp.fc.",
    "shared_head.norm.": "mtp.norm.",
    "": "mtp.layers.0.",
}
"""What files write for what names of the head that predicts a token further ahead go on with after its layer's."""

Mlp = Callable[[Writer, int, Value], Value]
"""Writes a layer's MLP, or its experts, given its number and the normalised rows."""


def hybrid(family: str, keys: Keys, mlp: Callable[[Shape], Mlp], *, ahead: bool = False) -> Model:
    """Describe a model of gated DeltaNet layers with a layer of gated attention after every three of them.

    Args:
        mlp: reads what the keys say of MLPs.
        ahead: not the model but its head that predicts a token further ahead, a layer of gated attention.
    """
    shape = read_shape(keys, norm_offset=1.0)
    rope, context = read_rope(keys, shape.heads.size, partial=0.25)
    attends = attending_by_interval(keys, shape.layers)
    keys.only("attn_output_gate", True)
    bias = keys.flag("attention_bias", False)
    heads, reach = read_heads(keys), keys.size(REACH)
    feed = mlp(shape)

    def layer(number: int, enter: Block | None = None) -> Layer:
        def mix(writer: Writer, x: Value) -> Value:
            if number >= len(attends) or attends[number]:
                return attention(writer, shape, number, x, qkv_bias=bias, output_bias=bias, qk_norm=True, gated=True)
            return delta_net(writer, shape, number, x, heads, reach)

        return pre_norm_layer(shape, number, mix, lambda writer, x: feed(writer, number, x), enter)

    if ahead:
        check_one_ahead(keys, "mtp_num_hidden_layers")
        keys.only("mtp_use_dedicated_embeddings", False)
        module = f"model.layers.{shape.layers}."
        spelled = {f"{module}{name}": other for name, other in AHEAD.items()}
        return head_ahead(family, shape, layer, {"main": rope}, context, hands_normed=True, spelled=spelled)
    return model(family, shape, layer, {"main": rope}, context)


def delta_net(
    writer: Writer, shape: Shape, number: int, x: Value, heads: RecurrentHeads, reach: int, squashed: bool = False
) -> Value:
    """f32[T, D] -> f32[T, D]{U_tp}: a gated DeltaNet, from its normalised input to its output projection.

    Args:
        reach: positions that the convolution of queries, keys and values sees, a row's own among them.
        squashed: see `DeltaRule`.
    """
    at, module = f"layers.{number}.attention", f"model.layers.{number}.linear_attn"
    q, k, v, z, b, a = _projections(writer, at, module, shape.residual, x, heads)
    projections, gates, epsilon, output = (q, k, v, z), (b, a), shape.epsilon, "out_proj"
    return gated_delta_net(
        writer,
        shape,
        number,
        module,
        projections,
        gates,
        heads,
        reach,
        epsilon=epsilon,
        norm="norm",
        output=output,
        squashed=squashed,
    )


def _projections(
    writer: Writer, at: str, module: str, residual: Axis, x: Value, heads: RecurrentHeads
) -> tuple[Value, ...]:
    """Queries, keys, values, gates and the numbers b and a.

    Files have the first three in one matrix, or all four, or each apart, and b and a likewise. Where all four, or b and
    a, are in one, what is of a key head lies side by side.
    """
    key, value, shared = heads.key_axis, heads.value_axis, heads.values // heads.keys
    sizes = {"q": heads.key_size, "k": heads.key_size, "v": shared * heads.value_size, "z": shared * heads.value_size}
    starts = {"q": 0, "k": key.size, "v": 2 * key.size}

    def by_heads(letters: str, each: Mapping[str, int], letter: str) -> Part:
        first, whole = sum(each[one] for one in letters[: letters.index(letter)]), sum(each[one] for one in letters)
        name, own = f"{module}.in_proj_{letters}.weight", range(first, first + each[letter])
        return Part(name, (heads.keys * whole, residual.size), heads=whole, of_head=(own,))

    def projection(letter: str, out: Axis) -> W:
        if letter in "ba":
            parts = [by_heads("ba", {"b": shared, "a": shared}, letter)]
        else:
            parts = [by_heads("qkvz", sizes, letter)]
        if letter in starts:
            qkv = f"{module}.in_proj_qkv.weight"
            parts.append(Part(qkv, (2 * key.size + value.size, residual.size), starts[letter]))
        return W(f"{module}.in_proj_{letter}.weight", out, residual, parts=tuple(parts))

    qkvz = [projection(letter, key if letter in "qk" else value) for letter in "qkvz"]
    ba = [projection(letter, heads.gate_axis) for letter in "ba"]
    return (
        *writer.linear(f"{at}.qkvz", x, *qkvz, ys=tuple(f"{at}.{letter}" for letter in "qkvz")),
        *writer.linear(f"{at}.ba", x, *ba, ys=(f"{at}.b", f"{at}.a")),
    )


def read_heads(keys: Keys) -> RecurrentHeads:
    """The heads of a layer with a recurrent state.

    Raises:
        ConfigError: value heads cannot share key heads evenly, or heads are too wide.
    """
    heads = RecurrentHeads(
        keys.size("linear_num_key_heads"),
        keys.size("linear_num_value_heads"),
        keys.size("linear_key_head_dim", most=WIDEST_HEAD),
        keys.size("linear_value_head_dim", most=WIDEST_HEAD),
    )
    if heads.values % heads.keys:
        raise keys.refusal("linear_num_value_heads", f"a multiple of linear_num_key_heads = {heads.keys}")
    return heads


def attending_by_interval(keys: Keys, layers: int) -> list[bool]:
    """Which layers attend, by ``layer_types`` or ``full_attention_interval``; the others have a recurrent state.

    Raises:
        ConfigError: ``layer_types`` names another kind, or no layer that attends.
    """
    period = keys.size("full_attention_interval", 4)
    return attending_layers(keys, layers, [LINEAR if (number + 1) % period else FULL for number in range(layers)])
