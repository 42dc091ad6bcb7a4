"""OLMo Hybrid: gated DeltaNets that may write twice a value, and OLMo 3's attention in every fourth layer.

Norms are before the blocks of the former, after those of the latter.
"""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.layers import model, post_norm_layer, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.recurrent.delta_net import attending_by_interval, read_heads
from motley.daemon.models.blocks.recurrent.gated_delta import REACH, gated_delta_net
from motley.daemon.models.blocks.shape import Shape, read_shape
from motley.daemon.models.description.axes import RecurrentHeads, Value, W
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope

EPSILON = 1e-5
"""Of the norms of what heads find, whatever a config says of others."""


def olmo_hybrid(keys: Keys) -> Model:
    """Describe a model of type ``olmo_hybrid``."""
    shape = read_shape(keys, kv_heads=True)
    rope, context = (
        read_rope(keys, shape.heads.size) if _rotates(keys) else (None, keys.size("max_position_embeddings"))
    )
    bias = keys.flag("attention_bias", False)
    attends = attending_by_interval(keys, shape.layers)
    heads, reach = read_heads(_told(keys, shape)), keys.size(REACH, 4, least=2)
    written = 2.0 if keys.flag("linear_allow_neg_eigval", True) else 1.0
    columns = mlp_axis(keys.size("intermediate_size"))

    def layer(number: int) -> Layer:
        def attend(writer: Writer, x: Value) -> Value:
            return attention(
                writer,
                shape,
                number,
                x,
                qkv_bias=bias,
                output_bias=bias,
                whole_qk_norm=True,
                rope="main" if rope else None,
            )

        def recur(writer: Writer, x: Value) -> Value:
            return _delta_net(writer, shape, number, x, heads, reach, written)

        def feed(writer: Writer, x: Value) -> Value:
            return mlp(writer, number, x, columns)

        if attends[number]:
            return post_norm_layer(shape, number, attend, feed)
        return pre_norm_layer(shape, number, recur, feed, norms=("attention_layer_norm", "feedforward_layer_norm"))

    return model("olmo_hybrid", shape, layer, {"main": rope} if rope else {}, context)


def _rotates(keys: Keys) -> bool:
    """Whether attention turns queries and keys: not where a base of the rotary embedding is told to be none."""
    rope = keys.inner("rope_parameters")
    return not any(each.says("rope_theta") and each.get("rope_theta") is None for each in (rope, keys))


def _told(keys: Keys, shape: Shape) -> Keys:
    """The keys with the sizes of recurrent heads, where they are silent of them."""
    queries = shape.heads.queries
    size = keys.size("linear_key_head_dim", int(0.75 * shape.hidden / keys.size("linear_num_key_heads", queries)))
    return keys.filled(
        {
            "linear_num_key_heads": queries,
            "linear_num_value_heads": queries,
            "linear_key_head_dim": size,
            "linear_value_head_dim": 2 * size,
        }
    )


def _delta_net(
    writer: Writer, shape: Shape, number: int, x: Value, heads: RecurrentHeads, reach: int, written: float
) -> Value:
    at, module = f"layers.{number}.attention", f"model.layers.{number}.linear_attn"
    key, value, gate = heads.key_axis, heads.value_axis, heads.gate_axis

    q, k, v, z = writer.linear(
        f"{at}.qkvz",
        x,
        *(
            W(f"{module}.{letter}_proj.weight", axis, shape.residual)
            for letter, axis in zip("qkvg", (key, key, value, value), strict=True)
        ),
        ys=tuple(f"{at}.{letter}" for letter in "qkvz"),
    )
    b, a = writer.linear(
        f"{at}.ba",
        x,
        *(W(f"{module}.{letter}_proj.weight", gate, shape.residual) for letter in "ba"),
        ys=(f"{at}.b", f"{at}.a"),
    )
    return gated_delta_net(
        writer, shape, number, module, (q, k, v, z), (b, a), heads, reach, epsilon=EPSILON, written=written
    )
