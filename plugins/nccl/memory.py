"""Where the buffers of a call are: host memory, which is used as it is, or a GPU's, which a `Device` reaches."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from motley.transport.cuda.library import driver_library

Array = npt.NDArray[Any]
Step = Callable[[Sequence[Array], Sequence[Array]], None]
"""The host's part of a call: from the bytes it reads to the bytes it writes, each ``uint8[nbytes]``."""

_CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2
_CU_MEMORYTYPE_DEVICE = 2


class Region(NamedTuple):
    """A piece of memory of the caller."""

    pointer: int
    nbytes: int


class Device(Protocol):
    """Runs a host step in order on a CUDA stream; what `install` is given in processes that compute on a GPU."""

    def current(self) -> int:
        """The number of the CUDA device that is current in the calling thread."""
        ...

    def submit(self, stream: int, reads: Sequence[Region], writes: Sequence[Region], step: Step) -> None:
        """Submit, in this order on `stream`: copy `reads` to host memory, run `step`, copy what it wrote to `writes`.

        Returns without waiting. Regions may overlap each other and may be host memory too (copy as
        ``cudaMemcpyDefault`` does). `step` gets staging of its own, all of `writes` is written by it; it never raises
        and calls nothing of CUDA. It is run once: a stream that is being captured in a graph is refused.

        Args:
            stream: a ``cudaStream_t``, 0 for the default one.
        """
        ...

    def synchronise(self, stream: int) -> None:
        """Wait until all steps submitted to `stream` are done."""
        ...


def host_view(region: Region) -> Array:
    """Host memory as ``uint8[nbytes]``, without a copy; the caller keeps it alive."""

    class Memory:
        __array_interface__ = {  # noqa: RUF012
            "shape": (region.nbytes,),
            "typestr": "|u1",
            "data": (region.pointer, False),
            "version": 3,
        }

    return np.asarray(Memory())


def is_device_memory(pointer: int) -> bool:
    """Whether an address is a GPU's memory, by the driver; no address is where there is no driver."""
    driver = driver_library()
    if driver is None:
        return False
    kind = ctypes.c_uint(0)
    failed = driver.cuPointerGetAttribute(
        ctypes.byref(kind), _CU_POINTER_ATTRIBUTE_MEMORY_TYPE, ctypes.c_uint64(pointer)
    )
    return not failed and kind.value == _CU_MEMORYTYPE_DEVICE  # it fails for memory that CUDA has never heard of
