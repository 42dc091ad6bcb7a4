"""NCCL's calls on the streams of an NVIDIA GPU. A call was seen on one (H200, 2026)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate

from motley.transport.cuda.driver import CudaDriver, Driver, Handle, Pinned
from motley.transport.cuda.errors import CudaError
from motley.transport.cuda.host_step import HostStep
from motley.transport.cuda.stream import CudaStream, measure_host_steps

from .memory import Array, Region, Step

ALIGNMENT = 16
"""Bytes: where a piece of staging begins."""
DEADLINE_S = 600.0
"""Longest wait for a stream: each of its calls has a deadline of its own."""


class CudaDevice:
    """`Device` on one GPU.

    Calls on a stream share its staging, as they take turns; it grows with the largest, and is kept until `close`.
    """

    def __init__(self, number: int = 0, form: HostStep | None = None, driver: Driver | None = None) -> None:
        """
        Args:
            number: of the GPU, as CUDA counts them.
            form: how a stream calls the host; by default the quickest that works.
            driver: of the GPU, if there is one already.

        Raises:
            CudaError: no GPU, no driver, or no form works.
        """
        self._driver = driver or CudaDriver(number)
        self._form = form or next(iter(measure_host_steps(self._driver)))
        self._streams: dict[Handle, CudaStream] = {}
        self._staging: dict[Handle, Pinned] = {}
        self._outgrown: list[Pinned] = []  # which a copy under way may still use
        self._submitting = threading.Lock()  # ranks of one process call from several threads

    def current(self) -> int:
        """See `Device.current`: there is only this GPU."""
        return self._driver.number

    def submit(self, stream: Handle, reads: Sequence[Region], writes: Sequence[Region], step: Step) -> None:
        """See `Device.submit`.

        Raises:
            CudaError: the GPU has failed, or somebody captures the stream in a graph.
        """
        with self._submitting:
            self._driver.attach()
            if self._driver.is_capturing(stream):
                raise CudaError(
                    "Motley's calls of NCCL cannot be captured in a CUDA graph; capture what is between them"
                )
            if stream not in self._streams:
                self._streams[stream] = CudaStream(self._driver, self._form, handle=stream, name="NCCL's caller")
            staged = self._staged(stream, [region.nbytes for region in (*reads, *writes)])
            given, taken = staged[: len(reads)], staged[len(reads) :]
            for region, place in zip(reads, given, strict=True):
                self._driver.copy(place.ctypes.data, region.pointer, region.nbytes, stream)
            self._streams[stream].submit(lambda: step(given, taken), "a call of NCCL")
            for region, place in zip(writes, taken, strict=True):
                self._driver.copy(region.pointer, place.ctypes.data, region.nbytes, stream)

    def synchronise(self, stream: Handle) -> None:
        """See `Device.synchronise`. TimeoutError: that took longer than `DEADLINE_S`."""
        self._driver.attach()
        if stream in self._streams:
            self._streams[stream].synchronise(DEADLINE_S)

    def close(self) -> None:
        """Wait for the calls under way, and free the staging."""
        self._driver.attach()
        for stream in self._streams.values():
            stream.close()
        for pinned in (*self._staging.values(), *self._outgrown):
            self._driver.free_pinned(pinned)
        self._streams.clear()
        self._staging.clear()
        self._outgrown.clear()

    def _staged(self, stream: Handle, sizes: Sequence[int]) -> list[Array]:
        """Pinned memory for so many bytes each, free for whoever comes next in this stream."""
        starts = [0, *accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
        total, held = starts[-1], self._staging.get(stream)
        if held is None or len(held.host) < total:
            if held is not None:
                self._outgrown.append(held)
                total = max(total, 2 * len(held.host))
            held = self._staging[stream] = self._driver.allocate_pinned(max(1, total))
        return [held.host[start : start + size] for start, size in zip(starts, sizes, strict=False)]
