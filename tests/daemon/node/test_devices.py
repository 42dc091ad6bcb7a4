"""What a machine's devices are told to be."""

from __future__ import annotations

import sys

import pytest

from motley.daemon.machine import gpus as machine_gpus
from motley.daemon.machine.vulkan import NoVulkanError
from motley.daemon.node.survey.devices import Device, devices_of, lacking
from motley.protocol import mesh_pb2 as pb
from motley.protocol.installing import how_to_install
from motley.protocol.wording import short_bytes
from tests.e2e.processes import command

WHY = "engine 'tensorrt': there is no NVIDIA driver"
MACHINE = pb.Capabilities(
    cpu="Some CPU",
    memory_bytes=8000,
    memory_bandwidth=2e10,
    gpus=[
        pb.Gpu(
            name="Big", kind="discrete", memory_bytes=9000, free_bytes=7000, driver="Vulkan 1.3", memory_bandwidth=1.0
        ),
        pb.Gpu(name="Small", kind="integrated", memory_bytes=4000, free_bytes=3000, driver="Vulkan 1.2"),
    ],
    engines=[
        pb.Engine(name="onnxruntime"),
        pb.Engine(name="tensorrt", on_gpu=True, lacking=WHY),
        pb.Engine(name="webgpu", on_gpu=True, memory_bandwidth=3e11),
    ],
)


def test_engines_compute_on_the_processor_or_on_the_first_gpu() -> None:
    assert devices_of(MACHINE) == [
        Device("Some CPU", "processor", 8000, 8000, "", 2e10, True, ["onnxruntime"]),
        Device("Big", "discrete", 9000, 7000, "Vulkan 1.3", 3e11, True, ["webgpu"]),
        Device("Small", "integrated", 4000, 3000, "Vulkan 1.2", 0.0, False, []),
    ]
    assert lacking(MACHINE) == {"tensorrt": WHY}


def test_what_the_driver_promises_counts_where_no_engine_has_measured() -> None:
    machine = pb.Capabilities(gpus=MACHINE.gpus[:1], engines=MACHINE.engines[:1])
    assert (devices_of(machine)[1].memory_bandwidth, devices_of(machine)[1].measured) == (1.0, False)


def test_a_missing_package_is_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vulkan", None)
    assert how_to_install("webgpu") in machine_gpus.why_no_gpu()


def test_the_command_shows_devices_and_what_is_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> list[object]:
        raise NoVulkanError("install some driver")

    async def engines() -> list[pb.Engine]:
        return list(MACHINE.engines)

    monkeypatch.setattr(machine_gpus, "vulkan_gpus", none)
    monkeypatch.setattr("motley.daemon.node.survey.engines.installed_engines", engines)
    nvidia = pb.Gpu(name="Big", kind="discrete", memory_bytes=9000, free_bytes=7000, compute_capability="9.0")
    monkeypatch.setattr("motley.daemon.node.survey.capabilities.gpus", lambda: [nvidia, MACHINE.gpus[1]])
    status, out, err = command("devices")
    assert status == 0, err
    for told in ("discrete", short_bytes(7000), "300 GB/s", "Vulkan 1.2", f"tensorrt cannot run here: {WHY}"):
        assert told in out
    assert "No GPU" not in out
    monkeypatch.setattr("motley.daemon.node.survey.capabilities.gpus", lambda: list(MACHINE.gpus))
    for asked in ("devices", "doctor"):
        _, out, _ = command(asked)
        assert "NVIDIA: no GPU found; if this machine has one, install its driver" in out
        assert "tensorrt" not in out
    monkeypatch.setattr("motley.daemon.node.survey.capabilities.gpus", list)
    status, out, err = command("devices")
    assert (status, "No GPU: install some driver" in out) == (0, True), err
