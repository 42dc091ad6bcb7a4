"""Shapes made smaller: what a layer's speed depends on stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from motley.bench.random_models.scaling import (
    READ,
    STORED,
    VOCABULARY,
    expert_count,
    kinds_of_layers,
    read_elements,
    scaled,
    with_layers,
)
from motley.daemon.models.description.model import Model, parameters
from motley.daemon.models.keys import Keys
from motley.daemon.models.reading import describe
from motley.orchestrator.known_models.shapes import SHAPES


def described(config: dict[str, Any]) -> Model:
    return describe(Keys(Path("config.json"), dict(config)))


@pytest.mark.parametrize(
    ("name", "layers", "experts"),
    [
        ("llama-3.2-1b", 8, 0),
        ("gemma-3-4b", 6, 0),
        ("gemma-4-e2b", 10, 0),
        ("ernie-4.5-21b-a3b", 2, 36),
        ("glm-4.7-flash", 4, 12),
        ("hunyuan-a13b", 1, 16),
        ("nemotron-3-nano-30b-a3b", 6, 18),
        ("lfm2-8b-a1b", 6, 8),
    ],
)
def test_layers_keep_their_kinds_and_widths(name: str, layers: int, experts: int) -> None:
    whole, small = SHAPES[name], scaled(SHAPES[name])
    model = described(small)
    assert (len(model.layers), expert_count(small), model.vocabulary) == (layers, experts, VOCABULARY)
    alike = with_layers(small | {"num_hidden_layers": layers}, layers)
    assert alike == small, "keys of layers have as many as there are"
    # With as many experts as the published model has, the layers are the published ones.
    counts = {key: whole[key] for key in small if isinstance(small[key], int) and "experts" in key}
    assert set(kinds_of_layers(described(small | counts))) == set(kinds_of_layers(described(whole | _one_dense(whole))))
    assert 120e6 / 0.53 < read_elements(model) < 1.1 * READ
    assert parameters(model) < 1.2 * STORED


def _one_dense(config: dict[str, Any]) -> dict[str, int]:
    """One layer without experts at the start is of the same kind as several."""
    return {key: 1 for key in ("first_k_dense_replace", "num_dense_layers") if config.get(key)}


def test_a_token_reads_no_table_and_no_expert_that_it_has_not_chosen() -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "vocab_size": 300, "head_dim": 16}
    layers = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    model = described(SHAPES["qwen3-moe-half"] | sizes | layers)
    unchosen, table = 3 * 6 * 3 * 64 * 32, 300 * 64
    assert read_elements(model) == parameters(model) - unchosen - table
