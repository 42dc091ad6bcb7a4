"""Ling 3: gated DeltaNets whose states decay row by row, by so much at most, latent attention with gates, and experts.

Source: the layers of Kimi Linear, https://arxiv.org/abs/2510.26692, with whole projections.
"""

from __future__ import annotations

from motley.daemon.models.blocks.attending.latent import latent_attention, read_latent
from motley.daemon.models.blocks.layer_kinds import FULL, LINEAR, attending_layers, layers_with_experts
from motley.daemon.models.blocks.layers import further, model, pre_norm_layer
from motley.daemon.models.blocks.recurrent.gated_delta import gated_delta_net
from motley.daemon.models.blocks.shape import Shape
from motley.daemon.models.blocks.spelling import also_spelled
from motley.daemon.models.description.axes import RecurrentHeads, Value, W
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.families.experts.glm4_moe import corrected_experts
from motley.daemon.models.families.recurrent.kimi_linear import KEYS
from motley.daemon.models.keys import Keys
from motley.plugins.recurrent import WIDEST_HEAD

DEFAULTS = {
    "max_position_embeddings": 262144,
    "rope_theta": 6e6,
    "n_routed_experts": 512,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 2,
}
"""What transformers takes where a config is silent."""
ONLY = {
    "use_mla_nope": False,
    "gated_attention_proj_granularity_type": "head_wise",
    "no_kda_lora": True,
    "use_qk_norm": True,
    "use_bias": False,
    "use_qkv_bias": False,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "routing_group_score_top_k": 2,
}
NAMES = {
    "self_attn.o_proj.": "attention.dense.",
    "self_attn.": "attention.",
    "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
}
"""What published files call tensors of a layer."""
LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
"""Keys of what bounds the gates of experts, by layers; transformers knows nothing of it."""
BOUND = "kda_lower_bound"


def bailing_hybrid(keys: Keys) -> Model:
    """Describe a model of type ``bailing_hybrid``."""
    keys = keys.also(KEYS).filled(DEFAULTS)
    for key, value in ONLY.items():
        keys.only(key, value)
    for key in LIMITS:
        if any(keys.get(key) or ()):
            raise keys.refusal(key, "only 0 or null for each layer")
    size = keys.size("linear_head_dim", keys.size("head_dim", 128), most=WIDEST_HEAD)
    shape, sizes, rope, context = read_latent(_turning_whole(keys, size))
    count = keys.size("linear_num_heads", sizes.heads)
    heads = RecurrentHeads(count, count, size, size)
    reach = keys.size("linear_conv_kernel_dim", keys.size("short_conv_kernel_size", 4), least=2)
    period = keys.size("layer_group_size", 6)
    attends = attending_layers(
        keys, shape.layers, [FULL if (number + 1) % period == 0 else LINEAR for number in range(shape.layers)]
    )
    columns, shared = keys.size("moe_intermediate_size"), keys.size("n_shared_experts", 1, least=0)
    keys.only("moe_shared_expert_intermediate_size", columns * shared)
    mixture = corrected_experts(keys, shape, layers_with_experts(keys))
    floor = _floor(keys)

    def layer(number: int) -> Layer:
        def mix(writer: Writer, x: Value) -> Value:
            if attends[number]:
                return latent_attention(writer, shape, sizes, number, x, gate="g_proj")
            return _delta_attention(writer, shape, number, x, heads, reach, floor)

        return pre_norm_layer(shape, number, mix, lambda writer, x: mixture(writer, number, x))

    ahead = further(shape, keys.size("num_nextn_predict_layers", keys.size("num_mtp_layers", 1, least=0), least=0))
    described = model("bailing_hybrid", shape, layer, {"main": rope}, context, ignored=ahead)
    return also_spelled(described, {"model.embed_tokens.": "model.word_embeddings."}, NAMES)


def _turning_whole(keys: Keys, size: int) -> Keys:
    """The keys without the part of a head that turns: it is told of heads as the recurrent layers have them, of which
    as many elements are those that turn in latent attention, all of them."""
    named, turned = "partial_rotary_factor", keys.size("qk_rope_head_dim")
    part = keys.number(named, 1.0)
    if part != 1.0 and part * size != turned:
        raise keys.refusal(named, f"1, or qk_rope_head_dim / head_dim = {turned / size:g}")
    keys.values.pop(named, None)
    return keys


def _floor(keys: Keys) -> float:
    """The logarithm of what is left of a state's row at least; 0: there is no floor."""
    bound = keys.get(BOUND)
    if not keys.flag("kda_safe_gate", True):
        return 0.0
    if bound is not None and (not isinstance(bound, int | float) or isinstance(bound, bool) or not -100 < bound < 0):
        raise keys.refusal(BOUND, "a negative number, more than -100")
    return float(bound or -5.0)


def _delta_attention(
    writer: Writer, shape: Shape, number: int, x: Value, heads: RecurrentHeads, reach: int, floor: float
) -> Value:
    """f32[T, D] -> f32[T, D]{U_tp}: a gated DeltaNet, from its normalised input to its output projection."""
    at, module, key = f"layers.{number}.attention", f"model.layers.{number}.self_attn", heads.key_axis
    axes = {"q": key, "k": key, "v": heads.value_axis, "g": heads.value_axis}
    q, k, v, z = writer.linear(
        f"{at}.qkvz",
        x,
        *(W(f"{module}.{letter}_proj.weight", axis, shape.residual) for letter, axis in axes.items()),
        ys=tuple(f"{at}.{letter}" for letter in "qkvz"),
    )
    b, a = writer.linear(
        f"{at}.ba",
        x,
        W(f"{module}.b_proj.weight", heads.gate_axis, shape.residual),
        W(f"{module}.f_proj.weight", heads.speed_axis, shape.residual),
        ys=(f"{at}.b", f"{at}.a"),
    )
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
