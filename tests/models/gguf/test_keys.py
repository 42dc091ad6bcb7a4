"""Models from GGUF metadata: the same as from ``config.json``, with the same logits, and refusals by key."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from motley.daemon.models.cutting.units import units
from motley.daemon.models.description.axes import Heads
from motley.daemon.models.description.model import expected_shapes
from motley.daemon.models.description.operations.experts import Route, Routing
from motley.daemon.models.description.rope import (
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    Rope,
    YarnScaling,
    rotary_tables,
)
from motley.daemon.models.files import open_model, open_weights, read_model
from motley.daemon.models.graph.expert_graph import build_expert_graph
from motley.daemon.models.graph.rank_graph import build_rank_graph
from motley.daemon.models.keys import ConfigError
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.gguf.checkpoint import GgufCheckpoint
from motley.daemon.weights.share_file import write_share
from motley.daemon.weights.spec import Piece
from motley.daemon.weights.stored import dequantised
from motley.plugins.reference.engine import ReferenceEngine
from tests.models.cases import GOLDEN, Case, LocalSession, golden_case, golden_cases, uneven_shares
from tests.models.graph.test_whole_experts import joined
from tests.models.to_gguf import to_gguf, write

ANOTHER_SCALE = ["gemma2", "gemma3", "gemma3-with-vision"]
"""No GGUF key tells the scale of attention: it follows from the size of a head, and theirs does not."""
NOT_TOLD = {
    "afmoe",
    "axk1",
    "axk2",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "granite_swa",
    "hy_v3",
    "hy_v4",
    "llama4",
    "mimo_v2_flash",
    "minimax_m3",
    "cohere2_moe",
    "phimoe",
    "apertus",
    "olmo_hybrid",
    "cwm",
    "glm",
    "cohere_compass",
    "flex_olmo",
    "flint",
    "granitemoe_swa",
    "helium",
    "hyperclovax",
    "kolibri1",
    "longcat_flash",
    "mellum",
    "muse_glimmer",
    "minicpm3",
    "nanochat",
    "sarvam_moe",
    "solar_open",
    "step3p5",
    "vaultgemma",
    "youtu",
}
"""Families of which a file does not tell all that the golden models have, or that no architecture here is."""
CASES = [
    case
    for case in golden_cases()
    if str(case) not in ANOTHER_SCALE
    and not case.recurrent  # which are not read from GGUF files
    and not any(trait in str(case) for trait in ("some-windows", "dynamic", "normalised"))
    and case.model.family not in NOT_TOLD
]
"""No GGUF key tells which layers have a window, of dynamic scaling, or of routers unlike their architecture's."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_golden_models(case: Case, tmp_path: Path) -> None:
    file = to_gguf(case.folder, tmp_path / "m.gguf")
    model, folder = read_model(file), case.changed(norms_are_whole=True)
    assert model.ropes.keys() == folder.ropes.keys()
    for name, rope in folder.ropes.items():
        if isinstance(rope.scaling, Llama3Scaling):
            assert isinstance(model.ropes[name].scaling, FactorScaling)
        tables = [np.stack(rotary_tables(each, 128, case.prompt)) for each in (model.ropes[name], rope)]
        assert np.abs(tables[0] - tables[1]).max() < 1e-5  # factors are float32
    # Which tensors files may have that predict further ahead, each tells in its own way.
    assert replace(model, ropes=folder.ropes, eos=folder.eos, ignored=folder.ignored) == folder
    assert set(model.eos) <= set(case.model.eos)
    with LocalSession(file, ReferenceEngine, uneven_shares(units(model, "fp32", 32), 3), tmp_path) as ranks:
        logits = ranks.step(case.tokens[:-1], 0)
    assert np.abs(logits - case.logits).max() < 1e-4 * np.abs(case.logits).max()
    assert logits[case.prompt - 1 :].argmax(axis=1).tolist() == case.tokens[case.prompt :]


