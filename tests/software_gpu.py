"""Shows a GPU to this process and those that it starts, on a machine that has none: Vulkan's software driver
SwiftShader, which Chromium brings. The Vulkan loader is of package libvulkan1.

SwiftShader has no FP16. Mesa's software driver has, and can be shown to other processes instead.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
from functools import cache
from glob import glob
from pathlib import Path

DRIVERS = ("/usr/lib/chromium", "/usr/lib/chromium-browser", "/opt/google/chrome", "/usr/lib64/chromium-browser")
"""Folders in which distributions put Chromium with its drivers."""
MESA_DRIVERS = "/usr/share/vulkan/icd.d/lvp_icd*.json"
"""Files by which Mesa tells of its software driver."""
MESA_VULKAN = (1, 4)
"""The version of Vulkan since which that is one that ONNX Runtime's provider takes: Mesa 25's."""
QUICK_TO_COMPILE = {"GALLIVM_PERF": "nopt", "LP_NATIVE_VECTOR_WIDTH": "128"}
"""What has that driver compile kernels in half of the time; it keeps them on disk for the next process."""
DEVICES = ("/sys/class/drm/card*", "/dev/nvidia[0-9]*", "/dev/dxg")
"""Files that there are where there is a GPU; a container may have the second alone."""
ALLOWED = "MOTLEY_SOFTWARE_GPU"
"""With this variable set to 1, Motley takes a software driver for a GPU."""
ALLOWED_BY_PROVIDER = "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER"
"""With this one set to 1, ONNX Runtime's provider does, where the machine has no GPU."""


@cache
def show_software_gpu() -> str:
    """Show it. Call it before ONNX Runtime is imported.

    Returns:
        Why that is not possible; empty: it is there, or a real one.
    """
    if sys.platform != "linux":
        return "software GPUs are shown on Linux only"
    if any(map(glob, DEVICES)):
        return ""
    found = [Path(folder) / "vk_swiftshader_icd.json" for folder in DRIVERS]
    driver = next((path for path in found if path.is_file()), None)
    if driver is None:
        return "there is no vk_swiftshader_icd.json, which Debian's package chromium-common brings"
    try:
        ctypes.CDLL("libvulkan.so.1")
    except OSError:
        return "there is no libvulkan.so.1, which Debian's package libvulkan1 brings"
    os.environ[ALLOWED_BY_PROVIDER] = "1"
    os.environ["VK_DRIVER_FILES"] = str(driver)
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())
    return ""


def fp16_driver() -> dict[str, str] | str:
    """The environment of a process to which Mesa's software driver is shown; or why that is not possible."""
    for file in glob(MESA_DRIVERS):
        version = json.loads(Path(file).read_text())["ICD"]["api_version"]
        if tuple(map(int, version.split(".")[:2])) >= MESA_VULKAN:
            return {"VK_DRIVER_FILES": file, **QUICK_TO_COMPILE}
    return "Mesa's software driver for Vulkan is missing or older than Mesa 25: Debian's mesa-vulkan-drivers brings it"
