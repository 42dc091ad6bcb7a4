"""Whole experts on a GPU: beside ONNX's own evaluator, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from motley.plugins.engine import EngineError, EngineMemoryError, EngineOptions
from motley.plugins.expert_engine import load_expert_engine
from motley.plugins.onnxruntime_gpu.device import Gpu
from motley.plugins.onnxruntime_gpu.hosted_experts import WebGpuExperts
from tests.models.cases import golden_case
from tests.models.graph.test_whole_experts import dequantised, needs, share


@pytest.mark.parametrize(
    ("name", "quantisation"), [("mixtral", "fp32"), ("mixtral", "int8"), ("qwen3-moe", "int4"), ("gpt-oss", "fp32")]
)
def test_an_expert_of_any_rows(name: str, quantisation: str, tmp_path: Path) -> None:
    case = golden_case(name)
    needs(case, quantisation)
    graph = share(case, quantisation, tmp_path, case.model.expert_layers[-1], 1)
    engine = WebGpuExperts(EngineOptions())
    expert = engine.open(graph)
    random = np.random.default_rng(7)
    for rows in (1, 5, 1):
        x = random.standard_normal((rows, case.model.hidden), np.float32)
        x.flags.writeable = False  # as rows in a message are
        y = expert(x)
        assert (y.shape, y.dtype, y.flags.c_contiguous) == (x.shape, np.float32, True)
        right = dequantised(graph, x)
        assert np.linalg.norm(y - right) < 1e-5 * np.linalg.norm(right)
    expert.close()
    engine.close()


def test_it_is_an_engine_of_single_experts() -> None:
    assert load_expert_engine("webgpu") is WebGpuExperts


def test_what_it_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot keep exact=true"):
        WebGpuExperts(EngineOptions(exact=True))
    with pytest.raises(EngineError, match="no option warp"):
        WebGpuExperts(EngineOptions(extra={"warp": "9"}))

    def no_room(*_: object) -> None:
        raise EngineMemoryError("the GPU is full")

    graph = share(golden_case("mixtral"), "fp32", tmp_path, 0, 0)
    engine = WebGpuExperts(EngineOptions())
    monkeypatch.setattr(Gpu, "session", no_room)
    with pytest.raises(MemoryError, match="the GPU is full"):  # which a host takes for no room, and goes on
        engine.open(graph)
