"""Cohere's Command A+: layers as of Cohere 2, with experts; first ones may have an MLP, and rotate without windows."""

from __future__ import annotations

from motley.daemon.models.blocks.attending.windows import listed_windows, period_kinds
from motley.daemon.models.blocks.experts import SharedExpert, expert_count, experts
from motley.daemon.models.blocks.layer_kinds import listed_sparse_layers
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.description.axes import Value
from motley.daemon.models.description.model import Model
from motley.daemon.models.description.operations.experts import Routing
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.families.dense.cohere import (
    DEFAULTS,
    PERIOD,
    cohere_model,
    read_cohere_shape,
    read_cohere_window,
    windowed_attention,
)
from motley.daemon.models.keys import Keys


def cohere2_moe(keys: Keys) -> Model:
    """Describe a model of type ``cohere2_moe``."""
    keys = keys.filled(DEFAULTS | {"head_dim": 128, "num_experts": 8, "num_experts_per_tok": 2})
    shape = read_cohere_shape(keys, rms_norms=keys.get("rms_norm_eps") is not None)
    first, before = keys.size("first_k_dense_replace", 0, least=0), keys.size(f"prefix_dense_{PERIOD}", 1)
    after = period_kinds(max(0, shape.layers - first), keys.size(PERIOD, 4))
    windows = listed_windows(keys, shape.layers, read_cohere_window(keys), [*period_kinds(first, before), *after])
    sparse = listed_sparse_layers(keys, shape.layers, first)
    attend = windowed_attention(keys, shape, windows, [not has and before == 1 for has in sparse])
    count, columns = expert_count(keys), keys.size("intermediate_size")
    plain = mlp_axis(keys.size("prefix_dense_intermediate_size", columns))
    routing = _routing(keys)
    number_shared = keys.size("num_shared_experts", 0, least=0)
    shared = SharedExpert(number_shared * columns, "shared_experts", gated=False) if number_shared else None
    average = keys.one_of("shared_expert_combination_strategy", ("average", "sum"), "average") == "average"

    def think(writer: Writer, number: int, x: Value) -> Value:
        if not sparse[number]:
            return mlp(writer, number, x, plain)
        made = experts(writer, shape, number, x, count, columns, routing, shared=shared)
        return writer.scaled(made, 0.5 if shared and average else 1.0)

    return cohere_model("cohere2_moe", keys, shape, attend, think)


def _routing(keys: Keys) -> Routing:
    """The largest logits are chosen, and weighed by their softmax, or by a sigmoid of each."""
    chosen = keys.size("num_experts_per_tok")
    normalised = keys.flag("norm_topk_prob", True)
    if keys.one_of("expert_selection_fn", ("softmax", "sigmoid"), "softmax") == "softmax":
        return Routing(chosen, "softmax of chosen")
    return Routing(chosen, "sigmoid", normalised)
