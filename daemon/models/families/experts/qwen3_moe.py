"""Qwen3 MoE: Qwen3 with experts; some layers may have an MLP. Qwen3-VL has its experts' matrices stacked.

The text of Qwen3-Omni is one, too.
"""

from __future__ import annotations

from collections.abc import Callable

from motley.daemon.models.blocks.attending.attention import attention
from motley.daemon.models.blocks.attending.windows import no_windows
from motley.daemon.models.blocks.experts import expert_count, experts, sparse_layers, stacked_parts
from motley.daemon.models.blocks.layers import model, pre_norm_layer
from motley.daemon.models.blocks.mlp import MlpNames, mlp, mlp_axis, usual_names
from motley.daemon.models.blocks.shape import read_shape
from motley.daemon.models.description.model import Layer, Model
from motley.daemon.models.description.operations.experts import Routing
from motley.daemon.models.keys import Keys
from motley.daemon.models.rope_keys import read_rope


def qwen3_moe(keys: Keys) -> Model:
    """Describe a model of type ``qwen3_moe``."""
    return _described("qwen3_moe", keys, lambda number, hidden, columns: None)


def qwen3_vl_moe(keys: Keys) -> Model:
    """Describe a model of type ``qwen3_vl_moe_text``."""
    return _described("qwen3_moe", keys.filled({"norm_topk_prob": True, "rope_theta": 5e6}), _stacked)


def qwen3_omni_moe(keys: Keys) -> Model:
    """Describe a model of type ``qwen3_omni_moe_text``."""
    where = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    rope = keys.inner(where).values
    rope.pop("interleaved", None)  # sections are, of which a text has one
    keys = keys.filled({"norm_topk_prob": True, "rope_theta": 1e6})
    keys.values[where] = rope
    return qwen3_moe(keys)


def _stacked(number: int, hidden: int, columns: int) -> MlpNames:
    """Experts' matrices as files of Qwen3-VL have them, those of a layer in two tensors: published ones transposed,
    [E, D, 2F] and [E, F, D], those that transformers 5 has saved not."""
    module = f"model.layers.{number}.mlp.experts"
    turned, usual = (stacked_parts(module, hidden, columns, transposed) for transposed in (True, False))
    return usual_names(f"{module}.{{expert}}", parts={name: (*turned[name], *usual[name]) for name in usual})


def _described(family: str, keys: Keys, named: Callable[[int, int, int], MlpNames | None]) -> Model:
    """`named`: what a layer's experts are called, by its number, D and the columns of an expert; None: as usual."""
    shape = read_shape(keys)
    rope, context = read_rope(keys, shape.heads.size)
    no_windows(keys, shape.layers)
    bias = keys.flag("attention_bias", False)
    count, columns = expert_count(keys), keys.size("moe_intermediate_size")
    sparse = sparse_layers(keys, shape.layers)
    plain = None if all(sparse) else mlp_axis(keys.size("intermediate_size"))
    routing = Routing(keys.size("num_experts_per_tok"), normalised=keys.flag("norm_topk_prob", False))

    def layer(number: int) -> Layer:
        return pre_norm_layer(
            shape,
            number,
            lambda writer, x: attention(writer, shape, number, x, qkv_bias=bias, output_bias=bias, qk_norm=True),
            lambda writer, x: (
                experts(writer, shape, number, x, count, columns, routing, names=named(number, shape.hidden, columns))
                if plain is None or sparse[number]
                else mlp(writer, number, x, plain)
            ),
        )

    return model(family, shape, layer, {"main": rope}, context)
