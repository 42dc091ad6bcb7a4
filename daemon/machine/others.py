"""What other programs do on this machine: on its GPU, on its processor, on its whole screen."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Collection

import psutil

from motley.daemon.machine.gpus import gpus_of_nvidia

HELD_BYTES = 64 << 20
"""A program that computes on a GPU has so much of its memory; what only draws windows is asked how busy it is."""
BUSY_PERCENT = 15
"""So busy on the GPU is no program that only draws windows."""
BUSY_TIMES = ("user", "nice", "system", "irq", "softirq", "interrupt", "dpc")
"""Kinds of processor time, as systems tell them, in which something computes."""
FULL_SCREEN = {2, 3, 4}
"""Windows' words for it: a program on the whole screen, one of Direct3D, a presentation."""


def family() -> set[int]:
    """The numbers of this process and all that it has started."""
    itself = psutil.Process()
    return {itself.pid, *(child.pid for child in itself.children(recursive=True))}


def others_on_gpu(own: Collection[int]) -> str:
    """Who else uses the first NVIDIA GPU, by name; empty: nobody, as far as its driver tells.

    Args:
        own: processes that are none of the others.
    """
    import pynvml

    with gpus_of_nvidia() as handles:
        for handle in handles[:1]:
            found = dict[int, bool]()
            with contextlib.suppress(pynvml.NVMLError):
                for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    found[process.pid] = int(process.usedGpuMemory or 0) >= HELD_BYTES
            with contextlib.suppress(pynvml.NVMLError):  # not every driver tells, and some do only if there is news
                since = int((time.time() - 2) * 1e6)
                for sample in pynvml.nvmlDeviceGetProcessUtilization(handle, since):
                    found[sample.pid] = found.get(sample.pid, False) or sample.smUtil >= BUSY_PERCENT
            for pid in sorted(pid for pid, uses in found.items() if uses and pid not in own):
                with contextlib.suppress(psutil.Error):  # else it is of another container: numbers mean nothing here
                    return psutil.Process(pid).name()
    return ""


def has_full_screen() -> bool:
    """Whether a program has the whole screen, as Windows tells; elsewhere it is not known, so none has."""
    if sys.platform == "win32":
        import ctypes

        state = ctypes.c_int()
        failed: int = ctypes.windll.shell32.SHQueryUserNotificationState(ctypes.byref(state))
        return not failed and state.value in FULL_SCREEN
    else:
        return False


class OthersOnProcessor:
    """How much of the processor others use, between two times that somebody asks."""

    def __init__(self) -> None:
        self._before: tuple[float, float, float] | None = None

    def part(self, own: Collection[int]) -> float:
        """From 0 to 1; 0 the first time.

        Args:
            own: processes that are none of the others.
        """
        times = psutil.cpu_times()
        busy = sum(getattr(times, kind, 0.0) for kind in BUSY_TIMES)
        now = time.monotonic(), busy, sum(map(_seconds, own))
        before, self._before = self._before, now
        if before is None or now[0] <= before[0]:
            return 0.0
        others = max(0.0, now[1] - before[1] - max(0.0, now[2] - before[2]))
        return min(1.0, others / ((now[0] - before[0]) * (os.cpu_count() or 1)))


def _seconds(pid: int) -> float:
    """What a process has computed since it began."""
    with contextlib.suppress(psutil.Error):
        times = psutil.Process(pid).cpu_times()
        return times.user + times.system
    return 0.0
