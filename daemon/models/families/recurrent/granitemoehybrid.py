"""Granite 4: Mamba2 or attention, a shared MLP with or without experts beside it; Granite's multipliers."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.layer_kinds import FULL, layer_kinds
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import shared_axis
from motley.daemon.models.blocks.recurrent.mamba import LEGACY, MAMBA, Mamba, mamba, read_mamba
from motley.daemon.models.blocks.shape import Shape, read_shape
from motley.daemon.models.description.axes import Value
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.families.experts.granitemoe import granite_experts, granite_shared
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope
from motley.plugins.recurrent import WIDEST_HEAD


def granitemoehybrid(keys: Keys) -> Model:
    """Describe a model of type ``granitemoehybrid``."""
    shape = read_shape(keys, kv_heads=True)
    turns = keys.one_of("position_embedding_type", ["rope", "nope"], "nope") == "rope"
    rope, context = read_rope(keys, shape.heads.size) if turns else (None, keys.size("max_position_embeddings", 2048))
    keys.only("sliding_window")
    keys.only("normalization_function", "rmsnorm")
    layers = shape.layers
    listed = next((each for each in ("layer_types", "layers_block_type") if keys.get(each)), "layer_types")
    kinds = layer_kinds(keys, listed, keys.get(listed), layers, [MAMBA, FULL], some=FULL, legacy=LEGACY)
    of = _mamba(keys, shape) if MAMBA in kinds else None
    bias = keys.flag("attention_bias", False)
    scale, by = keys.number("attention_multiplier", 1.0), keys.number("residual_multiplier", 1.0)
    columns = shared_axis(keys.size("shared_intermediate_size", 1024), "shared_intermediate_size")
    sparse = bool(keys.size("num_local_experts", 8, least=0))
    keys.only("num_experts", *([] if sparse else [0]))

    def layer(number: int) -> Layer:
        def mix(writer: Writer, x: Value) -> Value:
            if kinds[number] == MAMBA and of is not None:
                return writer.scaled_sum(mamba(writer, shape, number, x, of, f"model.layers.{number}.mamba"), by)
            turned = "main" if turns else None
            y = attention(writer, shape, number, x, qkv_bias=bias, output_bias=bias, rope=turned, scale=scale)
            return writer.scaled_sum(y, by)

        def feed(writer: Writer, x: Value) -> Value:
            x = writer.replicated(x)
            shared = granite_shared(writer, shape, number, x, columns)
            return writer.scaled_sum(granite_experts(writer, shape, number, x, keys, shared) if sparse else shared, by)

        return pre_norm_layer(shape, number, mix, feed)

    return model(
        "granitemoehybrid",
        shape,
        layer,
        {"main": rope} if rope else {},
        context,
        embedding_scale=keys.number("embedding_multiplier", 1.0),
        logits_scale=1 / keys.number("logits_scaling", 1.0),
    )


def _mamba(keys: Keys, shape: Shape) -> Mamba:
    heads, inner = keys.size("mamba_n_heads", 128), keys.size("mamba_expand", 2) * shape.hidden
    size = inner // heads if keys.get("mamba_d_head") in (None, "auto") else keys.size("mamba_d_head", most=WIDEST_HEAD)
    if heads * size != inner:
        raise keys.refusal("mamba_n_heads", f"so many that with mamba_d_head = {size} they have {inner} elements")
    return read_mamba(
        keys,
        heads,
        size,
        keys.size("mamba_d_state", 256, most=WIDEST_HEAD),
        keys.size("mamba_n_groups", 1),
        "mamba_n_groups",
        keys.size("mamba_d_conv", 4, least=2),
        (keys.flag("mamba_conv_bias", True), keys.flag("mamba_proj_bias", False)),
    )
