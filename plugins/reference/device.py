"""Where the reference engine computes: NumPy on the processor, or CuPy on the first NVIDIA GPU.

CuPy's arrays are in the GPU's memory and do not mix with NumPy's: what goes there and what comes back is said.
CuPy multiplies in FP32 unless the environment has ``CUPY_TF32=1``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from motley.plugins.engine import EngineError, EngineMemoryError
from motley.protocol.installing import how_to_install

Array: TypeAlias = Any
"""An array of the device's module, or a NumPy array on the host."""

ArrayModule: TypeAlias = Any
"""NumPy, or what has its interface."""

UPLOAD_BYTES = 16 << 20
"""Bytes that are taken to the device at once: CuPy copies them through as much pinned memory."""


@dataclass(frozen=True)
class Device:
    """An array module and what is particular to it.

    Attributes:
        xp: the module; ``xp.asarray`` takes host arrays to the device.
        to_host: gives a NumPy array of an array of the module: the same memory or a copy.
        out_of_memory: what it raises where an array does not fit.
        failures: what else it raises where the device fails.
    """

    xp: ArrayModule
    to_host: Callable[[Array], np.ndarray[Any, np.dtype[Any]]]
    out_of_memory: tuple[type[Exception], ...] = ()
    failures: tuple[type[Exception], ...] = ()

    def upload(self, stored: np.ndarray[Any, np.dtype[np.uint8]]) -> Array:
        """A file's bytes on the device; they stay where they are if that is the host."""
        if self.xp is np:
            return stored
        uploaded = self.xp.empty(len(stored), np.uint8)
        for start in range(0, len(stored), UPLOAD_BYTES):
            uploaded[start : start + UPLOAD_BYTES] = self.xp.asarray(stored[start : start + UPLOAD_BYTES])
        return uploaded

    @contextmanager
    def errors_told(self) -> Iterator[None]:
        """Raise `EngineError` for what the module raises meanwhile."""
        try:
            yield
        except self.out_of_memory as error:
            raise EngineMemoryError(
                f"engine 'reference': the GPU has too little memory for this rank ({error}); give it a smaller share"
            ) from error
        except self.failures as error:
            raise EngineError(f"engine 'reference': the GPU failed: {error}") from error


CPU = Device(np, np.asarray)


def open_device(name: str) -> Device:
    """The device that a session's option ``device`` names: ``cpu`` or ``cuda``.

    Raises:
        EngineError: there is none of that name, or it lacks its package, its driver, or a GPU.
    """
    if name == "cpu":
        return CPU
    if name == "cuda":
        return _open_cuda()
    raise EngineError(f"engine 'reference' has no device {name!r}; it has: cpu, cuda")


def _open_cuda() -> Device:
    try:
        import cupy
    except ImportError as error:
        raise EngineError(
            f"engine 'reference' needs CuPy for device 'cuda' ({error}): {how_to_install('gpu')}; device 'cpu' does not"
        ) from error
    cuda = cupy.cuda
    try:
        one = cupy.ones((1, 1), np.float32)
        float((one @ one)[0, 0])  # both of NVIDIA's libraries that are needed load here: NVRTC and cuBLAS
        failures = cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError, cuda.cublas.CUBLASError
    except (cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError) as error:
        raise EngineError(
            f"engine 'reference' finds no GPU for device 'cuda': {error}; install or update NVIDIA's driver, or use "
            "device 'cpu'"
        ) from error
    except Exception as error:  # each library that is missing or does not load has classes of its own
        raise EngineError(
            f"engine 'reference': CuPy does not compute on this GPU: {error}; the extra gpu brings NVIDIA's "
            f"libraries ({how_to_install('gpu')}), or use device 'cpu'"
        ) from error
    return Device(cupy, cupy.asnumpy, (cuda.memory.OutOfMemoryError,), (*failures, cuda.compiler.CompileException))
