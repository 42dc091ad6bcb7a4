"""Memory of a test on a GPU, or on what stands for one."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from motley.transport.cuda.driver import Driver
from motley.transport.cuda.stream import CudaEvent, DeviceArray

Array = npt.NDArray[Any]


class Memory(ExitStack):
    """Device arrays and staging of a test, freed with it."""

    def __init__(self, driver: Driver) -> None:
        super().__init__()
        self._driver = driver

    def device(self, elements: int, dtype: Any = np.float32) -> DeviceArray:
        kind = np.dtype(dtype)
        address = self._driver.allocate(elements * kind.itemsize)
        self.callback(self._driver.free, address)
        return DeviceArray(address, (elements,), kind)

    def pinned(self, elements: int, dtype: Any = np.float32) -> Array:
        pinned = self._driver.allocate_pinned(elements * np.dtype(dtype).itemsize)
        self.callback(self._driver.free_pinned, pinned)
        return pinned.host.view(dtype)

    def event(self) -> CudaEvent:
        event = CudaEvent(self._driver)
        self.callback(event.close)
        return event
