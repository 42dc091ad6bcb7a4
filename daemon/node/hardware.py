"""What this machine is and how fast: the facts that the planner shares a model by."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import psutil

from motley.plugins.expert_engine import expert_engine_names
from motley.protocol import mesh_pb2
from motley.transport.cuda.driver import Place, place_of
from motley.transport.cuda.errors import CudaError

MIB = 2**20

# ---------------------------------------------------------------- sizes

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}
_BARE = 1_000_000
"""Fewer bytes than this need a unit."""


def parse_size(text: str) -> int:
    """Bytes from "6GB", "512MiB" or "1.5g": decimal units, or binary ones with an i; any case.

    Without a unit, it is bytes, a megabyte or more: "6" was meant to be something else.

    Raises:
        ValueError: `text` is not a size of at least one byte.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([a-z]*)", text.strip().lower())
    if not match or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a size: write a number and a unit, as in 6GB, 512MiB or 1.5g")
    size = int(Fraction(match[1]) * _UNITS[match[2]])
    if size < 1:
        raise ValueError(f"{text!r} is less than one byte")
    if not match[2] and size < _BARE:
        raise ValueError(f"{text!r} is {size} bytes: write a number and a unit, as in 6GB, 512MiB or 1.5g")
    return size


# ---------------------------------------------------------------- processor and memory


def cpu_name() -> str:
    """The processor's name for people."""
    try:
        name = _cpu_name()
    except OSError:
        name = ""
    return name or platform.processor() or platform.machine()


def _cpu_name() -> str:
    if sys.platform == "win32":
        import winreg

        path = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
        with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, path) as key:
            return str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
    else:
        text = Path("/proc/cpuinfo").read_text()
        found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)  # Arm has no such line
        return found[1].strip() if found else ""


def usable_cores() -> int:
    """Cores this process may keep busy: its affinity, or a container's quota if that is less."""
    try:
        cores = len(psutil.Process().cpu_affinity() or ())
    except AttributeError:  # no affinity on this system
        cores = 0
    cores = cores or os.cpu_count() or 1
    quota = cgroup_cores(Path("/"))
    return cores if quota is None else max(1, min(cores, int(quota)))


def available_memory() -> int:
    """Bytes that could be used now without swapping, within a container's limit."""
    free = psutil.virtual_memory().available
    limit = cgroup_memory(Path("/"))
    return free if limit is None else min(free, limit)


def _cgroups(root: Path) -> list[Path]:
    """This process's control groups (v2), innermost first: a limit on any of them binds."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    mount = root / "sys/fs/cgroup"
    for line in lines:
        if line.startswith("0::/"):
            own = mount / line.removeprefix("0::/")
            return [group for group in (own, *own.parents) if group.is_relative_to(mount)]
    return []


def cgroup_cores(root: Path) -> float | None:
    """The CPU quota in cores, None if there is none (Linux kernel, cgroup-v2.rst: ``cpu.max``)."""
    quotas = []
    for group in _cgroups(root):
        try:
            quota, period = (group / "cpu.max").read_text().split()
        except OSError:
            continue
        if quota != "max":
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def cgroup_memory(root: Path) -> int | None:
    """Bytes left under the memory limit, None if there is none (``memory.max``, ``memory.current``).

    Cached file pages count as used, but give way: those of ``inactive_file`` are counted as free.
    """
    left = []
    for group in _cgroups(root):
        try:
            limit = (group / "memory.max").read_text().strip()
            if limit == "max":
                continue
            used = int((group / "memory.current").read_text())
            cached = re.search(r"^inactive_file (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
        except OSError:
            continue
        left.append(max(0, int(limit) - used + (int(cached[1]) if cached else 0)))
    return min(left, default=None)


def pin_to_core(index: int) -> bool:
    """Keep this process on one core: the `index`-th of those it may use, wrapping around.

    Call it before starting threads: on Linux only the main thread and those it starts later are kept.

    Returns:
        Whether the system can do that.
    """
    process = psutil.Process()
    try:
        allowed = process.cpu_affinity()
    except AttributeError:  # macOS
        return False
    if not allowed:
        return False
    process.cpu_affinity([allowed[index % len(allowed)]])
    return True


def memory_bandwidth(threads: int, seconds: float = 0.25, size: int = 256 * MIB) -> float:
    """Measured read bandwidth in bytes/s of `threads` threads together: what bounds a decode step.

    Every thread reads its own part of a buffer far larger than a usual cache, by a vectorised maximum (it computes
    next to nothing and lets the other threads run). The median pass of `seconds` counts: the best one owes too
    much to the cache. The buffer is written first: pages never written share one page of zeros.

    Args:
        size: bytes of the buffer; less is taken where memory is short.
    """
    size = min(size, available_memory() // 4)
    part = max(1, size // 4 // threads)

    def written(_: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.ones(part, np.int32)

    passes: list[float] = []
    with ThreadPoolExecutor(threads) as pool:
        buffers = list(pool.map(written, range(threads)))
        deadline = time.perf_counter() + seconds
        while not passes or time.perf_counter() < deadline:
            start = time.perf_counter()
            list(pool.map(np.max, buffers))
            passes.append(time.perf_counter() - start)
    return 4 * part * threads / median(passes)


# ---------------------------------------------------------------- graphics processors


REACHED = 0.85
"""Of the bandwidth that a GPU's memory has on paper, what kernels that only read reach; an estimate, not measured."""
HIDDEN = Place(1 << 16, 0)
"""Of a GPU that CUDA does not show, or where there is no CUDA: it comes last."""


