"""Multiplies many rows on a GPU by cuBLAS, in FP32 throughout: no TF32, no emulation, whatever the environment says.

Not yet run on a GPU. The library is the package ``nvidia-cublas``; five of its functions are called by ctypes.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

from motley.transport.cuda.errors import CudaError
from motley.transport.cuda.stream import CudaStream

TRANSPOSED, AS_IT_LIES = 1, 0  # CUBLAS_OP_T, CUBLAS_OP_N
REAL_32F = 0  # CUDA_R_32F
PEDANTIC_32F = 69  # CUBLAS_COMPUTE_32F_PEDANTIC
ANY_ALGORITHM = -1  # CUBLAS_GEMM_DEFAULT

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cublasCreate_v2": (_POINTER,),
    "cublasDestroy_v2": (_POINTER,),
    "cublasSetStream_v2": (_POINTER, _POINTER),
    "cublasGemmEx": (
        *(_POINTER, _INT, _INT),  # handle, what is done to a and to b
        *(_INT, _INT, _INT, _POINTER),  # m, n, k, alpha
        *(_POINTER, _INT, _INT) * 2,  # a and b: where, of which type, elements from column to column
        _POINTER,  # beta
        *(_POINTER, _INT, _INT),  # c
        *(_INT, _INT),  # arithmetic, algorithm
    ),
    "cublasGetStatusString": (_INT,),
}


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
    """`Gemm` by a loaded cuBLAS; `stream` is CUDA's handle as a number."""

    def __init__(self, library: Any, stream: int) -> None:
        """
        Raises:
            CudaError: cuBLAS does not start: the driver is older than it, or there is no memory.
        """
        self._library = library
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)
        handle = ctypes.c_void_p()
        self._call("cublasCreate_v2", ctypes.addressof(handle))
        self._handle = handle.value
        try:
            self._call("cublasSetStream_v2", self._handle, stream)
        except CudaError:
            self.close()
            raise

    def multiply(
        self, x: int, x_stride: int, weights: int, y: int, y_stride: int, rows: int, outputs: int, columns: int
    ) -> None:
        # cuBLAS has columns where we have rows: to it, this is y^T = weights x^T.
        self._call(
            "cublasGemmEx",
            self._handle,
            *(TRANSPOSED, AS_IT_LIES),
            *(outputs, rows, columns, ctypes.addressof(self._one)),
            *(weights, REAL_32F, columns),
            *(x, REAL_32F, x_stride),
            ctypes.addressof(self._zero),
            *(y, REAL_32F, y_stride),
            *(PEDANTIC_32F, ANY_ALGORITHM),
        )

    def close(self) -> None:
        self._library.cublasDestroy_v2(self._handle)  # it can only fail where all is lost

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            said = self._library.cublasGetStatusString(status)
            raise CudaError(f"{name} failed: {said.decode() if said else status}")


def open_cublas(stream: CudaStream) -> Gemm:
    """The installed cuBLAS.

    Raises:
        CudaError: it is not installed, or does not start.
    """
    return Cublas(load_cublas(), int(stream.handle))


def load_cublas() -> ctypes.CDLL:
    """The library, with its functions declared; needs neither a GPU nor a driver.

    Raises:
        CudaError: it is not installed, or another than this is made for.
    """
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        library = ctypes.CDLL(load_nvidia_dynamic_lib("cublas").abs_path)
        for name, arguments in PROTOTYPES.items():
            getattr(library, name).argtypes = arguments
        library.cublasGetStatusString.restype = ctypes.c_char_p
    except (ImportError, RuntimeError, OSError, AttributeError) as error:  # what is not found, or has no such function
        said = str(error).splitlines()[0]
        raise CudaError(f"cuBLAS is missing ({said}); install motley[gpu]") from error
    return library
