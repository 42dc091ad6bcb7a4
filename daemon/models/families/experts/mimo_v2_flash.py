"""MiMo-V2-Flash: windows with sinks in most layers, heads whose values are narrower than their keys, and experts."""

from __future__ import annotations

from dataclasses import replace

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import listed_windows
from motley.daemon.models.blocks.experts import expert_count, experts
from motley.daemon.models.blocks.layer_kinds import FULL, SLIDING, flags_of_layers, listed_sparse_layers
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import Shape, read_shape
from motley.daemon.models.description.axes import Heads
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.rope import Rope
from motley.daemon.models.families.experts.glm4_moe import corrected_routing
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import rope_keys_of_both_kinds, rope_of

PARTIAL = 0.334
"""Which part of a head turns where a config is silent."""
THETAS = 5e6, 1e4
"""The bases, likewise: of layers that see everything, and of those with windows."""


def mimo_v2_flash(keys: Keys) -> Model:
    """Describe a model of type ``mimo_v2_flash``."""
    keys = keys.filled({"rms_norm_eps": keys.get("layernorm_epsilon"), "head_dim": 192})
    shape = read_shape(keys, epsilon=1e-5)
    keys.only("scoring_func", "sigmoid")
    keys.only("topk_method", "noaux_tc")
    keys.only("add_swa_attention_sink_bias", True)
    keys.only("add_full_attention_sink_bias", False)
    narrow, values = _heads_of_windows(keys, shape), _values(keys, shape.heads.size)
    windows, (ropes, context) = _windows(keys, shape.layers), _ropes(keys, shape.heads.size)
    scale = keys.number("attention_value_scale", 1.0 if keys.says("attention_value_scale") else 0.707)
    bias = keys.flag("attention_bias", False)
    count, columns = expert_count(keys, "n_routed_experts", "num_local_experts"), keys.size("moe_intermediate_size")
    plain, sparse = mlp_axis(keys.size("intermediate_size")), sparse_by_numbers(keys, shape.layers, 1)

    def layer(number: int) -> Layer:
        window = windows[number]
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: writer.scaled(  # of values as well as of what is made of them
                attention(
                    writer,
                    shape,
                    number,
                    x,
                    heads=narrow if window else shape.heads,
                    qkv_bias=bias,
                    rope="sliding" if window else "full",
                    window=window,
                    sinks=bool(window),
                    values=values,
                ),
                scale,
            ),
            lambda writer, x: (
                experts(writer, shape, number, x, count, columns, corrected_routing(keys, number, count))
                if sparse[number]
                else mlp(writer, number, x, plain)
            ),
        )

    described = model("mimo_v2_flash", shape, layer, ropes, context, ignored=["model.mtp."])
    modules = [f"model.layers.{number}.self_attn" for number in range(shape.layers)]
    return replace(described, spelled={f"{each}.sinks": f"{each}.attention_sink_bias" for each in modules})


def _heads_of_windows(keys: Keys, shape: Shape) -> Heads:
    """The heads of layers with windows: twice as many keys and values, where no key says otherwise."""
    heads = shape.heads
    keys.only("swa_num_attention_heads", heads.queries)
    keys.only("swa_head_dim", heads.size)
    count = keys.size("swa_num_key_value_heads", 2 * heads.keys)
    if heads.queries % count:
        key = "swa_num_key_value_heads" if keys.get("swa_num_key_value_heads") else "num_key_value_heads"
        raise keys.refusal(key, f"so many that those of layers with windows divide {heads.queries} query heads")
    return replace(heads, keys=count)


def _values(keys: Keys, size: int) -> int:
    """Elements of a head's values; 0: as many as keys have."""
    values = keys.size("v_head_dim", 128, most=size)
    keys.only("swa_v_head_dim", values)
    if 2 * values < size:
        raise keys.refusal("v_head_dim", f"at least half of head_dim = {size}")
    return 0 if values == size else values


def _windows(keys: Keys, layers: int) -> list[int]:
    """The window of each layer, 0 for none: by ``layer_types``, or by numbers that are 1 where there is one.

    A row sees so many positions besides itself as ``sliding_window_size`` says, or with itself as ``sliding_window``.
    """
    listed = flags_of_layers(keys, "hybrid_layer_pattern", layers)
    if listed is None:
        listed = [number > 0 and (number + 1) % 6 != 0 for number in range(layers)]
    beside = keys.get("sliding_window_size")
    window = keys.size("sliding_window", 129) if beside is None else keys.size("sliding_window_size") + 1
    return listed_windows(keys, layers, window, [SLIDING if each else FULL for each in listed])


def sparse_by_numbers(keys: Keys, layers: int, dense: int) -> list[bool]:
    """Which layers have experts: by ``mlp_layer_types``, or by numbers of ``moe_layer_freq`` that are 1 where they do;
    where both are silent, all after `dense` of them."""
    listed = flags_of_layers(keys, "moe_layer_freq", layers)
    if listed is not None and any(listed) and not keys.get("mlp_layer_types"):
        return listed
    return listed_sparse_layers(keys, layers, dense)


def _ropes(keys: Keys, size: int) -> tuple[dict[str, Rope], int]:
    """The rotary embeddings of layers that see everything and of those with windows, and the longest context."""
    partial = keys.number("partial_rotary_factor", PARTIAL)
    bases = keys.number("rope_theta", THETAS[0]), keys.number("swa_rope_theta", THETAS[1])
    given = rope_keys_of_both_kinds(keys) if keys.get("rope_parameters") else (Keys(keys.where, {}),) * 2
    full, context = rope_of(keys, given[0], size, bases[0], partial)
    return {"full": full, "sliding": rope_of(keys, given[1], size, bases[1], partial)[0]}, context
