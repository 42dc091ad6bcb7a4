"""Which of several GPUs a node shows, on a machine made up for the test."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

import pytest

from motley.daemon.machine import gpus, vulkan
from motley.plugins.engine import EngineError
from motley.plugins.onnxruntime_gpu.preference import VARIABLE
from motley.plugins.onnxruntime_gpu.providers import WEBGPU
from motley.protocol import mesh_pb2 as pb


class Laptop(ModuleType):
    """Drivers that show the processor's GPU and one with memory of its own, in this order."""

    VkError = VkException = RuntimeError

    def vkEnumeratePhysicalDevices(self, instance: object) -> Sequence[int]:
        return vulkan.INTEGRATED, vulkan.DISCRETE


@pytest.fixture(autouse=True)
def _laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    def gpu(_: object, kind: int) -> vulkan.VulkanGpu:
        return vulkan.VulkanGpu(vendor=kind, kind=kind, gpu=pb.Gpu(name=vulkan.KINDS[kind]))

    monkeypatch.setitem(sys.modules, "vulkan", Laptop("vulkan"))
    monkeypatch.setattr(vulkan, "_instance", lambda: None)
    monkeypatch.setattr(vulkan, "_gpu", gpu)
    monkeypatch.setattr(gpus, "_nvidia_gpus", lambda: [pb.Gpu(name="NVIDIA's")])
    monkeypatch.delenv(vulkan.SOFTWARE, raising=False)


def shown() -> list[str]:
    return [gpu.name for gpu in gpus.gpus()]


def test_one_with_memory_of_its_own_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert shown() == ["NVIDIA's", "discrete", "integrated"]
    assert WEBGPU.settings() == {}


@pytest.mark.parametrize(
    ("wanted", "names", "settings"),
    [
        ("integrated", ["integrated"], {"powerPreference": "low-power"}),
        ("discrete", ["NVIDIA's", "discrete"], {}),
    ],
)
def test_whoever_runs_the_node_may_say_which(
    wanted: str, names: list[str], settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, wanted)
    assert shown() == names
    assert WEBGPU.settings() == settings


def test_another_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "fast")
    why = "MOTLEY_GPU must be 'discrete', 'integrated' or not set, not 'fast'"
    assert (shown(), gpus.why_no_gpu()) == ([], why)
    with pytest.raises(EngineError, match=why):
        WEBGPU.settings()


def test_one_that_is_asked_for_in_vain_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "discrete")
    monkeypatch.setattr(Laptop, "vkEnumeratePhysicalDevices", lambda *_: [vulkan.INTEGRATED])
    with pytest.raises(vulkan.NoVulkanError, match="no discrete GPU, which MOTLEY_GPU asks for, but integrated"):
        vulkan.vulkan_gpus()
