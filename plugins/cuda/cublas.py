"""Multiplies many rows on a GPU by cuBLAS, in FP32 throughout: no TF32, no emulation, whatever the environment says.

CuPy calls the library, which is the package ``nvidia-cublas``.
"""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

from motley.protocol.installing import how_to_install
from motley.transport.cuda.errors import CudaError
from motley.transport.cuda.stream import CudaStream

REAL_32F = 0  # CUDA_R_32F


class Gemm(Protocol):
    """Multiplies in a stream's order; belongs to the thread that made it."""

    def multiply(
        self, x: int, x_stride: int, weights: int, y: int, y_stride: int, rows: int, outputs: int, columns: int
    ) -> None:
        """y[rows, outputs] = x[rows, columns] weights[outputs, columns]^T: addresses of f32 on the device.

        Raises:
            CudaError: it could not be submitted.
        """
        ...

    def close(self) -> None: ...


class Cublas:
    """`Gemm` by CuPy. Such products cannot be captured: CuPy refuses that."""

    def __init__(self, library: Any, stream: AbstractContextManager[Any]) -> None:
        """`library`: ``cupy.cuda.cublas``; `stream`: CuPy's, current while it is entered.

        Raises:
            CudaError: cuBLAS does not start: the driver is older than it, or there is no memory.
        """
        self._library = library
        self._stream = stream
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)
        try:
            self._handle = library.create()
        except RuntimeError as error:
            raise CudaError(f"cuBLAS does not start: {error}") from error

    def multiply(
        self, x: int, x_stride: int, weights: int, y: int, y_stride: int, rows: int, outputs: int, columns: int
    ) -> None:
        # cuBLAS has columns where we have rows: to it, this is y^T = weights x^T.
        library, one, zero = self._library, ctypes.addressof(self._one), ctypes.addressof(self._zero)
        try:
            with self._stream:
                library.gemmEx(
                    self._handle,
                    *(library.CUBLAS_OP_T, library.CUBLAS_OP_N),
                    *(outputs, rows, columns, one),
                    *(weights, REAL_32F, columns),
                    *(x, REAL_32F, x_stride, zero),
                    *(y, REAL_32F, y_stride),
                    *(library.CUBLAS_COMPUTE_32F_PEDANTIC, library.CUBLAS_GEMM_DEFAULT),
                )
        except RuntimeError as error:  # of which CuPy's errors are kinds
            raise CudaError(f"cuBLAS does not multiply: {error}") from error

    def close(self) -> None:
        with suppress(RuntimeError):  # it can only fail where all is lost
            self._library.destroy(self._handle)


def open_cublas(stream: CudaStream) -> Gemm:
    """The installed cuBLAS.

    Raises:
        CudaError: it is not installed, or does not start.
    """
    library = load_cublas()
    from cupy.cuda import Stream

    return Cublas(library, Stream.from_external(stream))


def load_cublas() -> Any:
    """CuPy's binding, which loads the library; needs neither a GPU nor a driver.

    Raises:
        CudaError: it is not installed.
    """
    try:
        from cupy.cuda import cublas
    except ImportError as error:
        raise CudaError(f"cuBLAS is missing ({str(error).splitlines()[0]}): {how_to_install('gpu')}") from error
    return cublas
