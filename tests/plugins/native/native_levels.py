"""What tests of our own kernels share: levels of processors, and memory that ends where an array does."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np

from motley.plugins.native import library as native
from motley.plugins.native.library import F32

LEVELS = native.supported_levels(native.library())


def set_level(level: str) -> None:
    native.library().motley_set_level(native.LEVELS.index(level))


def assert_same(ours: Any, theirs: Any) -> None:
    """Of two f32 arrays: every bit."""
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


def normal(random: np.random.Generator, *shape: int) -> F32:
    return random.standard_normal(shape).astype(np.float32)


def at_all_levels(compute: Callable[[], F32]) -> F32:
    """What `compute` gives, the same to the bit at every level."""
    set_level(LEVELS[0])
    expected = compute()
    for level in LEVELS[1:]:
        set_level(level)
        assert_same(compute(), expected)
    return expected


def at_the_end(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A copy whose last byte stands before a page that nobody may touch; not on Windows."""
    size = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, size + mmap.PAGESIZE), np.uint8)
    fence = ctypes.c_void_p(memory.ctypes.data + size)
    assert ctypes.CDLL(None).mprotect(fence, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    copy: np.ndarray[Any, Any] = memory[size - array.nbytes : size].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
