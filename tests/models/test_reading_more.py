"""Configs of families that are mostly made of others' parts: defaults, both spellings, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from motley.daemon.models.description.axes import Heads
from motley.daemon.models.description.model import expected_shapes, tensors
from motley.daemon.models.description.operations.experts import Route, Routing
from motley.daemon.models.description.operations.rows import Activation, Gated, Norm, Scale, Sum
from motley.daemon.models.description.rope import Llama3Scaling, LongScaling, Rope
from motley.daemon.models.keys import ConfigError
from tests.models.configs import (
    AFMOE,
    APERTUS,
    ARCEE,
    COHERE,
    COHERE2,
    COHERE2_MOE,
    CWM,
    DEEPSEEK_V2,
    DOTS1,
    EXAONE4,
    GEMMA,
    GEMMA4,
    GLM,
    GRANITE,
    GRANITE_MOE,
    GRANITE_SWA,
    INTERNLM3,
    LLAMA,
    MIMO,
    MINIMAX_M3,
    MINISTRAL,
    MISTRAL,
    NEMOTRON,
    PHIMOE,
    QWEN2,
    QWEN3,
    STABLELM,
    STARCODER2,
    YOUTU,
    read,
    without,
)
from tests.models.test_reading import attentions, windows


def test_mimo_is_read_alike_in_both_spellings(tmp_path: Path) -> None:
    today = MIMO | {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "rope_parameters": {
            "full_attention": {"rope_theta": 5e6, "partial_rotary_factor": 0.334},
            "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.334},
        },
        "sliding_window": 129,
        "rms_norm_eps": 1e-6,
    }
    published = without(MIMO, "rms_norm_eps") | {
        "hybrid_layer_pattern": [0, 1, 1],
        "moe_layer_freq": [0, 1, 1],
        "rope_theta": 5000000,
        "swa_rope_theta": 10000,
        "partial_rotary_factor": 0.334,
        "sliding_window": 128,
        "sliding_window_size": 128,
        "layernorm_epsilon": 1e-6,
        "swa_num_key_value_heads": 2,
        "swa_v_head_dim": 16,
    }
    model = read(tmp_path, today)
    assert read(tmp_path, published) == model
    assert model.ropes == {"full": Rope(5e6, 8), "sliding": Rope(1e4, 8)}
    assert [attend.heads for attend in attentions(model)] == [Heads(4, 1, 24), Heads(4, 2, 24), Heads(4, 2, 24)]
    assert [attend.sinks is not None for attend in attentions(model)] == [False, True, True]
    assert (windows(model), model.expert_layers) == ([0, 129, 129], [1, 2])
    assert expected_shapes(model)["model.layers.1.self_attn.o_proj.weight"] == (64, 64)
    silent = read(tmp_path, MIMO | {"num_hidden_layers": 7})
    assert windows(silent) == [0, *[129] * 4, 0, 129]
    assert silent.expert_layers == [*range(1, 7)]


def test_dots1_has_windows_from_a_layer_on(tmp_path: Path) -> None:
    config = DOTS1 | {"sliding_window": 16, "max_window_layers": 1, "first_k_dense_replace": 2}
    model = read(tmp_path, config)
    assert (windows(model), model.expert_layers) == ([0, 16, 16], [2])
    assert windows(read(tmp_path, without(config, "max_window_layers"))) == [0, 0, 0]


def test_gemma_has_scaled_embeddings_and_gelu(tmp_path: Path) -> None:
    model = read(tmp_path, GEMMA | {"hidden_act": "gelu"})
    assert model == read(tmp_path, GEMMA | {"hidden_activation": "gelu_pytorch_tanh"})
    assert (model.tied, model.embedding_scale) == (True, 8.0)
    assert {each.activation for each in model.operations if isinstance(each, Gated)} == {Activation.GELU_TANH}
    assert {each.offset for each in model.operations if isinstance(each, Norm)} == {1.0}
    assert attentions(read(tmp_path, without(GEMMA, "head_dim")))[0].heads == Heads(4, 2, 256)


def test_arcee_has_no_gates(tmp_path: Path) -> None:
    names = expected_shapes(read(tmp_path, ARCEE | {"mlp_bias": True}))
    mlp = {name.removeprefix("model.layers.0.mlp.") for name in names if name.startswith("model.layers.0.mlp.")}
    assert mlp == {"up_proj.weight", "up_proj.bias", "down_proj.weight", "down_proj.bias"}


def test_ministral_has_windows_in_the_layers_that_are_listed(tmp_path: Path) -> None:
    listed = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    assert windows(read(tmp_path, MINISTRAL | listed)) == [16, 0, 16]
    assert windows(read(tmp_path, MINISTRAL)) == [16, 16, 16]
    assert windows(read(tmp_path, MINISTRAL | {"sliding_window": None})) == [0, 0, 0]


def test_gemma4_s_wide_heads_may_be_told_by_layers(tmp_path: Path) -> None:
    """As transformers 5.24 writes them."""
    keys = GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    told = without(without(keys, "global_head_dim"), "num_global_key_value_heads")
    told |= {"per_layer_config": {"2": {"head_dim": 32, "num_key_value_heads": 1}}}
    assert read(tmp_path, told) == read(tmp_path, keys)
    unified = without(keys, "hidden_size_per_layer_input") | {"model_type": "gemma4_unified_text"}
    given = {"sliding_window": 512, "max_position_embeddings": 256}
    assert read(tmp_path, unified | given) == read(tmp_path, keys | given)
    assert windows(read(tmp_path, unified)) == [1024, 1024, 0]


def test_granites_experts_have_an_mlp_beside_them_or_none(tmp_path: Path) -> None:
    names = expected_shapes(read(tmp_path, GRANITE_MOE))
    shared = GRANITE_MOE | {"model_type": "granitemoeshared", "shared_intermediate_size": 48}
    more = {name.removeprefix("model.layers.0.") for name in expected_shapes(read(tmp_path, shared)).keys() - names}
    beside = {f"shared_mlp.{part}.weight" for part in ("gate_proj", "up_proj", "output_linear")}
    assert {name for name in more if not name.startswith("model.layers")} == beside
    none = read(tmp_path, without(shared, "shared_intermediate_size"))
    assert expected_shapes(none).keys() == names.keys()


def test_granite_swa_has_a_base_for_each_layer(tmp_path: Path) -> None:
    model = read(tmp_path, GRANITE_SWA | {"layer_rope_theta": [0, 1e4, 500]})
    assert [attend.rope for attend in attentions(model)] == [None, "base1", "base0"]
    assert model.ropes == {"base0": Rope(500.0, 16), "base1": Rope(1e4, 16)}
    assert (windows(model), model.tied) == ([0, 128, 128], True)
    assert all(attend.sinks is not None for attend in attentions(model))
    assert read(tmp_path, GRANITE_SWA | {"rope_theta": 500}).ropes == {"main": Rope(500.0, 16)}


def test_afmoe_rotates_where_it_has_windows(tmp_path: Path) -> None:
    model = read(tmp_path, AFMOE | {"global_attn_every_n_layers": 2, "mup_enabled": True})
    assert [(attend.window, attend.rope) for attend in attentions(model)] == [(1024, "main"), (0, None), (1024, "main")]
    assert (model.embedding_scale, model.expert_layers) == (8.0, [1, 2])
    shapes = expected_shapes(model)
    assert shapes["model.layers.1.mlp.shared_experts.up_proj.weight"] == (64, 64)
    assert shapes["model.layers.0.self_attn.gate_proj.weight"] == (64, 64)
    assert read(tmp_path, AFMOE).embedding_scale == 1.0


def test_experts_of_deepseek_v2_are_chosen_by_a_softmax(tmp_path: Path) -> None:
    model = read(tmp_path, DEEPSEEK_V2 | {"topk_method": "greedy", "n_group": 3, "routed_scaling_factor": 2.0})
    assert {each.routing for each in model.operations if isinstance(each, Route)} == {Routing(2, scaling=2.0)}
    assert "model.layers.0.self_attn.q_a_proj.weight" in expected_shapes(model)
    lite = read(tmp_path, DEEPSEEK_V2 | {"q_lora_rank": None, "first_k_dense_replace": 1})
    assert lite.expert_layers == [1, 2]
    assert "model.layers.0.self_attn.q_a_proj.weight" not in expected_shapes(lite)


def test_kv_heads_of_minimax_m3_see_blocks_that_an_indexer_chooses(tmp_path: Path) -> None:
    """In both spellings."""
    freq = {"sparse_attention_freq": [0, 1, 1], "sparse_block_size": 16, "sparse_topk_blocks": 4}
    freq |= {"sparse_num_index_heads": 2, "sparse_index_dim": 24, "sparse_local_block": 2, "sparse_init_block": 0}
    freq |= {"sparse_score_type": "max", "use_sparse_attention": True, "sparse_disable_index_value": [0, 1, 1]}
    published = read(tmp_path, MINIMAX_M3 | {"hidden_act": "swigluoai", "sparse_attention_config": freq})
    kinds = ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]
    today = without(MINIMAX_M3, "moe_layer_freq") | {"mlp_layer_types": ["dense", "sparse", "sparse"]}
    today |= {"layer_types": kinds, "index_block_size": 16, "index_topk_blocks": 4, "partial_rotary_factor": 0.5}
    today |= {"index_n_heads": 2, "index_head_dim": 24, "index_local_blocks": 2}
    assert read(tmp_path, today) == published
    assert (published.context, published.expert_layers) == (4096, [1, 2])
    assert [attend.choices for attend in attentions(published)] == [0, 64, 64]
    choices = [layer.choice for layer in published.layers if layer.choice]
    assert {(each.heads, each.weights, each.block, each.latest) for each in choices} == {(Heads(2, 1, 24), None, 16, 2)}
    assert [attend.choices for attend in attentions(read(tmp_path, MINIMAX_M3))] == [0, 0, 0]
    assert published.ropes == {"main": Rope(5e6, 8)}
    assert {each.activation for each in published.operations if isinstance(each, Gated)} == {Activation.CLAMPED}
    places = {tensor.name: {part.tensor for part in tensor.parts} for tensor in tensors(published)}
    assert "model.layers.1.self_attn.index_q_proj.weight" in places["model.layers.1.self_attn.indexer.q_proj.weight"]
    assert "model.layers.1.self_attn.index_k_norm.weight" in places["model.layers.1.self_attn.indexer.k_norm.weight"]
    shared = places["model.layers.1.mlp.shared_experts.up_proj.weight"]
    assert "model.layers.1.block_sparse_moe.shared_experts.up_proj.weight" in shared
    assert "model.layers.1.mlp.shared_experts.gate_up_proj.weight" in shared
    assert places["model.layers.1.mlp.gate.weight"] == {"model.layers.1.block_sparse_moe.gate.weight"}


def test_glm_has_no_norms_after_its_blocks(tmp_path: Path) -> None:
    names = expected_shapes(read(tmp_path, GLM))
    more = expected_shapes(read(tmp_path, GLM | {"model_type": "glm4"})).keys() - names.keys()
    norms = {"post_self_attn_layernorm.weight", "post_mlp_layernorm.weight"}
    assert more == {f"model.layers.{layer}.{norm}" for layer in range(3) for norm in norms}
    assert read(tmp_path, GLM).ropes == {"main": Rope(1e4, 64)}


def test_cwm_sees_everything_in_every_fourth_layer(tmp_path: Path) -> None:
    model = read(tmp_path, CWM | {"num_hidden_layers": 5})
    assert windows(model) == [0, 8192, 8192, 8192, 0]
    assert model.ropes == {"main": Rope(1e6, 128, Llama3Scaling(16.0, 1.0, 4.0, 8192))}
    said = read(tmp_path, CWM | {"rope_parameters": {"rope_type": "default", "rope_theta": 500}})
    assert said.ropes == {"main": Rope(500.0, 128)}


def test_internlm3_is_a_llama(tmp_path: Path) -> None:
    biased = read(tmp_path, INTERNLM3 | {"qkv_bias": True, "bias": True})
    assert biased == read(tmp_path, LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 128})
    assert read(tmp_path, without(INTERNLM3, "rms_norm_eps")) == read(tmp_path, LLAMA | {"head_dim": 128})


def test_youtu_has_latent_attention_and_no_experts(tmp_path: Path) -> None:
    model = read(tmp_path, YOUTU)
    assert (model.experts, model.tied) == (None, True)
    assert {(attend.heads, attend.v) for attend in attentions(model)} == {(Heads(4, 1, 40), None)}


@pytest.mark.parametrize(
    ("kind", "text", "prefix"),
    [
        ("exaone4_5", EXAONE4, "model.language_model."),
        ("granite4_vision", GRANITE | {"model_type": "granite4_vision_text"}, "model.language_model."),
        ("granite_speech", GRANITE, "language_model.model."),
        ("idefics2", MISTRAL, "model.text_model."),
        ("idefics3", LLAMA, "model.text_model."),
        ("internvl", QWEN3, "language_model.model."),
        ("llava", MISTRAL, "language_model.model."),
        ("llava_next", GRANITE, "model.language_model."),
        ("llava_onevision", QWEN2, "language_model.model."),
        ("ovis2", QWEN2, "model.language_model."),
        ("perception_lm", LLAMA, "model.language_model."),
        ("qwen2_audio", QWEN2, "language_model.model."),
        ("qwen2_vl", QWEN2 | {"model_type": "qwen2_vl_text"}, "model.language_model."),
        ("smolvlm", LLAMA, "model.text_model."),
        ("voxtral", LLAMA, "language_model.model."),
    ],
)
def test_the_text_part_of_a_model_that_sees_or_hears(
    kind: str, text: dict[str, Any], prefix: str, tmp_path: Path
) -> None:
    alone = read(tmp_path, text)
    part = read(tmp_path, {"model_type": kind, "text_config": text, "vision_config": {"hidden_size": 8}})
    assert replace(part, prefixes=()) == alone
    places = {tensor.name: {place.tensor for place in tensor.parts} for tensor in tensors(part)}
    assert f"{prefix}layers.0.self_attn.q_proj.weight" in places["model.layers.0.self_attn.q_proj.weight"]
    with pytest.raises(ConfigError, match=r"text_config\.model_type"):
        read(tmp_path, {"model_type": kind, "text_config": GEMMA})


def test_cohere_has_layer_norms_and_blocks_side_by_side(tmp_path: Path) -> None:
    model = read(tmp_path, COHERE)
    assert (model.tied, model.eos, model.context) == (True, (2,), 256)
    assert model.ropes["main"].theta == 500000.0
    norms = [each for each in model.operations if isinstance(each, Norm)]
    assert [(each.centred, each.epsilon, each.gain and each.gain.bias) for each in norms] == [(True, 1e-5, "")] * 4
    assert [len(each.xs) for each in model.operations if isinstance(each, Sum)] == [2, 2, 2]
    assert [each.by for each in model.head if isinstance(each, Scale)] == [0.0625]
    assert read(tmp_path, COHERE | {"model_max_length": 4096}).context == 4096
    with_norms = expected_shapes(read(tmp_path, COHERE | {"use_qk_norm": True}))
    assert with_norms["model.layers.0.self_attn.k_halves_norm.weight"] == (32,)


def test_cohere2_rotates_where_there_are_windows(tmp_path: Path) -> None:
    listed = read(tmp_path, COHERE2 | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]})
    assert [(each.window, each.rope) for each in attentions(listed)] == [(0, None), (4096, "main"), (0, None)]
    assert windows(read(tmp_path, COHERE2 | {"sliding_window": 16})) == [16, 16, 16]
    assert windows(read(tmp_path, COHERE2 | {"sliding_window_pattern": 2})) == [4096, 0, 4096]


def test_cohere2_moe_s_first_layers_may_have_an_mlp_and_rotate(tmp_path: Path) -> None:
    model = read(tmp_path, COHERE2_MOE | {"first_k_dense_replace": 1, "prefix_dense_intermediate_size": 32})
    assert [(each.window, each.rope) for each in attentions(model)] == [(0, "main"), (4096, "main"), (4096, "main")]
    assert model.expert_layers == [1, 2]
    assert expected_shapes(model)["model.layers.0.mlp.up_proj.weight"] == (32, 64)
    without_rope = {"first_k_dense_replace": 1, "sliding_window_pattern": 2, "prefix_dense_sliding_window_pattern": 2}
    assert windows(read(tmp_path, COHERE2_MOE | without_rope)) == [4096, 4096, 0]
    assert {each.routing for each in model.operations if isinstance(each, Route)} == {Routing(2, "softmax of chosen")}
    assert {each.centred for each in model.operations if isinstance(each, Norm)} == {True}
    rms = read(tmp_path, COHERE2_MOE | {"rms_norm_eps": 1e-6})
    assert {(each.centred, each.epsilon) for each in rms.operations if isinstance(each, Norm)} == {(False, 1e-6)}


def norms_of(folder: Path, config: dict[str, Any]) -> set[tuple[bool, float, float, str]]:
    found = [each for each in read(folder, config).operations if isinstance(each, Norm)]
    return {(each.centred, each.epsilon, each.offset, each.gain.bias.rpartition(".")[2]) for each in found if each.gain}


def test_starcoder2_has_biases_everywhere_and_no_gates(tmp_path: Path) -> None:
    assert norms_of(tmp_path, STARCODER2 | {"norm_epsilon": 1e-4}) == {(True, 1e-4, 0.0, "bias")}
    model = read(tmp_path, STARCODER2)
    names = {name.removeprefix("model.layers.0.") for name in expected_shapes(model)}
    assert {f"mlp.{part}.{kind}" for part in ("c_fc", "c_proj") for kind in ("weight", "bias")} <= names
    assert {"self_attn.k_proj.bias", "self_attn.o_proj.bias", "input_layernorm.bias", "model.norm.bias"} <= names
    assert {each.up for each in model.operations if isinstance(each, Gated)} == {None}
    assert (model.tied, windows(model)) == (True, [0, 0, 0])
    assert windows(read(tmp_path, STARCODER2 | {"sliding_window": 16, "use_bias": False})) == [16, 16, 16]


def test_phimoe_chooses_two_by_a_sparse_mixer(tmp_path: Path) -> None:
    assert norms_of(tmp_path, PHIMOE | {"rms_norm_eps": 1e-4}) == {(True, 1e-4, 0.0, "bias")}
    model = read(tmp_path, PHIMOE)
    found = {each.routing for each in model.operations if isinstance(each, Route)}
    assert found == {Routing(2, "sparse mixer", tolerance=0.02)}
    assert "lm_head.bias" not in expected_shapes(model)
    assert expected_shapes(read(tmp_path, PHIMOE | {"lm_head_bias": True}))["lm_head.bias"] == (100,)
    published = next(each for each in tensors(model) if each.name == "model.layers.0.mlp.router.weight")
    assert [part.tensor for part in published.parts] == ["model.layers.0.block_sparse_moe.gate.weight"]
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "short_mscale": 1.2, "long_mscale": 1.2}
    long = {"type": "longrope", "original_max_position_embeddings": 128, **factors}
    scaling = read(tmp_path, PHIMOE | {"rope_scaling": long}).ropes["main"].scaling
    assert isinstance(scaling, LongScaling)
    assert (scaling.attention_factor, scaling.original_context) == (1.2, 128)
    with pytest.raises(ConfigError, match="long_mscale"):
        read(tmp_path, PHIMOE | {"rope_scaling": long | {"long_mscale": 1.3}})


def test_apertus_learns_how_its_activation_bends(tmp_path: Path) -> None:
    model = read(tmp_path, APERTUS)
    names = {name.removeprefix("model.layers.0.") for name in expected_shapes(model)}
    assert {"mlp.act_fn.alpha_p", "mlp.act_fn.alpha_n", "attention_layernorm.weight"} <= names
    assert {"feedforward_layernorm.weight", "self_attn.q_norm.weight"} <= names
    assert not {"input_layernorm.weight", "post_attention_layernorm.weight", "mlp.gate_proj.weight"} & names
    assert "model.layers.2.mlp.act_fn.beta" in model.ignored
    silent = read(tmp_path, {key: value for key, value in APERTUS.items() if not key.startswith("rope")})
    assert silent.ropes["main"] == Rope(12000000.0, 16, Llama3Scaling(8.0, 1.0, 4.0, 8192))


def test_nemotron_stores_gains_less_1_and_turns_half_a_head(tmp_path: Path) -> None:
    assert norms_of(tmp_path, NEMOTRON | {"norm_eps": 1e-4}) == {(True, 1e-4, 1.0, "bias")}
    assert read(tmp_path, NEMOTRON).ropes["main"] == Rope(10000.0, 8)
    assert read(tmp_path, NEMOTRON | {"partial_rotary_factor": 0.25}).ropes["main"].size == 4


def test_stablelm_has_blocks_one_after_another_or_side_by_side(tmp_path: Path) -> None:
    assert norms_of(tmp_path, STABLELM | {"layer_norm_eps": 1e-4}) == {(True, 1e-4, 0.0, "bias")}
    apart, beside = read(tmp_path, STABLELM), read(tmp_path, STABLELM | {"use_parallel_residual": True})
    assert apart.ropes["main"] == Rope(10000.0, 4)
    sums = [[len(each.xs) for each in model.operations if isinstance(each, Sum)] for model in (apart, beside)]
    assert sums == [[1] * 6, [2] * 3]
    assert "model.layers.0.post_attention_layernorm.bias" in expected_shapes(apart)
    assert "model.layers.0.post_attention_layernorm.bias" not in expected_shapes(beside)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (STARCODER2 | {"hidden_act": "silu"}, "hidden_act"),
        (NEMOTRON | {"hidden_act": "silu"}, "hidden_act"),
        (APERTUS | {"hidden_act": "silu"}, "hidden_act"),
        (APERTUS | {"post_norm": True}, "post_norm"),
        (PHIMOE | {"num_experts_per_tok": 3}, "num_experts_per_tok"),
        (NEMOTRON | {"sliding_window": 16}, "sliding_window"),
        (STABLELM | {"qk_layernorm": True}, "qk_layernorm"),
        (COHERE2_MOE | {"expert_selection_fn": "topk"}, "expert_selection_fn"),
        (COHERE2_MOE | {"shared_expert_combination_strategy": "max"}, "shared_expert_combination_strategy"),
        (COHERE | {"use_parallel_block": False}, "use_parallel_block"),
        (COHERE | {"hidden_act": "gelu"}, "hidden_act"),
        (COHERE2 | {"sliding_window": None}, "sliding_window"),
        (COHERE2 | {"use_qk_norm": True}, "use_qk_norm"),
        (GEMMA | {"hidden_act": "silu"}, "hidden_act"),
        (GEMMA | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (ARCEE | {"hidden_act": "silu"}, "hidden_act"),
        (MINISTRAL | {"layer_types": ["full_attention"] * 2}, "layer_types"),
        (GEMMA4 | {"per_layer_config": {"1": {"head_dim": 32}}}, "per_layer_config"),
        (GEMMA4 | {"per_layer_config": {"2": {"intermediate_size": 32}}}, "per_layer_config"),
        (GEMMA4 | {"model_type": "gemma4_unified_text", "enable_moe_block": True}, "enable_moe_block"),
        (GRANITE_MOE | {"sliding_window": 16}, "sliding_window"),
        (GRANITE_MOE | {"shared_intermediate_size": 64}, "shared_intermediate_size"),
        (GRANITE_SWA | {"layer_rope_theta": [0, 1e4]}, "layer_rope_theta"),
        (GRANITE_SWA | {"layer_rope_theta": [0, 1e4, -1]}, "layer_rope_theta"),
        (AFMOE | {"score_func": "softmax"}, "score_func"),
        (AFMOE | {"num_expert_groups": 2}, "num_expert_groups"),
        (AFMOE | {"route_norm": False}, "route_norm"),
        (DEEPSEEK_V2 | {"topk_method": "group_limited_greedy", "n_group": 3}, "n_group"),
        (DEEPSEEK_V2 | {"topk_method": "noaux_tc"}, "topk_method"),
        (DEEPSEEK_V2 | {"norm_topk_prob": True}, "norm_topk_prob"),
        (MINIMAX_M3 | {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        (MINIMAX_M3 | {"rotary_dim": 8, "partial_rotary_factor": 1.0}, "rotary_dim"),
        (MINIMAX_M3 | {"swiglu_limit": 10.0}, "swiglu_limit"),
        (MINIMAX_M3 | {"layer_types": ["minimax_m3_sparse"] * 3, "index_n_heads": 4}, "index_n_heads"),
        (MINIMAX_M3 | {"index_local_blocks": 17}, "index_local_blocks"),
        (MINIMAX_M3 | {"sparse_attention_config": {"sparse_init_block": 1}}, "sparse_init_block"),
        (MINIMAX_M3 | {"sparse_attention_config": {"sparse_score_type": "mean"}}, "sparse_score_type"),
        (
            MINIMAX_M3
            | {"layer_types": ["minimax_m3_sparse"] * 3, "index_n_heads": 2}
            | {"sparse_attention_config": {"sparse_disable_index_value": [1, 1, 0]}},
            "sparse_disable_index_value",
        ),
        (MINIMAX_M3 | {"sparse_attention_config": {"sparse_index_dim": 4}}, "sparse_index_dim"),
        (MINIMAX_M3 | {"moe_layer_freq": [0, 1]}, "moe_layer_freq"),
        (INTERNLM3 | {"qkv_bias": True, "bias": False}, "bias"),
        (CWM | {"layer_types": ["full_attention"]}, "layer_types"),
        (YOUTU | {"attention_bias": True}, "attention_bias"),
        (DOTS1 | {"layer_types": ["sliding_attention"] * 3}, "layer_types"),
        (DOTS1 | {"scoring_func": "softmax"}, "scoring_func"),
        (MIMO | {"v_head_dim": 8}, "v_head_dim"),
        (MIMO | {"v_head_dim": 32}, "v_head_dim"),
        (MIMO | {"swa_num_key_value_heads": 3}, "swa_num_key_value_heads"),
        (MIMO | {"num_key_value_heads": 4}, "num_key_value_heads"),
        (MIMO | {"swa_head_dim": 32}, "swa_head_dim"),
        (MIMO | {"hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern"),
        (MIMO | {"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias"),
        (MIMO | {"n_shared_experts": 1}, "n_shared_experts"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, config: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} = .*supported: "):
        read(tmp_path, config)
