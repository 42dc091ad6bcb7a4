"""GPUs as a driver tells of them: this machine's, and one made up for a test."""

from __future__ import annotations

import os
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pynvml
import pytest

from motley.daemon.machine import gpus
from motley.transport.cuda.driver import Place
from motley.transport.cuda.errors import CudaError


def test_gpus_agree_with_the_driver() -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        assert gpus.gpus() == []
        return
    try:
        count = pynvml.nvmlDeviceGetCount()
    finally:
        pynvml.nvmlShutdown()
    found = gpus.gpus()
    assert len(found) == count
    assert all(gpu.name and gpu.driver and gpu.free_bytes <= gpu.memory_bytes for gpu in found)
    assert all(gpu.multiprocessors > 0 for gpu in found) or not find_spec("cuda.bindings")


class Handle(NamedTuple):
    """A GPU of a driver made up for a test."""

    name: str
    bus: str
    mhz: int = 10501


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that shows two, of which CUDA takes the second for the first. Functions and fields are NVML's."""
    handles = [Handle("slow", "0000:01:00.0", 0), Handle("fast", "0000:02:00.0")]

    def clock(handle: Handle, kind: int) -> int:
        assert kind == pynvml.NVML_CLOCK_MEM
        if not handle.mhz:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return handle.mhz

    def graphics(handle: Handle) -> list[Any]:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    processes = [SimpleNamespace(pid=2**31 - 1, usedGpuMemory=None), SimpleNamespace(pid=os.getpid(), usedGpuMemory=5)]
    for name, answer in {
        "Init": lambda: None,
        "Shutdown": lambda: None,
        "SystemGetDriverVersion": lambda: "580.1",
        "DeviceGetCount": lambda: len(handles),
        "DeviceGetHandleByIndex": lambda index: handles[index],
        "DeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=24, free=20),
        "DeviceGetCudaComputeCapability": lambda handle: (8, 9),
        "DeviceGetName": lambda handle: handle.name,
        "DeviceGetPciInfo": lambda handle: SimpleNamespace(busId=handle.bus),
        "DeviceGetMemoryBusWidth": lambda handle: 384,
        "DeviceGetMaxClockInfo": clock,
        "DeviceGetComputeRunningProcesses": lambda handle: processes,
        "DeviceGetGraphicsRunningProcesses": graphics,
    }.items():
        assert hasattr(pynvml, f"nvml{name}")
        monkeypatch.setattr(pynvml, f"nvml{name}", answer)


def test_gpus_are_told_as_cuda_counts_them(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"0000:01:00.0": Place(1, 10), "0000:02:00.0": Place(0, 128)}
    monkeypatch.setattr(gpus, "place_of", places.__getitem__)
    fast, slow = gpus.gpus()
    assert (fast.name, fast.multiprocessors, slow.name, slow.multiprocessors) == ("fast", 128, "slow", 10)
    assert (fast.memory_bytes, fast.free_bytes, fast.driver, fast.compute_capability) == (24, 20, "580.1", "8.9")
    assert fast.memory_bandwidth == pytest.approx(gpus.REACHED * 1008e9, rel=1e-3)  # of an RTX 4090, on paper
    assert slow.memory_bandwidth == 0  # not told
    assert [(user.pid, user.bytes) for user in fast.users] == [(os.getpid(), 5), (2**31 - 1, 0)]
    assert fast.users[0].name == psutil.Process().name()
    assert fast.users[1].name == ""


def test_gpus_that_cuda_does_not_show_come_last(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def place_of(address: str) -> Place:
        if address == "0000:01:00.0":
            raise CudaError("hidden")
        return Place(0, 128)

    monkeypatch.setattr(gpus, "place_of", place_of)
    assert [(gpu.name, gpu.multiprocessors) for gpu in gpus.gpus()] == [("fast", 128), ("slow", 0)]
