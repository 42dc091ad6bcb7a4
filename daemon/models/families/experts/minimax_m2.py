"""MiniMax M2: norms over all query heads at once, part of a head rotated, experts by sigmoids with a correction."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import no_windows
from motley.daemon.models.blocks.experts import expert_count
from motley.daemon.models.blocks.layers import further, model, pre_norm_layer
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.axes import Axis, Kind, W
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.experts import Routing
from motley.daemon.models.families.experts.mixtral import mixtral_experts
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope
from motley.daemon.weights.places import Part


def minimax_m2(keys: Keys) -> Model:
    """Describe a model of type ``minimax_m2``."""
    shape = read_shape(keys, head_dim=128)
    turned = keys.size("rotary_dim", shape.heads.size)
    if turned > shape.heads.size:
        raise keys.refusal("rotary_dim", f"at most head_dim = {shape.heads.size}")
    rope, context = read_rope(keys, shape.heads.size, theta=5e6, partial=turned / shape.heads.size)
    no_windows(keys, shape.layers)
    keys.only("scoring_func", "sigmoid")
    keys.only("use_qk_norm", True)
    keys.only("qk_norm_type", "per_layer")
    keys.only("shared_intermediate_size", 0)
    keys.only("use_routing_bias", True)
    kinds = keys.get("attn_type_list")
    if kinds is not None and kinds != [1] * shape.layers:
        raise keys.refusal("attn_type_list", f"a list of {shape.layers} times 1, attention to all positions")
    count, columns = expert_count(keys), keys.size("intermediate_size")
    chosen = keys.size("num_experts_per_tok")

    def layer(number: int) -> Layer:
        module = f"model.layers.{number}"
        correction = W(
            f"{module}.mlp.e_score_correction_bias",
            Axis(Kind.PLAIN, count, "num_local_experts"),
            parts=(Part(f"{module}.block_sparse_moe.e_score_correction_bias", (count,)),),
        )
        routing = Routing(chosen, scores="sigmoid", normalised=True, correction=correction)
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: attention(writer, shape, number, x, whole_qk_norm=True),
            lambda writer, x: mixtral_experts(writer, shape, number, x, count, columns, routing),
        )

    ignored = further(shape, keys.size("num_mtp_modules", 0, least=0))
    return model("minimax_m2", shape, layer, {"main": rope}, context, ignored=ignored)
