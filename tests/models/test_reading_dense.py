"""Configs of dense families that are mostly others': defaults, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from motley.daemon.models.description.axes import Heads
from motley.daemon.models.description.model import expected_shapes, tensors
from motley.daemon.models.description.operations.rows import Norm, Scale, SoftCap
from motley.daemon.models.description.rope import Rope
from motley.daemon.models.keys import ConfigError
from tests.models.configs import (
    APERTUS_15,
    EXAONE,
    GRANITE,
    HELIUM,
    HUNYUAN,
    HYPERCLOVAX,
    IQUESTCODER,
    JAIS2,
    LLAMA,
    MUSE_GLIMMER,
    NANOCHAT,
    NORTH_MICRO,
    VAULTGEMMA,
    read,
    without,
)
from tests.models.test_reading import attentions, windows


def test_vaultgemma_is_a_gemma_2_without_norms_after_its_blocks(tmp_path: Path) -> None:
    model, usual = read(tmp_path, VAULTGEMMA), read(tmp_path, VAULTGEMMA | {"model_type": "gemma2"})
    after = {
        f"model.layers.{layer}.post_{block}_layernorm.weight"
        for layer in range(3)
        for block in ("attention", "feedforward")
    }
    assert expected_shapes(usual).keys() - expected_shapes(model).keys() == after
    assert expected_shapes(model).keys() <= expected_shapes(usual).keys()
    assert [attend.soft_cap for attend in attentions(model)] == [50.0] * 3
    assert (windows(model), model.embedding_scale, model.tied) == ([4096, 0, 4096], 8.0, True)


def test_iquestcoder_is_a_llama(tmp_path: Path) -> None:
    assert read(tmp_path, IQUESTCODER) == read(tmp_path, LLAMA | {"head_dim": 128})
    silent = without(without(IQUESTCODER, "num_key_value_heads"), "rms_norm_eps") | {"num_attention_heads": 16}
    assert {attend.heads for attend in attentions(read(tmp_path, silent))} == {Heads(16, 8, 128)}
    unused = read(tmp_path, IQUESTCODER | {"use_sliding_window": False, "sliding_window": 16})
    assert windows(unused) == [0, 0, 0]


def test_muse_glimmer_turns_where_there_are_windows(tmp_path: Path) -> None:
    model = read(tmp_path, MUSE_GLIMMER)
    assert [(each.rope, each.window) for each in attentions(model)] == [("main", 2048), ("main", 2048), (None, 0)]
    assert {each.scale for each in attentions(model)} == {3.87 * 16**-0.5}
    based = read(tmp_path, MUSE_GLIMMER | {"layer_rope_theta": [0, 500, 500], "rope_theta": 500})
    assert [each.rope for each in attentions(based)] == [None, "base0", "base0"]
    assert based.ropes == {"base0": Rope(500.0, 16)}


def test_north_micro_has_a_rotary_embedding_for_each_kind_of_layer(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    model = read(tmp_path, NORTH_MICRO | {"layer_types": kinds, "sliding_window": 16})
    assert [(each.rope, each.window) for each in attentions(model)] == [
        ("sliding_attention", 16),
        (None, 0),
        ("sliding_attention", 16),
    ]
    assert model.ropes == {"sliding_attention": Rope(500.0, 16)}
    assert windows(read(tmp_path, NORTH_MICRO)) == [0, 0, 0]


def test_helium_s_neighbouring_elements_turn_together(tmp_path: Path) -> None:
    model = read(tmp_path, without(HELIUM, "rms_norm_eps"))
    assert (model.ropes, model.last_norm.epsilon) == ({"main": Rope(1e5, 128)}, 1e-8)
    (part,) = next(each.parts for each in tensors(model) if each.name.endswith(".0.self_attn.q_halves_proj.weight"))
    assert part.of_head[:2] == (range(0, 128, 2), range(1, 128, 2))


def test_exaone_is_a_llama_in_both_spellings(tmp_path: Path) -> None:
    names = {
        "num_hidden_layers": "num_layers",
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
    }
    model = read(tmp_path, EXAONE)
    assert read(tmp_path, {names.get(key, key): value for key, value in EXAONE.items()}) == model
    assert replace(model, spelled={}) == read(tmp_path, LLAMA | {"rope_theta": 5e5})
    assert (
        attentions(read(tmp_path, without(EXAONE | {"num_attention_heads": 8}, "num_key_value_heads")))[0].heads.keys
        == 8
    )
    places = {each.name: {part.tensor for part in each.parts} for each in tensors(model)}
    assert places["model.layers.1.self_attn.o_proj.weight"] == {"transformer.h.1.attn.attention.out_proj.weight"}
    assert places["model.layers.1.self_attn.q_proj.weight"] == {"transformer.h.1.attn.attention.q_proj.weight"}
    assert places["model.layers.2.mlp.up_proj.weight"] == {"transformer.h.2.mlp.c_fc_1.weight"}
    assert places["model.layers.0.post_attention_layernorm.weight"] == {"transformer.h.0.ln_2.weight"}
    assert places["model.embed_tokens.weight"] == {"transformer.wte.weight"}
    assert places["model.norm.weight"] == {"transformer.ln_f.weight"}


def test_hyperclovax_is_a_granite_with_norms_after_its_blocks(tmp_path: Path) -> None:
    scales = {"logits_scaling": 0.5, "residual_multiplier": 0.25, "embedding_multiplier": 3.0}
    model = read(tmp_path, HYPERCLOVAX | scales)
    usual = expected_shapes(read(tmp_path, GRANITE))
    after = {f"model.layers.{layer}.post_norm{block}.weight" for layer in range(3) for block in (1, 2)}
    assert expected_shapes(model).keys() - usual.keys() == after
    assert [each.by for each in model.operations if isinstance(each, Scale)] == [0.25] * 6 + [0.5]
    assert (model.embedding_scale, attentions(model)[0].scale) == (3.0, 0.25)
    assert expected_shapes(read(tmp_path, HYPERCLOVAX | {"use_post_norm": False})).keys() == usual.keys()


def test_hunyuan_vl_s_text_is_a_hunyuan_in_all_spellings(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    usual = read(tmp_path, HUNYUAN | {"rope_scaling": rope, "head_dim": 16, "tie_word_embeddings": True})
    today = HUNYUAN | {"model_type": "hunyuan_vl_text", "rope_parameters": rope | {"mrope_section": [2, 2, 2, 2]}}
    model = read(tmp_path, {"model_type": "hunyuan_vl", "text_config": today, "vision_config": {}})
    assert replace(model, prefixes=()) == usual
    flat = HUNYUAN | {"model_type": "hunyuan_vl", "attention_head_dim": 16, "vision_config": {}}
    flat |= {"rope_scaling": rope | {"type": "xdrope", "rope_type": "xdrope", "xdrope_section": [2, 2, 2, 2]}}
    assert read(tmp_path, flat) == model


def test_nanochat_has_norms_without_gains_and_turns_backwards(tmp_path: Path) -> None:
    model = read(tmp_path, NANOCHAT)
    assert not [name for name in expected_shapes(model) if "norm" in name]
    norms = [each for each in model.operations if isinstance(each, Norm)]
    # One of embeddings, two of each layer's rows, two of its heads, and the head's.
    assert (len(norms), {each.gain for each in norms}) == (1 + 4 * 3 + 1, {None})
    assert model.ropes["main"] == Rope(1e4, 16, backwards=True)
    assert [each.cap for each in model.operations if isinstance(each, SoftCap)] == [15.0]
    silent = read(tmp_path, NANOCHAT | {"final_logit_softcapping": None, "attention_bias": True})
    assert not [each for each in silent.operations if isinstance(each, SoftCap)]
    assert {"model.layers.2.self_attn.o_proj.bias", "model.layers.0.mlp.fc1.weight"} <= expected_shapes(silent).keys()
    assert "model.layers.0.mlp.fc1.bias" not in expected_shapes(silent)


def test_jais2_has_biases_unless_its_config_says_otherwise(tmp_path: Path) -> None:
    biases = {f"{part}_proj.bias" for part in ("self_attn.o", "self_attn.q", "mlp.up", "mlp.down")}
    usual = {name.removeprefix("model.layers.1.") for name in expected_shapes(read(tmp_path, JAIS2))}
    assert biases | {"input_layernorm.bias", "model.norm.bias"} <= usual
    assert "mlp.gate_proj.weight" not in usual
    without_any = read(tmp_path, JAIS2 | {"attention_bias": False, "mlp_bias": False})
    assert not biases & {name.removeprefix("model.layers.1.") for name in expected_shapes(without_any)}


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (VAULTGEMMA | {"hidden_activation": "gelu"}, "hidden_activation"),
        (IQUESTCODER | {"clip_qkv": 8.0}, "clip_qkv"),
        (IQUESTCODER | {"use_sliding_window": True, "sliding_window": 16}, "sliding_window"),
        (EXAONE | {"num_layers": 2}, "num_layers"),
        (EXAONE | {"hidden_act": "gelu"}, "hidden_act"),
        (HYPERCLOVAX | {"use_post_norm": 1}, "use_post_norm"),
        (HELIUM | {"hidden_act": "gelu"}, "hidden_act"),
        (APERTUS_15 | {"output_vocab_size": 101}, "output_vocab_size"),
        (APERTUS_15 | {"tie_word_embeddings": True}, "tie_word_embeddings"),
        (MUSE_GLIMMER | {"hidden_activation": "gelu"}, "hidden_activation"),
        (MUSE_GLIMMER | {"attention_bias": True}, "attention_bias"),
        (MUSE_GLIMMER | {"layer_rope_theta": [500, 0]}, "layer_rope_theta"),
        (MUSE_GLIMMER | {"layer_rope_theta": [1e4, 500, 0]}, "layer_rope_theta"),
        (NORTH_MICRO | {"rope_parameters": {"sliding_attention": None}}, "rope_parameters"),
        (NORTH_MICRO | {"rope_parameters": None}, "rope_parameters"),
        (NANOCHAT | {"hidden_act": "silu"}, "hidden_act"),
        (NANOCHAT | {"final_logit_softcapping": 0}, "final_logit_softcapping"),
        (NANOCHAT | {"sliding_window": 16}, "sliding_window"),
        (JAIS2 | {"hidden_act": "silu"}, "hidden_act"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, config: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} = .*supported: "):
        read(tmp_path, config)
