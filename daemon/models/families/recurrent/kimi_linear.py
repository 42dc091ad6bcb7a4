"""Kimi Linear: gated DeltaNets whose states decay row by row, latent attention that does not rotate, and experts.

Source: https://arxiv.org/abs/2510.26692.
"""

from __future__ import annotations

from dataclasses import replace

from motley.daemon.models.blocks.attending.latent import latent_attention, read_latent_sizes
from motley.daemon.models.blocks.layer_kinds import FULL, LINEAR, attending_layers, layers_with_experts
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.recurrent.gated_delta import REACH, gated_delta_net
from motley.daemon.models.blocks.shape import Shape
from motley.daemon.models.blocks.spelling import spelled
from motley.daemon.models.description.axes import Axis, Kind, RecurrentHeads, Value, W
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.families.experts.glm4_moe import corrected_experts
from motley.daemon.models.keys import Keys
from motley.plugins.recurrent import WIDEST_HEAD

KEYS = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
"""What files call keys that other families with such layers call otherwise."""
NAMES = {
    ".mlp.gate.": ".block_sparse_moe.gate.",
    ".mlp.experts.": ".block_sparse_moe.experts.",
    ".mlp.shared_experts.": ".block_sparse_moe.shared_experts.",
    ".experts.{expert}.gate_proj.": ".experts.{expert}.w1.",
    ".experts.{expert}.up_proj.": ".experts.{expert}.w3.",
    ".experts.{expert}.down_proj.": ".experts.{expert}.w2.",
}
"""What files call modules of experts."""


def kimi_linear(keys: Keys) -> Model:
    """Describe a model of type ``kimi_linear``."""
    keys = keys.also(KEYS)
    for key, only in {"mla_use_nope": True, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid"}.items():
        keys.only(key, only)
    keys.only("use_grouped_topk", True)
    keys.only("num_nextn_predict_layers", 0)
    shape, sizes = read_latent_sizes(keys, 1e-5)
    sizes = replace(sizes, neighbours=False)  # as nothing turns
    of = keys.inner("linear_attn_config")
    attends = _attending_layers(keys, of, shape.layers)
    mixture = corrected_experts(keys, shape, layers_with_experts(keys))
    count = _of(keys, of, "num_heads", "linear_num_heads", 32)
    size = _of(keys, of, "head_dim", "linear_head_dim", 128, most=WIDEST_HEAD)
    heads = RecurrentHeads(count, count, size, size)
    reach = _of(keys, of, "short_conv_kernel_size", REACH, 4, least=2)

    def layer(number: int) -> Layer:
        def mix(writer: Writer, x: Value) -> Value:
            if attends[number]:
                return latent_attention(writer, shape, sizes, number, x, rope=None)
            return kimi_delta_attention(writer, shape, number, x, heads, reach)

        return pre_norm_layer(shape, number, mix, lambda writer, x: mixture(writer, number, x))

    context = keys.size("max_position_embeddings", 1048576)
    return spelled(model("kimi_linear", shape, layer, {}, context), NAMES)


def kimi_delta_attention(
    writer: Writer, shape: Shape, number: int, x: Value, heads: RecurrentHeads, reach: int, floor: float = 0.0
) -> Value:
    """f32[T, D] -> f32[T, D]{U_tp}: a gated DeltaNet, from its normalised input to its output projection.

    What opens its gates, and how fast each row of a state decays, are products with short rows, which every rank has.

    Args:
        floor: see `DeltaRule`.
    """
    at, module, key = f"layers.{number}.attention", f"model.layers.{number}.self_attn", heads.key_axis

    def matrix(name: str, out: Axis, inner: Axis) -> W:
        return W(f"{module}.{name}_proj.weight", out, inner)

    axes = zip("qkv", (key, key, heads.value_axis), strict=True)
    q, k, v = writer.linear(
        f"{at}.qkv",
        x,
        *(matrix(letter, axis, shape.residual) for letter, axis in axes),
        ys=tuple(f"{at}.{letter}" for letter in "qkv"),
    )
    (b,) = writer.linear(f"{at}.b", x, matrix("b", heads.gate_axis, shape.residual))
    short = Axis(Kind.PLAIN, heads.key_size, "the size of a key head")
    rows = writer.linear(
        f"{at}.short",
        x,
        *(matrix(f"{letter}_a", short, shape.residual) for letter in "fg"),
        ys=(f"{at}.short.f", f"{at}.short.g"),
    )
    (a,) = writer.linear(f"{at}.a", rows[0], matrix("f_b", heads.speed_axis, short))
    (z,) = writer.linear(f"{at}.z", rows[1], matrix("g_b", heads.value_axis, short))
    return gated_delta_net(
        writer,
        shape,
        number,
        module,
        (q, k, v, z),
        (b, a),
        heads,
        reach,
        epsilon=shape.epsilon,
        squashed=True,
        floor=floor,
    )


def _of(keys: Keys, of: Keys, own: str, key: str, default: int, least: int = 1, most: int | None = None) -> int:
    """A size that stands in ``linear_attn_config``, or beside it."""
    return of.size(own, keys.size(key, default, least, most), least, most)


def _attending_layers(keys: Keys, of: Keys, layers: int) -> list[bool]:
    """Which layers attend; the others have a recurrent state. ``linear_attn_config`` counts them from 1."""
    default = [FULL if number and number % 4 == 0 else LINEAR for number in range(layers)]
    full, linear = of.get("full_attn_layers"), of.get("kda_layers")
    if full is not None and linear is not None:
        lists = isinstance(full, list) and isinstance(linear, list)
        if not lists or sorted([*full, *linear]) != [*range(1, layers + 1)]:
            raise of.refusal("full_attn_layers", f"a list that has with kda_layers each number from 1 to {layers} once")
        default = [FULL if number + 1 in full else LINEAR for number in range(layers)]
    return attending_layers(keys, layers, default)
