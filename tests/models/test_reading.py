"""Configs: both spellings read alike, and whatever would change the maths unnoticed is refused by name."""

from __future__ import annotations

from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest

from motley.daemon.models.cutting.profile import profile
from motley.daemon.models.description.axes import Heads, Kind, Value
from motley.daemon.models.description.model import Model, expected_shapes, tensors
from motley.daemon.models.description.operations.attention import Attend
from motley.daemon.models.description.operations.experts import Route, Routing
from motley.daemon.models.description.operations.rows import (
    Activation,
    Add,
    Clip,
    Gated,
    Linear,
    Norm,
    Scale,
    Sum,
    WholeNorm,
)
from motley.daemon.models.description.rope import ProportionalScaling, Rope
from motley.daemon.models.keys import ConfigError, Keys
from motley.daemon.models.reading import describe, read_model
from tests.models.configs import (
    DEEPSEEK_V3,
    ERNIE4_5,
    ERNIE4_5_MOE,
    EXAONE4,
    GEMMA3,
    GEMMA4,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GPT_OSS,
    GRANITE,
    LLAMA,
    LLAMA3,
    MINIMAX_M2,
    MISTRAL,
    MIXTRAL,
    OLMO2,
    OLMO3,
    OLMOE,
    PHI3,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    SEED_OSS,
    SMOLLM3,
    YARN,
    read,
    without,
)

QKV_BIASES = [f"self_attn.{letter}_proj.bias" for letter in "qkv"]
OUTPUT_BIAS = "self_attn.o_proj.bias"
MLP_BIASES = [f"mlp.{part}_proj.bias" for part in ("gate", "up", "down")]
QK_NORMS = [f"self_attn.{letter}_norm.weight" for letter in "qk"]


def attentions(model: Model) -> list[Attend]:
    return [layer.attention for layer in model.layers if layer.attention]


def windows(model: Model) -> list[int]:
    return [attend.window for attend in attentions(model)]


def epsilons(model: Model) -> set[float]:
    return {each.epsilon for each in model.operations if isinstance(each, Norm | WholeNorm)}


def columns(model: Model) -> set[int]:
    """Of all MLPs."""
    linear = [each for each in model.operations if isinstance(each, Linear)]
    return {w.out.size for each in linear for w in each.ws if w.out.kind is Kind.MLP}


def test_llama(tmp_path: Path) -> None:
    """All of it, and which operations make it."""
    model = read(tmp_path, LLAMA)
    assert (model.family, model.hidden, model.vocabulary, model.context, model.eos) == ("llama", 64, 100, 256, (2,))
    assert model.ropes == {"main": Rope(1e4, 16)}
    assert (model.tied, model.embedding_scale, model.experts) == (False, 1.0, None)
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (64, 64),
        "self_attn.k_proj.weight": (32, 64),
        "self_attn.v_proj.weight": (32, 64),
        "self_attn.o_proj.weight": (64, 64),
        "mlp.gate_proj.weight": (96, 64),
        "mlp.up_proj.weight": (96, 64),
        "mlp.down_proj.weight": (64, 96),
        "input_layernorm.weight": (64,),
        "post_attention_layernorm.weight": (64,),
    }
    assert expected_shapes(model) == {
        "model.embed_tokens.weight": (100, 64),
        "model.norm.weight": (64,),
        "lm_head.weight": (100, 64),
        **{f"model.layers.{number}.{name}": shape for number in range(3) for name, shape in layer.items()},
    }
    for number, attend in enumerate(attentions(model)):
        assert (attend.layer, attend.heads, attend.rope, attend.scale) == (number, Heads(4, 2, 16), "main", 0.25)
        assert (attend.window, attend.soft_cap, attend.sinks) == (0, 0.0, None)
    attention = ["Norm", "Linear", "Attend", "Linear", "Sum", "Add"]
    mlp = ["Norm", "Linear", "Gated", "Linear", "Sum", "Add"]
    assert [type(each).__name__ for each in model.layers[2].operations] == attention + mlp
    assert [type(each).__name__ for each in model.head] == ["Norm", "Linear"]
    assert {each.activation for each in model.operations if isinstance(each, Gated)} == {Activation.SILU}
    assert epsilons(model) == {1e-5}


