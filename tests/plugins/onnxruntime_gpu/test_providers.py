"""The providers of GPUs differ in a table alone, and say what they lack on a machine."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from motley.daemon.models.cutting.units import units
from motley.plugins.engine import DOMAIN, EngineError
from motley.plugins.installed import device_speed, engine_names, lacking, load_engine, on_gpu
from motley.plugins.onnxruntime_gpu import measuring
from motley.plugins.onnxruntime_gpu.device import Gpu
from motley.plugins.onnxruntime_gpu.engine import CudaProviderEngine, TensorRtRtxProviderEngine, WebGpuEngine
from motley.plugins.onnxruntime_gpu.lowering import lowered_for
from motley.plugins.onnxruntime_gpu.providers import CUDA, TENSORRT_RTX, WEBGPU, Provider
from motley.plugins.segments import ATTEND
from tests.models.cases import LocalSession, golden_case, uneven_shares


@pytest.mark.parametrize("kind", [WebGpuEngine, CudaProviderEngine, TensorRtRtxProviderEngine])
def test_each_has_an_engine_of_its_name(kind: type[WebGpuEngine]) -> None:
    name = kind.provider.engine
    assert name in engine_names()
    assert load_engine(name) is kind
    assert on_gpu(name)


def test_a_gpu_s_speed_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    speed = device_speed("webgpu")
    assert speed.memory_bandwidth > 0 < speed.host_s
    floats, *quantised = speed.speeds
    assert (floats.format, floats.bytes_per_s) == ("fp32", speed.memory_bandwidth)
    assert {each.format for each in quantised} == {"int4", "int8"}
    for each in quantised:
        assert each.bytes_per_s > 0
        assert each.row_bytes_per_s == floats.row_bytes_per_s * int(each.format[3:]) / 32

    assert min(measuring._besides(Gpu(WEBGPU))) > 0


@pytest.mark.parametrize("provider", [CUDA, TENSORRT_RTX])
def test_a_package_that_is_missing_is_named_with_how_to_get_it(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, provider.module, None)
    said = lacking(provider.engine)
    assert said.startswith(f"engine {provider.engine!r} needs a package that is missing")
    assert said.endswith(provider.install())


@pytest.mark.parametrize("provider", [CUDA, TENSORRT_RTX])
def test_a_plugin_without_its_driver_says_what_it_needs(
    provider: Provider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Plugin(ModuleType):
        @staticmethod
        def get_library_path() -> str:
            return str(tmp_path / "provider.so")

    monkeypatch.setitem(sys.modules, provider.module, Plugin(provider.module))
    with pytest.raises(EngineError, match=r"cannot be loaded .*provider\.so.* it needs NVIDIA's driver"):
        Gpu(provider)


@pytest.mark.parametrize("provider", [WEBGPU, CUDA, TENSORRT_RTX], ids=lambda provider: provider.engine)
def test_quantised_products_are_of_operators_that_it_has(provider: Provider, tmp_path: Path) -> None:
    case = golden_case("llama-mqa")
    shares = uneven_shares(units(case.model, "int4", 32), 1)
    with LocalSession(case.folder, WebGpuEngine, shares, tmp_path, "int4") as session:
        nodes = lowered_for(provider, session.graphs[0].proto).nodes
    kinds = {(node.domain, node.op_type) for node in nodes}
    assert (DOMAIN, ATTEND) in kinds
    assert (("com.microsoft", "MatMulNBits") in kinds) == provider.has_products
    assert (("", "DequantizeLinear") in kinds) != provider.has_products


def test_only_a_provider_that_can_is_to_capture_runs_of_few_rows() -> None:
    """Others would go without having sums written to the host by the run that makes them."""
    with_provider = ((WEBGPU, 8, True), (WEBGPU, 9, False), (CUDA, 1, False), (TENSORRT_RTX, 1, False))
    for provider, rows, captured in with_provider:
        assert Gpu.captures(SimpleNamespace(provider=provider), rows) == captured
