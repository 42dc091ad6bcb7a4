"""Synthetic models: complete, readable, finite, and the same each time."""

import errno
import json
import os
import shutil
from collections import namedtuple
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from motley.bench.random_models import writing
from motley.bench.random_models.writing import SynthError, synthesise, temporary_model
from motley.daemon.models.files import open_model
from motley.daemon.models.keys import ConfigError
from motley.daemon.weights.checkpoints.checkpoint import CheckpointError
from motley.daemon.weights.checkpoints.safetensors_checkpoint import SafetensorsCheckpoint
from motley.daemon.weights.spec import Piece
from motley.orchestrator.known_models.shapes import SHAPES

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 300,
    "bos_token_id": 1,
    "eos_token_id": [2, 299],
}


def tiny(like: str) -> dict[str, Any]:
    return SHAPES[like] | TINY


HYBRID = ("qwen3-next", "qwen3.5")
"""What the names of models begin with of which parts are described that lie in larger tensors."""
PARAMETERS = {  # as the models' authors count them, in millions
    "granite-4.0-h-tiny": 6939,
    "olmo-hybrid-7b": 7431,
    "kimi-linear-48b-a3b": 49123,
    "falcon-h1-0.5b": 521,
    "lfm2-1.2b": 1170,
    "lfm2-8b-a1b": 8340,
    "llama-7m": 7,
    "nemotron-3-nano-30b-a3b": 31578,
    "tinyllama-1.1b": 1100,
    "llama-3.2-1b": 1236,
    "llama-3.2-3b": 3213,
    "llama-3.1-8b": 8030,
    "mistral-7b": 7242,
    "qwen2.5-0.5b": 494,
    "qwen2.5-7b": 7616,
    "qwen3-0.6b": 596,
    "qwen3-4b": 4022,
    "qwen3-8b": 8191,
    "qwen3-14b": 14768,
    "qwen3-32b": 32762,
    "smollm3-3b": 3075,
    "seed-oss-36b": 36151,
    "mixtral-8x7b": 46703,
    "mixtral-quarter": 1517,
    "qwen3-30b-a3b": 30532,
    "qwen3-moe-half": 1281,
    "qwen3-next-80b-a3b": 79674,
    "qwen3.5-9b": 8954,
    "qwen3.5-35b-a3b": 34661,
    "deepseek-v3": 671026,
    "kimi-k2": 1026408,
    "glm-4.7-flash": 29943,
    "glm-flash-quarter": 1037,
    "minimax-m2": 228690,
    "gemma-4-31b": 30697,
    "gemma-4-26b-a4b": 25233,
    "longcat-flash-560b": 560665,
    "gemma-3n-e4b": 6835,  # without 31 of keys and values that no layer reads
    "gemma-4-e2b": 4629,
    "gemma-4-e4b": 7463,
    "ministral-3-8b": 8490,
    "hunyuan-7b": 7505,
    "hunyuan-a13b": 80393,
    "glm-4-9b-0414": 9400,
    "llama-4-scout": 107770,
    "glm-5": 743911,
    "gpt-oss-20b": 20915,
    "glm-4.5-air": 106852,
    "ernie-4.5-21b-a3b": 21825,
    "gemma-3-4b": 3880,
    "olmo-3-7b": 7298,
    "phi-3-mini-4k": 3821,
    # Rounded by their authors, to 119, 40 and 4 B.
    "mistral-small-4-119b": 118973,
    "iquest-coder-40b": 39794,
    "minicpm3-4b": 4074,
    # Without what predicts further ahead, and what sees; with them their authors count 321 and 780 B.
    "glm-5.3-flash": 313327,
    "hy4-preview": 769907,
    "muse-glimmer-30b": 27855,  # without what sees
}


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_shapes_have_the_published_number_of_parameters(name: str) -> None:
    count = sum(prod(tensor.shape) for tensor in writing._tensors(SHAPES[name]))
    assert round(count / 1e6) == PARAMETERS[name]