@pytest.mark.parametrize(
    "case", [each for each in golden_cases() if each.recurrent and each.model.family.startswith("qwen3")], ids=str
)
def test_golden_models_with_recurrent_states(case: Case, tmp_path: Path) -> None:
    """Their projections lie apart and in another order, so their descriptions are not those of the folders."""
    file = to_gguf(case.folder, tmp_path / "m.gguf")
    with LocalSession(file, ReferenceEngine, uneven_shares(units(read_model(file), "fp32", 32), 3), tmp_path) as ranks:
        logits = ranks.step(case.tokens[:-1], 0)
    assert np.abs(logits - case.logits).max() < 1e-4 * np.abs(case.logits).max()
    assert logits[case.prompt - 1 :].argmax(axis=1).tolist() == case.tokens[case.prompt :]


@pytest.mark.parametrize("type_", [Type.F32, Type.Q4_0, Type.Q8_0])
def test_columns_of_value_heads_are_put_in_order(type_: Type, tmp_path: Path) -> None:
    """Two key heads with three value heads of 64 elements each; codes move as they are."""
    name = "model.layers.0.linear_attn.out_proj.weight"
    values = np.random.default_rng(0).standard_normal((5, 2, 3, 64)).astype(np.float32)
    raw = gguf.quants.quantize(values.reshape(5, -1), type_)
    expected = gguf.quants.dequantize(raw, type_)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen35")
    writer.add_ssm_state_size(32)
    writer.add_ssm_group_count(2)
    writer.add_ssm_time_step_rank(6)
    writer.add_ssm_inner_size(6 * 64)
    tiled = np.ascontiguousarray(values.swapaxes(1, 2)).reshape(5, -1)
    writer.add_tensor("blk.0.ssm_out.weight", gguf.quants.quantize(tiled, type_), raw_dtype=type_)
    write(writer)
    with GgufCheckpoint(tmp_path / "m.gguf") as source:
        for columns in (range(384), range(64, 256), range(96, 128)):
            piece = Piece(name, range(1, 4), columns)
            want = expected[1:4, columns.start : columns.stop]
            np.testing.assert_array_equal(source.read(piece), want)
            if (form := source.format(name)).block:
                np.testing.assert_array_equal(dequantised(source.codes(piece), form), want)


