"""GLM-4.5 and 4.6: experts in groups, chosen by sigmoids with a correction, after some layers with an MLP.

Solar Open has such experts in every layer, and heads that turn whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from motley.daemon.models.blocks.ahead import check_one_ahead, head_ahead
from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import no_windows
from motley.daemon.models.blocks.experts import SharedExpert, expert_count, experts
from motley.daemon.models.blocks.layers import Block, further, model, pre_norm_layer
from motley.daemon.models.blocks.mlp import Limits, gated_mlp, mlp_axis, usual_names
from motley.daemon.models.blocks.shape import Shape, read_shape
from motley.daemon.models.description.axes import Axis, Kind, Value, W
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.experts import Routing
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope

NEXTN = "num_nextn_predict_layers"
"""Layers beyond the last one, which predict tokens further ahead."""


def glm4_moe(keys: Keys) -> Model:
    """Describe a model of type ``glm4_moe``."""
    return glm4_moe_like("glm4_moe", keys, 10000.0, 0.5)


def glm4_moe_ahead(keys: Keys) -> Model:
    """Describe its head that predicts a token further ahead."""
    return glm4_moe_like("glm4_moe", keys, 10000.0, 0.5, ahead=True)


def solar_open(keys: Keys) -> Model:
    """Describe a model of type ``solar_open``."""
    columns = keys.size("moe_intermediate_size", 1280)
    silent = {"first_k_dense_replace": 0, "moe_intermediate_size": columns, "intermediate_size": columns}
    return glm4_moe_like("solar_open", keys.filled(silent), 1e6, 1.0)


def glm4_moe_like(family: str, keys: Keys, theta: float, partial: float, ahead: bool = False, fused: str = "") -> Model:
    """A model of GLM-4.5's layers.

    Args:
        theta, partial: of the rotary embedding where the keys are silent.
        ahead: not the model but its head that predicts a token further ahead.
        fused: see `attention`.
    """
    shape = read_shape(keys, epsilon=1e-5)
    rope, context = read_rope(keys, shape.heads.size, theta, partial)
    no_windows(keys, shape.layers)
    bias, qk_norm = keys.flag("attention_bias", False), keys.flag("use_qk_norm", False)
    dense = keys.size("first_k_dense_replace", 1, least=0)
    mixture = corrected_experts(keys, shape, [number >= dense for number in range(shape.layers)])

    def layer(number: int, enter: Block | None = None) -> Layer:
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: attention(writer, shape, number, x, qkv_bias=bias, qk_norm=qk_norm, fused=fused),
            lambda writer, x: mixture(writer, number, x),
            enter,
        )

    if ahead:
        check_one_ahead(keys, NEXTN)
        return head_ahead(family, shape, layer, {"main": rope}, context)
    ignored = further(shape, keys.size(NEXTN, 1, least=0))
    return model(family, shape, layer, {"main": rope}, context, ignored=ignored)


def corrected_experts(
    keys: Keys, shape: Shape, sparse: list[bool], limits: Limits | None = None, limits_of_all: Limits | None = None
) -> Callable[[Writer, int, Value], Value]:
    """What writes a layer's experts by `corrected_routing` where it is `sparse` or after the last one, else its MLP.

    Args:
        limits, limits_of_all: see `routed_experts`.
    """
    keys.only("scoring_func", "sigmoid")
    keys.only("topk_method", "noaux_tc")
    return routed_experts(
        keys, shape, sparse, lambda number, count: corrected_routing(keys, number, count), limits, limits_of_all
    )


def routed_experts(
    keys: Keys,
    shape: Shape,
    sparse: list[bool],
    routing: Callable[[int, int], Routing],
    limits: Limits | None = None,
    limits_of_all: Limits | None = None,
) -> Callable[[Writer, int, Value], Value]:
    """What writes a layer's experts where it is `sparse` or after the last one, else its MLP.

    Args:
        routing: how experts are chosen, by the layer's number and how many experts it has.
        limits: of experts that rows are sent to, see `gated_mlp`.
        limits_of_all: of MLPs and shared experts, which all rows go through.
    """
    count, columns = expert_count(keys, "n_routed_experts", "num_local_experts"), keys.size("moe_intermediate_size")
    plain, number_shared = mlp_axis(keys.size("intermediate_size")), keys.size("n_shared_experts", 1, least=0)
    shared = (
        SharedExpert(number_shared * columns, "shared_experts", gated=False, limits=limits_of_all)
        if number_shared
        else None
    )

    def write(writer: Writer, number: int, x: Value) -> Value:
        if number < len(sparse) and not sparse[number]:
            names = usual_names(f"model.layers.{number}.mlp")
            return gated_mlp(writer, f"layers.{number}.mlp", x, plain, names, limits=limits_of_all)
        return experts(writer, shape, number, x, count, columns, routing(number, count), shared=shared, limits=limits)

    return write


def corrected_routing(keys: Keys, number: int, count: int) -> Routing:
    """Experts in groups, chosen by sigmoids with a correction."""
    correction = W(
        f"model.layers.{number}.mlp.gate.e_score_correction_bias", Axis(Kind.PLAIN, count, "n_routed_experts")
    )
    return replace(grouped_routing(keys, count), scores="sigmoid", correction=correction)


def grouped_routing(keys: Keys, count: int) -> Routing:
    """Experts in groups, chosen by a softmax."""
    groups, kept, chosen = keys.size("n_group", 1), keys.size("topk_group", 1), keys.size("num_experts_per_tok")
    if count % groups or (groups > 1 and count // groups < 2):
        raise keys.refusal("n_group", f"a divisor of n_routed_experts = {count} that leaves two experts in a group")
    if kept > groups or kept * (count // groups) < chosen:
        raise keys.refusal("topk_group", f"at most n_group = {groups}, with num_experts_per_tok = {chosen} experts")
    return Routing(
        chosen,
        normalised=keys.flag("norm_topk_prob", True),
        epsilon=1e-20,
        groups=groups,
        groups_kept=kept,
        scaling=keys.number("routed_scaling_factor", 1.0),
    )
