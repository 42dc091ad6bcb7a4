"""GPUs of any make that Vulkan shows: what they are, and what is free on them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from motley.daemon.machine.memory import available_memory
from motley.plugins.engine import EngineError
from motley.plugins.onnxruntime_gpu.preference import SOFTWARE, VARIABLE, driver_needed, takes_software, wanted_gpu
from motley.protocol import mesh_pb2 as pb
from motley.protocol.installing import how_to_install

BUDGET = "VK_EXT_memory_budget"
DISCRETE, INTEGRATED, VIRTUAL, PROCESSOR = 2, 1, 3, 4
"""Vulkan's kinds of devices."""
KINDS = {DISCRETE: "discrete", INTEGRATED: "integrated", VIRTUAL: "virtual", PROCESSOR: "software"}
"""Those that may be GPUs, as people call them, the best first."""
NVIDIA = 0x10DE
"""The vendor's number on the PCI bus."""


@dataclass(frozen=True)
class VulkanGpu:
    """A GPU as Vulkan shows it, `vendor` by its number on the PCI bus."""

    vendor: int
    kind: int
    gpu: pb.Gpu


class NoVulkanError(Exception):
    """Vulkan shows no GPU here; the message says why, and what to install."""


def vulkan_gpus() -> list[VulkanGpu]:
    """The GPUs that Vulkan shows now, those with memory of their own first; at least one. If `wanted_gpu` says which,
    others are left out.

    Raises:
        NoVulkanError: there is none, or the package or the driver is missing by which it would be found.
    """
    try:
        import vulkan
    except ImportError as error:
        raise NoVulkanError(
            f"for a GPU of any make, a package is missing ({error}): {how_to_install('webgpu')}"
        ) from error
    except OSError as error:
        raise NoVulkanError(
            f"the Vulkan loader is missing ({error}): on Linux install libvulkan1 (vulkan-loader, vulkan-icd-loader);"
            " on Windows the GPU's driver brings it"
        ) from error
    try:
        software, wanted, needed = takes_software(), wanted_gpu(), driver_needed()
    except EngineError as error:
        raise NoVulkanError(str(error)) from error
    try:
        found = [_gpu(vulkan, device) for device in vulkan.vkEnumeratePhysicalDevices(_instance())]
    except (vulkan.VkError, vulkan.VkException) as error:
        raise NoVulkanError(f"no Vulkan driver works here ({type(error).__name__}); it needs {needed}") from error
    kinds = [kind for kind, name in KINDS.items() if name == wanted or (not wanted and (kind != PROCESSOR or software))]
    able = sorted((each for each in found if each.kind in kinds), key=lambda each: kinds.index(each.kind))
    if not able:
        other = ", ".join(each.gpu.name for each in found) or "nothing"
        if wanted:
            raise NoVulkanError(f"Vulkan shows no {wanted} GPU, which {VARIABLE} asks for, but {other}")
        raise NoVulkanError(
            f"Vulkan shows no GPU but {other}: install the driver of the GPU; {SOFTWARE}=1 takes software for one"
        )
    return able


@cache
def _instance() -> Any:
    """Make this process's connection to the drivers."""
    import vulkan

    version = vulkan.VK_MAKE_VERSION(1, 1, 0)  # where memory can be asked for with extensions
    about = vulkan.VkApplicationInfo(pApplicationName="motley", apiVersion=version)
    return vulkan.vkCreateInstance(vulkan.VkInstanceCreateInfo(pApplicationInfo=about), None)


def _gpu(vulkan: Any, device: Any) -> VulkanGpu:
    about = vulkan.vkGetPhysicalDeviceProperties(device)
    extensions = {each.extensionName for each in vulkan.vkEnumerateDeviceExtensionProperties(device, None)}
    memory, free = _memory(vulkan, device, BUDGET in extensions)
    if about.deviceType != DISCRETE:  # it is the machine's own
        free = min(free, available_memory())
    return VulkanGpu(
        vendor=about.vendorID,
        kind=about.deviceType,
        gpu=pb.Gpu(
            name=about.deviceName,
            memory_bytes=memory,
            free_bytes=free,
            kind=KINDS.get(about.deviceType, ""),
            driver=f"Vulkan {_version(about.apiVersion)}, driver {about.driverVersion:#x}",
        ),
    )


def _memory(vulkan: Any, device: Any, budget: bool) -> tuple[int, int]:
    """Bytes of a GPU's own memory, all and free; where it has several kinds, of the largest.

    Args:
        budget: whether the driver tells what is free; else all is taken for free.
    """
    found = vulkan.vkGetPhysicalDeviceMemoryProperties(device)
    heaps = [found.memoryHeaps[number] for number in range(found.memoryHeapCount)]
    own = [number for number, heap in enumerate(heaps) if heap.flags & vulkan.VK_MEMORY_HEAP_DEVICE_LOCAL_BIT]
    largest = max(own or range(len(heaps)), key=lambda number: heaps[number].size)
    size = int(heaps[largest].size)
    if not budget:
        return size, size
    told = vulkan.VkPhysicalDeviceMemoryBudgetPropertiesEXT()
    asked = vulkan.VkPhysicalDeviceMemoryProperties2(pNext=told)
    vulkan.vkGetPhysicalDeviceMemoryProperties2(device, asked)
    bound = int(told.heapBudget[largest]) or size
    return size, max(0, bound - int(told.heapUsage[largest]))


def _version(number: int) -> str:
    return f"{number >> 22 & 0x7F}.{number >> 12 & 0x3FF}.{number & 0xFFF}"
