"""What configs of OLMo Hybrid, Kimi Linear and Ling 3 say, whose gated DeltaNets differ from Qwen's, and what they are
refused for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from motley.daemon.models.cutting.profile import profile
from motley.daemon.models.cutting.states import reach
from motley.daemon.models.cutting.units import units
from motley.daemon.models.description.axes import RecurrentHeads
from motley.daemon.models.description.model import Model, expected_shapes, tensors
from motley.daemon.models.description.operations.recurrence import DeltaRule
from motley.daemon.models.description.operations.rows import Activation, Gated
from motley.daemon.models.description.rope import Rope
from motley.daemon.models.files import open_weights
from motley.daemon.models.keys import ConfigError
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.spec import Piece
from motley.orchestrator.known_models.shapes import SHAPES
from motley.plugins.recurrent import StateSpec
from tests.models.cases import golden_case
from tests.models.configs import DEEPSEEK_V3, LLAMA, read

OLMO = LLAMA | {"model_type": "olmo_hybrid", "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
KDA = {"kda_layers": [1, 3], "full_attn_layers": [2], "head_dim": 32, "num_heads": 8, "short_conv_kernel_size": 3}
KIMI = DEEPSEEK_V3 | {"model_type": "kimi_linear", "num_experts": 6, "linear_attn_config": KDA}
LING = DEEPSEEK_V3 | {"model_type": "bailing_hybrid", "n_group": 1, "topk_group": 1, "layer_group_size": 3}


def deltas(model: Model) -> list[DeltaRule]:
    return [each for each in model.operations if isinstance(each, DeltaRule)]


def test_published_shapes(tmp_path: Path) -> None:
    """The parts of layers, and their sizes, as the models' authors tell them."""
    olmo, kimi = (read(tmp_path, SHAPES[name]) for name in ("olmo-hybrid-7b", "kimi-linear-48b-a3b"))
    assert [layer.attention is not None for layer in olmo.layers] == [False, False, False, True] * 8
    assert {(each.heads, each.decays, each.written) for each in deltas(olmo)} == {
        (RecurrentHeads(30, 30, 96, 192), 1, 2)
    }
    assert [each.layer for each in deltas(kimi)][:4] == [0, 1, 2, 4]
    assert (len(deltas(kimi)), len(kimi.layers), len(kimi.expert_layers)) == (20, 27, 26)
    assert {(each.heads, each.decays, each.written) for each in deltas(kimi)} == {
        (RecurrentHeads(32, 32, 128, 128), 128, 1)
    }
    for model, squashed in ((olmo, False), (kimi, True)):
        assert {each.squashed for each in deltas(model)} == {squashed}
        assert {layer.attention.rope for layer in model.layers if layer.attention} == {None}
        assert not model.ropes


