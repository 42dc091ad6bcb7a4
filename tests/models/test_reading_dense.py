"""Configs of dense families that are mostly others': defaults, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from motley.daemon.models.description.axes import Heads
from motley.daemon.models.description.model import expected_shapes, tensors
from motley.daemon.models.description.rope import Rope
from motley.daemon.models.keys import ConfigError
from tests.models.configs import HELIUM, IQUESTCODER, LLAMA, VAULTGEMMA, read, without
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


def test_helium_s_neighbouring_elements_turn_together(tmp_path: Path) -> None:
    model = read(tmp_path, without(HELIUM, "rms_norm_eps"))
    assert (model.ropes, model.last_norm.epsilon) == ({"main": Rope(1e5, 128)}, 1e-8)
    (part,) = next(each.parts for each in tensors(model) if each.name.endswith(".0.self_attn.q_halves_proj.weight"))
    assert part.of_head[:2] == (range(0, 128, 2), range(1, 128, 2))


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (VAULTGEMMA | {"hidden_activation": "gelu"}, "hidden_activation"),
        (IQUESTCODER | {"clip_qkv": 8.0}, "clip_qkv"),
        (IQUESTCODER | {"use_sliding_window": True, "sliding_window": 16}, "sliding_window"),
        (HELIUM | {"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, config: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} = .*supported: "):
        read(tmp_path, config)