@pytest.mark.parametrize(
    ("config", "more"),
    [
        (LLAMA | {"attention_bias": True, "mlp_bias": True}, [*QKV_BIASES, OUTPUT_BIAS, *MLP_BIASES]),
        (MISTRAL, []),
        (QWEN2, QKV_BIASES),
        (QWEN3, QK_NORMS),
        (QWEN3 | {"attention_bias": True}, [*QKV_BIASES, OUTPUT_BIAS, *QK_NORMS]),
        (GRANITE | {"attention_bias": True, "mlp_bias": True}, [*QKV_BIASES, OUTPUT_BIAS, *MLP_BIASES]),
        (SEED_OSS, QKV_BIASES),
        (SEED_OSS | {"attention_out_bias": True, "mlp_bias": True}, [*QKV_BIASES, OUTPUT_BIAS, *MLP_BIASES]),
        (
            SMOLLM3 | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
            [*QKV_BIASES, OUTPUT_BIAS, *MLP_BIASES],
        ),
    ],
)
def test_traits_of_families(tmp_path: Path, config: dict[str, Any], more: list[str]) -> None:
    """By the tensors that a layer has besides Llama's."""
    llama = set(expected_shapes(read(tmp_path, LLAMA)))
    got = set(expected_shapes(read(tmp_path, config))) - llama
    assert got == {f"model.layers.{layer}.{name}" for layer in range(3) for name in more}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA | {"use_sliding_window": False, "sliding_window": 16}, [0, 0, 0]),
        (MISTRAL, [16, 16, 16]),
        (MISTRAL | {"sliding_window": None}, [0, 0, 0]),
        (without(MISTRAL, "sliding_window"), [4096, 4096, 4096]),
        (QWEN2, [0, 0, 0]),
        (QWEN2 | {"use_sliding_window": True}, [0, 16, 16]),
        (
            QWEN3
            | {
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            [16, 0, 16],
        ),
    ],
)
def test_windows(tmp_path: Path, config: dict[str, Any], expected: list[int]) -> None:
    assert windows(read(tmp_path, config)) == expected


@pytest.mark.parametrize(
    ("config", "count", "chosen", "widths", "normalised", "layers"),
    [
        (MIXTRAL, 6, 2, {96}, True, [0, 1, 2]),
        (MIXTRAL | {"norm_topk_prob": False}, 6, 2, {96}, True, [0, 1, 2]),  # which it has not
        (OLMOE, 6, 2, {96}, False, [0, 1, 2]),
        (OLMOE | {"norm_topk_prob": True, "num_experts_per_tok": 6}, 6, 6, {96}, True, [0, 1, 2]),
        (QWEN2_MOE, 6, 2, {32, 48}, False, [0, 1, 2]),
        (QWEN2_MOE | {"mlp_only_layers": [1]}, 6, 2, {32, 48, 96}, False, [0, 2]),
        (QWEN3_MOE | {"norm_topk_prob": True}, 6, 2, {32}, True, [0, 1, 2]),
        (QWEN3_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [0]}, 6, 2, {32, 96}, False, [1]),
        (without(QWEN3_MOE, "num_experts") | {"num_local_experts": 6}, 6, 2, {32}, False, [0, 1, 2]),
    ],
)
def test_experts(
    tmp_path: Path,
    config: dict[str, Any],
    count: int,
    chosen: int,
    widths: set[int],
    normalised: bool,
    layers: list[int],
) -> None:
    """`widths` are of experts, of the shared one, and of MLPs."""
    got = read(tmp_path, config)
    assert got.experts is not None
    assert (got.experts.count, got.experts.chosen.axis.size) == (count, chosen)
    assert columns(got) == widths
    assert {each.axis.size for each in expert_widths(got)} == {min(widths)} or len(widths) == 1
    for layer in got.expert_layers:
        (rule,) = [each.routing for each in got.layers[layer].operations if isinstance(each, Route)]
        assert rule == Routing(chosen, normalised=normalised)
    assert got.expert_layers == layers
    assert [number for number in range(-1, 4) if got.experts_of(number)] == layers


