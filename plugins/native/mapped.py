"""Files that are mapped into memory and may fail to be read: the process goes on, and knows (`mapped.c`)."""

from __future__ import annotations

import mmap
import weakref

import numpy as np

from motley.plugins.native.library import library


class Guard:
    """Guards the memory that a file is mapped to, for as long as it is mapped: what a disk cannot read, or what is
    beyond the end of a file that has become shorter, is zeros. Without one, reading it ends the process.

    It does so on Linux. Elsewhere, and beside 63 others, it does nothing.
    """

    def __init__(self, mapped: mmap.mmap) -> None:
        self._library = library()
        whole = np.frombuffer(mapped, np.uint8)
        self._number = self._library.motley_guard(whole.ctypes.data, whole.nbytes)
        if self._number >= 0:
            self._end = weakref.finalize(mapped, self._library.motley_unguard, self._number)

    @property
    def broken(self) -> bool:
        """Whether something could not be read since it is mapped."""
        return self._number >= 0 and self._end.alive and bool(self._library.motley_is_broken(self._number))
