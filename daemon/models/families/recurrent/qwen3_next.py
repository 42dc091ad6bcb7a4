"""Qwen3-Next: three gated DeltaNet layers to one of gated attention; experts and a shared one, gated by row."""

from __future__ import annotations

from motley.daemon.models.blocks.experts import SharedExpert, expert_count, experts, sparse_layers
from motley.daemon.models.blocks.mlp import mlp, mlp_axis
from motley.daemon.models.blocks.recurrent.delta_net import DEFAULTS, Mlp, hybrid
from motley.daemon.models.blocks.shape import Shape
from motley.daemon.models.description.axes import Value
from motley.daemon.models.description.model import Model
from motley.daemon.models.description.operations.experts import Routing
from motley.daemon.models.description.writing import Writer
from motley.daemon.models.keys import Keys


def qwen3_next(keys: Keys) -> Model:
    """Describe a model of type ``qwen3_next``."""
    return _described(keys)


def qwen3_next_ahead(keys: Keys) -> Model:
    """Describe its head that predicts a token further ahead."""
    return _described(keys, ahead=True)


def _described(keys: Keys, ahead: bool = False) -> Model:
    keys = keys.filled({**DEFAULTS, "num_key_value_heads": 2})

    def feeding(shape: Shape) -> Mlp:
        count, columns = expert_count(keys), keys.size("moe_intermediate_size")
        sparse = sparse_layers(keys, shape.layers)
        plain = None if all(sparse) else mlp_axis(keys.size("intermediate_size"))
        shared = SharedExpert(keys.size("shared_expert_intermediate_size"))
        routing = Routing(keys.size("num_experts_per_tok"), normalised=keys.flag("norm_topk_prob", True))

        def feed(writer: Writer, number: int, x: Value) -> Value:
            if plain is None or number >= len(sparse) or sparse[number]:
                return experts(writer, shape, number, x, count, columns, routing, shared=shared)
            return mlp(writer, number, x, plain)

        return feed

    return hybrid("qwen3_next", keys, feeding, ahead=ahead)
