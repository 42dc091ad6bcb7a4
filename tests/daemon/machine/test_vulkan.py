"""Which of several GPUs a node shows, on a machine made up for the test."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from motley.daemon.machine import gpus, vulkan
from motley.plugins.engine import EngineError
from motley.plugins.onnxruntime_gpu.preference import DRIVERS, VARIABLE
from motley.plugins.onnxruntime_gpu.providers import WEBGPU
from motley.protocol import mesh_pb2 as pb
from tests.software_gpu import ALLOWED_BY_PROVIDER


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


@pytest.mark.parametrize(
    ("said", "takes"),
    [("1", True), ("yes", True), (" True ", True), ("ON", True), ("0", False), ("no", False), ("", False)],
)
def test_a_switch_is_set_as_people_type_it(said: str, takes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOWED_BY_PROVIDER, "")
    monkeypatch.setenv(vulkan.SOFTWARE, said)
    monkeypatch.setattr(Laptop, "vkEnumeratePhysicalDevices", lambda *_: [vulkan.INTEGRATED, vulkan.PROCESSOR])
    names = [each.gpu.name for each in vulkan.vulkan_gpus()]
    assert names == (["integrated", "software"] if takes else ["integrated"])
    assert os.environ[ALLOWED_BY_PROVIDER] == ("1" if takes else "")


def test_a_switch_that_says_neither_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vulkan.SOFTWARE, "maybe")
    why = "MOTLEY_SOFTWARE_GPU must be 1 (yes, true, on) or 0 (no, false, off), not 'maybe'"
    assert (shown(), gpus.why_no_gpu()) == ([], why)


@pytest.mark.parametrize("software", ["0", "1"])
def test_what_is_in_the_drivers_way_is_named_and_not_guessed(
    software: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> Sequence[int]:
        raise RuntimeError

    monkeypatch.setattr(Laptop, "vkEnumeratePhysicalDevices", none)
    monkeypatch.setenv(vulkan.SOFTWARE, software)
    monkeypatch.delenv(DRIVERS, raising=False)
    in_software = "as MOTLEY_SOFTWARE_GPU is set, one in software: SwiftShader, or Mesa's"
    for told in (gpus.why_no_gpu(), WEBGPU.driver()):
        assert (in_software in told, "libvulkan1" in told) == (software == "1", software == "0")
    monkeypatch.setenv(DRIVERS, str(tmp_path))
    assert (f"looks for no other than {tmp_path}, as VK_DRIVER_FILES says" in WEBGPU.driver()) == (software == "1")
    monkeypatch.setenv(DRIVERS, os.pathsep.join((str(tmp_path), "/none.json")))
    assert gpus.why_no_gpu().endswith(
        "it needs the drivers that VK_DRIVER_FILES names, of which /none.json is not there"
    )


def test_one_that_is_asked_for_in_vain_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "discrete")
    monkeypatch.setattr(Laptop, "vkEnumeratePhysicalDevices", lambda *_: [vulkan.INTEGRATED])
    with pytest.raises(vulkan.NoVulkanError, match="no discrete GPU, which MOTLEY_GPU asks for, but integrated"):
        vulkan.vulkan_gpus()
