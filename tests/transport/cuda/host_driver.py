"""A driver of CUDA made of host streams, with CUDA's rules: what is submitted runs later, in order; a wait captures the
recording before it; the device's memory is not the host's. Kernels are the real ones, compiled for the host.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from motley.transport.cuda.driver import Pinned
from motley.transport.cuda.errors import CudaError
from motley.transport.streams import HostEvent, HostStream
from tests.transport.cuda.host_kernels import launch

DEVICE = 1 << 60
"""Added to addresses as the device sees them, so that nothing mistakes one for the other."""
STUCK_S = 20.0

Kernel = tuple[tuple[Path, ...], str]


class HostDriver:
    """`motley.transport.cuda.driver.Driver`. `lost`: every question for an event fails, as on a device that is gone."""

    def __init__(self, *, spins: bool = True) -> None:
        """`spins`: it knows host functions that spin."""
        self.lost = False
        self._spins = spins
        self._memory: dict[int, Any] = {}
        self._pinned: dict[int, Any] = {}
        self._handles: set[Any] = set()

    @property
    def live(self) -> int:
        """Allocations, streams and events that have not been given back."""
        return len(self._memory) + len(self._pinned) + len(self._handles)

    def create_stream(self) -> HostStream:
        stream = HostStream("device")
        self._handles.add(stream)
        return stream

    def destroy_stream(self, stream: HostStream) -> None:
        self._handles.remove(stream)
        stream.close()

    def create_event(self) -> HostEvent:
        event = HostEvent()
        self._handles.add(event)
        return event

    def destroy_event(self, event: HostEvent) -> None:
        self._handles.remove(event)

    def record(self, event: HostEvent, stream: HostStream) -> None:
        stream.record(event)

    def wait(self, stream: HostStream, event: HostEvent) -> None:
        stream.wait(event)

    def reached(self, event: HostEvent) -> bool:
        if self.lost:
            raise CudaError("cuEventQuery failed: the device is lost")
        if not event.done():
            return False
        event.synchronise(0)  # raises what went wrong in the device's stream
        return True

    def allocate(self, nbytes: int) -> int:
        address = self._allocate(self._memory, nbytes).ctypes.data + DEVICE
        return int(address)

    def free(self, address: int) -> None:
        del self._memory[address - DEVICE]

    def allocate_pinned(self, nbytes: int) -> Pinned:
        host = self._allocate(self._pinned, nbytes)
        return Pinned(host, host.ctypes.data + DEVICE)

    def free_pinned(self, pinned: Pinned) -> None:
        del self._pinned[pinned.host.ctypes.data]

    def copy(self, target: int, source: int, nbytes: int, stream: HostStream) -> None:
        to, from_ = (address - DEVICE if address >= DEVICE else address for address in (target, source))
        for address, held in ((target, to), (source, from_)):
            kept = self._memory if address >= DEVICE else self._pinned
            assert any(start <= held and held + nbytes <= start + len(kept[start]) for start in kept)
        stream.submit(lambda: ctypes.memmove(to, from_, nbytes), "copy")

    def function(self, sources: tuple[Path, ...], name: str) -> Kernel:
        return sources, name

    def launch(self, function: Kernel, blocks: int, threads: int, arguments: Sequence[Any], stream: HostStream) -> None:
        real = []
        for argument in arguments:
            if isinstance(argument, ctypes.c_void_p):
                address = argument.value or 0  # null stays
                assert not address or address >= DEVICE
                argument = ctypes.c_void_p(address - DEVICE if address else 0)
            real.append(argument)
        stream.submit(lambda: launch(*function, blocks, threads, real), function[1])

    def launch_host(self, stream: HostStream, function: int, data: int, *, spinning: bool) -> None:
        if spinning and not self._spins:
            raise CudaError("spinning host functions need CUDA 13.2, the driver knows 13.0")
        call: Callable[[int], None] = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
        stream.submit(lambda: call(data), "host function")

    def write_value(self, stream: HostStream, address: int, value: int) -> None:
        word = self._word(address)

        def write() -> None:
            word.value = value

        stream.submit(write, "write value")

    def wait_value(self, stream: HostStream, address: int, value: int) -> None:
        word = self._word(address)

        def wait() -> None:
            stuck_at = time.monotonic() + STUCK_S
            while ctypes.c_int32(word.value - value).value < 0:
                assert time.monotonic() < stuck_at, "the answer never came"
                time.sleep(0)

        stream.submit(wait, "wait value")

    def _word(self, address: int) -> ctypes.c_uint32:
        assert address >= DEVICE
        return ctypes.c_uint32.from_address(address - DEVICE)

    @staticmethod
    def _allocate(kept: dict[int, Any], nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        whole = np.zeros(nbytes + 256, np.uint8)
        start = -whole.ctypes.data % 256
        array = whole[start : start + nbytes]
        kept[array.ctypes.data] = array
        return array
