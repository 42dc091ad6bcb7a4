"""Configs of families with several residual streams: what they say, both spellings, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from motley.daemon.models.cutting.profile import activations, profile
from motley.daemon.models.description.axes import Heads, RecurrentHeads
from motley.daemon.models.description.model import Model, expected_shapes, parameters, tensors
from motley.daemon.models.description.operations.recurrence import DeltaRule
from motley.daemon.models.description.operations.rows import Gated, Norm, SideBySide, SoftCap, StatisticalTopK, Times
from motley.daemon.models.description.operations.streams import ReadStreams, StreamGates, WriteStreams
from motley.daemon.models.description.rope import Rope
from motley.daemon.models.keys import ConfigError
from motley.orchestrator.known_models.shapes import SHAPES
from tests.models.configs import GEMMA3N, GLM5_NEXT, HY_V4, LLAMA, read, without
from tests.models.test_reading import attentions, columns, windows


def rules(model: Model) -> set[tuple[float, ...]]:
    """Of the gates of streams: parts, epsilon, written, least, rounds."""
    found = (each for each in model.operations if isinstance(each, StreamGates))
    return {(each.scale.out.size, each.epsilon, each.written, each.least, each.rounds) for each in found}


def limits(model: Model) -> dict[str, tuple[float, float] | None]:
    """Of MLPs and experts."""
    return {each.y.name: each.limits for each in model.operations if isinstance(each, Gated) and ".mlp" in each.y.name}


@pytest.mark.parametrize("config", [HY_V4, GLM5_NEXT])
def test_streams_are_between_layers_alone(config: dict[str, Any], tmp_path: Path) -> None:
    """Embeddings enter the first layer, and the last ends with what the head reads."""
    model = read(tmp_path, config | {"hc_mult": 3})
    assert [layer.x.axis.size for layer in model.layers] == [64, *[3 * 64] * (len(model.layers) - 1)]
    assert model.layers[-1].y.axis.size == 64
    assert model.further_streams == profile(model, "fp32", 32).further_streams == 2
    kinds = [type(each) for each in model.operations]
    assert sum(isinstance(each, SideBySide) and len({*each.xs}) == 1 for each in model.operations) == 1
    assert kinds.count(WriteStreams) == 2 * len(model.layers)
    assert kinds.count(ReadStreams) == 2 * len(model.layers) + 1
    wider = read(tmp_path, config | {"hc_mult": 4})
    assert activations(wider) > activations(model) > activations(read(tmp_path, config | {"hc_mult": 2}))


def test_models_of_one_stream_have_no_further_ones(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA).further_streams == 0


def test_hy4_s_streams_are_not_mixed(tmp_path: Path) -> None:
    model = read(tmp_path, HY_V4 | {"hc_magnitude": 3.0, "hc_eps": 1e-3, "swiglu_limit": 7.0})
    assert rules(model) == {(2, 1e-3, 3.0, 1e-3, 0), (1, 1e-3, 0.0, 0.0, 0)}
    assert rules(read(tmp_path, HY_V4)) == {(2, 1e-6, 2.0, 1e-6, 0), (1, 1e-6, 0.0, 0.0, 0)}
    assert model.ropes == {"main": Rope(10000.0, 8)}
    (attend, *_) = attentions(model)
    assert (attend.heads, attend.v) == (Heads(4, 1, 40), None)
    assert attend.sinks is not None
    opened = [each.gate.name for each in model.operations if isinstance(each, Gated) and "attention" in each.y.name]
    assert opened == [f"layers.{number}.attention.gate" for number in range(3)]
    assert expected_shapes(model)["model.layers.0.self_attn.gate_proj.weight"] == (4 * 16, 64)
    assert limits(model) == {
        "layers.0.mlp.gated": None,
        **{f"layers.{number}.mlp.shared.gated": None for number in (1, 2)},
        **{f"layers.{number}.mlp.experts.{{expert}}.gated": (7.0, 7.0) for number in (1, 2)},
    }


def test_layers_of_hy4_share_indexers_that_choose_what_rows_see(tmp_path: Path) -> None:
    model = read(tmp_path, HY_V4 | {"num_hidden_layers": 10, "index_topk": 48})
    assert [number for number, layer in enumerate(model.layers) if not layer.follows] == [0, 1, 5, 9]
    chosen = [layer.attention.chosen for layer in model.layers if layer.attention]
    assert [(each.name, each.axis.size) for each in chosen if each] == [
        (f"layers.{number}.attention.chosen", 48) for number in (0, 1, 1, 1, 1, 5, 5, 5, 5, 9)
    ]
    published = read(tmp_path, HY_V4 | {"layer_types": ["deepseek_sparse_attention"] * 3})
    assert published == read(tmp_path, HY_V4 | {"layer_types": None})
    assert published.context == 256
    places = {tensor.name: {part.tensor for part in tensor.parts} for tensor in tensors(published)}
    assert "model.layers.1.hc_attn_layer.hc_pre.hc_fn" in places["model.layers.1.attn_hc.fn"]
    assert "model.layers.1.hc_mlp_layer.hc_pre.hc_base" in places["model.layers.1.ffn_hc.base"]
    assert "model.layers.0.self_attn.learnable_sink_param" in places["model.layers.0.self_attn.sinks"]
    assert "model.layers.0.self_attn.linear_gate.weight" in places["model.layers.0.self_attn.gate_proj.weight"]
    assert "model.hc_head.hc_head_scale" in places["model.hc_head.hc_scale"]


def test_neighbours_turn_together_in_hy4_if_a_config_says_so(tmp_path: Path) -> None:
    halves = "model.layers.0.self_attn.q_halves_proj.weight"
    assert halves not in expected_shapes(read(tmp_path, HY_V4))
    assert halves in expected_shapes(read(tmp_path, HY_V4 | {"rope_interleave": True}))


def test_hy4_s_latent_norms_and_what_turns_together_are_others_where_it_sees(tmp_path: Path) -> None:
    def latent_epsilons(model: Model) -> set[float]:
        norms = (each for each in model.operations if isinstance(each, Norm))
        return {each.epsilon for each in norms if "latent" in each.y.name}

    assert latent_epsilons(read(tmp_path, HY_V4)) == {1e-6}
    text = HY_V4 | {"model_type": "hy_v4_vl_text", "rope_parameters": {"rope_theta": 500.0, "mrope_section": [2, 1, 1]}}
    model = read(tmp_path, {"model_type": "hy_v4_vl", "text_config": text, "vision_config": {"hidden_size": 8}})
    assert latent_epsilons(model) == {1e-5}
    assert model.ropes == {"main": Rope(500.0, 8)}
    assert "model.layers.0.self_attn.q_halves_proj.weight" in expected_shapes(model)
    silent = read(tmp_path, without(text, "moe_intermediate_size"))
    assert expected_shapes(silent)["model.layers.1.mlp.experts.0.up_proj.weight"] == (2048, 64)


def test_hy4_preview_has_as_many_parameters_as_its_makers_say(tmp_path: Path) -> None:
    """Its layers, embeddings and head have 769,907,408,797, those of its 21 indexers of 32 heads among them."""
    model = read(tmp_path, SHAPES["hy4-preview"])
    assert parameters(model) == 769_907_408_797


def test_glm_5_3_s_streams_are_mixed(tmp_path: Path) -> None:
    model = read(tmp_path, GLM5_NEXT | {"hc_sinkhorn_iters": 7, "swiglu_limit": 3.0})
    assert rules(model) == {(3, 1e-6, 2.0, 0.0, 7)}
    assert [layer.attention is not None for layer in model.layers] == [False, False, False, True]
    (attend,) = attentions(model)
    assert (attend.heads, attend.rope, attend.scale) == (Heads(4, 1, 32), None, 16**-0.5)
    assert {*limits(model).values()} == {(3.0, 3.0)}
    deltas = [each for each in model.operations if isinstance(each, DeltaRule)]
    assert {(each.heads, each.floor, each.squashed) for each in deltas} == {
        (RecurrentHeads(64, 64, 128, 128), -5.0, True)
    }
    last = next(each for each in reversed([*model.layers[-1].operations]) if isinstance(each, ReadStreams))
    assert last.gates == (0.25,) * 4
    assert model.expert_layers == [1, 2, 3]
    assert read(tmp_path, without(GLM5_NEXT, "first_k_dense_replace")).expert_layers == [3]


def test_glm_5_3_is_read_alike_in_both_spellings(tmp_path: Path) -> None:
    today = GLM5_NEXT | {"linear_head_dim": 16, "linear_num_heads": 4, "linear_conv_kernel_dim": 3, "head_dim": 0}
    model = read(tmp_path, today | {"linear_lower_bound": -2.0})
    of = {"head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 3, "gate_lower_bound": -2.0}
    kinds = [*["linear_attention"] * 3, "deepseek_sparse_attention"]
    published = GLM5_NEXT | {"linear_attn_config": of, "mhc": True, "mla_use_nope": True, "layer_types": kinds}
    assert read(tmp_path, published) == model
    text = read(tmp_path, {"model_type": "glm5_next", "text_config": published, "vision_config": {"depth": 1}})
    assert replace(text, prefixes=()) == model
    none = {
        each.floor
        for each in read(tmp_path, today | {"linear_lower_bound": None}).operations
        if isinstance(each, DeltaRule)
    }
    assert none == {0.0}
    safe = read(tmp_path, GLM5_NEXT | {"linear_attn_config": of | {"gate_lower_bound": None}})
    assert {each.floor for each in safe.operations if isinstance(each, DeltaRule)} == {-5.0}
    places = {tensor.name: {part.tensor for part in tensor.parts} for tensor in tensors(text)}
    assert "model.layers.1.hc_ffn_fn" in places["model.layers.1.ffn_hc.fn"]
    assert "model.language_model.layers.1.hc_ffn_fn" in places["model.layers.1.ffn_hc.fn"]
    assert "model.layers.0.self_attn.forget_gate.f_a_proj.weight" in places["model.layers.0.self_attn.f_a_proj.weight"]
    assert "model.layers.0.self_attn.forget_gate.A_log[:]" in places["model.layers.0.self_attn.decay"]


def test_rows_of_glm_5_3_see_pools_that_an_indexer_chooses_and_what_follows(tmp_path: Path) -> None:
    model = read(tmp_path, GLM5_NEXT | {"index_topk": 48, "index_kpool": 8})
    assert model.context == GLM5_NEXT["max_position_embeddings"]
    (choose,) = [layer.choice for layer in model.layers if layer.choice]
    assert (choose.layer, choose.rope, choose.block, choose.y.axis.size) == (3, None, 8, 48 + 7)
    assert (choose.heads, choose.cached) == (Heads(32, 1, 128), 256)
    shapes = expected_shapes(model)
    assert shapes["model.layers.3.self_attn.indexer.index_kpool_compress_gate"] == (128, 64)
    assert shapes["model.layers.3.self_attn.indexer.index_kpool_compress_ape"] == (8, 128)
    listed = {"index_topk_pattern": "SSSF", "index_topk": 48, "index_kpool": 8}
    assert read(tmp_path, GLM5_NEXT | listed | {"indexer_types": ["full"] * 4}) == model


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (HY_V4 | {"hc_mult": 1}, "hc_mult"),
        (HY_V4 | {"hc_mult": 9}, "hc_mult"),
        (HY_V4 | {"hc_eps": 0}, "hc_eps"),
        (HY_V4 | {"hc_magnitude": -1.0}, "hc_magnitude"),
        (HY_V4 | {"swiglu_limit": 0.0}, "swiglu_limit"),
        (HY_V4 | {"layer_types": ["full_attention"] * 3}, "layer_types"),
        (HY_V4 | {"gating_type": "head_wise"}, "gating_type"),
        (HY_V4 | {"attention_bias": True}, "attention_bias"),
        (HY_V4 | {"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types"),
        (GLM5_NEXT | {"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters"),
        (GLM5_NEXT | {"mhc": False}, "mhc"),
        (GLM5_NEXT | {"mla_use_nope": False}, "mla_use_nope"),
        (GLM5_NEXT | {"qk_rope_head_dim": 8}, "qk_rope_head_dim"),
        (GLM5_NEXT | {"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail"),
        (GLM5_NEXT | {"index_topk": 40}, "index_topk"),
        (GLM5_NEXT | {"indexer_types": ["full", "full", "full", "shared"]}, "indexer_types"),
        (GLM5_NEXT | {"index_topk_freq": 3}, "indexer_types"),
        (GLM5_NEXT | {"linear_lower_bound": 1.0}, "linear_lower_bound"),
        (GLM5_NEXT | {"linear_head_dim": 1024}, "linear_head_dim"),
        (GLM5_NEXT | {"layer_types": ["linear_attention"] * 4}, "layer_types"),
        (LLAMA | {"model_type": "deepseek_v4"}, "model_type"),
    ],
)
def test_what_cannot_be_is_named(config: dict[str, Any], key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=key):
        read(tmp_path, config)


def test_gemma3n_computes_with_the_first_of_its_streams(tmp_path: Path) -> None:
    model = read(tmp_path, GEMMA3N | {"altup_num_inputs": 3})
    assert [layer.x.axis.size for layer in model.layers] == [64, 3 * 64, 3 * 64]
    assert (model.layers[-1].y.axis.size, model.further_streams, model.whole) == (64, 2, True)
    assert [attend.layer for attend in attentions(model)] == [0, 1, 1]
    assert windows(model) == [512, 0, 0]
    given = [each.gates for each in model.operations if isinstance(each, WriteStreams) and type(each.gates) is tuple]
    assert given == [(1.0, 1.0, 1.0), (0.0, 1.0, 1.0)] * 3
    unscaled = read(tmp_path, GEMMA3N | {"altup_correct_scale": False})
    assert [sum(isinstance(each, Times) for each in one.operations) for one in (model, unscaled)] == [3, 0]
    assert not any(name.endswith("correct_output_scale") for name in expected_shapes(unscaled))


def test_gemma3n_s_defaults(tmp_path: Path) -> None:
    model = read(tmp_path, GEMMA3N)
    assert model.ropes == {"full": Rope(1e6, 256), "sliding": Rope(1e4, 256)}
    older = GEMMA3N | {"rope_theta": 5000.0, "rope_local_base_freq": 100.0, "rope_scaling": None}
    assert read(tmp_path, older).ropes == {"full": Rope(5000.0, 256), "sliding": Rope(100.0, 256)}
    uncapped = read(tmp_path, GEMMA3N | {"final_logit_softcapping": None})
    assert [[each.cap for each in one.head if isinstance(each, SoftCap)] for one in (model, uncapped)] == [[30.0], []]
    shorter = without(without(GEMMA3N, "layer_types"), "num_kv_shared_layers") | {"num_hidden_layers": 35}
    by_default = read(tmp_path, shorter)
    assert [attend.window for attend in attentions(by_default)[:6]] == [512, 512, 512, 512, 0, 512]
    assert [attend.layer for attend in attentions(by_default)[18:24]] == [18, 19, 18, 18, 18, 18]
    closed = [each for each in by_default.operations if isinstance(each, StatisticalTopK)]
    assert [each.deviations for each in closed] == pytest.approx([1.6448536] * 10)
    assert not any(isinstance(each, StatisticalTopK) for each in model.operations)


def test_gemma3n_s_layers_have_widths_of_their_own(tmp_path: Path) -> None:
    assert columns(read(tmp_path, GEMMA3N | {"intermediate_size": [32, 64, 96]})) == {32, 64, 96}


def test_gemma3n_is_the_text_of_a_model_of_more(tmp_path: Path) -> None:
    text = without(GEMMA3N, "model_type") | {"model_type": "gemma3n_text"}
    whole = read(tmp_path, {"model_type": "gemma3n", "text_config": text, "vision_config": {}, "audio_config": {}})
    assert replace(whole, prefixes=()) == read(tmp_path, GEMMA3N)
    places = {part.tensor for tensor in tensors(whole) for part in tensor.parts}
    assert "model.language_model.layers.0.altup.prediction_coefs.weight" in places
    assert "model.language_model.altup_projections.0.weight" in places


def test_the_sizes_of_gemma3n_s_published_model(tmp_path: Path) -> None:
    """Of 6.87 billion parameters, files have 31 million for keys and values of layers that borrow them."""
    assert round(parameters(read(tmp_path, SHAPES["gemma-3n-e4b"])) / 1e9, 2) == 6.84


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"altup_active_idx": 1}, "altup_active_idx"),
        ({"altup_num_inputs": 9}, "altup_num_inputs"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_activation": "gelu"}, "hidden_activation"),
        ({"intermediate_size": [64, 64]}, "intermediate_size"),
        ({"intermediate_size": [64, 0, 64]}, "intermediate_size"),
        ({"activation_sparsity_pattern": [0.5, 0.5]}, "activation_sparsity_pattern"),
        ({"activation_sparsity_pattern": [0.5, 0.5, 1.0]}, "activation_sparsity_pattern"),
        ({"activation_sparsity_pattern": 0.5}, "activation_sparsity_pattern"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping"),
    ],
)
def test_gemma3n_refuses(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=named):
        read(tmp_path, GEMMA3N | changes)