def expert_widths(model: Model) -> list[Value]:
    """What the experts' MLPs have between their matrices."""
    return [each.y for layer in model.layers if layer.experts for each in layer.experts.body if isinstance(each, Gated)]


def test_how_experts_are_scored_may_be_said(tmp_path: Path) -> None:
    said = read(tmp_path, GLM4_MOE | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"})
    assert said == read(tmp_path, GLM4_MOE)


def test_latent_attention_keeps_one_short_row_of_a_token(tmp_path: Path) -> None:
    model = read(tmp_path, DEEPSEEK_V3 | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}})
    attend = attentions(model)[0]
    assert (attend.heads, attend.v, attend.window) == (Heads(4, 1, 40), None, 0)
    assert attend.scale == pytest.approx(24**-0.5 * (0.05 * log(4.0) + 1) ** 2)
    assert model.expert_layers == [1, 2]
    assert model.ignored == ("model.layers.3.",)
    told = profile(model, "fp32", 32)
    assert (told.kv_groups, tuple(told.attention_splits)) == (1, (1, 2, 4))
    assert told.cache_bytes_per_token == 3 * 40 * 4


def test_gemma4_has_wide_heads_where_a_layer_sees_everything(tmp_path: Path) -> None:
    model = read(tmp_path, GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1})
    wide = Heads(4, 1, 32)
    assert [attend.heads for attend in attentions(model)] == [Heads(4, 2, 256), Heads(4, 2, 256), wide]
    assert windows(model) == [512, 512, 0]
    assert model.ropes == {"full": Rope(1e6, 32, ProportionalScaling(4)), "sliding": Rope(1e4, 256)}
    names = {name for name in expected_shapes(model) if "v_proj" in name}
    assert names == {f"model.layers.{layer}.self_attn.v_proj.weight" for layer in (0, 1)}
    assert (model.tied, model.embedding_scale, model.experts) == (True, 8.0, None)


def test_a_dense_model_has_no_experts(tmp_path: Path) -> None:
    got = read(tmp_path, LLAMA)
    assert (got.experts, got.expert_layers, got.experts_of(0), columns(got)) == (None, [], None, {96})


def test_a_shared_expert_is_what_the_others_are_added_to(tmp_path: Path) -> None:
    experts = read(tmp_path, QWEN2_MOE).experts
    assert experts is not None
    assert experts.base is not None
    assert experts.base.name == "layers.0.mlp.shared.scaled"
    for config in (MIXTRAL, OLMOE, QWEN3_MOE):
        experts = read(tmp_path, config).experts
        assert experts is not None
        assert experts.base is None


def test_defaults_of_families_with_experts(tmp_path: Path) -> None:
    mixtral = read(tmp_path, without(MIXTRAL, "rms_norm_eps"))
    assert mixtral.ropes == {"main": Rope(1e6, 16)}
    assert (epsilons(mixtral), windows(mixtral)) == ({1e-5}, [0, 0, 0])
    assert windows(read(tmp_path, MIXTRAL | {"sliding_window": 16})) == [16, 16, 16]
    olmoe = read(tmp_path, without(OLMOE, "num_key_value_heads") | {"clip_qkv": 8.0})
    assert attentions(olmoe)[0].heads == Heads(4, 4, 16)
    assert sum(isinstance(each, WholeNorm) for each in olmoe.operations) == 3
    limits = [(each.low, each.high) for each in olmoe.operations if isinstance(each, Clip)]
    assert limits == [(-8.0, 8.0)] * 9
    assert not any(isinstance(each, Clip) for each in read(tmp_path, OLMOE).operations)
    bias = "model.layers.0.self_attn.q_proj.bias"
    assert bias in expected_shapes(read(tmp_path, QWEN2_MOE))
    assert bias not in expected_shapes(read(tmp_path, QWEN2_MOE | {"qkv_bias": False}))


