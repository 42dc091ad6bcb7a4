"""Configs of families with experts that are mostly others': defaults, both spellings, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import pytest

from motley.daemon.models.description.axes import Heads
from motley.daemon.models.description.model import expected_shapes, tensors
from motley.daemon.models.description.operations.experts import Route, Routing
from motley.daemon.models.description.operations.rows import Activation, Gated, Join, Norm
from motley.daemon.models.description.rope import Llama3Scaling, Rope
from motley.daemon.models.keys import ConfigError
from tests.models.configs import (
    FLEX_OLMO,
    FLINT,
    GLM4_MOE,
    KOLIBRI,
    LAGUNA,
    MELLUM,
    QWEN2,
    QWEN3_MOE,
    SARVAM_MOE,
    STEP,
    read,
    without,
)
from tests.models.test_reading import attentions, windows


def test_sarvam_30b_is_a_glm_whose_heads_turn_whole(tmp_path: Path) -> None:
    model = read(tmp_path, SARVAM_MOE | {"head_dim": 16, "attention_bias": True})
    told = {"head_dim": 16, "use_qk_norm": True, "partial_rotary_factor": 1.0, "rope_theta": 8e6}
    usual = read(tmp_path, GLM4_MOE | told | {"attention_bias": True, "routed_scaling_factor": 2.5})
    assert model.ropes == {"main": Rope(8e6, 16)}
    assert [tensor.name for tensor in tensors(model)] == [tensor.name for tensor in tensors(usual)]
    published = without(SARVAM_MOE, "n_routed_experts") | {"num_experts": 6, "num_shared_experts": 1}
    published |= {"use_qkv_bias": True, "head_dim": 16}
    assert replace(read(tmp_path, published), family="") == replace(model, family="")
    places = {tensor.name: {part.tensor for part in tensor.parts} for tensor in tensors(model)}
    fused = {f"model.layers.0.{module}.query_key_value.weight" for module in ("attention", "self_attn")}
    assert places["model.layers.0.self_attn.k_proj.weight"] == fused
    assert places["model.layers.1.mlp.gate.e_score_correction_bias"] == {"model.layers.1.mlp.gate.expert_bias"}
    assert "model.word_embeddings.weight" in places["model.embed_tokens.weight"]


def test_flint_sees_everything_in_the_first_two_layers_and_the_last(tmp_path: Path) -> None:
    model = read(tmp_path, FLINT | {"num_hidden_layers": 5})
    assert [(each.window, each.rope) for each in attentions(model)] == [
        *[(0, None)] * 2,
        *[(513, "main")] * 2,
        (0, None),
    ]
    assert model.expert_layers == [2, 3, 4]
    (routing,) = {each.routing for each in model.operations if isinstance(each, Route)}
    assert routing == Routing(2, "sigmoid", normalised=True)


def test_every_fifth_layer_of_kolibri_sees_everything(tmp_path: Path) -> None:
    model = read(tmp_path, KOLIBRI | {"num_hidden_layers": 6})
    assert windows(model) == [513, 513, 513, 513, 0, 513]
    assert {(each.routing.scores, each.routing.normalised) for each in model.operations if isinstance(each, Route)} == {
        ("sigmoid of chosen", False)
    }


def test_mellum_s_layers_with_windows_have_a_rotary_embedding_of_their_own(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    model = read(tmp_path, MELLUM | {"layer_types": kinds, "mlp_layer_types": ["sparse", "dense", "sparse"]})
    assert model.ropes == {"full": Rope(5e5, 128), "sliding": Rope(1e4, 128)}
    seen = [(attend.window, attend.rope) for attend in attentions(model)]
    assert seen == [(1024, "sliding"), (0, "full"), (1024, "sliding")]
    assert model.expert_layers == [0, 2]
    assert {each.routing for each in model.operations if isinstance(each, Route)} == {Routing(2, normalised=True)}
    assert read(tmp_path, MELLUM).expert_layers == [0, 1, 2]
    assert windows(read(tmp_path, MELLUM)) == [0, 0, 0]


def test_laguna_has_as_many_query_heads_in_a_layer_as_its_config_lists(tmp_path: Path) -> None:
    told = {"num_attention_heads_per_layer": [4, 6, 2], "layer_types": KINDS, "moe_routed_scaling_factor": 2.5}
    model = read(tmp_path, LAGUNA | told)
    assert [attend.heads for attend in attentions(model)] == [Heads(count, 2, 16) for count in (4, 6, 2)]
    assert [(attend.window, attend.rope) for attend in attentions(model)] == [
        (0, "full"),
        (512, "sliding"),
        (512, "sliding"),
    ]
    assert model.ropes == {"full": Rope(5e5, 8), "sliding": Rope(1e4, 16)}
    assert model.expert_layers == [1, 2]
    (routing,) = {replace(each.routing, correction=None) for each in model.operations if isinstance(each, Route)}
    assert routing == Routing(2, "sigmoid", normalised=True, scaling=2.5)
    opened = [each.activation for each in model.operations if isinstance(each, Gated) and "attention" in each.y.name]
    assert opened == [Activation.SOFTPLUS] * 3
    shapes = expected_shapes(model)
    assert shapes["model.layers.1.self_attn.g_proj.weight"] == (6, 64)
    assert shapes["model.layers.1.mlp.shared_experts.up_proj.weight"] == (512, 64)
    places = {tensor.name: {part.tensor for part in tensor.parts} for tensor in tensors(model)}
    bias, up = "gate.e_score_correction_bias", "shared_experts.up_proj.weight"
    assert places[f"model.layers.2.mlp.{bias}"] == {"model.layers.2.mlp.experts.e_score_correction_bias"}
    assert places[f"model.layers.2.mlp.{up}"] == {"model.layers.2.mlp.shared_expert.up_proj.weight"}


def test_laguna_s_gates_may_be_of_elements(tmp_path: Path) -> None:
    of_elements = {"gating": "per-element", "gating_types": ["per_element"] * 3}
    shapes = expected_shapes(read(tmp_path, LAGUNA | of_elements))
    assert shapes["model.layers.1.self_attn.g_proj.weight"] == (64, 64)
    assert read(tmp_path, LAGUNA | {"gating": True, "gating_types": ["per_head"] * 3}) == read(tmp_path, LAGUNA)
    older = {"mlp_only_layers": [0], "decoder_sparse_step": 1, "norm_topk_prob": True}
    assert read(tmp_path, LAGUNA | older) == read(tmp_path, LAGUNA)


def test_flex_olmo_has_norms_after_its_blocks(tmp_path: Path) -> None:
    model, usual = read(tmp_path, FLEX_OLMO), expected_shapes(read(tmp_path, FLEX_OLMO | {"model_type": "olmoe"}))
    norms = {f"model.layers.{layer}.post_feedforward_layernorm.weight" for layer in range(3)}
    assert expected_shapes(model).keys() - usual.keys() == norms
    assert model.ropes == {"main": Rope(5e5, 16)}


KINDS = ["full_attention", "sliding_attention", "sliding_attention"]


def test_step_is_read_alike_in_both_spellings(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0}
    rope["original_max_position_embeddings"] = 128
    bases = {"full": {"rope_theta": 5e6, "partial_rotary_factor": 0.5} | rope, "sliding": {"rope_theta": 1e4}}
    today = without(without(STEP, "moe_num_experts"), "moe_top_k") | {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "layer_types": KINDS,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_sliding_attention_heads": 6,
        "num_nextn_predict_layers": 1,
        "rope_parameters": {f"{kind}_attention": own for kind, own in bases.items()},
        "swiglu_limits": [0.0, 7.0, None],
        "swiglu_limits_shared": [None, 16.0, 0],
    }
    published = without(STEP, "num_key_value_heads") | {
        "num_attention_groups": 2,
        "sliding_window": 16,
        "layer_types": [*KINDS, "full_attention"],
        "moe_layers_enum": "1, 2,3",
        "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 6},
        "num_nextn_predict_layers": 1,
        "rope_theta": [5e6, 1e4, 1e4, 5e6],
        "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
        "rope_scaling": rope,
        "swiglu_limits": [0, 7, 0, 0],
        "swiglu_limits_shared": [0, 16, 0, 0],
        "use_qk_norm": True,
        "use_head_wise_attn_gate": True,
    }
    model = read(tmp_path, today)
    assert read(tmp_path, published) == model
    assert model.ropes["sliding"] == Rope(1e4, 128)
    assert model.ropes["full"] == Rope(5e6, 64, Llama3Scaling(2.0, 1.0, 32.0, 128))
    assert [attend.heads for attend in attentions(model)] == [Heads(4, 2, 128), *[Heads(6, 2, 128)] * 2]
    assert (windows(model), model.expert_layers) == ([0, 16, 16], [1, 2])
    assert {each.offset for each in model.operations if isinstance(each, Norm)} == {1.0}
    assert (
        read(tmp_path, {"model_type": "step3p7", "text_config": published, "vision_config": {}}).layers == model.layers
    )
    places = {tensor.name: {part.tensor for part in tensor.parts} for tensor in tensors(model)}
    assert "model.layers.1.moe.up_proj.weight[5]" in places["model.layers.1.mlp.experts.5.up_proj.weight"]
    assert "model.layers.1.moe.gate.weight" in places["model.layers.1.mlp.gate.weight"]


def test_gates_of_step_are_bounded_after_they_are_opened(tmp_path: Path) -> None:
    """As SiLU grows where it is positive, what opens to the limit bounds what is opened."""
    limits = {"swiglu_limits": [0, 0.5, 0], "swiglu_limits_shared": [3.0, 0, 0]}
    model = read(tmp_path, STEP | limits | {"mlp_layer_types": ["dense", "sparse", "sparse"]})
    bounded = [each for each in model.operations if isinstance(each, Gated) and each.limits]
    assert [each.gate.name for each in bounded] == ["layers.0.mlp.gate", "layers.1.mlp.experts.{expert}.gate"]
    gates, ups = zip(*(each.limits for each in bounded if each.limits), strict=True)
    assert [gate / (1 + exp(-gate)) for gate in gates] == pytest.approx([3.0, 0.5])
    assert ups == (3.0, 0.5)


@pytest.mark.parametrize("size", [2, 6, 14, 16])
def test_a_gate_of_step_opens_a_whole_head(size: int, tmp_path: Path) -> None:
    model = read(tmp_path, STEP | {"head_dim": size})
    joins = [each for each in model.layers[0].operations if isinstance(each, Join)]
    assert len(joins) == size.bit_length() + size.bit_count() - 2
    assert joins[-1].y.axis == attentions(model)[0].y.axis
    assert expected_shapes(model)["model.layers.0.self_attn.g_proj.weight"] == (4, 64)


@pytest.mark.parametrize("prefix", ["thinker.model.", "thinker.model.language_model."])
def test_the_text_of_an_omni_is_in_its_thinker(prefix: str, tmp_path: Path) -> None:
    rope = {"rope_type": "default", "interleaved": True, "mrope_section": [4, 2, 2]}
    text = QWEN3_MOE | {"model_type": "qwen3_omni_moe_text", "rope_scaling": rope}
    thinker = {"model_type": "qwen3_omni_moe_thinker", "text_config": text, "audio_config": {}}
    model = read(tmp_path, {"model_type": "qwen3_omni_moe", "thinker_config": thinker, "talker_config": {}})
    assert replace(model, prefixes=()) == read(tmp_path, QWEN3_MOE | {"norm_topk_prob": True, "rope_theta": 1e6})
    assert replace(read(tmp_path, thinker), prefixes=()) == replace(model, prefixes=())
    places = {tensor.name: {part.tensor for part in tensor.parts} for tensor in tensors(model)}
    assert f"{prefix}layers.0.mlp.experts.3.up_proj.weight" in places["model.layers.0.mlp.experts.3.up_proj.weight"]
    assert "thinker.lm_head.weight" in places["lm_head.weight"]


def test_the_text_of_qwen_2_5_omni_is_a_qwen2(tmp_path: Path) -> None:
    thinker = {"text_config": QWEN2 | {"model_type": "qwen2_5_omni_text"}}
    model = read(tmp_path, {"model_type": "qwen2_5_omni", "thinker_config": thinker})
    assert replace(model, prefixes=()) == read(tmp_path, QWEN2)
    with pytest.raises(ConfigError, match=r"text_config\.model_type = .*supported: qwen2_5_omni_text"):
        read(tmp_path, {"model_type": "qwen2_5_omni", "thinker_config": {"text_config": QWEN2}})
    with pytest.raises(ConfigError, match="text_config is absent"):
        read(tmp_path, {"model_type": "qwen3_omni_moe"})


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (SARVAM_MOE | {"num_experts": 4}, "num_experts"),
        (SARVAM_MOE | {"num_shared_experts": 2, "n_shared_experts": 1}, "num_shared_experts"),
        (SARVAM_MOE | {"scoring_func": "softmax"}, "scoring_func"),
        (MELLUM | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, "rope_parameters"),
        (STEP | {"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate"),
        (STEP | {"moe_router_activation": "softmax"}, "moe_router_activation"),
        (STEP | {"moe_top_k": 7}, "moe_top_k"),
        (STEP | {"moe_layers_enum": "1,x"}, "moe_layers_enum"),
        (STEP | {"moe_layers_enum": "3"}, "moe_layers_enum"),
        (STEP | {"num_sliding_attention_heads": 5}, "num_sliding_attention_heads"),
        (STEP | {"attention_other_setting": {"head_dim": 64}}, "attention_other_setting.head_dim"),
        (STEP | {"swiglu_limits": [7.0]}, "swiglu_limits"),
        (STEP | {"swiglu_limits": [7.0, -1.0, 0]}, "swiglu_limits"),
        (STEP | {"rope_theta": [1e4, 1e4]}, "rope_theta"),
        (STEP | {"rope_theta": 0}, "rope_theta"),
        (FLINT | {"mlp_only_layers": [7]}, "mlp_only_layers"),
        (FLINT | {"layer_types": ["full_attention"]}, "layer_types"),
        (KOLIBRI | {"num_experts_per_tok": 7}, "num_experts_per_tok"),
        (FLEX_OLMO | {"clip_qkv": 8.0}, "clip_qkv"),
        (MELLUM | {"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types"),
        (LAGUNA | {"attention_bias": True}, "attention_bias"),
        (LAGUNA | {"gating": False}, "gating"),
        (LAGUNA | {"gating_types": ["per_head", "per_element", "per_head"]}, "gating_types"),
        (LAGUNA | {"num_attention_heads_per_layer": [4, 6]}, "num_attention_heads_per_layer"),
        (LAGUNA | {"num_attention_heads_per_layer": [4, 6, 3]}, "num_attention_heads_per_layer"),
        (LAGUNA | {"num_key_value_heads_per_layer": [2, 2, 1]}, "num_key_value_heads_per_layer"),
        (LAGUNA | {"mlp_only_layers": [1]}, "mlp_only_layers"),
        (LAGUNA | {"moe_router_logit_softcapping": 30.0}, "moe_router_logit_softcapping"),
        (LAGUNA | {"moe_apply_router_weight_on_input": True}, "moe_apply_router_weight_on_input"),
        (LAGUNA | {"norm_topk_prob": False}, "norm_topk_prob"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, config: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} = .*supported: "):
        read(tmp_path, config)
