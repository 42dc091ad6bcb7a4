"""Falcon-H1: a Mamba2 layer and attention beside each other in every layer, and a multiplier for nearly every product.

Source: https://arxiv.org/abs/2507.22448.
"""

from __future__ import annotations

from dataclasses import replace

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import gated_mlp, mlp_axis, usual_names
from motley.daemon.models.blocks.recurrent.mamba import Mamba, mamba, read_mamba
from motley.daemon.models.blocks.shape import Shape, read_shape
from motley.daemon.models.description.axes import Value
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope
from motley.plugins.recurrent import WIDEST_HEAD


def falcon_h1(keys: Keys) -> Model:
    """Describe a model of type ``falcon_h1``."""
    shape = read_shape(keys, kv_heads=True, epsilon=1e-5)
    rope, context = read_rope(keys, shape.heads.size)
    keys.only("sliding_window")
    keys.only("attn_layer_indices")
    keys.only("mamba_use_mlp", True)
    for kinds in ("layer_types", "layers_block_type"):
        keys.only(kinds, ["hybrid"] * shape.layers)
    of, bias, columns = (
        _mamba(keys, shape),
        keys.flag("attention_bias", False),
        mlp_axis(keys.size("intermediate_size")),
    )
    scale = shape.heads.size**-0.5 * keys.number("key_multiplier", 1.0)
    gate, down = _numbers(keys, "mlp_multipliers", 2)
    into, out, from_mamba, into_mamba = (
        keys.number(f"{name}_multiplier", 1.0) for name in ("attention_in", "attention_out", "ssm_out", "ssm_in")
    )

    def layer(number: int) -> Layer:
        at, module = f"layers.{number}", f"model.layers.{number}"

        def mix(writer: Writer, x: Value) -> Value:
            rows = writer.scaled(x, into_mamba, f"{at}.mamba.input")
            y = writer.scaled(mamba(writer, shape, number, rows, of, f"{module}.mamba", f"{at}.mamba"), from_mamba)
            rows = writer.scaled(x, into, f"{at}.attention.input")
            z = attention(writer, shape, number, rows, qkv_bias=bias, output_bias=bias, scale=scale)
            return writer.both(f"{at}.attention.both", writer.scaled(z, out), y)

        def feed(writer: Writer, x: Value) -> Value:
            names = usual_names(f"{module}.feed_forward")
            return writer.scaled(gated_mlp(writer, f"{at}.mlp", x, columns, names, opening=gate), down)

        return pre_norm_layer(shape, number, mix, feed, norms=("input_layernorm", "pre_ff_layernorm"))

    return model(
        "falcon_h1",
        shape,
        layer,
        {"main": rope},
        context,
        embedding_scale=keys.number("embedding_multiplier", 1.0),
        logits_scale=keys.number("lm_head_multiplier", 1.0),
        last_norm="model.final_layernorm.weight",
    )


def _mamba(keys: Keys, shape: Shape) -> Mamba:
    heads = keys.size("mamba_n_heads", 128)
    inner = keys.size(
        "mamba_d_ssm", 1024 if not keys.says("mamba_d_ssm") else keys.size("mamba_expand", 2) * shape.hidden
    )
    size = inner // heads if keys.get("mamba_d_head") in (None, "auto") else keys.size("mamba_d_head", most=WIDEST_HEAD)
    if heads * size != inner:
        raise keys.refusal("mamba_n_heads", f"so many that with mamba_d_head = {size} they have {inner} elements")
    normed = keys.flag("mamba_rms_norm", False)
    if normed and keys.flag("mamba_norm_before_gate", True):
        raise keys.refusal("mamba_norm_before_gate", "only false where mamba_rms_norm is true")
    of = read_mamba(
        keys,
        heads,
        size,
        keys.size("mamba_d_state", 256, most=WIDEST_HEAD),
        keys.size("mamba_n_groups", 1),
        "mamba_n_groups",
        keys.size("mamba_d_conv", 4, least=2),
        (keys.flag("mamba_conv_bias", True), keys.flag("mamba_proj_bias", False)),
    )
    z, x, b, c, dt = _numbers(keys, "ssm_multipliers", 5)
    scales = {"z": z, "x": x, "b": b, "c": c, "dt": dt}
    return replace(of, output_bias=keys.flag("projectors_bias", False), normed=normed, scales=scales)


def _numbers(keys: Keys, key: str, count: int) -> list[float]:
    """A list of so many positive numbers; 1 each where the keys are silent."""
    given = keys.get(key)
    if given is None:
        return [1.0] * count
    numbers = isinstance(given, list) and all(type(each) in (int, float) and 0 < each < float("inf") for each in given)
    if not numbers or len(given) != count:
        raise keys.refusal(key, f"a list of {count} positive numbers")
    return [float(each) for each in given]
