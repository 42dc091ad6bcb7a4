"""Sliced or parallel."""

from __future__ import annotations

from typing import Any

import pytest

from motley.orchestrator.planning.layout import LayoutError, is_parallel
from motley.protocol.mesh_pb2 import ModelProfile

ABLE = ["onnxruntime", "reference"]
ORDINARY: dict[str, Any] = {
    "asked": "auto",
    "engines": {"pc": ABLE, "laptop": ABLE, "box": []},
    "engine": "onnxruntime",
    "replicas": 1,
    "trunk": 1,
    "by_hand": False,
    "exact": False,
}


@pytest.mark.parametrize(
    ("unlike", "parallel"),
    [
        ({}, True),
        ({"engines": {"pc": ABLE}}, False),
        ({"engines": {"pc": ABLE, "laptop": ["reference"]}}, False),
        ({"by_hand": True}, False),
        ({"engine": "cuda"}, False),
        ({"engine": "reference"}, True),
        ({"asked": "sliced"}, False),
        ({"asked": "parallel", "engines": {"pc": ABLE, "laptop": []}}, True),
        ({"engines": {"pc": ABLE}, "replicas": 2}, True),
        ({"engines": {"pc": ABLE}, "trunk": 2}, True),
        ({"exact": True}, False),
        ({"asked": "parallel", "exact": True}, True),
    ],
)
def test_a_model_with_experts(moe: ModelProfile, unlike: dict[str, Any], parallel: bool) -> None:
    assert is_parallel(profile=moe, **{**ORDINARY, **unlike}) is parallel


def test_a_model_without_experts(profile: ModelProfile) -> None:
    for asked in ("auto", "sliced"):
        assert not is_parallel(profile=profile, **{**ORDINARY, "asked": asked})
    for unlike in ({"asked": "parallel"}, {"replicas": 2}, {"trunk": 2}):
        with pytest.raises(LayoutError, match=r"bard \(llama\) has no experts"):
            is_parallel(profile=profile, **{**ORDINARY, **unlike})


@pytest.mark.parametrize(
    ("engines", "instead"),
    [
        (ORDINARY["engines"], "pc, laptop, box; use engine 'onnxruntime' or 'reference', or experts 'sliced'"),
        ({"box": []}, "box; use experts 'sliced'"),
    ],
)
def test_engines_without_single_experts_are_refused(moe: ModelProfile, engines: Any, instead: str) -> None:
    with pytest.raises(LayoutError, match=f"engine 'cuda' cannot have experts elsewhere on {instead}"):
        is_parallel(profile=moe, **{**ORDINARY, "asked": "parallel", "engine": "cuda", "engines": engines})
