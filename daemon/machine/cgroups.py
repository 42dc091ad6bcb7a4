"""Limits of the container that this process is in: control groups of Linux, version 2."""

from __future__ import annotations

import re
from pathlib import Path


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
