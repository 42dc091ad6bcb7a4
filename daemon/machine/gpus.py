"""This machine's GPUs: what they are, what is free on them, and who holds the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil

from motley.daemon.machine.vulkan import DISCRETE, KINDS, NVIDIA, NoVulkanError, vulkan_gpus
from motley.plugins.engine import EngineError
from motley.plugins.onnxruntime_gpu.preference import INTEGRATED, takes_software, wanted_gpu
from motley.protocol import mesh_pb2 as pb
from motley.transport.cuda.driver import Place, place_of
from motley.transport.cuda.errors import CudaError

REACHED = 0.85
"""The part of a GPU's bandwidth on paper that kernels reach which only read; an estimate, not measured."""
HIDDEN = Place(1 << 16, 0)
"""The place of a GPU that CUDA does not show, or where there is no CUDA: behind all others."""


def gpus() -> list[pb.Gpu]:
    """The GPUs that there are now: those of NVIDIA first, as CUDA counts them; then those that only Vulkan shows. If
    `wanted_gpu` says which, others are left out; if it or `takes_software` fails, all are."""
    try:
        takes_software()
        found = [] if wanted_gpu() == INTEGRATED else _nvidia_gpus()
    except EngineError:  # which `why_no_gpu` tells
        return []
    with contextlib.suppress(NoVulkanError):
        found += [each.gpu for each in vulkan_gpus() if not found or each.vendor != NVIDIA]
    return found


def why_no_gpu() -> str:
    """Why `gpus` finds none, and what to install; empty where it is not known."""
    try:
        vulkan_gpus()
    except NoVulkanError as error:
        return str(error)
    return ""


def _nvidia_gpus() -> list[pb.Gpu]:
    """NVIDIA GPUs as the driver reports them now, as CUDA counts them; none if there is no driver."""
    import pynvml

    with gpus_of_nvidia() as handles:
        try:
            driver = str(pynvml.nvmlSystemGetDriverVersion()) if handles else ""
            return [_gpu(handle, driver) for handle in handles]
        except pynvml.NVMLError:  # a driver that is being updated or has lost a device
            return []


@contextlib.contextmanager
def gpus_of_nvidia() -> Iterator[list[object]]:
    """NVML's handles of NVIDIA's GPUs, as CUDA counts them, for as long as the context lasts; none if there is no
    driver, or none that works."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield []
        return
    try:
        handles: list[object] = []
        with contextlib.suppress(pynvml.NVMLError):
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            handles.sort(key=lambda handle: _place(handle).number)
        yield handles
    finally:
        pynvml.nvmlShutdown()


def _gpu(handle: object, driver: str) -> pb.Gpu:
    """A GPU as its driver reports it now."""
    import pynvml

    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return pb.Gpu(
        name=str(pynvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(memory.total),
        free_bytes=int(memory.free),
        driver=driver,
        kind=KINDS[DISCRETE],
        compute_capability=f"{major}.{minor}",
        multiprocessors=_place(handle).multiprocessors,
        memory_bandwidth=_gpu_bandwidth(handle),
        users=_gpu_users(handle),
    )


def _place(handle: object) -> Place:
    """How CUDA counts a GPU. NVML does not know; nor does CUDA if the GPU is hidden from it, or the extra gpu is not
    installed."""
    import pynvml

    try:
        return place_of(str(pynvml.nvmlDeviceGetPciInfo(handle).busId))
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


def _gpu_users(handle: object) -> list[pb.GpuUser]:
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
        users.append(pb.GpuUser(pid=pid, name=name, bytes=size))
    return users
