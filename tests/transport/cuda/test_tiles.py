"""What stands for tensor cores on the host has elements where PTX says that threads have them."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest

from motley.transport.cuda.compiler import DEVICE
from tests.transport.cuda.host_kernels import launch

TILE = (DEVICE, Path(__file__).with_name("tile.cu"))
"""Kernels ``multiply_16`` and ``multiply_32``: c: i32[16, 8] += a: i8[16, k] b: i8[k, 8], a warp."""


@pytest.mark.parametrize("k", [16, 32])
def test_tiles_are_multiplied(k: int) -> None:
    rng = np.random.default_rng(k)
    a, b = (rng.integers(-128, 128, shape, np.int8) for shape in ((16, k), (k, 8)))
    c = rng.integers(-(1 << 20), 1 << 20, (16, 8), np.int32)
    expected = c + a.astype(np.int32) @ b.astype(np.int32)
    launch(TILE, f"multiply_{k}", 1, 32, [ctypes.c_void_p(array.ctypes.data) for array in (a, b, c)])
    assert np.array_equal(c, expected)
