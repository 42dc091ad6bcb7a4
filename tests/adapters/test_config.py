"""Configs of adapters: what PEFT means by them, and what is refused by name."""

from __future__ import annotations

import json
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from motley.daemon.adapters.config import AdapterConfig, read_config
from motley.daemon.models.keys import ConfigError

PLAIN = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
Q0, Q1, Q11 = (f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1, 11))


def read(folder: Path, **changes: Any) -> AdapterConfig:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({key: value for key, value in (PLAIN | changes).items() if value != "absent"}))
    return read_config(file)


@pytest.mark.parametrize(
    ("changes", "adapted", "left"),
    [
        ({}, [Q0, Q1, "q_proj"], ["model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.xq_proj"]),
        ({"target_modules": "all-linear"}, [Q0, "model.layers.1.mlp.up_proj"], []),
        ({"target_modules": r".*\.1\d?\.self_attn\.q_proj"}, [Q1, Q11], [Q0, f"{Q1}.more"]),
        ({"target_modules": [Q1]}, [Q1], [Q0, Q11]),
        ({"exclude_modules": ["1.self_attn.q_proj"]}, [Q0, Q11], [Q1]),
        ({"exclude_modules": r".*\.0\..*"}, [Q1], [Q0]),
        ({"layers_to_transform": [1, 2]}, [Q1], [Q0, Q11, "x.q_proj"]),
        ({"layers_to_transform": 0}, [Q0], [Q1]),
        ({"layers_to_transform": [1], "layers_pattern": "layers"}, [Q1], [Q0]),
        ({"layers_to_transform": [1], "layers_pattern": ["blocks"]}, ["model.blocks.1.q_proj"], [Q1]),
        ({"layers_to_transform": [1]}, ["model.layers.1.experts.0.q_proj"], ["model.layers.0.experts.1.q_proj"]),
    ],
)
def test_what_is_adapted(changes: dict[str, Any], adapted: list[str], left: list[str], tmp_path: Path) -> None:
    config = read(tmp_path, **changes)
    assert [module for module in adapted + left if config.adapts(module)] == adapted


def test_ranks_and_scales(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        rank_pattern={"k_proj": 4, r"layers\.1\.mlp\.up_proj": 32, "up_proj": 16},
        alpha_pattern={"1.self_attn.q_proj": 2},
    )
    found = {
        module: (config.rank_of(module), config.scale_of(module))
        for module in (Q0, Q1, Q11, "x.k_proj", "a.layers.1.mlp.up_proj", "a.layers.11.mlp.up_proj")
    }
    assert found == {
        Q0: (8, 2),
        Q1: (8, 0.25),
        Q11: (8, 2),  # a pattern matches whole parts of a name
        "x.k_proj": (4, 4),
        "a.layers.1.mlp.up_proj": (32, 0.5),
        "a.layers.11.mlp.up_proj": (16, 1),
    }
    assert read(tmp_path, use_rslora=True).scale_of(Q0) == 16 / sqrt(8)
    assert read(tmp_path, r=0).scale_of(Q0) == 0
    silent = read(tmp_path, r=None, lora_alpha=None)
    assert (silent.rank_of(Q0), silent.scale_of(Q0)) == (8, 1)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"peft_type": "IA3"}, 'peft_type = "IA3"'),
        ({"peft_type": "absent"}, "peft_type is absent"),
        ({"use_dora": True}, "use_dora = true"),
        ({"use_qalora": True}, "use_qalora = true"),
        ({"lora_bias": True}, "lora_bias = true"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out = true"),
        ({"bias": "all"}, 'bias = "all"'),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights = "pissa"'),
        ({"modules_to_save": "lm_head"}, "modules_to_save.* a list of names of modules"),
        ({"trainable_token_indices": [3]}, r"trainable_token_indices = \[3\]"),
        ({"target_parameters": "mlp.experts.down_proj"}, "target_parameters"),
        ({"layer_replication": [[0, 4]]}, "layer_replication"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"use_something_new": 1}, "use_something_new = 1"),
        ({"target_modules": None}, "target_modules = null"),
        ({"target_modules": "absent"}, "target_modules is absent"),
        ({"target_modules": [1]}, "a word or a list of words"),
        ({"target_modules": "("}, "no regular expression"),
        ({"alpha_pattern": {"(?i)up_proj": 1}}, "no regular expression"),
        ({"rank_pattern": {"up_proj": 1.5}}, "whole numbers"),
        ({"rank_pattern": {"up_proj": "4"}}, "finite numbers"),
        ({"rank_pattern": [4]}, "numbers by patterns"),
        ({"lora_alpha": "16"}, "finite numbers"),
        ({"r": -1}, "r = -1"),
        ({"layers_to_transform": ["1"]}, "numbers of layers"),
        ({"target_modules": "x" * 3000}, "too long"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        read(tmp_path, **changes)


@pytest.mark.parametrize(
    "pattern",
    [
        *("([a-z0-9_.]+)+X", r"(?:a*)*b", "((ab?)+c)*", "(?:.|..)*!"),
        *(".*" * 30 + "!", ".?" * 30 + "!", "(?:.|.)" * 30 + "!", "(?:.*){10}!"),
    ],
)
def test_a_pattern_that_might_never_end_is_refused(pattern: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="may take for ever to match"):
        read(tmp_path, target_modules=pattern)


def test_many_patterns_together_are_refused_too(tmp_path: Path) -> None:
    read(tmp_path, rank_pattern={f"layers.{layer}.mlp.up_proj": 4 for layer in range(500)})
    with pytest.raises(ConfigError, match="may take for ever to match"):
        read(tmp_path, rank_pattern={f"{layer}.*.*.*": 4 for layer in range(500)})


def test_the_pattern_that_is_written_for_models_that_see(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        target_modules=(
            r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:q_proj|k_proj).*?)"
            r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp)\.(?:(?:q_proj|k_proj)))"
        ),
    )
    assert [config.adapts(module) for module in (Q0, "model.language_model.layers.0.self_attn.k_proj", "lm_head")] == [
        True,
        True,
        False,
    ]


def test_what_is_off_says_nothing(tmp_path: Path) -> None:
    read(tmp_path, use_something_new=False, another=None, more={}, modules_to_save=[], lora_dropout=0.3)


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file; an adapter in PEFT's format"):
        read_config(tmp_path / "adapter_config.json")