@pytest.mark.parametrize(
    ("like", "gains"),
    [
        ("mixtral-8x7b", ["post_attention_layernorm.weight"]),
        ("glm-4.7-flash", ["self_attn.kv_a_layernorm.weight", "self_attn.q_a_layernorm.weight"]),
        ("gemma-4-26b-a4b", ["router.scale", "router.per_expert_scale", "layer_scalar"]),
        ("minimax-m2", ["self_attn.q_norm.weight"]),
    ],
)
def test_what_multiplies_values_is_about_one(like: str, gains: list[str], tmp_path: Path) -> None:
    small = {"q_lora_rank": 32, "global_head_dim": 32, "rotary_dim": 8, "moe_intermediate_size": 32}
    own = {key: value for key, value in small.items() if key in SHAPES[like]}
    heads = {"num_key_value_heads": 4, "num_global_key_value_heads": 4}
    synthesise(tiny(like) | heads | own, tmp_path)
    with open_model(tmp_path) as opened:
        for name in gains:
            values = opened.source.read(Piece(f"model.layers.1.{name}", range(1)))
            assert values == pytest.approx(1, abs=0.1), name
        matrix = opened.source.read(Piece("model.layers.1.self_attn.o_proj.weight", range(64), range(32)))
        assert matrix.std() == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("name", sorted(name for name in SHAPES if name.startswith(HYBRID)))
def test_weights_that_lie_in_larger_tensors_are_found(name: str, tmp_path: Path) -> None:
    few = {"num_experts": 3, "num_experts_per_tok": 2} if "num_experts" in SHAPES[name] else {}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "moe_intermediate_size": 32}
    synthesise(tiny(name) | few | heads | {"num_hidden_layers": 4}, tmp_path)
    with open_model(tmp_path) as opened:
        assert any(layer.recurrences for layer in opened.model.layers)
        (gain,) = {each.gain.name for layer in opened.model.layers[:1] for each in layer.recurrences}
        assert opened.source.read(Piece(gain, range(128))).mean() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    ("name", "key"),
    [("qwen3-next-80b-a3b", "mtp_num_hidden_layers"), ("glm-4.7-flash", "num_nextn_predict_layers")],
)
def test_a_head_that_the_configuration_tells_of_is_written(name: str, key: str, tmp_path: Path) -> None:
    own = {"num_experts": 3, "n_routed_experts": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    config = tiny(name) | {key: value for key, value in own.items() if key in SHAPES[name]}
    config |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_key_value_heads": 4, "num_hidden_layers": 4}
    for number, ahead in enumerate((0, 1)):
        synthesise(config | {key: ahead}, tmp_path / str(number))
        with open_model(tmp_path / str(number)):
            pass
    with open_model(tmp_path / "1", ahead=True) as opened:
        assert opened.rows([1, 2]).any()
    with pytest.raises((CheckpointError, ConfigError), match="head"), open_model(tmp_path / "0", ahead=True):
        pass


def test_a_weight_that_all_layers_have_is_written_once(tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "num_key_value_heads": 1, "global_head_dim": 32}
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2}
    rows = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 300}
    synthesise(tiny("gemma-4-e2b") | layers | kinds | rows, tmp_path)
    with open_model(tmp_path) as opened:
        gain = opened.source.read(Piece("model.per_layer_projection_norm.weight", range(16)))
        assert gain == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_are_gaussian_of_the_right_width(tmp_path: Path, dtype: Any) -> None:
    seen: list[tuple[int, int]] = []
    synthesise(tiny("qwen3-8b"), tmp_path, dtype, progress=lambda done, total: seen.append((done, total)))
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == dtype
    with SafetensorsCheckpoint(tmp_path) as checkpoint:

        def read(name: str, *shape: int) -> Any:
            rows, *columns = shape
            return checkpoint.read(Piece(name, range(rows), range(columns[0]) if columns else None))

        layer = "model.layers.1"
        assert read(f"{layer}.self_attn.q_proj.weight", 96, 64).std() == pytest.approx(0.02, rel=0.05)
        assert read(f"{layer}.self_attn.o_proj.weight", 64, 96).std() == pytest.approx(0.01, rel=0.05)
        assert read(f"{layer}.mlp.down_proj.weight", 64, 96).std() == pytest.approx(0.01, rel=0.05)
        assert read(f"{layer}.self_attn.k_norm.weight", 24).mean() == pytest.approx(1, abs=0.02)
        assert "lm_head.weight" in checkpoint
    assert seen[-1][0] == seen[-1][1] > 0


