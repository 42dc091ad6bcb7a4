"""CuPy's binding of cuBLAS on the host, as far as it is called: matrices by columns, in the order of a stream."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from motley.plugins.cuda.cublas import Cublas
from motley.transport.cuda.stream import CudaStream
from tests.transport.cuda.host_driver import HostDriver

HANDLE = 0xC0DE


@dataclass
class HostBlas:
    """`starts`: whether there is a handle to be had. `shapes`: (m, n, k) of every product."""

    driver: HostDriver
    stream: Any
    starts: bool = True

    CUBLAS_OP_N, CUBLAS_OP_T, CUBLAS_GEMM_DEFAULT, CUBLAS_COMPUTE_32F_PEDANTIC = 0, 1, -1, 69

    def __post_init__(self) -> None:
        self.shapes: list[tuple[int, int, int]] = []
        self.handles = 0

    def create(self) -> int:
        if not self.starts:
            raise RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED")
        self.handles += 1
        return HANDLE

    def destroy(self, handle: int) -> None:
        assert handle == HANDLE
        self.handles -= 1

    def gemmEx(
        self, handle: int, of_a: int, of_b: int, m: int, n: int, k: int, alpha: int, a: int, a_type: int, lda: int,
        b: int, b_type: int, ldb: int, beta: int, c: int, c_type: int, ldc: int, arithmetic: int, algorithm: int,
    ) -> None:  # fmt: skip
        assert handle == HANDLE
        assert a_type == b_type == c_type == 0
        assert arithmetic == 69, "not FP32 throughout"
        if min(m, n, k) < 1 or lda < (k if of_a else m) or ldb < (n if of_b else k) or ldc < m:
            raise RuntimeError("CUBLAS_STATUS_INVALID_VALUE")
        left, right = self._matrix(a, of_a, m, k, lda), self._matrix(b, of_b, k, n, ldb)
        out = self._matrix(c, 0, m, n, ldc)
        factor, kept = (ctypes.c_float.from_address(each).value for each in (alpha, beta))

        def multiply() -> None:
            out[:] = factor * (left @ right) + (kept * out if kept else 0)

        self.shapes.append((m, n, k))
        self.driver.submit(self.stream, multiply, "product")

    def _matrix(self, address: int, transposed: int, rows: int, columns: int, stride: int) -> np.ndarray[Any, Any]:
        """f32[rows, columns], which lies by columns, or by rows if it is transposed."""
        lines, width = (rows, columns) if transposed else (columns, rows)
        held = self.driver.floats(address, (lines - 1) * stride + width)
        lying = as_strided(held, (lines, width), (4 * stride, 4))
        return lying if transposed else lying.T


class HostGemms(list[HostBlas]):
    """Stands in for `cublas.open_cublas` where an engine runs on a host driver; lists what was opened."""

    def __call__(self, stream: CudaStream) -> Cublas:
        assert isinstance(stream.driver, HostDriver)
        self.append(HostBlas(stream.driver, stream.handle))
        return Cublas(self[-1], nullcontext())