def test_olmo3_scales_the_rotary_embedding_of_layers_that_see_everything(tmp_path: Path) -> None:
    model = read(tmp_path, OLMO3 | {"num_hidden_layers": 5, "rope_theta": 500000, "rope_scaling": YARN})
    assert windows(model) == [4096, 4096, 4096, 0, 4096]
    assert [attend.rope for attend in attentions(model)] == ["sliding", "sliding", "sliding", "full", "sliding"]
    assert (model.ropes["full"].theta, model.context) == (5e5, 512)
    assert model.ropes["full"].scaling
    assert model.ropes["sliding"] == Rope(5e5, 16)


def test_granite_scales_nothing_where_its_config_is_silent(tmp_path: Path) -> None:
    model = read(tmp_path, GRANITE)
    assert (model.embedding_scale, attentions(model)[0].scale) == (1.0, 1.0)
    assert not any(isinstance(each, Scale) for each in model.operations)
    scaled = read(tmp_path, GRANITE | {"residual_multiplier": 0.5, "logits_scaling": 8.0})
    assert [each.by for each in scaled.operations if isinstance(each, Scale)] == [0.5] * 6 + [0.125]


def test_exaone4_rotates_in_layers_with_blocks_or_in_all(tmp_path: Path) -> None:
    def seen(config: dict[str, Any]) -> list[tuple[int, str | None]]:
        return [(attend.window, attend.rope) for attend in attentions(read(tmp_path, EXAONE4 | config))]

    assert seen({"num_hidden_layers": 5}) == [*[(4096, "main")] * 3, (0, None), (4096, "main")]
    assert seen({"sliding_window": 16, "sliding_window_pattern": 2}) == [(16, "main"), (0, None), (16, "main")]
    listed = {"layer_types": [*["full_attention"] * 2, "sliding_attention"], "sliding_window_pattern": "LLLG"}
    assert seen(listed) == [(0, None), (0, None), (4096, "main")]
    assert seen({"sliding_window": None}) == [(0, "main")] * 3


def test_a_part_of_a_larger_model_has_its_tensors_under_a_prefix(tmp_path: Path) -> None:
    model = replace(read(tmp_path, PHI3), prefixes=("language_model.model.", "model.language_model."))
    places = {tensor.name: [part.tensor for part in tensor.parts] for tensor in tensors(model)}
    assert places["lm_head.weight"] == ["language_model.lm_head.weight", "model.lm_head.weight"]
    fused = "layers.0.self_attn.qkv_proj.weight"
    assert set(places["model.layers.0.self_attn.k_proj.weight"]) == {
        f"model.{fused}",
        *(f"{prefix}{fused}" for prefix in model.prefixes),
        *(f"{prefix}layers.0.self_attn.k_proj.weight" for prefix in model.prefixes),
    }


def test_olmo2_has_norms_after_its_blocks_only(tmp_path: Path) -> None:
    model = read(tmp_path, without(without(OLMO2, "rms_norm_eps"), "num_key_value_heads"))
    assert (attentions(model)[0].heads, epsilons(model)) == (Heads(4, 4, 16), {1e-5})
    block = [Linear, Sum, Norm, Add]
    assert [type(each) for each in model.layers[0].operations] == [
        Linear,
        WholeNorm,
        Attend,
        *block,
        Linear,
        Gated,
        *block,
    ]
    names = {name.removeprefix("model.layers.0.") for name in expected_shapes(model)}
    assert names >= {"post_attention_layernorm.weight", "post_feedforward_layernorm.weight", *QK_NORMS}
    assert not names & {"input_layernorm.weight", *QKV_BIASES, OUTPUT_BIAS}
    assert f"model.layers.0.{OUTPUT_BIAS}" in expected_shapes(read(tmp_path, OLMO2 | {"attention_bias": True}))


