"""What configs of LFM2 and 3, Nemotron-H, Falcon-H1 and Granite 4 say, how they are cut, what they are refused for."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from motley.daemon.models.cutting.profile import profile
from motley.daemon.models.cutting.states import reach
from motley.daemon.models.cutting.units import units
from motley.daemon.models.description.axes import RecurrentHeads
from motley.daemon.models.description.model import tensors
from motley.daemon.models.description.operations.recurrence import ShortConvolution, StateSpace
from motley.daemon.models.description.operations.rows import Gated, Norm, Sum, WholeNorm
from motley.daemon.models.description.rope import Rope
from motley.daemon.models.files import open_model
from motley.daemon.models.keys import ConfigError
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.orchestrator.known_models.shapes import SHAPES
from motley.plugins.recurrent import StateSpec
from tests.models.cases import changed, golden_case
from tests.models.configs import LLAMA, read

HEADS = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 12, "n_groups": 4, "head_dim": 16}
NEMOTRON = LLAMA | HEADS | {"model_type": "nemotron_h", "num_hidden_layers": 4, "hybrid_override_pattern": "M-*M"}
GRANITE = LLAMA | {"model_type": "granitemoehybrid", "mamba_n_heads": 8, "num_local_experts": 0}
GRANITE["layer_types"] = ["mamba", "attention", "mamba"]
FALCON = LLAMA | {"model_type": "falcon_h1", "mamba_d_ssm": 128, "mamba_n_heads": 8}
LFM3 = LLAMA | {"model_type": "lfm3", "num_hidden_layers": 5}
LFM2 = LLAMA | {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]}


def test_published_shapes(tmp_path: Path) -> None:
    """The parts of layers, and their sizes, as the models' authors tell them."""
    nemotron, granite, lfm2 = (
        read(tmp_path, SHAPES[name]) for name in ("nemotron-3-nano-30b-a3b", "granite-4.0-h-tiny", "lfm2-1.2b")
    )
    spaces = [each for each in nemotron.operations if isinstance(each, StateSpace)]
    assert (len(spaces), len(nemotron.expert_layers), len([*filter(None, _attentions(nemotron))])) == (23, 23, 6)
    assert {(each.heads, reach(each.filters[0])) for each in spaces} == {(RecurrentHeads(8, 64, 128, 64), 4)}
    spaces = [each for each in granite.operations if isinstance(each, StateSpace)]
    assert {each.heads for each in spaces} == {RecurrentHeads(48, 48, 128, 64, shared=True)}
    convolutions = [each for each in lfm2.operations if isinstance(each, ShortConvolution)]
    assert {(each.filter.shape, each.filter_bias) for each in convolutions} == {((2048, 3), None)}
    assert (granite.logits.axis.size, granite.embedding_scale, granite.tied) == (100352, 12.0, True)


def _attentions(model: Any) -> list[Any]:
    return [layer.attention for layer in model.layers]


def test_the_text_of_nemotron_omni_is_in_its_llm(tmp_path: Path) -> None:
    part = read(tmp_path, {"model_type": "nemotron_h_omni", "llm_config": NEMOTRON, "vision_config": {}})
    assert replace(part, prefixes=("backbone.",)) == read(tmp_path, NEMOTRON)
    places = {tensor.name: {place.tensor for place in tensor.parts} for tensor in tensors(part)}
    assert "language_model.backbone.layers.1.norm.weight" in places["model.layers.1.norm.weight"]
    assert "language_model.lm_head.weight" in places["lm_head.weight"]


