"""What Llama 4, Ministral 3 and Hunyuan read of a config, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from motley.daemon.models.description.axes import Heads
from motley.daemon.models.description.operations.attention import Warmth
from motley.daemon.models.keys import ConfigError
from tests.models.configs import DEEPSEEK_V3, LLAMA, MISTRAL, read

MINISTRAL3 = LLAMA | {
    "model_type": "ministral3",
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 64,
        "llama_4_scaling_beta": 0.1,
    },
}


@pytest.mark.parametrize(("text", "family"), [(MISTRAL, "mistral"), (MINISTRAL3, "ministral3"), (LLAMA, None)])
def test_the_text_part_of_mistral_3_is_of_two_families(
    text: dict[str, Any], family: str | None, tmp_path: Path
) -> None:
    whole = {"model_type": "mistral3", "text_config": text, "vision_config": {"model_type": "pixtral"}}
    if family is None:
        with pytest.raises(ConfigError, match=r"text_config.model_type = \"llama\" is not supported; .* ministral3"):
            read(tmp_path, whole)
        return
    model = read(tmp_path, whole)
    assert (model.family, "language_model.model." in model.prefixes) == (family, True)


def test_queries_of_ministral_3_grow_from_the_context_that_was_stretched(tmp_path: Path) -> None:
    model = read(tmp_path, MINISTRAL3)
    assert {layer.attention.warmth for layer in model.layers if layer.attention} == {Warmth(0.1, 64)}
    assert model.context == 1024


HUNYUAN = LLAMA | {"model_type": "hunyuan_v1_dense"}
HUNYUAN_MOE = LLAMA | {"model_type": "hunyuan_v1_moe", "num_experts": 4, "moe_topk": 2}
LLAMA4 = LLAMA | {"model_type": "llama4_text", "intermediate_size_mlp": 96, "num_local_experts": 4}


def test_llama_4_cuts_in_chunks_where_it_rotates(tmp_path: Path) -> None:
    def traits(changes: dict[str, Any]) -> list[tuple[int, bool, Warmth | None, bool]]:
        layers = read(tmp_path, LLAMA4 | {"num_hidden_layers": 4} | changes).layers
        attends = [layer.attention for layer in layers]
        return [(attend.window, attend.chunked, attend.warmth, attend.rope is not None) for attend in attends if attend]

    usual, everywhere = (8192, True, None, True), (0, False, None, True)
    assert traits({}) == [usual] * 3 + [(0, False, Warmth(0.1, 8192, 1), False)]
    assert traits({"attention_chunk_size": None})[:3] == [everywhere] * 3
    assert traits({"attn_temperature_tuning": 4})[3][2] == Warmth(0.1, 8192, 1)  # as the first configs have it
    assert traits({"attn_temperature_tuning": False})[3][2] is None
    assert traits({"no_rope_layers": [1, 0, 1, 1]})[1][3] is False
    layers = read(tmp_path, LLAMA4 | {"num_hidden_layers": 4, "interleave_moe_layer_step": 2}).layers
    assert [layer.experts is not None for layer in layers] == [False, True, False, True]


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_indexers_choose_what_rows_see(family: str, tmp_path: Path) -> None:
    config = DEEPSEEK_V3 | {"model_type": family}
    model = read(tmp_path, config | {"index_topk": 48})
    assert model.context == read(tmp_path, DEEPSEEK_V3).context
    heads = {"deepseek_v32": 64, "glm_moe_dsa": 32}[family]
    for layer in model.layers:
        assert layer.choice is not None
        assert layer.attention is not None
        assert (layer.choice.y, layer.choice.y.axis.size) == (layer.attention.chosen, 48)
        assert layer.choice.heads == Heads(heads, 1, 128)
    assert not model.whole


@pytest.mark.parametrize(
    ("more", "own"),
    [
        ({"indexer_types": ["full", "shared", "full"]}, [0, 2]),
        ({"index_topk_pattern": "FSS"}, [0]),
        ({"index_topk_freq": 2}, [0, 1]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 3}, [0, 1, 2]),
    ],
)
def test_layers_of_glm_may_share_an_indexer(more: dict[str, Any], own: list[int], tmp_path: Path) -> None:
    model = read(tmp_path, DEEPSEEK_V3 | {"model_type": "glm_moe_dsa"} | more)
    assert [number for number, layer in enumerate(model.layers) if layer.choice] == own
    for number, layer in enumerate(model.layers):
        assert layer.attention is not None
        assert layer.attention.chosen == model.layers[max(each for each in own if each <= number)].choice.y
        assert layer.follows == (number not in own)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA4 | {"num_experts_per_tok": 2}, "num_experts_per_tok = 2 is not supported; supported: only 1"),
        (LLAMA4 | {"moe_layers": [7]}, "moe_layers"),
        (LLAMA4 | {"moe_layers": []}, "moe_layers"),
        (LLAMA4 | {"moe_layers": [True]}, "moe_layers"),
        (LLAMA4 | {"layer_types": ["full_attention"] * 3}, "layer_types"),
        (LLAMA4 | {"attn_temperature_tuning": 3}, "attn_temperature_tuning"),
        (MINISTRAL3 | {"rope_parameters": {"rope_type": "default"}}, "rope_parameters.rope_type"),
        (HUNYUAN | {"rope_scaling": {"type": "dynamic", "alpha": 50.0, "beta": 1}}, "rope_scaling.beta"),
        (HUNYUAN | {"rope_scaling": {"type": "dynamic", "alpha": 1e300}, "head_dim": 4}, "rope_scaling.alpha"),
        (HUNYUAN | {"rope_scaling": {"type": "dynamic", "alpha": 50.0}, "head_dim": 2}, "rope_scaling.alpha"),
        (HUNYUAN | {"use_qk_norm": False}, "use_qk_norm"),
        (HUNYUAN | {"use_cla": True}, "use_cla"),
        (HUNYUAN_MOE | {"moe_topk": [1, 2, 2]}, "moe_topk"),
        (HUNYUAN_MOE | {"moe_topk": [[1], [1], [1]]}, "moe_topk"),
        (HUNYUAN_MOE | {"num_shared_expert": [2] * 3}, "num_shared_expert"),
        (HUNYUAN_MOE | {"moe_intermediate_size": 16}, "moe_intermediate_size"),
        (DEEPSEEK_V3 | {"model_type": "glm_moe_dsa", "rope_interleave": False}, "rope_interleave"),
        (DEEPSEEK_V3 | {"model_type": "glm_moe_dsa", "index_topk_pattern": "SFF"}, "indexer_types"),
        (DEEPSEEK_V3 | {"model_type": "glm_moe_dsa", "indexer_types": ["full", "none", "full"]}, "indexer_types"),
        (DEEPSEEK_V3 | {"model_type": "deepseek_v32", "index_head_dim": 2}, "index_head_dim"),
        (DEEPSEEK_V3 | {"model_type": "deepseek_v32", "q_lora_rank": None}, "q_lora_rank"),
    ],
)
def test_what_newer_families_cannot_be_is_refused_by_name(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, config)
