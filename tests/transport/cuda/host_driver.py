"""A driver of CUDA made of host streams, with CUDA's rules: what is submitted runs later, in order; a wait captures the
recording before it; the device's memory is not the host's. Kernels are the real ones, compiled for the host.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from motley.transport.cuda.driver import Pinned
from motley.transport.cuda.errors import CudaError, DeviceLost, OutOfDeviceMemory
from tests.transport.cuda.host_kernels import launch
from tests.transport.host_stream import HostEvent, HostStream

DEVICE = 1 << 60
"""Added to addresses as the device sees them, so that nothing mistakes one for the other."""
STUCK_S = 60.0

Kernel = tuple[tuple[Path, ...], str]


def _real(address: int | None) -> int:
    """An address of the host, by what the device calls it; null stays."""
    assert not address or address >= DEVICE
    return address - DEVICE if address else 0


@dataclass(eq=False)
class Graph:
    """What a stream has recorded."""

    nodes: list[tuple[Callable[[], object], str]]


class HostDriver:
    """`motley.transport.cuda.driver.Driver`.

    Attributes:
        lost: the device is gone: every call fails, though what is given back is.
        memory: bytes that the device has.
    """

    def __init__(self, *, spins: bool = True, captures: bool = True, memory: int = DEVICE) -> None:
        """`spins`: it knows host functions that spin; `captures`: it records graphs."""
        self.lost = False
        self.memory = memory
        self._captures = captures
        self.number = 0
        self._spins = spins
        self._recorded: dict[HostStream, list[tuple[Callable[[], object], str]]] = {}
        self._memory: dict[int, Any] = {}
        self._pinned: dict[int, Any] = {}
        self._handles: set[Any] = set()

    @property
    def live(self) -> int:
        """Allocations, streams and events that have not been given back."""
        return len(self._memory) + len(self._pinned) + len(self._handles)

    def attach(self) -> None:
        pass

    def create_stream(self) -> HostStream:
        self._check()
        stream = HostStream("device")
        self._handles.add(stream)
        return stream

    def destroy_stream(self, stream: HostStream) -> None:
        self._handles.remove(stream)
        stream.close()
        self._check()

    def create_event(self) -> HostEvent:
        self._check()
        event = HostEvent()
        self._handles.add(event)
        return event

    def destroy_event(self, event: HostEvent) -> None:
        self._handles.remove(event)
        self._check()

    def record(self, event: HostEvent, stream: HostStream) -> None:
        self._check()
        assert stream not in self._recorded, "an event in a graph marks no place in a stream"
        stream.record(event)

    def wait(self, stream: HostStream, event: HostEvent) -> None:
        assert stream not in self._recorded
        stream.wait(event)

    def reached(self, event: HostEvent) -> bool:
        self._check()
        if not event.done():
            return False
        event.synchronise(0)  # raises what went wrong in the device's stream
        return True

    def allocate(self, nbytes: int) -> int:
        self._check()
        assert not self._recorded, "while a stream is captured, no memory can be had"
        free = self.memory - sum(map(len, self._memory.values()))
        if nbytes > free:
            raise OutOfDeviceMemory(f"out of memory: {nbytes} bytes are needed, {free} of {self.memory} are free")
        memory = self._allocate(self._memory, nbytes)
        memory[:] = 0xFF  # whatever was there before: floats that are no numbers
        return int(memory.ctypes.data) + DEVICE

    def free(self, address: int) -> None:
        del self._memory[address - DEVICE]
        self._check()

    def allocate_pinned(self, nbytes: int) -> Pinned:
        self._check()
        host = self._allocate(self._pinned, nbytes)
        return Pinned(host, host.ctypes.data + DEVICE)

    def free_pinned(self, pinned: Pinned) -> None:
        del self._pinned[pinned.host.ctypes.data]
        self._check()

    def floats(self, address: int, elements: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Memory of the device, for what computes there."""
        held = address - DEVICE
        assert any(start <= held and held + 4 * elements <= start + len(kept) for start, kept in self._memory.items())
        return np.ctypeslib.as_array((ctypes.c_float * elements).from_address(held))

    def copy(self, target: int, source: int, nbytes: int, stream: HostStream) -> None:
        to, from_ = (address - DEVICE if address >= DEVICE else address for address in (target, source))
        for address, held in ((target, to), (source, from_)):
            kept = self._memory if address >= DEVICE else self._pinned
            assert any(start <= held and held + nbytes <= start + len(kept[start]) for start in kept)
        self.submit(stream, lambda: ctypes.memmove(to, from_, nbytes), "copy")

    def function(self, sources: tuple[Path, ...], name: str) -> Kernel:
        return sources, name

    def compile(self, modules: Collection[tuple[Path, ...]]) -> None:
        pass  # when they are launched

    def launch(
        self,
        function: Kernel,
        blocks: int,
        threads: int,
        arguments: Sequence[Any],
        stream: HostStream,
        *,
        early: bool = False,
    ) -> None:
        assert blocks > 0, f"drivers refuse {function[1]} without blocks"

        def real(argument: Any) -> Any:
            if isinstance(argument, ctypes.c_void_p):
                return ctypes.c_void_p(_real(argument.value))
            if isinstance(argument, ctypes.Structure):
                copy = type(argument).from_buffer_copy(argument)
                for name, kind in copy._fields_:
                    if kind is ctypes.c_void_p:
                        setattr(copy, name, _real(getattr(copy, name)))
                return copy
            return argument

        given = [real(argument) for argument in arguments]
        self.submit(stream, lambda: launch(*function, blocks, threads, given), function[1])

    def launch_host(self, stream: HostStream, function: int, data: int, *, spinning: bool) -> None:
        if spinning and not self._spins:
            raise CudaError("spinning host functions need CUDA 13.2, the driver knows 13.0")
        call: Callable[[int], None] = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
        self.submit(stream, lambda: call(data), "host function")

    def write_value(self, stream: HostStream, address: int, value: int) -> None:
        word = self._word(address)

        def write() -> None:
            word.value = value

        self.submit(stream, write, "write value")

    def wait_value(self, stream: HostStream, address: int, value: int) -> None:
        word = self._word(address)

        def wait() -> None:
            stuck_at = time.monotonic() + STUCK_S
            while ctypes.c_int32(word.value - value).value < 0:
                assert time.monotonic() < stuck_at, "the answer never came"
                time.sleep(0)

        self.submit(stream, wait, "wait value")

    def begin_capture(self, stream: HostStream) -> None:
        self._check()
        if not self._captures:
            raise CudaError("cuStreamBeginCapture failed: operation not supported")
        assert stream not in self._recorded
        self._recorded[stream] = []

    def end_capture(self, stream: HostStream) -> Graph:
        graph = Graph(self._recorded.pop(stream))
        self._handles.add(graph)
        return graph

    def is_capturing(self, stream: HostStream) -> bool:
        return stream in self._recorded

    def launch_graph(self, graph: Graph, stream: HostStream) -> None:
        assert graph in self._handles
        for work, what in graph.nodes:
            self.submit(stream, work, what)

    def destroy_graph(self, graph: Graph) -> None:
        self._handles.remove(graph)
        self._check()

    def submit(self, stream: HostStream, work: Callable[[], object], what: str) -> None:
        """Have the device do `work`, in order."""
        self._check()
        recorded = self._recorded.get(stream)
        if recorded is None:
            stream.submit(work, what)
        else:
            recorded.append((work, what))

    def _check(self) -> None:
        if self.lost:
            raise DeviceLost("the device is lost")

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
