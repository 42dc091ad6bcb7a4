"""GGUF files compute what the folders do that they are made of; what cannot be computed is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from motley.daemon.models.cutting.units import units
from motley.daemon.models.description.operations.attention import Warmth
from motley.daemon.models.description.rope import YarnScaling
from motley.daemon.models.files import read_model
from motley.daemon.models.keys import ConfigError
from motley.daemon.weights.checkpoints.gguf.checkpoint import GgufCheckpoint
from motley.plugins.reference.engine import ReferenceEngine
from tests.models.cases import GOLDEN, LocalSession, golden_case, uneven_shares
from tests.models.to_gguf import to_gguf


@pytest.mark.parametrize(
    ("name", "told", "architecture"),
    [
        ("deepseek-v2", {}, "deepseek2"),
        ("llama-llama3-rope-tied", {"model_type": "exaone"}, "exaone"),
        ("gemma2", {"query_pre_attn_scalar": 16}, "gemma2"),
        ("falcon-h1", {}, "falcon-h1"),
        ("bailing-hybrid", {}, "bailingmoe3"),
        ("kimi-linear", {"num_expert_group": 1, "topk_group": 1}, "kimi-linear"),
        ("granitemoehybrid", {"time_step_limit": None}, "granitehybrid"),
        ("granitemoehybrid-dense", {}, "granitehybrid"),
        ("lfm2", {}, "lfm2"),
        ("lfm2-moe", {"routed_scaling_factor": 1.0}, "lfm2moe"),
        ("minicpm3", {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}, "minicpm3"),
        ("nemotron-h-latent", {}, "nemotron_h_moe"),
        ("qwen2", {"model_type": "qwen2_5_vl_text"}, "qwen2vl"),
        ("qwen3", {"model_type": "qwen3_vl_text"}, "qwen3vl"),
        ("qwen3-moe", {"model_type": "qwen3_vl_moe_text"}, "qwen3vlmoe"),
    ],
)
def test_a_file_computes_what_its_folder_does(
    name: str, told: dict[str, Any], architecture: str, tmp_path: Path
) -> None:
    """Where a file cannot tell everything of the golden model, of one that differs from it in that."""
    same_logits(copied(name, tmp_path, told), architecture, tmp_path)


def copied(name: str, to: Path, told: dict[str, Any]) -> Path:
    """The folder of a golden model whose config is told otherwise."""
    folder = to / name
    shutil.copytree(GOLDEN / name, folder)
    (folder / "config.json").write_text(json.dumps(configured(folder) | told))
    return folder


def configured(folder: Path) -> dict[str, Any]:
    """A folder's config."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def same_logits(folder: Path, architecture: str, tmp_path: Path) -> None:
    """Make sure that a GGUF file made of a folder is of an architecture, and has the folder's logits."""
    file, tokens = to_gguf(folder, tmp_path / "m.gguf"), golden_case(folder.name).tokens
    logits = []
    for path in (folder, file):
        shares = uneven_shares(units(read_model(path), "fp32", 32), 2)
        with LocalSession(path, ReferenceEngine, shares, tmp_path / f"ranks {path.name}") as ranks:
            logits.append(ranks.step(tokens, 0))
    assert np.abs(logits[1] - logits[0]).max() < 1e-5 * np.abs(logits[0]).max()
    with GgufCheckpoint(file) as checkpoint:
        assert checkpoint.metadata["general.architecture"] == architecture


def test_what_no_key_tells_of_llama_4(tmp_path: Path) -> None:
    """It is as in the published models; of these, the one of 128 experts has no norms of queries and keys."""
    usual = {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}
    folder = copied("llama4", tmp_path, usual)
    same_logits(folder, "llama4", tmp_path)
    assert read_model(tmp_path / "m.gguf").layers == read_model(folder).layers
    many = read_model(to_gguf(folder, tmp_path / "m.gguf", adapt=told("llama4.expert_count", 128)))
    (folder / "config.json").write_text(json.dumps(configured(folder) | {"use_qk_norm": False}))
    assert [each.attention for each in many.layers] == [each.attention for each in read_model(folder).layers]
    chunked = told("llama4.attention.sliding_window", 0)
    with pytest.raises(ConfigError, match=r"sliding_window = 0 .* only its absence"):
        read_model(to_gguf(folder, tmp_path / "m.gguf", adapt=chunked))