def test_defaults(tmp_path: Path) -> None:
    def heads(config: dict[str, Any]) -> Heads:
        return attentions(read(tmp_path, config))[0].heads

    assert heads(without(LLAMA, "num_key_value_heads")) == Heads(4, 4, 16)
    assert heads(without(QWEN3, "head_dim")) == Heads(4, 2, 128)
    assert heads(LLAMA | {"head_dim": None}) == Heads(4, 2, 16)
    assert epsilons(read(tmp_path, without(LLAMA, "rms_norm_eps"))) == {1e-6}
    tied = read(tmp_path, LLAMA | {"tie_word_embeddings": True})
    assert tied.tied
    assert "lm_head.weight" not in expected_shapes(tied)


def test_end_tokens_of_both_files(tmp_path: Path) -> None:
    assert read(tmp_path, without(LLAMA, "eos_token_id")).eos == ()
    assert read(tmp_path, LLAMA | {"eos_token_id": [2, 5]}, {"eos_token_id": [7, 2]}).eos == (7, 2, 5)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (LLAMA | {"model_type": "gpt2"}, "model_type"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act"),
        (LLAMA | {"hidden_size": "64"}, "hidden_size"),
        (LLAMA | {"num_hidden_layers": 0}, "num_hidden_layers"),
        (LLAMA | {"num_hidden_layers": True}, "num_hidden_layers"),
        (without(LLAMA, "vocab_size"), "vocab_size"),
        (without(MISTRAL, "num_key_value_heads"), "num_key_value_heads"),
        (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads"),
        (LLAMA | {"head_dim": 15}, "head_dim"),
        (LLAMA | {"num_attention_heads": 6}, "head_dim"),
        (LLAMA | {"num_attention_heads": 6, "head_dim": None}, "head_dim"),
        (LLAMA | {"rms_norm_eps": -1.0}, "rms_norm_eps"),
        (LLAMA | {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        (LLAMA | {"tie_word_embeddings": 1}, "tie_word_embeddings"),
        (LLAMA | {"eos_token_id": "</s>"}, "eos_token_id"),
        (LLAMA | {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope_scaling.rope_type"),
        (LLAMA | {"rope_scaling": {"type": "ntk", "factor": 4.0}}, "rope_scaling.type"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling.factor"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 1e300}}, "rope_scaling.factor"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 32}}, "rope_scaling.beta_fast"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": "4"}}, "rope_scaling.factor"),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 4.0, "alpha": 8}}, "rope_scaling.alpha"),
        (
            LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 64}},
            "rope_scaling.original_max_position_embeddings",
        ),
        (LLAMA | {"rope_parameters": without(YARN, "factor")}, "rope_parameters.factor"),
        (LLAMA | {"rope_parameters": YARN | {"finetuned": True}}, "rope_parameters.finetuned"),
        (LLAMA | {"rope_parameters": YARN | {"low_freq_factor": 1.0}}, "rope_parameters.low_freq_factor"),
        (LLAMA | {"rope_parameters": YARN | {"beta_fast": 0.5}}, "rope_parameters.beta_fast"),
        (LLAMA | {"rope_parameters": YARN | {"beta_slow": -1.0}}, "rope_parameters.beta_slow"),
        (LLAMA | {"rope_parameters": YARN | {"attention_factor": 0.0}}, "rope_parameters.attention_factor"),
        (LLAMA | {"rope_parameters": YARN | {"mscale": "1"}}, "rope_parameters.mscale"),
        (LLAMA | {"rope_parameters": YARN | {"truncate": 1}}, "rope_parameters.truncate"),
        (LLAMA | {"rope_parameters": YARN | {"rope_theta": 1.0}}, "rope_parameters.rope_theta"),
        (LLAMA | {"rope_parameters": YARN, "rope_theta": 0.5}, "rope_theta"),
        (
            LLAMA | {"rope_parameters": YARN | {"original_max_position_embeddings": 0}},
            "original_max_position_embeddings",
        ),
        (LLAMA | {"rope_parameters": without(LLAMA3, "factor")}, "rope_parameters.factor"),
        (LLAMA | {"rope_parameters": LLAMA3 | {"high_freq_factor": 0.5}}, "rope_parameters.high_freq_factor"),
        (LLAMA | {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters.full_attention"),
        (LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA | {"num_local_experts": 8}, "num_local_experts"),
        (LLAMA | {"sliding_window": 16}, "sliding_window"),
        (MISTRAL | {"attention_bias": True}, "attention_bias"),
        (QWEN2 | {"mlp_bias": True}, "mlp_bias"),
        (QWEN2 | {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        (QWEN2 | {"use_sliding_window": True, "layer_types": ["full_attention"] * 2}, "layer_types"),
        (QWEN3 | {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 3}, "layer_types"),
        (MISTRAL | {"layer_types": ["full_attention"] * 3}, "layer_types"),
        (MIXTRAL | {"num_experts_per_tok": 7}, "num_experts_per_tok"),
        (MIXTRAL | {"num_experts": 5}, "num_local_experts"),
        (without(MIXTRAL, "num_local_experts"), "num_experts"),
        (without(OLMOE, "num_experts_per_tok"), "num_experts_per_tok"),
        (MIXTRAL | {"clip_qkv": 8.0}, "clip_qkv"),
        (OLMO2 | {"clip_qkv": 8.0}, "clip_qkv"),
        (OLMO2 | {"sliding_window": 16}, "sliding_window"),
        (OLMO2 | {"mlp_bias": True}, "mlp_bias"),
        (OLMO3 | {"rope_theta": 10000.0}, "rope_theta"),
        (OLMO3 | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_parameters"),
        (OLMO3 | {"sliding_window": None, "layer_types": ["sliding_attention"] * 3}, "layer_types"),
        (OLMO3 | {"layer_types": ["sliding_attention"]}, "layer_types"),
        (OLMOE | {"clip_qkv": -1}, "clip_qkv"),
        (OLMOE | {"shared_expert_intermediate_size": 48}, "shared_expert_intermediate_size"),
        (without(QWEN2_MOE, "shared_expert_intermediate_size"), "shared_expert_intermediate_size"),
        (QWEN3_MOE | {"num_experts": 0}, "num_experts"),
        (QWEN3_MOE | {"mlp_only_layers": [3]}, "mlp_only_layers"),
        (QWEN3_MOE | {"decoder_sparse_step": 4}, "decoder_sparse_step"),
        (QWEN3_MOE | {"use_sliding_window": True}, "sliding_window"),
        (QWEN3_MOE | {"routed_scaling_factor": 2.5}, "routed_scaling_factor"),
        (QWEN3_MOE | {"norm_topk_prob": 1}, "norm_topk_prob"),
        (LLAMA | {"lm_head_bias": True}, "lm_head_bias"),
        (PHI3 | {"attention_bias": True}, "attention_bias"),
        (EXAONE4 | {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern"),
        (EXAONE4 | {"sliding_window_pattern": None}, "sliding_window_pattern"),
        (EXAONE4 | {"sliding_window": None, "layer_types": ["sliding_attention"] * 3}, "layer_types"),
        (GRANITE | {"sliding_window": 16}, "sliding_window"),
        (GRANITE | {"logits_scaling": 0}, "logits_scaling"),
        (GRANITE | {"residual_multiplier": -1.0}, "residual_multiplier"),
        (SEED_OSS | {"sliding_window": 16}, "sliding_window"),
        (SMOLLM3 | {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        (SMOLLM3 | {"no_rope_layers": [1, 0, 2]}, "no_rope_layers"),
        (SMOLLM3 | {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        (PHI3 | {"mlp_bias": True}, "mlp_bias"),
        (PHI3 | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type"),
        (PHI3 | {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        (GLM4_MOE | {"mlp_bias": True}, "mlp_bias"),
        (GLM4_MOE | {"scoring_func": "softmax"}, "scoring_func"),
        (GLM4_MOE | {"topk_method": "greedy"}, "topk_method"),
        (GLM4_MOE | {"n_group": 4}, "n_group"),
        (GLM4_MOE | {"n_group": 3, "topk_group": 4}, "topk_group"),
        (DEEPSEEK_V3 | {"attention_bias": True}, "attention_bias"),
        (DEEPSEEK_V3 | {"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
        (DEEPSEEK_V3 | {"num_key_value_heads": 2}, "num_key_value_heads"),
        (DEEPSEEK_V3 | {"moe_layer_freq": 2}, "moe_layer_freq"),
        (without(DEEPSEEK_V3, "kv_lora_rank"), "kv_lora_rank"),
        (GLM4_MOE_LITE | {"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types"),
        (GLM4_MOE_LITE | {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types"),
        (ERNIE4_5 | {"sliding_window": 16}, "sliding_window"),
        (ERNIE4_5_MOE | {"use_bias": True}, "use_bias"),
        (ERNIE4_5_MOE | {"moe_layer_start_index": 3}, "moe_layer_start_index"),
        (MINIMAX_M2 | {"rotary_dim": 32}, "rotary_dim"),
        (MINIMAX_M2 | {"attn_type_list": [1, 0, 1]}, "attn_type_list"),
        (MINIMAX_M2 | {"shared_intermediate_size": 64}, "shared_intermediate_size"),
        (GPT_OSS | {"swiglu_limit": 10.0}, "swiglu_limit"),
        (GPT_OSS | {"mlp_bias": True}, "mlp_bias"),
        (GEMMA4 | {"num_kv_shared_layers": 1000}, "num_kv_shared_layers"),
        (GEMMA4 | {"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        (GEMMA4 | {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        (GEMMA4 | {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, "layer_types"),
        (GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "num_global_key_value_heads"),
        (GEMMA4 | {"enable_moe_block": True}, "top_k_experts"),
        (GEMMA4 | {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}}, "rope_type"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (GEMMA3 | {"hidden_activation": "gelu"}, "hidden_activation"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, config: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, config)
    told = str(caught.value)
    assert (f"{key} = " in told and "supported: " in told) or f"{key} is absent; expected" in told


@pytest.mark.parametrize("text", ["", "{", "[]", "\ud800".encode("utf-8", "surrogatepass").decode("latin-1")])
def test_broken_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_model(tmp_path)


def test_seed_oss_has_heads_of_128_by_default(tmp_path: Path) -> None:
    assert attentions(read(tmp_path, SEED_OSS))[0].heads == Heads(4, 2, 128)
    assert attentions(read(tmp_path, SEED_OSS | {"head_dim": None}))[0].heads == Heads(4, 2, 16)


def test_smollm3_does_not_rotate_in_some_layers(tmp_path: Path) -> None:
    def ropes(config: dict[str, Any]) -> list[str | None]:
        return [attend.rope for attend in attentions(read(tmp_path, SMOLLM3 | config))]

    assert ropes({"num_hidden_layers": 5}) == ["main", "main", "main", None, "main"]
    assert ropes({"no_rope_layer_interval": 2}) == ["main", None, "main"]
    assert ropes({"no_rope_layers": [0, 1, 1]}) == [None, "main", "main"]
    windowed = SMOLLM3 | {"use_sliding_window": True, "sliding_window": 16, "no_rope_layers": [0, 1, 1]}
    assert windows(read(tmp_path, windowed)) == [16, 0, 0]
    assert read(tmp_path, SMOLLM3).tied
    assert read(tmp_path, SMOLLM3).ropes == {"main": Rope(2e6, 16)}


def test_absent_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        read_model(tmp_path / "nowhere")


def test_no_model_type(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model_type; supported: .*llama, .*minimax_m2, .*mistral.* qwen2"):
        read(tmp_path, without(LLAMA, "model_type"))


def test_a_text_has_the_same_position_in_every_section_of_an_image_s_rope() -> None:
    sections = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    plain = {key: sections[key] for key in ("rope_type", "rope_theta")}
    text_part = LLAMA | {"model_type": "qwen3_vl_text", "rope_scaling": sections}
    image = describe(keys({"model_type": "qwen3_vl", "text_config": text_part}))
    text = describe(keys(LLAMA | {"model_type": "qwen3", "rope_scaling": plain}))
    assert (image.layers, image.ropes) == (text.layers, text.ropes)


def keys(config: dict[str, Any]) -> Keys:
    return Keys(Path("config.json"), config)
