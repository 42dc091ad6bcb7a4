"""The memory that sums on a stream need beside their buffers; they take turns there, so they can share it."""

from __future__ import annotations

from contextlib import ExitStack

from ..formats import Bytes
from .driver import Driver


class SumMemory:
    """Pieces of memory by their use. A piece grows to twice its size at least, and what it has outgrown is kept until
    `close`, as captured graphs have its address: all in all less than four times what the largest sum needs.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._all = ExitStack()
        self._on_device: dict[str, tuple[int, int]] = {}
        """Addresses and sizes, by use."""
        self._on_host: dict[str, Bytes] = {}

    def on_device(self, use: str, nbytes: int) -> int:
        """The address of so many bytes on the device.

        Raises:
            OutOfDeviceMemory: there is no room.
        """
        address, held = self._on_device.get(use, (0, 0))
        if held < nbytes:
            size = max(nbytes, 2 * held)
            address = self._driver.allocate(size)
            self._all.callback(self._driver.free, address)
            self._on_device[use] = address, size
        return address

    def on_host(self, use: str, nbytes: int) -> Bytes:
        """So many bytes of pinned memory.

        Raises:
            OutOfDeviceMemory: there is no room.
        """
        held = self._on_host.get(use)
        if held is None or len(held) < nbytes:
            pinned = self._driver.allocate_pinned(max(nbytes, 0 if held is None else 2 * len(held)))
            self._all.callback(self._driver.free_pinned, pinned)
            held = self._on_host[use] = pinned.host
        return held[:nbytes]

    def close(self) -> None:
        """Free it. The stream must have come to the end of the last sum."""
        self._all.close()