def test_a_nemotron_without_experts_is_of_another_architecture(tmp_path: Path) -> None:
    """The golden model without its last layer, which is the one that has experts."""
    experts = dict.fromkeys(("n_routed_experts", "n_shared_experts", "n_group", "routed_scaling_factor"))
    folder = copied("nemotron-h", tmp_path, {"hybrid_override_pattern": "M-M*", "num_hidden_layers": 4} | experts)
    weights = load_file(folder / "model.safetensors")
    save_file({name: own for name, own in weights.items() if ".layers.4." not in name}, folder / "model.safetensors")
    same_logits(folder, "nemotron_h", tmp_path)


def test_what_mamba_layers_of_a_file_cannot_be(tmp_path: Path) -> None:
    folder = copied("granitemoehybrid", tmp_path, {"time_step_limit": None})
    for key, value, complaint in (
        ("ssm.time_step_rank", 7, r"granitehybrid\.ssm\.inner_size = 128 .* a multiple of ssm\.time_step_rank = 7"),
        ("expert_feed_forward_length", 16, r"expert_feed_forward_length = 16 .* only feed_forward_length = 32"),
        ("attention.head_count_kv", [0, 2, 4], r"head_count_kv = \[0, 2, 4\] .* one number, or a list of it and of 0"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            read_model(to_gguf(folder, tmp_path / "m.gguf", adapt=told(f"granitehybrid.{key}", value)))


def test_a_falcon_whose_head_is_its_embeddings_is_refused(tmp_path: Path) -> None:
    """Both are multiplied by numbers of their own, of which a file tells none."""

    def tied(writer: gguf.GGUFWriter) -> None:
        del writer.tensors[0]["output.weight"]

    with pytest.raises(ConfigError, match=r"vocab_size = 101 .* with a tensor output\.weight beside"):
        read_model(to_gguf(GOLDEN / "falcon-h1", tmp_path / "m.gguf", adapt=tied))


def test_what_a_file_of_ling_3_cannot_tell(tmp_path: Path) -> None:
    folder = GOLDEN / "bailing-hybrid"
    for key, value, complaint in (
        ("swiglu_clamp_exp", [0, 7, 7], r"bailingmoe3\.swiglu_clamp_exp = \[0, 7, 7\] .* only 0 for each layer"),
        ("kda.safe_gate", 0, r"bailingmoe3\.kda\.safe_gate = 0 .* only true"),
        ("kda.gate_lower_bound", 1, r"kda_lower_bound = 1 .* a negative number"),
        ("expert_shared_feed_forward_length", 48, r"shared_feed_forward_length = 48 .* only that of 1 experts, 32"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            read_model(to_gguf(folder, tmp_path / "m.gguf", adapt=told(f"bailingmoe3.{key}", value)))
    assert read_model(to_gguf(folder, tmp_path / "m.gguf", adapt=told("bailingmoe3.swiglu_clamp_exp", [0, 0, 0])))

    def silent(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["bailingmoe3.kda.gate_lower_bound"]

    with pytest.raises(ConfigError, match=r"kda\.gate_lower_bound is absent; expected a negative number"):
        read_model(to_gguf(folder, tmp_path / "m.gguf", adapt=silent))


def test_what_experts_of_k_exaone_cannot_be(tmp_path: Path) -> None:
    for key, value, complaint in (
        ("expert_gating_func", 1, r"exaone-moe\.expert_gating_func = 1 .* only 2, a sigmoid"),
        ("expert_shared_feed_forward_length", 48, r"shared_feed_forward_length = 48 .* only that of 1 experts, 32"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            read_model(to_gguf(GOLDEN / "exaone-moe", tmp_path / "m.gguf", adapt=told(f"exaone-moe.{key}", value)))


def test_what_a_file_of_laguna_tells(tmp_path: Path) -> None:
    """Without a list, all layers but the first of four have a window; YaRN's factor of queries may be told."""

    def more(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop("laguna.attention.sliding_window_pattern", None)
        writer.add_rope_scaling_yarn_attn_factor(1.25)

    model = read_model(to_gguf(GOLDEN / "laguna", tmp_path / "m.gguf", adapt=more))
    assert [layer.attention.window for layer in model.layers if layer.attention] == [0, 8]
    scaling = model.ropes["full"].scaling
    assert isinstance(scaling, YarnScaling)
    assert scaling.attention_factor == 1.25
    for key, value, complaint in (
        ("attention.head_count", [4, 6, 6], r"head_count = \[4, 6, 6\] .* a number, or a list of 2 numbers"),
        ("attention.head_count", [4, 5], r"head_count = \[4, 5\] .* multiples of num_key_value_heads = 2"),
        ("expert_gating_func", 1, r"laguna\.expert_gating_func = 1 .* only 2, a sigmoid"),
        ("expert_shared_count", 2, r"laguna\.expert_shared_count = 2 .* only 1"),
        ("rope.dimension_count_swa", 32, r"dimension_count_swa = 32 .* at most 16"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            read_model(to_gguf(GOLDEN / "laguna", tmp_path / "m.gguf", adapt=told(f"laguna.{key}", value)))


def test_what_experts_of_deepseek_cannot_be(tmp_path: Path) -> None:
    """Groups by their best expert in V2, and a softmax in GLM-5."""
    for name, key, value, complaint in (
        ("deepseek-v2", "deepseek2.expert_group_count", 4, r"n_group = 4 .* only 1"),
        ("deepseek-v2", "deepseek2.expert_gating_func", 3, r"deepseek2\.expert_gating_func = 3 .* only 2, a sigmoid"),
        ("glm-moe-dsa", "glm-dsa.expert_gating_func", 1, r"glm-dsa\.expert_gating_func = 1 .* only 2, a sigmoid"),
        ("mistral4", "mistral4.expert_gating_func", 2, r"mistral4\.expert_gating_func = 2 .* only 1, a softmax"),
        ("mistral4", "mistral4.attention.temperature_length", 16, r"temperature_length = 16 .*context_length = 8"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            read_model(to_gguf(GOLDEN / name, tmp_path / "m.gguf", adapt=told(key, value)))


def test_a_glm_5_without_indexers_is_no_glm_5(tmp_path: Path) -> None:
    def forget(writer: gguf.GGUFWriter) -> None:
        for tensors in writer.tensors:
            for name in [each for each in tensors if "indexer" in each]:
                del tensors[name]

    with pytest.raises(ConfigError, match=r"indexer\.top_k = .* a file with tensors of indexers \(blk\.0\.indexer"):
        read_model(to_gguf(GOLDEN / "glm-moe-dsa", tmp_path / "m.gguf", adapt=forget))


def test_mistral_large_3_is_a_deepseek_whose_queries_grow(tmp_path: Path) -> None:
    def warm(writer: gguf.GGUFWriter) -> None:
        writer.add_attn_temperature_scale(0.25)

    model = read_model(to_gguf(GOLDEN / "deepseek-v2", tmp_path / "m.gguf", adapt=warm))
    warmths = {layer.attention.warmth for layer in model.layers if layer.attention}
    assert (model.family, warmths) == ("mistral4", {Warmth(0.25, 32)})


def test_what_gemma_4_cannot_be(tmp_path: Path) -> None:
    folder = copied("gemma4", tmp_path, {})
    for key, value, complaint in (
        ("attention.head_count_kv", [2, 1, 2], r"head_count_kv = \[2, 1, 2\] .* one for layers with windows"),
        ("attention.value_length_swa", 8, r"value_length_swa = 8 .* only attention\.key_length_swa = 16"),
        ("rope.dimension_count", 16, r"rope\.dimension_count = 16 .* only the size of a head, 32"),
        ("feed_forward_length", [64, 64, 96], r"feed_forward_length = \[64, 64, 96\] .* a list of it for 3 layers"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            read_model(to_gguf(folder, tmp_path / "m.gguf", adapt=told(f"gemma4.{key}", value)))
    own_values = copied("gemma4-given-rows", tmp_path, {})
    more_heads = told("gemma4.attention.head_count_kv", [1, 2, 1, 2])
    with pytest.raises(ConfigError, match=r"only one number where layers that see everything have values of their own"):
        read_model(to_gguf(own_values, tmp_path / "m.gguf", adapt=more_heads))

    def half_turned(writer: gguf.GGUFWriter) -> None:
        writer.tensors[0].pop("rope_freqs.weight")
        writer.add_tensor("rope_freqs.weight", np.array([1.0, 2.0] * 8, np.float32))

    with pytest.raises(ConfigError, match=r"rope_freqs\.weight should hold 1 for frequencies that turn"):
        read_model(to_gguf(folder, tmp_path / "m.gguf", adapt=half_turned))


def test_keys_of_layers_that_borrow_them_are_left_out(tmp_path: Path) -> None:
    def unused(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.3.attn_k.weight", np.zeros((32, 80), np.float32))

    folder = copied("gemma4-given-rows", tmp_path, {})
    assert len(read_model(to_gguf(folder, tmp_path / "m.gguf", adapt=unused)).layers) == 4


def told(key: str, value: int | list[int]) -> Callable[[gguf.GGUFWriter], None]:
    """Say something else of a key."""

    def adapt(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_uint32(key, value)

    return adapt
