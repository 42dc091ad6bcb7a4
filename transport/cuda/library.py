"""The library of NVIDIA's driver itself, for the few functions that are called without a package between."""

from __future__ import annotations

import ctypes
import sys
from functools import cache


@cache
def driver_library() -> ctypes.CDLL | None:
    """None: there is no driver on this machine."""
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
