"""Configs of families with latent attention: defaults, both spellings, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest

from motley.daemon.models.description.axes import Heads
from motley.daemon.models.description.model import expected_shapes, parameters, tensors
from motley.daemon.models.description.operations.attention import Warmth
from motley.daemon.models.description.operations.experts import Route, Routing
from motley.daemon.models.description.operations.rows import Scale
from motley.daemon.models.description.rope import Rope, YarnScaling
from motley.daemon.models.keys import ConfigError
from motley.orchestrator.known_models.shapes import SHAPES
from tests.models.configs import AXK1, AXK2, DEEPSEEK_V3, LONGCAT, MINICPM3, MISTRAL4, SARVAM_MLA, read, without
from tests.models.test_reading import attentions


def test_mistral4_s_queries_grow_and_latent_rows_are_cached_as_values(tmp_path: Path) -> None:
    model = read(tmp_path, MISTRAL4 | {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.0})
    assert model.ropes == {"main": Rope(10000.0, 8, YarnScaling(128.0, 8192, 32.0, 1.0, True, 1.0))}
    (attend, *_) = attentions(model)
    assert (attend.heads, attend.warmth) == (Heads(4, 1, 40), Warmth(0.1, 8192))
    assert attend.v == attend.k
    assert attend.scale == pytest.approx(24**-0.5 * (0.1 * log(128) + 1) ** 2)
    assert (model.context, model.expert_layers) == (8192 * 128, [0, 1, 2])
    rule = Routing(2, normalised=True, epsilon=1e-20, groups=2, groups_kept=1, scaling=2.0)
    assert {each.routing for each in model.operations if isinstance(each, Route)} == {rule}
    places = {tensor.name: {part.tensor for part in tensor.parts} for tensor in tensors(model)}
    stacked = places["model.layers.0.mlp.experts.5.up_proj.weight"]
    assert stacked == {"model.layers.0.mlp.experts.gate_up_proj[5]"}


def test_mistral4_s_queries_have_a_latent_row_unless_it_is_null(tmp_path: Path) -> None:
    silent = expected_shapes(read(tmp_path, without(MISTRAL4, "q_lora_rank")))
    assert silent["model.layers.0.self_attn.q_a_proj.weight"] == (1024, 64)
    none = expected_shapes(read(tmp_path, MISTRAL4 | {"q_lora_rank": None}))
    assert "model.layers.0.self_attn.q_a_proj.weight" not in none


def test_the_text_of_mistral_3_may_be_a_mistral4(tmp_path: Path) -> None:
    part = read(tmp_path, {"model_type": "mistral3", "text_config": MISTRAL4, "vision_config": {"hidden_size": 8}})
    assert replace(part, prefixes=()) == read(tmp_path, MISTRAL4)


def test_sarvam_105b_is_a_deepseek_in_both_spellings(tmp_path: Path) -> None:
    today = read(tmp_path, SARVAM_MLA | {"rope_parameters": YARN})
    assert today == read(tmp_path, DEEPSEEK_V3 | {"rope_parameters": YARN, "routed_scaling_factor": 2.5})
    published = without(SARVAM_MLA, "n_routed_experts") | {"num_experts": 6, "num_shared_experts": 1, "head_dim": 40}
    scaling = {key: value for key, value in YARN.items() if not key.startswith("rope_")} | {"type": "deepseek_yarn"}
    assert read(tmp_path, published | {"rope_theta": 500.0, "rope_scaling": scaling}) == today


def test_minicpm3_scales_embeddings_residuals_and_logits(tmp_path: Path) -> None:
    model = read(tmp_path, MINICPM3)
    scales = [each.by for each in model.operations if isinstance(each, Scale)]
    assert scales == pytest.approx([1.4 / 3**0.5] * 6 + [256 / 64])
    assert (model.embedding_scale, model.tied, model.experts) == (12.0, True, None)
    none = read(tmp_path, MINICPM3 | {"scale_depth": None, "dim_model_base": None, "scale_emb": 1})
    assert not any(isinstance(each, Scale) for each in none.operations)
    assert none.embedding_scale == 1.0


def test_minicpm3_s_heads_are_as_published_where_a_config_is_silent(tmp_path: Path) -> None:
    sizes = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    model = read(tmp_path, {key: value for key, value in MINICPM3.items() if key not in sizes})
    assert {attend.heads for attend in attentions(model)} == {Heads(4, 1, 32 + 256)}
    assert model.ropes == {"main": Rope(10000.0, 32)}
    shapes = expected_shapes(model)
    assert shapes["model.layers.0.self_attn.q_a_proj.weight"] == (768, 64)
    assert shapes["model.layers.0.self_attn.v_up_proj.weight"] == (64, 256)


def test_a_x_k2_has_gates_on_norms_before_attention_and_experts(tmp_path: Path) -> None:
    names = expected_shapes(read(tmp_path, AXK2 | {"first_k_dense_replace": 1})).keys()
    gated = {f"model.layers.{n}.input_layernorm.mlp.fc1.weight" for n in range(3)}
    gated |= {f"model.layers.{n}.post_attention_layernorm.mlp.fc1.weight" for n in (1, 2)}
    assert {name for name in names if name.endswith("mlp.fc1.weight")} == gated
    assert "model.layers.0.post_attention_layernorm.weight" in names


def test_a_x_k1_s_experts_have_a_norm_and_no_correction(tmp_path: Path) -> None:
    model, usual = (
        read(tmp_path, AXK1),
        read(tmp_path, AXK1 | {"model_type": "deepseek_v3", "first_k_dense_replace": 1}),
    )
    shapes, others = expected_shapes(model), expected_shapes(usual)
    norms = {f"model.layers.{layer}.post_mlp_layernorm.weight" for layer in (1, 2)}
    assert shapes.keys() - others.keys() == norms
    corrections = {f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)}
    assert others.keys() - shapes.keys() == corrections
    rule = Routing(2, "sigmoid", normalised=True, epsilon=1e-20, groups=3, groups_kept=2, scaling=2.5)
    assert {each.routing for each in model.operations if isinstance(each, Route)} == {rule}
    assert "model.layers.0.post_mlp_layernorm." in model.ignored
    assert "model.layers.1.post_mlp_layernorm." not in model.ignored
    sizes = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    silent = read(tmp_path, {key: value for key, value in AXK1.items() if key not in sizes})
    assert {attend.heads for attend in attentions(silent)} == {Heads(4, 1, 512 + 64)}


YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (MISTRAL4 | {"rope_scaling": YARN}, "rope_scaling"),
        (MISTRAL4 | {"rope_parameters": YARN | {"rope_type": "linear"}}, "rope_parameters.rope_type"),
        (MISTRAL4 | {"rope_parameters": YARN}, "rope_parameters.llama_4_scaling_beta"),
        (MISTRAL4 | {"n_group": 4}, "n_group"),
        (AXK1 | {"n_group": 4}, "n_group"),
        (AXK1 | {"moe_layer_freq": 2}, "moe_layer_freq"),
        (AXK2 | {"gated_norm_rank": 0}, "gated_norm_rank"),
        (AXK2 | {"index_head_dim": 4}, "index_head_dim"),
        (AXK2 | {"q_lora_rank": 0}, "q_lora_rank"),
        (AXK1 | {"scoring_func": "softmax"}, "scoring_func"),
        (AXK1 | {"topk_method": "greedy"}, "topk_method"),
        (MISTRAL4 | {"attention_bias": True}, "attention_bias"),
        (MISTRAL4 | {"scoring_func": "sigmoid"}, "scoring_func"),
        (SARVAM_MLA | {"num_experts": 4}, "num_experts"),
        (MINICPM3 | {"rope_interleave": True}, "rope_interleave"),
        (MINICPM3 | {"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, config: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} (= .*supported: |is absent; expected)"):
        read(tmp_path, config)


def test_longcat_s_layers_are_two_here(tmp_path: Path) -> None:
    model = read(tmp_path, LONGCAT)
    assert ([layer.y.axis.size for layer in model.layers], model.expert_layers) == ([128, 64, 128, 64], [0, 2])
    assert (model.further_streams, model.ropes) == (1, {"main": Rope(1e7, 8)})
    assert {attend.scale for attend in attentions(model)} == {24**-0.5 * 2**0.5}
    assert {each.by for each in model.operations if isinstance(each, Scale)} == {2**0.5}
    (routing,) = {replace(each.routing, correction=None) for each in model.operations if isinstance(each, Route)}
    assert routing == Routing(2, scaling=6.0, identities=3)
    shapes = expected_shapes(model)
    attended = {name.partition(".q_a_proj")[0] for name in shapes if "q_a_proj" in name}
    assert attended == {f"model.layers.{layer}.self_attn.{own}" for layer in (0, 1) for own in (0, 1)}
    assert shapes["model.layers.1.mlp.router.e_score_correction_bias"] == (9,)
    assert "model.layers.1.mlps.1.down_proj.weight" in shapes
    assert not any(".experts.6." in name for name in shapes)


def test_longcat_s_rows_may_have_experts_alone(tmp_path: Path) -> None:
    model = read(tmp_path, LONGCAT | {"zero_expert_num": 0})
    assert [(each.kept, each.routing.identities) for each in model.operations if isinstance(each, Route)] == [
        (None, 0)
    ] * 2
    assert expected_shapes(model)["model.layers.0.mlp.router.classifier.weight"] == (6, 64)


def test_the_sizes_of_longcat_s_published_model(tmp_path: Path) -> None:
    assert round(parameters(read(tmp_path, SHAPES["longcat-flash-560b"])) / 1e9) == 561


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 3}, "num_hidden_layers"),
        ({"norm_topk_prob": True}, "norm_topk_prob"),
        ({"zero_expert_type": "drop"}, "zero_expert_type"),
        ({"router_bias": True}, "router_bias"),
        ({"mla_scale_kv_lora": False}, "mla_scale_kv_lora"),
        ({"q_lora_rank": 0}, "q_lora_rank"),
        ({"qk_head_dim": 32}, "qk_head_dim"),
        ({"head_dim": 16}, "head_dim"),
        ({"moe_topk": 7}, "moe_topk"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_longcat_refuses(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        read(tmp_path, LONGCAT | changes)