def gpus() -> list[mesh_pb2.Gpu]:
    """NVIDIA GPUs as the driver reports them now, as CUDA counts them; none if there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        found = [_gpu(pynvml.nvmlDeviceGetHandleByIndex(i), driver) for i in range(pynvml.nvmlDeviceGetCount())]
        return [gpu for _, gpu in sorted(found, key=lambda one: one[0])]
    except pynvml.NVMLError:  # a driver that is being updated or has lost a device
        return []
    finally:
        pynvml.nvmlShutdown()


def _gpu(handle: object, driver: str) -> tuple[int, mesh_pb2.Gpu]:
    """A GPU, and its number in CUDA."""
    import pynvml

    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    place = _place(str(pynvml.nvmlDeviceGetPciInfo(handle).busId))
    return place.number, mesh_pb2.Gpu(
        name=str(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(memory.total),
        free_bytes=int(memory.free),
        driver=driver,
        compute_capability=f"{major}.{minor}",
        multiprocessors=place.multiprocessors,
        memory_bandwidth=_gpu_bandwidth(handle),
        users=_gpu_users(handle),
    )


def _place(pci_address: str) -> Place:
    """NVML does not know; nor does CUDA without motley[gpu], or for a GPU that is hidden from it."""
    try:
        return place_of(pci_address)
    except CudaError:
        return HIDDEN


def _gpu_bandwidth(handle: object) -> float:
    """Bytes/s, estimated: two transfers per tick of the memory's clock, as wide as its bus. 0: NVML does not know."""
    import pynvml

    try:
        mhz = int(pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_MEM))
        bits = int(pynvml.nvmlDeviceGetMemoryBusWidth(handle))
    except pynvml.NVMLError:
        return 0.0
    return REACHED * 2 * mhz * 1e6 * bits / 8


def _gpu_users(handle: object) -> list[mesh_pb2.GpuUser]:
    """Whoever holds memory of a GPU, most first; empty where NVML does not tell."""
    import pynvml

    held: dict[int, int] = {}
    for ask in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
        with contextlib.suppress(pynvml.NVMLError):
            held |= {process.pid: int(process.usedGpuMemory or 0) for process in ask(handle)}
    users = []
    for pid, size in sorted(held.items(), key=lambda one: -one[1]):
        try:
            name = psutil.Process(pid).name()
        except psutil.Error:  # it has ended, or is not ours to see
            name = ""
        users.append(mesh_pb2.GpuUser(pid=pid, name=name, bytes=size))
    return users


# ---------------------------------------------------------------- all of it


def measure(
    engines: Sequence[mesh_pb2.Engine], memory_limit: int | None = None, cores: int | None = None
) -> mesh_pb2.Capabilities:
    """This machine's capabilities. Takes half a second, for the bandwidth.

    Args:
        engines: `motley.daemon.node.engines.installed_engines`.
        memory_limit: bytes that ranks may use here at most; what is available bounds it.
        cores: cores that ranks may use here at most.
    """
    available = available_memory()
    usable = usable_cores()
    cores = usable if cores is None else min(cores, usable)
    return mesh_pb2.Capabilities(
        platform=sys.platform,
        cpu=cpu_name(),
        cores=cores,
        memory_bytes=available if memory_limit is None else min(memory_limit, available),
        memory_bandwidth=memory_bandwidth(cores),
        gpus=gpus(),
        engines=engines,
        expert_engines=expert_engine_names(),
    )


class Resident(NamedTuple):
    """Memory of this process in RAM, in bytes."""

    now: int
    peak: int


def resident_bytes() -> Resident:
    """What this process holds in memory, mapped file pages included, now and at most."""
    info = psutil.Process().memory_info()
    peak = getattr(info, "peak_wset", info.rss)  # Windows
    with contextlib.suppress(OSError):
        # Not getrusage: its maximum is inherited from the parent.
        for line in Path("/proc/self/status").read_text("ascii").splitlines():
            if line.startswith("VmHWM:"):
                peak = int(line.split()[1]) * 1024
    return Resident(info.rss, peak)
