"""Memory that is free goes back to the system, where the C library would keep much of it for itself.

Glibc serves what is smaller than a threshold from a heap that only shrinks at its end, and raises the threshold (to
32 MB) as larger pieces are freed: activations that come and go would leave holes between what stays.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""What `mallopt` calls them."""
_BYTES = 1 << 18


def give_back_what_is_free() -> None:
    """Have pieces of more than 256 KiB go back to the system as soon as they are free. Does nothing without glibc."""
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        for option in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
            mallopt(option, _BYTES)
