"""Rotary embeddings as configs spell them: both spellings read alike, and the context that a scaling reaches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from motley.daemon.models.description.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    Rope,
    RopeScaling,
    YarnScaling,
)
from tests.models.configs import LLAMA, LLAMA3, YARN, read, without


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_theta": 5e5, "rope_scaling": without(LLAMA3, "rope_type") | {"type": "llama3"}},
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5, "partial_rotary_factor": 1.0}, "rope_theta": 1e4},
    ],
)
def test_both_spellings_of_rope(tmp_path: Path, spelling: dict[str, Any]) -> None:
    assert read(tmp_path, LLAMA | spelling).ropes == {"main": Rope(5e5, 16, Llama3Scaling(8.0, 1.0, 4.0, 64))}


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind_key", ["type", "rope_type"])
@pytest.mark.parametrize(
    ("scaling", "expected", "context"),
    [
        ({"kind": "linear", "factor": 2.5}, LinearScaling(2.5), 640),
        ({"kind": "dynamic", "factor": 4.0}, DynamicScaling(4.0, 256), 1024),
        ({"kind": "llama3"} | without(LLAMA3, "rope_type"), Llama3Scaling(8.0, 1.0, 4.0, 64), 256),
        (
            {"kind": "yarn", "factor": 4.0, "attention_factor": 1.0},
            YarnScaling(4.0, 256, 32.0, 1.0, True, 1.0),
            1024,
        ),
        (
            {
                "kind": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 16,
                "beta_slow": 2,
                "truncate": False,
                "attention_factor": 1.5,
                "mscale": None,
            },
            YarnScaling(4.0, 32, 16.0, 2.0, False, 1.5),
            256,
        ),
    ],
)
def test_scaled_ropes_and_the_contexts_they_reach(
    tmp_path: Path,
    scaling: dict[str, Any],
    expected: RopeScaling | None,
    context: int,
    kind_key: str,
    spelling: str,
) -> None:
    given = without(scaling, "kind") | {kind_key: scaling["kind"]}
    got = read(tmp_path, LLAMA | {"rope_theta": 5e5, spelling: given})
    assert got.ropes == {"main": Rope(5e5, 16, expected)}
    assert got.context == context


@pytest.mark.parametrize(
    ("scales", "attention_factor"),
    [
        ({}, 1.1386294361119891),
        ({"mscale": 0.7}, 1.1386294361119891),  # alone it does not count
        ({"mscale": 0, "mscale_all_dim": 0.5}, 1.1386294361119891),
        ({"mscale": 0.7, "mscale_all_dim": 0.7}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, 1.1386294361119891 / 1.0693147180559946),
        ({"mscale": 1.0, "mscale_all_dim": 0.5, "attention_factor": 2}, 2.0),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_attention_factor_of_yarn(tmp_path: Path, scales: dict[str, Any], attention_factor: float) -> None:
    scaling = read(tmp_path, LLAMA | {"rope_parameters": YARN | scales}).ropes["main"].scaling
    assert isinstance(scaling, YarnScaling)
    assert scaling.attention_factor == pytest.approx(attention_factor, rel=1e-12)


@pytest.mark.parametrize("given", [YARN, LLAMA3])
def test_an_original_context_beside_the_rope_object_comes_first(tmp_path: Path, given: dict[str, Any]) -> None:
    model = read(tmp_path, LLAMA | {"rope_parameters": given, "original_max_position_embeddings": 32})
    scaling = model.ropes["main"].scaling
    assert isinstance(scaling, YarnScaling | Llama3Scaling)
    assert scaling.original_context == 32