@pytest.mark.parametrize("name", ["glm4-moe-qk-norm", "qwen3-5"])
def test_layers_that_predict_further_ahead_are_left_out(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(GOLDEN / name, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    number = config["num_hidden_layers"]
    more = all_of(tensor(f"blk.{number}.nextn.eh_proj.weight", 8, 16), tensor(f"blk.{number}.attn_norm.weight", 8))
    if name == "qwen3-5":
        more = all_of(more, key("nextn_predict_layers", 1, "qwen35"))
    model = read_model(to_gguf(folder, tmp_path / "m.gguf", adapt=more))
    assert len(model.layers) == number


def test_latent_attention(tmp_path: Path) -> None:
    """Of YaRN's two scales a file tells one, which is both: as in the published models."""
    folder = tmp_path / "folder"
    shutil.copytree(GOLDEN / "deepseek-v3", folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_scaling"]["mscale"] = config["rope_scaling"]["mscale_all_dim"]
    (folder / "config.json").write_text(json.dumps(config))
    file, tokens = to_gguf(folder, tmp_path / "m.gguf"), golden_case("deepseek-v3").tokens
    logits = []
    for path in (folder, file):
        shares = uneven_shares(units(read_model(path), "fp32", 32), 3)
        with LocalSession(path, ReferenceEngine, shares, tmp_path / f"ranks {path.name}") as ranks:
            logits.append(ranks.step(tokens, 0))
    assert np.abs(logits[1] - logits[0]).max() < 1e-5 * np.abs(logits[0]).max()
    (rope,) = read_model(file).ropes.values()
    assert isinstance(rope.scaling, YarnScaling)
    assert rope.scaling.attention_factor == 1.0


def test_layers_that_attend_have_equally_many_heads(tmp_path: Path) -> None:
    for heads in ([2, 0, 3], [0, 0], [2, "x"]):
        adapt = lambda writer, told=heads: writer.add_array("lfm2.attention.head_count_kv", told)  # noqa: E731
        if "x" in heads:
            adapt = key("attention.head_count_kv", "x", "lfm2")
        with pytest.raises(ConfigError, match=r"lfm2\.attention\.head_count_kv = .* one number, or a list"):
            read_model(adapted(tmp_path, adapt, "lfm2"))


@pytest.mark.parametrize("name", ANOTHER_SCALE)
def test_the_scale_of_gemmas_attention_follows_from_the_size_of_a_head(name: str, tmp_path: Path) -> None:
    case = golden_case(name)
    model = read_model(to_gguf(case.folder, tmp_path / "m.gguf"))
    folder = case.changed(norms_are_whole=True, query_pre_attn_scalar=case.heads.size)
    assert replace(model, eos=folder.eos, prefixes=folder.prefixes) == folder


@pytest.mark.parametrize(
    ("name", "quantisation"),
    [
        *product(
            ["llama-mha", "qwen3", "mixtral", "qwen2-moe", "gemma3-softcaps", "gpt-oss", "glm4-moe", "phi3"],
            ["fp32", "int8"],
        ),
        ("gpt-oss-mxfp4", "stored"),
    ],
)
def test_a_share_of_the_file_is_that_of_the_folder_bit_for_bit(name: str, quantisation: str, tmp_path: Path) -> None:
    experts = Type.MXFP4 if quantisation == "stored" else Type.F32
    file = to_gguf(GOLDEN / name, tmp_path / "m.gguf", lambda name: experts if "_exps." in name else Type.F32)
    written = []
    for path in (GOLDEN / name, file):
        with open_model(path) as opened:
            model, stored = opened.model, opened.stored
            shares = uneven_shares(units(model, quantisation, 32, stored), 2)
            declared = build_rank_graph(model, shares, 0, quantisation, 32, model.context, stored)
            write_share(opened.source, declared.weights, declared.share_bytes, tmp_path / "share")
        written.append((model.ropes, model.eos, (tmp_path / "share").read_bytes()))
    assert written[0] == written[1]


@pytest.mark.parametrize("name", ["mixtral", "olmoe", "qwen2-moe", "qwen3-moe", "gpt-oss", "glm4-moe"])
@pytest.mark.parametrize("type_", [Type.F32, Type.F16])
def test_whole_experts_beside_a_trunk(name: str, type_: Type, tmp_path: Path) -> None:
    case = golden_case(name)
    file = to_gguf(case.folder, tmp_path / "m.gguf", lambda name: type_)
    shares = uneven_shares(units(read_model(file), "fp32", 32), 3)
    with LocalSession(file, ReferenceEngine, shares, tmp_path, declare=joined) as ranks:
        logits = ranks.step(case.tokens[:-1], 0)
    limit = {"F32": 1e-4, "F16": 1e-2}[type_.name]
    assert np.abs(logits - case.logits).max() < limit * np.abs(case.logits).max()


@pytest.mark.parametrize("experts", ["fused", "apart"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_experts_are_the_same_wherever_they_lie(name: str, experts: str, tmp_path: Path) -> None:
    opened = []
    for how in ("stacked", experts):
        file = to_gguf(GOLDEN / name, tmp_path / f"{how}.gguf", experts=how)
        model = read_model(file)
        declared = build_expert_graph(model, units(model, "fp32", 32), len(model.layers) - 1, 2)
        with open_weights(file) as source:
            write_share(source, declared.weights, declared.share_bytes, tmp_path / "share")
        opened.append((model, (tmp_path / "share").read_bytes()))
    assert opened[0] == opened[1]


def test_experts_of_no_width_of_their_own(tmp_path: Path) -> None:
    """As in llama.cpp: those of a row together are as wide as an MLP."""
    adapt = mixture(tensor("blk.0.ffn_gate_inp.weight", 8, 32), "qwen3moe")
    model = read_model(adapted(tmp_path, adapt, "qwen3moe"))
    assert expected_shapes(model)["model.layers.0.mlp.experts.7.down_proj.weight"] == (32, 24)
    (rule,) = [each.routing for each in model.layers[0].operations if isinstance(each, Route)]
    assert rule == Routing(2, normalised=True)


def adapted(folder: Path, adapt: Callable[[gguf.GGUFWriter], None], architecture: str = "llama") -> Path:
    """A file with next to nothing in it, and what `adapt` adds or changes."""
    writer = gguf.GGUFWriter(folder / "m.gguf", architecture)
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((10, 32), np.float32))
    writer.add_tensor("blk.1.attn_norm.weight", np.ones(32, np.float32))
    adapt(writer)
    write(writer)
    return folder / "m.gguf"


def key(name: str, value: Any, architecture: str = "llama") -> Callable[[gguf.GGUFWriter], None]:
    """Add a key in the type that converters give it."""

    def adapt(writer: gguf.GGUFWriter) -> None:
        full = f"{architecture}.{name}"
        writer.kv_data[0].pop(full, None)
        match value:
            case bool():
                writer.add_bool(full, value)
            case int():
                writer.add_uint32(full, value)
            case float():
                writer.add_float32(full, value)
            case str():
                writer.add_string(full, value)
            case list():
                writer.add_array(full, value)

    return adapt


def all_of(*adapt: Callable[[gguf.GGUFWriter], None]) -> Callable[[gguf.GGUFWriter], None]:
    def adapt_all(writer: gguf.GGUFWriter) -> None:
        for each in adapt:
            each(writer)

    return adapt_all


def test_the_least_that_a_file_can_say(tmp_path: Path) -> None:
    model = read_model(adapted(tmp_path, lambda writer: None))
    assert (model.vocabulary, model.ropes) == (10, {"main": Rope(10000.0, 8)})
    assert (model.tied, model.eos, model.context) == (True, (), 64)
    for layer in model.layers:
        assert layer.attention is not None
        assert (layer.attention.heads, layer.attention.window) == (Heads(4, 4, 8), 0)


@pytest.mark.parametrize(
    ("adapt", "rope", "context"),
    [
        (key("rope.freq_base", 1e6), Rope(1e6, 8), 64),
        (key("rope.scale_linear", 2.5), Rope(1e4, 8, LinearScaling(2.5)), 160),
        (key("rope.scaling.factor", 4.0), Rope(1e4, 8, LinearScaling(4.0)), 256),
        (all_of(key("rope.scaling.type", "none"), key("rope.scaling.finetuned", False)), Rope(1e4, 8), 64),
        (
            all_of(key("rope.scaling.type", "yarn"), key("rope.scaling.factor", 4.0)),
            Rope(1e4, 8, YarnScaling(4.0, 64, 32.0, 1.0, True, 0.1 * np.log(4.0) + 1.0)),
            256,
        ),
        (
            all_of(
                key("rope.scaling.type", "yarn"),
                key("rope.scaling.factor", 4.0),
                key("rope.scaling.original_context_length", 16),
            ),
            Rope(1e4, 8, YarnScaling(4.0, 16, 32.0, 1.0, True, 0.1 * np.log(4.0) + 1.0)),
            64,
        ),
        (
            lambda writer: writer.add_tensor("rope_freqs.weight", np.array([1, 2, 4, 4], np.float32)),
            Rope(1e4, 8, FactorScaling((1.0, 2.0, 4.0, 4.0))),
            64,
        ),
    ],
)
def test_rope(adapt: Callable[[gguf.GGUFWriter], None], rope: Rope, context: int, tmp_path: Path) -> None:
    model = read_model(adapted(tmp_path, adapt))
    assert (model.ropes, model.context) == ({"main": rope}, context)


def tensor(name: str, *shape: int) -> Callable[[gguf.GGUFWriter], None]:
    return lambda writer: writer.add_tensor(name, np.ones(shape, np.float32))


def mixture(adapt: Callable[[gguf.GGUFWriter], None], architecture: str = "llama") -> Callable[[gguf.GGUFWriter], None]:
    """With 8 experts in the second layer."""
    return all_of(
        key("expert_count", 8, architecture),
        key("expert_used_count", 2, architecture),
        tensor("blk.1.ffn_gate_inp.weight", 8, 32),
        adapt,
    )


@pytest.mark.parametrize(
    ("adapt", "complaint"),
    [
        (key("expert_count", 8), r"llama\.expert_used_count is absent; expected a whole number of at least 1"),
        (
            all_of(key("expert_count", 8), key("expert_used_count", 9)),
            r"llama\.expert_used_count = 9 .* at most expert_count = 8",
        ),
        (
            all_of(key("expert_count", 8), key("expert_used_count", 2)),
            r"llama\.expert_count = 8 .* no tensor ffn_gate_inp\.weight",
        ),
        (mixture(key("expert_weights_norm", False)), r"expert_weights_norm = false .* only true in this architecture"),
        (mixture(key("expert_weights_scale", 2.5)), r"expert_weights_scale = 2\.5 .* only 0\.0"),
        (mixture(key("expert_gating_func", 2)), r"expert_gating_func = 2 .* only 1"),
        (mixture(key("expert_group_count", 4)), r"expert_group_count = 4 .* only 0"),
        (mixture(key("expert_shared_count", 1)), r"expert_shared_count = 1 .* only 0"),
        (
            mixture(key("expert_feed_forward_length", 64)),
            r"expert_feed_forward_length = 64 .* feed_forward_length = 48",
        ),
        (mixture(key("expert_shared_feed_forward_length", 64)), r"expert_shared_feed_forward_length = 64 .* absence"),
        (mixture(tensor("blk.0.ffn_gate_shexp.weight", 48, 32)), r"no tensors model\.layers\.0\.mlp\.shared_expert\."),
        (
            mixture(tensor("blk.1.ffn_up_exps.bias", 8, 48)),
            r"has no tensors model\.layers\.1\.mlp\.experts\.0\.up_proj\.bias",
        ),
        (mixture(tensor("blk.1.exp_probs_b.bias", 8)), r"has no tensors blk\.1\.exp_probs_b\.bias"),
        (mixture(tensor("blk.1.ffn_up_exps.weight", 9, 48, 32)), r"has no tensors model\.layers\.1\.mlp\.experts\.8\."),
        (key("attention.clamp_kqv", 8.0), r"llama\.attention\.clamp_kqv = 8\.0"),
        (
            key("a_key_of_tomorrow", "x"),
            r"llama\.a_key_of_tomorrow = .x. is not supported; supported: only its absence",
        ),
        (key("block_count", 0), r"llama\.block_count = 0 is not supported; supported: a whole number of at least 1"),
        (key("block_count", 1 << 31), r"llama\.block_count = 2147483648 .* layers whose tensors are there"),
        (key("attention.head_count", [4, 2]), r"llama\.attention\.head_count = \[4, 2\]"),
        (key("attention.head_count_kv", 3), r"head_count_kv = 3 .* a divisor of num_attention_heads = 4"),
        (key("attention.key_length", 7), r"key_length = 7 .* an even number"),
        (key("attention.value_length", 16), r"value_length = 16 .* only the size of a head, 8"),
        (
            all_of(key("attention.key_length", 8), key("rope.dimension_count", 4)),
            r"dimension_count = 4 .* only the size",
        ),
        (key("attention.layer_norm_rms_epsilon", 0.0), r"layer_norm_rms_epsilon = 0\.0 .* a positive number"),
        (key("vocab_size", 11), r"vocab_size = 11 .* only the rows of token_embd\.weight, 10"),
        (key("rope.scaling.type", "longrope"), r"rope\.scaling\.type = .longrope. .* none, linear, yarn"),
        (key("rope.scaling.type", "linear"), r"rope\.scale_linear is absent"),
        (key("rope.scaling.factor", 0.5), r"rope\.scaling\.factor = 0\.5"),
        (key("rope.scaling.attn_factor", 1.5), r"attn_factor = 1\.5 .* only 1\.0"),
        (
            all_of(tensor("rope_factors_long.weight", 4), tensor("rope_factors_short.weight", 4)),
            r"has no tensors rope_factors_long\.weight, rope_factors_short\.weight",
        ),
        (
            all_of(
                key("rope.scaling.type", "yarn"),
                key("rope.scaling.factor", 2.0),
                key("rope.scaling.yarn_beta_fast", 0.5),
            ),
            r"yarn_beta_fast = 0\.5 .* at least yarn_beta_slow = 1\.0",
        ),
        (
            all_of(key("rope.scaling.factor", 2.0), tensor("rope_freqs.weight", 4)),
            r"only none beside the tensor rope_freqs\.weight|rope\.scaling\.type is absent",
        ),
        (tensor("blk.0.ffn_gate_exps.weight", 2, 2), r"has no tensors blk\.0\.ffn_gate_exps\.weight"),
        (tensor("blk.0.attn_q_norm.weight", 8), r"has no tensors model\.layers\.0\.self_attn\.q_norm\.weight"),
        (tensor("blk.1.attn_q.bias", 32), r"has no tensors model\.layers\.1\.self_attn\.q_proj\.bias"),
        (lambda writer: writer.add_string("tokenizer.ggml.eos_token_id", "x"), r"eos_token_id = x .* a token id"),
    ],
)
def test_refusals(adapt: Callable[[gguf.GGUFWriter], None], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_model(adapted(tmp_path, adapt))


def test_other_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'architecture = "bert" is not supported; supported: llama, mistral3, qwen2'):
        read_model(adapted(tmp_path, lambda writer: None, "bert"))
    with pytest.raises(ConfigError, match=r"qwen2\.expert_count = 8 is not supported; supported: only 0"):
        read_model(adapted(tmp_path, key("expert_count", 8, "qwen2"), "qwen2"))
    with pytest.raises(ConfigError, match=r"olmoe\.attention\.clamp_kqv = 0\.75 is not supported"):
        read_model(adapted(tmp_path, key("attention.clamp_kqv", 0.75, "olmoe"), "olmoe"))
    with pytest.raises(ConfigError, match=r"attn_factor = 1\.5 .* only 1\.0 without the tensor rope_factors_long"):
        read_model(adapted(tmp_path, key("rope.scaling.attn_factor", 1.5, "phi3"), "phi3"))
    with pytest.raises(ConfigError, match=r"granite\.rope\.scaling\.finetuned = false is not supported"):
        read_model(adapted(tmp_path, key("rope.scaling.finetuned", False, "granite"), "granite"))
    pattern = "attention.sliding_window_pattern"
    for wrong in (0, "every", [True, False, True], [1, 0]):
        adapt = all_of(key("attention.sliding_window", 8, "gemma3"), key(pattern, wrong, "gemma3"))
        with pytest.raises(ConfigError, match=r"gemma3\.attention\.sliding_window_pattern = .* is not supported"):
            read_model(adapted(tmp_path, adapt, "gemma3"))
    plain = mixture(tensor("blk.0.ffn_up_exps.weight", 8, 48, 32), "qwen3moe")  # its layer 0 has an MLP
    with pytest.raises(ConfigError, match=r"has no tensors model\.layers\.0\.mlp\.experts\.0\."):
        read_model(adapted(tmp_path, plain, "qwen3moe"))
    with pytest.raises(ConfigError, match=r"qwen2\.attention\.sliding_window = 8 is not supported"):
        read_model(adapted(tmp_path, key("attention.sliding_window", 8, "qwen2"), "qwen2"))
    with pytest.raises(CheckpointError, match=r"'rope_freqs\.weight' has shape \[3\]; the config makes it \[4\]"):
        read_model(adapted(tmp_path, tensor("rope_freqs.weight", 3)))
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight should hold numbers"):
        read_model(adapted(tmp_path, lambda writer: writer.add_tensor("rope_freqs.weight", np.zeros(4, np.float32))))
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    write(writer)
    with pytest.raises(ConfigError, match=r"llama\.block_count is absent; expected a whole number"):
        read_model(tmp_path / "m.gguf")


@pytest.mark.parametrize("architecture", ["llama", "mistral3"])
def test_a_window_in_every_layer_is_mistrals(architecture: str, tmp_path: Path) -> None:
    model = read_model(adapted(tmp_path, key("attention.sliding_window", 16, architecture), architecture))
    windows = [layer.attention.window for layer in model.layers if layer.attention]
    assert (model.family, windows) == ("mistral", [16, 16])


def test_granites_scale_of_attention_is_the_usual_one_where_no_key_tells_it(tmp_path: Path) -> None:
    model = read_model(adapted(tmp_path, lambda writer: None, "granite"))
    assert [layer.attention.scale for layer in model.layers if layer.attention] == [8**-0.5] * 2
