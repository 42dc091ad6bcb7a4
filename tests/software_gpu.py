"""Shows a GPU to this process and those that it starts, on a Linux machine that has none: Vulkan's software driver
SwiftShader, which Chromium brings.

ONNX Runtime looks for GPUs in /sys/class/drm, so the process gets a mount namespace of its own in which one is listed
there. That takes root. The Vulkan loader is of package libvulkan1.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from functools import cache
from pathlib import Path

DRIVERS = ("/usr/lib/chromium", "/usr/lib/chromium-browser", "/opt/google/chrome", "/usr/lib64/chromium-browser")
"""Folders in which distributions put Chromium with its drivers."""
DEVICES = Path("/sys/class/drm")
ALLOWED = "MOTLEY_SOFTWARE_GPU"
"""With this variable set to 1, Motley takes a software driver for a GPU."""
NEW_MOUNTS, BIND, RECURSIVE, PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000


@cache
def show_software_gpu() -> str:
    """Show it. Call it before ONNX Runtime is imported, and while the process has a single thread.

    Returns:
        Why that is not possible; empty: it is there, or a real one.
    """
    if sys.platform != "linux":
        return "software GPUs are shown on Linux only"
    if DEVICES.is_dir() and any(DEVICES.glob("card*")):
        return ""
    found = [Path(folder) / "vk_swiftshader_icd.json" for folder in DRIVERS]
    driver = next((path for path in found if path.is_file()), None)
    if driver is None:
        return "there is no vk_swiftshader_icd.json, which Debian's package chromium brings"
    try:
        ctypes.CDLL("libvulkan.so.1")
    except OSError:
        return "there is no libvulkan.so.1, which Debian's package libvulkan1 brings"
    if os.geteuid() != 0:
        return "it takes root to show a software GPU"
    try:
        _list_device()
    except OSError as error:
        return f"no software GPU can be shown: {error}"
    os.environ["VK_DRIVER_FILES"] = str(driver)
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())
    return ""


def _list_device() -> None:
    """Have /sys/class/drm list a GPU, in a mount namespace of this process's own.

    Raises:
        OSError: this process may not.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def checked(result: int) -> None:
        if result:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    checked(libc.unshare(NEW_MOUNTS))
    checked(libc.mount(b"none", b"/", None, RECURSIVE | PRIVATE, None))
    listed = [each.name for each in Path("/sys/class").iterdir()]
    real = {name: os.open(f"/sys/class/{name}", os.O_PATH) for name in listed}
    checked(libc.mount(b"none", b"/sys/class", b"tmpfs", 0, None))
    for name, descriptor in real.items():  # all else is there as before
        Path("/sys/class", name).mkdir()
        checked(libc.mount(f"/proc/self/fd/{descriptor}".encode(), f"/sys/class/{name}".encode(), None, BIND, None))
        os.close(descriptor)
    device = DEVICES / "card0" / "0000:00:02.0"
    device.mkdir(parents=True)
    for name, value in {"vendor": "0x1ae0", "device": "0xc0de", "class": "0x030000"}.items():
        (device / name).write_text(f"{value}\n")
    (DEVICES / "card0" / "device").symlink_to(device.name)