def test_olmo_hybrid_rotates_and_writes_a_value_twice_unless_it_says_otherwise(tmp_path: Path) -> None:
    model = read(tmp_path, OLMO | {"rope_theta": 500.0})
    assert (model.ropes["main"].theta, deltas(model)[0].written) == (500.0, 2.0)
    assert deltas(model)[0].heads == RecurrentHeads(4, 4, 12, 24), "as three quarters of the residual, and twice that"
    for silent in ({"rope_theta": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": None}}):
        model = read(tmp_path, OLMO | silent | {"linear_allow_neg_eigval": False})
        assert (model.ropes, deltas(model)[0].written) == ({}, 1.0)


def test_kimi_linear_reads_sizes_beside_what_published_files_have_them_in(tmp_path: Path) -> None:
    model = read(tmp_path, KIMI)
    assert [(each.layer, each.heads, reach(each.filters[0])) for each in deltas(model)] == [
        (layer, RecurrentHeads(8, 8, 32, 32), 3) for layer in (0, 2)
    ]
    beside = {"linear_num_heads": 8, "linear_head_dim": 32, "linear_conv_kernel_dim": 3, "linear_attn_config": None}
    kinds = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    assert read(tmp_path, KIMI | beside | kinds) == model


def test_ling_3_attends_in_the_last_layer_of_each_group(tmp_path: Path) -> None:
    model = read(tmp_path, LING | {"kda_lower_bound": -3})
    assert [layer.attention is not None for layer in model.layers] == [False, False, True]
    assert [(each.heads, each.decays, each.floor, each.squashed) for each in deltas(model)] == [
        (RecurrentHeads(4, 4, 128, 128), 128, -3.0, True)
    ] * 2
    assert (model.ropes["main"], model.context) == (Rope(6e6, 8), 256)
    gates = [each.activation for each in model.operations if isinstance(each, Gated) and "attention" in each.y.name]
    assert gates == [Activation.SIGMOID]
    assert expected_shapes(model)["model.layers.2.self_attn.g_proj.weight"] == (4, 64)
    assert {each.floor for each in deltas(read(tmp_path, LING))} == {-5.0}
    assert {each.floor for each in deltas(read(tmp_path, LING | {"kda_safe_gate": False}))} == {0.0}
    kinds = {"layer_types": ["full_attention", "linear_attention", "full_attention"]}
    assert [each.layer for each in deltas(read(tmp_path, LING | kinds))] == [1]


def test_ling_3_is_read_alike_in_both_spellings(tmp_path: Path) -> None:
    model = read(tmp_path, LING | {"head_dim": 16})
    published = {key: value for key, value in LING.items() if key != "n_routed_experts"}
    published |= {"num_experts": 6, "num_shared_experts": 1, "moe_shared_expert_intermediate_size": 32}
    published |= {"head_dim": 16, "partial_rotary_factor": 0.5, "use_qk_norm": True, "score_function": "sigmoid"}
    assert read(tmp_path, published) == model
    beside = {"linear_head_dim": 16, "linear_num_heads": 4, "linear_conv_kernel_dim": 4, "head_dim": 8}
    assert deltas(read(tmp_path, LING | beside)) == deltas(model)
    places = {tensor.name: {part.tensor for part in tensor.parts} for tensor in tensors(model)}
    assert places["model.layers.2.self_attn.o_proj.weight"] == {"model.layers.2.attention.dense.weight"}
    assert places["model.layers.0.self_attn.f_proj.weight"] == {"model.layers.0.attention.f_proj.weight"}
    assert places["model.layers.1.mlp.gate.e_score_correction_bias"] == {"model.layers.1.mlp.gate.expert_bias"}


def test_the_profile_counts_a_number_for_each_row_of_a_state(tmp_path: Path) -> None:
    told = profile(read(tmp_path, KIMI), "fp32", 32)
    assert (told.kv_groups, told.attention_splits) == (1, [1, 2, 4])
    assert told.state_bytes == 2 * StateSpec(0, 3 * 8 * 32, 3, 8, 32, 32, 8 * (1 + 32)).bytes


def test_key_heads_are_not_cut_apart_where_there_are_fewer_than_query_heads(tmp_path: Path) -> None:
    model = read(tmp_path, OLMO | {"linear_num_key_heads": 2, "linear_num_value_heads": 4})
    assert (units(model, "fp32", 32).kv_groups, units(model, "fp32", 32).attention_splits) == (2, (1,))


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (OLMO | {"layer_types": ["full_attention", "sliding_attention", "linear_attention"]}, "layer_types"),
        (OLMO | {"linear_num_key_heads": 3}, "linear_num_value_heads"),
        (OLMO | {"linear_key_head_dim": 513}, "linear_key_head_dim"),
        (OLMO | {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
        (OLMO | {"hidden_act": "gelu"}, "hidden_act"),
        (KIMI | {"linear_attn_config": KDA | {"kda_layers": [0, 2]}}, "linear_attn_config.full_attn_layers"),
        (KIMI | {"linear_attn_config": KDA | {"head_dim": 513}}, "linear_attn_config.head_dim"),
        (KIMI | {"layer_types": ["linear_attention"] * 3}, "layer_types"),
        (KIMI | {"mlp_layer_types": ["dense", "expert", "sparse"]}, "mlp_layer_types"),
        (KIMI | {"mla_use_nope": False}, "mla_use_nope"),
        (KIMI | {"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        (KIMI | {"num_experts_per_token": 7}, "num_experts_per_token = 7"),
        (KIMI | {"num_expert_group": 4}, "num_expert_group = 4"),
        (KIMI | {"num_expert_group": 1, "n_group": 2}, "num_expert_group = 1 is not supported; supported: only 2"),
        (KIMI | {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
        (LING | {"head_dim": 513}, "head_dim"),
        (LING | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LING | {"kda_lower_bound": 5.0}, "kda_lower_bound"),
        (LING | {"use_mla_nope": True}, "use_mla_nope"),
        (LING | {"no_kda_lora": False}, "no_kda_lora"),
        (LING | {"gated_attention_proj_granularity_type": "element_wise"}, "gated_attention_proj_granularity_type"),
        (LING | {"moe_shared_expert_intermediate_size": 48}, "moe_shared_expert_intermediate_size"),
        (LING | {"score_function": "softmax"}, "score_function"),
        (LING | {"num_experts": 4}, "num_experts"),
        (LING | {"expert_swiglu_limit_list": [None, 0, 7.0]}, "expert_swiglu_limit_list"),
        (LING | {"layer_types": ["linear_attention"] * 3}, "layer_types"),
    ],
)
def test_what_cannot_be_is_named(config: dict[str, Any], key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=key):
        read(tmp_path, config)


def test_a_tensor_of_three_dimensions_is_a_vector_if_all_but_one_are_ones() -> None:
    with open_weights(golden_case("kimi-linear").folder) as files:
        name = "model.layers.0.self_attn.A_log"
        assert (files.shape(name), files.shape(f"{name}[:]")) == ((1, 1, 4, 1), (4,))
        assert files.read(Piece(f"{name}[:]", range(1, 4))).shape == (3,)
        for other in ("model.layers.0.self_attn.q_conv1d.weight[:]", "nothing[:]"):
            with pytest.raises(CheckpointError, match="is absent"):
                files.shape(other)