def test_lfm3_has_windows_gates_and_norms_unless_it_says_otherwise(tmp_path: Path) -> None:
    model = read(tmp_path, LFM3)
    windows = [layer.attention and (layer.attention.rope, layer.attention.window) for layer in model.layers]
    assert windows == [None, None, ("full_attention", 0), None, ("sliding_attention", 256)]
    assert (model.ropes["full_attention"].theta, model.ropes["sliding_attention"]) == (1e6, Rope(1e4, 128))
    assert {each.filter.shape for each in model.operations if isinstance(each, ShortConvolution)} == {(64, 7)}
    gates, norms = (sum(isinstance(each, kind) for each in model.operations) for kind in (Gated, Norm))
    assert (gates, norms) == (5 + 2, 5 * 4 + 2 * 2 + 1), "of MLPs and heads; of blocks, queries and keys, the head"
    plain = read(tmp_path, LFM3 | {"use_attention_gate": False, "use_sandwich_norm": False})
    counts = [sum(isinstance(each, kind) for each in plain.operations) for kind in (Gated, Norm)]
    assert counts == [5, 5 * 2 + 2 * 2 + 1]


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (NEMOTRON | {"hybrid_override_pattern": "M-X*"}, "hybrid_override_pattern"),
        (NEMOTRON | {"hybrid_override_pattern": "M-MM"}, "hybrid_override_pattern"),
        (NEMOTRON | {"hybrid_override_pattern": None}, "hybrid_override_pattern"),
        (NEMOTRON | {"layers_block_type": ["mamba", "windowed", "attention", "mlp"]}, "layers_block_type"),
        (NEMOTRON | {"num_hidden_layers": 5}, "num_hidden_layers"),
        (NEMOTRON | {"n_groups": 3}, "n_groups"),
        (NEMOTRON | {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        (NEMOTRON | {"attention_bias": True}, "attention_bias"),
        (NEMOTRON | {"time_step_limit": [1.0, 0.5]}, "time_step_limit"),
        (NEMOTRON | {"time_step_limit": "none"}, "time_step_limit"),
        (GRANITE | {"layer_types": ["mamba"] * 3}, "layer_types"),
        (GRANITE | {"layer_types": None}, "layer_types"),
        (GRANITE | {"mamba_n_heads": 7}, "mamba_n_heads"),
        (GRANITE | {"mamba_n_groups": 3}, "mamba_n_groups"),
        (GRANITE | {"position_embedding_type": "alibi"}, "position_embedding_type"),
        (GRANITE | {"normalization_function": "layernorm"}, "normalization_function"),
        (GRANITE | {"hidden_act": "gelu"}, "hidden_act"),
        (FALCON | {"layer_types": ["mamba"] * 3}, "layer_types"),
        (FALCON | {"mamba_n_heads": 7}, "mamba_n_heads"),
        (FALCON | {"mamba_rms_norm": True}, "mamba_norm_before_gate"),
        (FALCON | {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers"),
        (FALCON | {"mlp_multipliers": [1.0, -1]}, "mlp_multipliers"),
        (FALCON | {"key_multiplier": 0}, "key_multiplier"),
        (FALCON | {"mlp_bias": True}, "mlp_bias"),
        (LFM3 | {"layer_types": ["conv"] * 5}, "layer_types"),
        (LFM3 | {"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        (LFM3 | {"conv_L_cache": 1}, "conv_L_cache"),
        (LFM2 | {"layer_types": ["conv"] * 3}, "layer_types"),
        (LFM2 | {"layer_types": None, "full_attn_idxs": [3]}, "full_attn_idxs"),
        (LFM2 | {"layer_types": [["conv"], "conv", "full_attention"]}, "layer_types"),
        (LFM2 | {"layer_types": None, "full_attn_idxs": [True]}, "full_attn_idxs"),
        (LFM2 | {"block_ffn_dim_multiplier": 1e308}, "block_ffn_dim_multiplier"),
        (LFM2 | {"conv_L_cache": 1}, "conv_L_cache"),
        (LFM2 | {"num_attention_heads": 6, "head_dim": 16}, "hidden_size"),
        (LFM2 | {"model_type": "lfm2_moe", "num_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok"),
    ],
)
def test_what_cannot_be_is_named(config: dict[str, Any], key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=key):
        read(tmp_path, config)


def test_groups_that_cannot_be_cut_like_attention_are_named(tmp_path: Path) -> None:
    model = read(tmp_path, NEMOTRON | {"num_attention_heads": 6, "num_key_value_heads": 3})
    with pytest.raises(ConfigError, match="layers of 3 KV heads and layers with a recurrent state of 4 key heads"):
        units(model, "fp32", 32)


def test_the_profile_counts_states_by_what_a_unit_has(tmp_path: Path) -> None:
    told = profile(read(tmp_path, NEMOTRON), "fp32", 32)
    assert (told.kv_groups, told.attention_splits) == (2, [1, 2])
    assert told.state_bytes == 2 * StateSpec(0, 4 * 16 + 2 * 2 * 12, 4, 4, 12, 16, 4).bytes
    shared = profile(read(tmp_path, GRANITE | {"mamba_d_state": 12}), "fp32", 32)
    assert shared.state_bytes == 2 * StateSpec(0, 64 + 2 * 12, 4, 4, 12, 16, 4).bytes, "all have what heads share"
    assert profile(read(tmp_path, LFM2), "fp32", 32).state_bytes == 2 * StateSpec(0, 32, 3).bytes


def test_a_norm_over_all_heads_is_summed_and_one_over_a_group_is_not(tmp_path: Path) -> None:
    one, four = (read(tmp_path, GRANITE | {"mamba_n_groups": groups}) for groups in (1, 4))
    assert [sum(isinstance(each, WholeNorm) for each in model.operations) for model in (one, four)] == [2, 0]
    assert [sum(isinstance(each, Sum) for each in model.operations) for model in (one, four)] == [6, 6]


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("nemotron-h", "backbone.layers.0.mixer.dt_bias"),
        ("granitemoehybrid", "model.layers.0.shared_mlp.output_linear.weight"),
        ("lfm2", "model.layers.1.self_attn.out_proj.weight"),
    ],
)
def test_a_tensor_that_is_missing_or_of_another_shape_is_named(name: str, tensor: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    shutil.copytree(golden_case(name).folder, folder)
    weights = load_file(folder / "model.safetensors")
    called = tensor.removeprefix("backbone.").removeprefix("model.")
    left = {each: value for each, value in weights.items() if each != tensor}
    for kept in (left, left | {tensor: weights[tensor][:-1].copy()}):
        save_file(kept, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=called), open_model(folder):
            pass


@pytest.mark.parametrize("name", ["nemotron-h", "qwen3-5-with-vision", "deepseek-v3"])
@pytest.mark.parametrize(
    ("own", "where"),
    [
        ("{trunk}layers.1.mixer.up_proj.bias", "in a layer of"),
        ("{trunk}layers.1.self_attn.sinks", "in a layer of"),
        ("{trunk}layers.9.norm.weight", "in a layer beyond the [0-9] of"),
        ("lm_head.bias", "of the head"),
    ],
)
def test_a_tensor_too_many_is_named(name: str, own: str, where: str, tmp_path: Path) -> None:
    """The bias that a projection has not by its config, say, or a layer; tensors elsewhere are none of ours."""
    folder = tmp_path / name
    shutil.copytree(golden_case(name).folder, folder)
    weights = load_file(folder / "model.safetensors")
    trunk = next(iter(reversed(golden_case(name).model.prefixes)), "model.")
    more = {
        "mtp.layers.0.mixer.norm.weight": np.ones(3),
        "vision_tower.layers.9.norm.weight": np.ones(3),
        f"{trunk}layers.0.self_attn.rotary_emb.inv_freq": np.ones(3),
    }
    save_file(weights | more, folder / "model.safetensors")
    with open_model(folder):
        pass
    called = own.format(trunk=trunk)
    save_file(weights | more | {called: np.ones(3)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{re.escape(called)}' is {where}"), open_model(folder):
        pass


def test_published_files_may_be_of_todays_transformers(tmp_path: Path) -> None:
    """Which calls the trunk ``model.`` and not ``backbone.``."""
    folder = tmp_path / "nemotron-h"
    shutil.copytree(golden_case("nemotron-h").folder, folder)
    weights = load_file(folder / "model.safetensors")
    renamed = {name.replace("backbone.", "model."): each for name, each in weights.items()}
    save_file(renamed, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["layers_block_type"] = ["mamba", "mlp", "linear_attention", "attention", "moe"]
    del config["hybrid_override_pattern"]
    (folder / "config.json").write_text(json.dumps(config))
    with open_model(folder) as opened:
        assert [bool(layer.recurrences) for layer in opened.model.layers] == [True, False, True, False, False]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *(("nemotron-h", key) for key in ("mamba_head_dim", "ssm_state_size")),
        *(("qwen3-5", key) for key in ("linear_key_head_dim", "linear_value_head_dim")),
        ("granitemoehybrid", "mamba_d_state"),
    ],
)
def test_heads_that_are_too_wide_for_a_state_are_refused(name: str, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} = 513 is not supported; supported: a whole number of at most 512"):
        changed(golden_case(name).folder, **{key: 513})


def test_falcon_h1_attends_beside_each_state_and_both_share_a_sum(tmp_path: Path) -> None:
    model = read(tmp_path, SHAPES["falcon-h1-0.5b"])
    assert all(layer.attention and isinstance(layer.recurrences[0], StateSpace) for layer in model.layers)
    assert {each.heads for each in model.operations if isinstance(each, StateSpace)} == {
        RecurrentHeads(24, 24, 128, 64, shared=True)
    }
    assert [sum(isinstance(each, kind) for each in model.operations) for kind in (Sum, WholeNorm)] == [72, 0]
    normed = read(tmp_path, FALCON | {"mamba_rms_norm": True, "mamba_norm_before_gate": False})
    assert sum(isinstance(each, WholeNorm) for each in normed.operations) == 3