def test_ties_and_biases_follow_the_configuration(tmp_path: Path) -> None:
    synthesise(tiny("qwen2.5-0.5b"), tmp_path)
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        assert "lm_head.weight" not in checkpoint
        assert checkpoint.tensor("model.layers.0.self_attn.k_proj.bias").shape == (48,)
        assert "model.layers.0.self_attn.o_proj.bias" not in checkpoint


def test_a_large_model_is_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_SHARD", 50_000)
    synthesise(tiny("llama-3.1-8b"), tmp_path / "out")
    shards = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(shards) > 1
    assert shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    monkeypatch.undo()
    synthesise(tiny("llama-3.1-8b"), tmp_path / "whole")
    with SafetensorsCheckpoint(tmp_path / "out") as sharded, SafetensorsCheckpoint(tmp_path / "whole") as whole:
        for tensor in writing._tensors(tiny("llama-3.1-8b")):
            piece = Piece(tensor.name, *map(range, tensor.shape))
            np.testing.assert_array_equal(sharded.read(piece), whole.read(piece))


def test_the_seed_decides(tmp_path: Path) -> None:
    contents = []
    for index, seed in enumerate((7, 7, 8)):
        synthesise(tiny("mistral-7b"), tmp_path / str(index), seed=seed)
        contents.append((tmp_path / str(index) / "model.safetensors").read_bytes())
    assert contents[0] == contents[1] != contents[2]


def test_text_goes_in_and_comes_out(tmp_path: Path) -> None:
    synthesise(tiny("llama-3.2-1b"), tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 300
    text = "Grüße, 世界 👋\n  two  spaces"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert not {1, 2, 299} & set(ids)
    assert tokenizer.token_to_id("</s>") == 2
    assert tokenizer.decode([1, *ids, 2]) == text
    assert tokenizer.decode([298]) == "~298"
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == ("<s>", "</s>")


def test_an_occupied_folder_is_refused_unless_forced(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"stale")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(SynthError, match="not an empty folder"):
        synthesise(tiny("mistral-7b"), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    synthesise(tiny("mistral-7b"), tmp_path, force=True)
    assert {file.name for file in tmp_path.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model_type": "gpt2"}, 'model_type = "gpt2" is not supported; supported: .*llama, .*minimax_m2, .*mistral'),
        ({"hidden_size": None}, "hidden_size = null is not supported; supported: a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0 is not supported"),
        ({"vocab_size": 258}, "vocab_size 258 should hold 256 bytes and"),
        ({"eos_token_id": 300}, r"should hold 256 bytes and bos_token_id and eos_token_id \[1, 300\]"),
    ],
)
def test_wrong_configurations(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SynthError, match=complaint):
        synthesise(tiny("llama-3.1-8b") | change, tmp_path)
    assert not list(tmp_path.iterdir())


def test_too_little_space_is_noticed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**9, 10**9, 0))
    with pytest.raises(SynthError, match=r"the model takes 2\.20 GB and 0\.00 GB are free"):
        synthesise(SHAPES["tinyllama-1.1b"], tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_failure_leaves_no_half_model(tmp_path: Path) -> None:
    def fill_up(done: int, total: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(SynthError, match=os.strerror(errno.ENOSPC)):
        synthesise(tiny("qwen3-0.6b"), tmp_path, progress=fill_up)
    assert not list(tmp_path.iterdir())


def test_a_temporary_model_is_there_for_as_long_as_it_is_wanted() -> None:
    with temporary_model(tiny("llama-3.1-8b"), "a-name") as folder:
        assert folder.name == "a-name"
        assert (folder / "model.safetensors").is_file()
    assert not folder.parent.exists()


def test_scores_are_about_one_where_nothing_scales_them(tmp_path: Path) -> None:
    synthesise(tiny("gemma-4-26b-a4b") | {"head_dim": 64, "global_head_dim": 16}, tmp_path)
    with open_model(tmp_path) as opened:
        size = opened.model.layers[0].attention.heads.size
        for name in ("q_norm", "k_norm"):
            values = opened.source.read(Piece(f"model.layers.0.self_attn.{name}.weight", range(1)))
            assert values == pytest.approx(size**-0.25, rel=0.1)
