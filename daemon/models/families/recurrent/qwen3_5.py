"""Qwen3.5's text model: Qwen3-Next with its projections apart in files, and MLPs; or experts and a shared one."""

from __future__ import annotations

from motley.daemon.models.blocks.experts import SharedExpert, expert_count, experts
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.recurrent.delta_net import DEFAULTS, Mlp, hybrid
from motley.daemon.models.blocks.shape import Shape
from motley.daemon.models.description.model import Model
from motley.daemon.models.description.operations.experts import Routing
from motley.daemon.models.keys import Keys


def qwen3_5(keys: Keys) -> Model:
    """Describe a model of type ``qwen3_5_text``."""
    return _dense(keys)


def qwen3_5_ahead(keys: Keys) -> Model:
    """Describe its head that predicts a token further ahead."""
    return _dense(keys, ahead=True)


def qwen3_5_moe(keys: Keys) -> Model:
    """Describe a model of type ``qwen3_5_moe_text``."""
    return _with_experts(keys)


def qwen3_5_moe_ahead(keys: Keys) -> Model:
    """Describe its head that predicts a token further ahead."""
    return _with_experts(keys, ahead=True)


def _dense(keys: Keys, ahead: bool = False) -> Model:
    keys = keys.filled({**DEFAULTS, "num_key_value_heads": 4})

    def feeding(shape: Shape) -> Mlp:
        columns = mlp_axis(keys.size("intermediate_size"))
        return lambda writer, number, x: mlp(writer, number, x, columns)

    return hybrid("qwen3_5", keys, feeding, ahead=ahead)


def _with_experts(keys: Keys, ahead: bool = False) -> Model:
    keys = keys.filled({**DEFAULTS, "num_key_value_heads": 2})

    def feeding(shape: Shape) -> Mlp:
        count, columns = expert_count(keys), keys.size("moe_intermediate_size")
        shared = SharedExpert(keys.size("shared_expert_intermediate_size"))
        routing = Routing(keys.size("num_experts_per_tok"), normalised=True)
        return lambda writer, number, x: experts(writer, shape, number, x, count, columns, routing, shared=shared)

    return hybrid("qwen3_5_moe", keys, feeding, ahead=ahead)
