"""This machine's memory: what is available, how fast it is read, and what this process holds of it."""

from __future__ import annotations

import contextlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import psutil

from motley.daemon.machine.cgroups import cgroup_memory


def available_memory() -> int:
    """Bytes that could be used now without swapping, within a container's limit."""
    free = psutil.virtual_memory().available
    limit = cgroup_memory(Path("/"))
    return free if limit is None else min(free, limit)


def limit_memory(more: int) -> None:
    """Let this process have so many bytes of memory more than it has, beside files that it maps; what wants more than
    that gets a `MemoryError`. Linux only: elsewhere nothing bounds it."""
    if sys.platform == "linux":
        import resource

        most = psutil.Process().memory_info().data + more
        limits = [each for each in resource.getrlimit(resource.RLIMIT_DATA) if each != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min([most, *limits]),) * 2)


def memory_bandwidth(threads: int, seconds: float = 0.25, size: int = 256 << 20) -> float:
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


class Resident(NamedTuple):
    """Memory of a process in RAM, in bytes."""

    now: int
    peak: int


def resident_bytes(pid: int | None = None) -> Resident:
    """What a process holds in memory, mapped file pages included, now and at most.

    Args:
        pid: None: this process.

    Raises:
        psutil.NoSuchProcess: it has ended.
    """
    info = psutil.Process(pid).memory_info()
    peak = getattr(info, "peak_wset", info.rss)  # Windows
    with contextlib.suppress(OSError):
        # Not getrusage: its maximum is inherited from the parent.
        for line in Path(f"/proc/{pid or 'self'}/status").read_text("ascii").splitlines():
            if line.startswith("VmHWM:"):
                peak = int(line.split()[1]) * 1024
    return Resident(info.rss, peak)
