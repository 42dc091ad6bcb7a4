"""Laguna: more query heads in some layers, windows in some, gates on attention that a softplus opens, and experts."""

from __future__ import annotations

from dataclasses import replace

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import listed_windows, read_window
from motley.daemon.models.blocks.experts import SharedExpert, expert_count, experts, sparse_layers
from motley.daemon.models.blocks.layer_kinds import FULL, listed_sparse_layers
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.shape import Shape, read_shape
from motley.daemon.models.blocks.spelling import also_spelled
from motley.daemon.models.description.axes import Axis, Heads, Kind, W
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.experts import Routing
from motley.daemon.models.description.operations.rows import Activation
from motley.daemon.models.description.rope import Rope
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import rope_keys_of_both_kinds, rope_of

DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
"""What transformers takes where a config is silent."""
ONLY = {
    "attention_bias": False,
    "norm_topk_prob": True,
    "moe_apply_router_weight_on_input": False,
    "moe_router_logit_softcapping": 0.0,
}
NAMES = {
    "mlp.gate.e_score_correction_bias": "mlp.experts.e_score_correction_bias",
    "mlp.shared_experts.": "mlp.shared_expert.",
}
"""What published files call tensors of a layer."""
HEADS, GATES = "num_attention_heads_per_layer", "gating"
OF_HEADS, OF_ELEMENTS = "per-head", "per-element"


def laguna(keys: Keys) -> Model:
    """Describe a model of type ``laguna``."""
    keys = keys.filled(DEFAULTS)
    for key, value in ONLY.items():
        keys.only(key, value)
    shape = read_shape(keys, head_dim=128)
    windows = listed_windows(keys, shape.layers, read_window(keys, 512), [FULL] * shape.layers)
    heads, (ropes, context) = _heads(keys, shape), _ropes(keys, shape.heads.size, windows)
    of_heads = _gates_of_heads(keys)
    count, columns = expert_count(keys), keys.size("moe_intermediate_size")
    chosen, scaling = keys.size("num_experts_per_tok"), keys.number("moe_routed_scaling_factor", 1.0)
    shared = SharedExpert(keys.size("shared_expert_intermediate_size"), "shared_experts", gated=False)
    sparse, plain = _sparse(keys, shape.layers), mlp_axis(keys.size("intermediate_size"))

    def layer(number: int) -> Layer:
        window = windows[number]
        correction = W(
            f"model.layers.{number}.mlp.gate.e_score_correction_bias", Axis(Kind.PLAIN, count, "num_experts")
        )
        routing = Routing(chosen, "sigmoid", normalised=True, scaling=scaling, correction=correction)
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: attention(
                writer,
                shape,
                number,
                x,
                heads=heads[number],
                qk_norm=True,
                rope="sliding" if window else "full",
                window=window,
                gate="g_proj",
                gate_of_heads=of_heads,
                opened_by=Activation.SOFTPLUS,
            ),
            lambda writer, x: (
                experts(writer, shape, number, x, count, columns, routing, shared=shared)
                if sparse[number]
                else mlp(writer, number, x, plain)
            ),
        )

    return also_spelled(model("laguna", shape, layer, ropes, context), {}, NAMES)


def _heads(keys: Keys, shape: Shape) -> list[Heads]:
    """The heads of each layer, all of which have as many of keys."""
    keys.only("num_key_value_heads_per_layer", [shape.heads.keys] * shape.layers)
    counts = keys.get(HEADS) or [shape.heads.queries] * shape.layers
    whole = isinstance(counts, list) and all(type(each) is int and each > 0 for each in counts)
    if not whole or len(counts) != shape.layers or any(each % shape.heads.keys for each in counts):
        raise keys.refusal(HEADS, f"a list of {shape.layers} multiples of num_key_value_heads = {shape.heads.keys}")
    return [replace(shape.heads, queries=each) for each in counts]


def _gates_of_heads(keys: Keys) -> bool:
    """Whether a gate is one number for each head; else it is one for each of a head's elements."""
    value = keys.get(GATES)
    if value is not None and value is not True and value not in (OF_HEADS, OF_ELEMENTS):
        raise keys.refusal(GATES, f"true, {OF_HEADS} or {OF_ELEMENTS}")
    kinds, own = keys.get("gating_types"), OF_ELEMENTS if value == OF_ELEMENTS else OF_HEADS
    if kinds is not None and (not isinstance(kinds, list) or {str(kind).replace("_", "-") for kind in kinds} != {own}):
        raise keys.refusal("gating_types", f"{own} for all layers, as {GATES} has it")
    return own == OF_HEADS


def _sparse(keys: Keys, layers: int) -> list[bool]:
    """Which layers have experts: all but the first, unless ``mlp_layer_types`` says otherwise; what older keys say too
    has to be the same."""
    sparse = listed_sparse_layers(keys, layers, 1)
    if keys.get("mlp_only_layers") is not None and sparse_layers(keys, layers) != sparse:
        raise keys.refusal("mlp_only_layers", "the layers that mlp_layer_types calls dense")
    return sparse


def _ropes(keys: Keys, size: int, windows: list[int]) -> tuple[dict[str, Rope], int]:
    """The rotary embeddings of layers that see everything and of those with windows, and the longest context."""
    keys.get("partial_rotary_factor")  # which counts within the objects alone
    silent = keys.get("rope_parameters") is None
    full, sliding = rope_keys_of_both_kinds(keys)
    seeing, context = rope_of(keys, full, size, 5e5, 0.5 if silent else 1.0)
    own = {"full": seeing, "sliding": rope_of(keys, sliding, size, 1e4, 1.0)[0]}
    used = {"sliding" if window else "full" for window in windows}
    return {name: rope for name, rope in own.items() if name in used}, context
