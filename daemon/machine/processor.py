"""This machine's processor: its name, the cores that may be used, and keeping a process on one of them."""

from __future__ import annotations

import os
import platform
import re
import sys
from pathlib import Path

import psutil

from motley.daemon.machine.cgroups import cgroup_cores


def cpu_name() -> str:
    """The name of the processor, as people know it."""
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
