"""Memory in huge pages, through which a core reads more in a second than through small ones."""

from __future__ import annotations

import contextlib
import mmap
import sys
from typing import Any

import numpy as np

HUGE_PAGE = 2 << 20


def huge_pages(size: int) -> np.ndarray[Any, Any]:
    """u8[size], in huge pages as far as it fills them and the system has them. Memory is taken as it is written to."""
    if sys.platform == "linux" and size >= HUGE_PAGE:
        # Private: most systems give huge pages to no shared memory.
        pages = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = -np.frombuffer(pages, np.uint8).ctypes.data % HUGE_PAGE
        whole = size // HUGE_PAGE * HUGE_PAGE
        with contextlib.suppress(OSError):  # a system without them
            pages.madvise(mmap.MADV_HUGEPAGE, start, whole)
            pages.madvise(mmap.MADV_NOHUGEPAGE, start + whole)  # or the rest would be one, too
        return np.frombuffer(pages, np.uint8)[start : start + size]
    return np.empty(size, np.uint8)
