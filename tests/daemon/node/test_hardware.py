"""What a machine says of itself: sizes, limits of containers, bandwidth, and the whole message."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.node import hardware
from motley.daemon.node.engines import installed_engines
from motley.transport.cuda.driver import Place
from motley.transport.cuda.errors import CudaError

MIB = 2**20


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("6GB", 6 * 10**9),
        ("512MiB", 512 * MIB),
        ("1.5g", 1_500_000_000),
        (" 2 GiB ", 2 * 2**30),
        ("0.5tib", 2**39),
        (".25k", 250),
        ("1000000", 1000000),
        ("7b", 7),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert hardware.parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "6XB", "-1GB", "1e9", "6 G B", "1.2.3g", "nan", "0", "0.4b", "٣k", "6", "999999"]
)
def test_what_is_no_size_is_refused_with_the_text(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text!r} is"):
        hardware.parse_size(text)


@given(st.integers(10**6, 2**60))
def test_plain_bytes_come_back(size: int) -> None:
    assert hardware.parse_size(str(size)) == size


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_tightest_control_group_binds(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/old\n0::/slice/box\n",
            "sys/fs/cgroup/slice/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/slice/memory.max": f"{100 * MIB}\n",
            "sys/fs/cgroup/slice/memory.current": f"{60 * MIB}\n",
            "sys/fs/cgroup/slice/memory.stat": f"anon 5\ninactive_file {10 * MIB}\n",
            "sys/fs/cgroup/slice/box/cpu.max": "max 100000\n",
            "sys/fs/cgroup/slice/box/memory.max": "max\n",
        },
    )
    assert hardware.cgroup_cores(root) == 1.5
    assert hardware.cgroup_memory(root) == 50 * MIB


def test_a_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    files = {"memory.max": "1000", "memory.current": "1500", "memory.stat": "anon 1500"}
    root = write(tmp_path, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    write(root, {"proc/self/cgroup": "0::/\n"})
    assert hardware.cgroup_memory(root) == 0


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert hardware.cgroup_cores(tmp_path) is None
    assert hardware.cgroup_memory(tmp_path) is None


def test_bandwidth_is_physically_plausible() -> None:
    measured = hardware.memory_bandwidth(1, seconds=0.02, size=32 * MIB)
    assert 0.2e9 < measured < 2e12


def test_bandwidth_is_measured_in_the_time_given_and_with_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "available_memory", lambda: 4 * MIB)
    assert hardware.memory_bandwidth(2, seconds=0) > 0


async def test_the_whole_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "memory_bandwidth", lambda threads: 1e9 * threads)
    machine = hardware.measure(await installed_engines())
    assert machine.platform == sys.platform
    assert machine.cpu
    assert 1 <= machine.cores <= (psutil.cpu_count() or 1)
    assert 0 < machine.memory_bytes <= psutil.virtual_memory().total
    assert machine.memory_bandwidth == 1e9 * machine.cores
    engines = {engine.name: engine for engine in machine.engines}
    assert {name: (engine.on_gpu, engine.keeps_fp16) for name, engine in engines.items()} == {
        "onnxruntime": (False, False),
        "reference": (False, True),
        "cuda": (True, True),
        "tensorrt": (True, True),
        "tensorrt-whole": (True, True),
    }
    assert engines["onnxruntime"].lacking == engines["reference"].lacking == ""
    assert machine.gpus or (engines["cuda"].lacking.startswith("engine 'cuda': ") and engines["tensorrt"].lacking)
    limited = hardware.measure([], memory_limit=5 * MIB, cores=1)
    assert (limited.memory_bytes, limited.cores) == (5 * MIB, 1)
    assert hardware.measure([], memory_limit=2**60).memory_bytes <= psutil.virtual_memory().total


def test_gpus_agree_with_the_driver() -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        assert hardware.gpus() == []
        return
    try:
        count = pynvml.nvmlDeviceGetCount()
    finally:
        pynvml.nvmlShutdown()
    found = hardware.gpus()
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
    monkeypatch.setattr(hardware, "place_of", places.__getitem__)
    fast, slow = hardware.gpus()
    assert (fast.name, fast.multiprocessors, slow.name, slow.multiprocessors) == ("fast", 128, "slow", 10)
    assert (fast.memory_bytes, fast.free_bytes, fast.driver, fast.compute_capability) == (24, 20, "580.1", "8.9")
    assert fast.memory_bandwidth == pytest.approx(hardware.REACHED * 1008e9, rel=1e-3)  # of an RTX 4090, on paper
    assert slow.memory_bandwidth == 0  # not told
    assert [(user.pid, user.bytes) for user in fast.users] == [(os.getpid(), 5), (2**31 - 1, 0)]
    assert fast.users[0].name == psutil.Process().name()
    assert fast.users[1].name == ""


def test_gpus_that_cuda_does_not_show_come_last(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def place_of(address: str) -> Place:
        if address == "0000:01:00.0":
            raise CudaError("hidden")
        return Place(0, 128)

    monkeypatch.setattr(hardware, "place_of", place_of)
    assert [(gpu.name, gpu.multiprocessors) for gpu in hardware.gpus()] == [("fast", 128), ("slow", 0)]


def test_pinning_wraps_around_the_cores_allowed() -> None:
    process = psutil.Process()
    if not hasattr(process, "cpu_affinity"):
        assert hardware.pin_to_core(0) is False
        return
    before = process.cpu_affinity()
    assert before
    try:
        assert hardware.pin_to_core(len(before)) is True
        assert process.cpu_affinity() == [before[0]]
    finally:
        process.cpu_affinity(before)
