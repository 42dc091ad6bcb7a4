"""Sliced or parallel."""

from __future__ import annotations

from typing import Any

import pytest

from motley.orchestrator.planning.experts.layout import LayoutError, is_parallel
from motley.orchestrator.session_request import SessionRequest
from motley.protocol.mesh_pb2 import ModelProfile

ABLE = ["onnxruntime", "reference"]
ENGINES = {"pc": ABLE, "laptop": ABLE, "box": []}


def asking(**fields: Any) -> SessionRequest:
    return SessionRequest("mix", **fields)


@pytest.mark.parametrize(
    ("fields", "engines", "parallel"),
    [
        ({}, ENGINES, True),
        ({}, {"pc": ABLE}, False),
        ({}, {"pc": ABLE, "laptop": ["reference"]}, False),
        ({"shares": (2.0, 1.0)}, ENGINES, False),
        ({"engines": {"pc": "cuda"}}, ENGINES, False),
        ({"quantisations": {"pc": "int4"}}, ENGINES, False),
        ({"engine": "cuda"}, ENGINES, False),
        ({"engine": "reference"}, ENGINES, True),
        ({"experts": "sliced"}, ENGINES, False),
        ({"experts": "parallel"}, {"pc": ABLE, "laptop": []}, True),
        ({"replicas": 2}, {"pc": ABLE}, True),
        ({"trunk": 2}, {"pc": ABLE}, True),
        ({"exact": True}, ENGINES, False),
        ({"experts": "parallel", "exact": True}, ENGINES, True),
    ],
)
def test_a_model_with_experts(moe: ModelProfile, fields: Any, engines: Any, parallel: bool) -> None:
    assert is_parallel(asking(**fields), moe, engines) is parallel


def test_a_model_without_experts(profile: ModelProfile) -> None:
    for layout in ("auto", "sliced"):
        assert not is_parallel(asking(experts=layout), profile, ENGINES)
    for fields in ({"experts": "parallel"}, {"replicas": 2}, {"trunk": 2}):
        with pytest.raises(LayoutError, match=r"bard \(llama\) has no experts"):
            is_parallel(asking(**fields), profile, ENGINES)


@pytest.mark.parametrize(
    ("engines", "instead"),
    [
        (ENGINES, "pc, laptop, box; use engine 'onnxruntime' or 'reference', or experts 'sliced'"),
        ({"box": []}, "box; use experts 'sliced'"),
    ],
)
def test_engines_without_single_experts_are_refused(moe: ModelProfile, engines: Any, instead: str) -> None:
    with pytest.raises(LayoutError, match=f"engine 'cuda' cannot have experts elsewhere on {instead}"):
        is_parallel(asking(experts="parallel", engine="cuda"), moe, engines)
