"""One all-reduce of a buffer on the GPU: its terms travel by way of pinned memory, and are summed on the device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from ..collectives import Sums
from ..formats import Bytes, WireFormat
from ..schedules.forecast import Choice
from ..schedules.schedule import Algorithm, Operation
from ..streams import ordered_collective
from .reduction import SOURCES, THREADS, Reduction
from .stream import CudaEvent, CudaStream, DeviceArray
from .sum_memory import SumMemory


class Exchange(Sums, Protocol):
    """The part of a `Communicator` that is needed to sum on the device."""

    wire_format: WireFormat

    def forecast(self, operation: Operation, elements: int, dtype: npt.DTypeLike) -> Choice:
        """See `motley.transport.Communicator.forecast`."""
        ...

    def exchange_terms(self, own: Bytes, others: Sequence[Bytes], dtype: npt.DTypeLike) -> None:
        """See `motley.transport.Communicator.exchange_terms`."""
        ...


class AllReduce:
    """Sums one buffer, in place and in rank order, as often as it is submitted.

    The mesh chooses one-shot for what a decode step sums. Payloads for which it chooses another algorithm are summed by
    the ranks that own their parts in the middle of the exchange, where no kernel can be called: those this rank sums on
    the host. The bits are the same.
    """

    def __init__(
        self,
        stream: CudaStream,
        communicator: Exchange | Sums,
        buffer: DeviceArray,
        memory: SumMemory | None = None,
    ) -> None:
        """
        Args:
            communicator: belongs to the host steps of `stream` from the first one on; no step may be under way yet. One
                that has no more than an `all_reduce` (a stand-in, say) is given the buffer in host memory.
            memory: what this takes, shared with other sums of the stream; by default it has its own.

        Raises:
            UsageError: elements that a GPU does not sum, or an address that is not aligned.
            CudaError: no memory, or the kernels cannot be compiled.
        """
        self._stream = stream
        self._communicator = communicator
        self._buffer = buffer
        self._memory = ExitStack()
        full: Exchange | None = communicator if hasattr(communicator, "exchange_terms") else None  # type: ignore[assignment]
        self._alone = full is not None and full.size == 1
        self._exchange: Exchange | None = None
        """Set if the sum is taken on the device."""
        if self._alone:
            return
        others = communicator.size - 1
        if memory is None:
            memory = SumMemory(stream.driver)
            self._memory.callback(memory.close)
        if full is not None:
            chosen = full.forecast(Operation.ALL_REDUCE, buffer.size, buffer.dtype).schedule.algorithm
            self._exchange = full if chosen is Algorithm.ONE_SHOT else None
        if self._exchange is None:
            staging = memory.on_host("own", buffer.nbytes)
            self._staging = staging.view(buffer.dtype).reshape(buffer.shape)
            return
        self._reduction = reduction = Reduction(
            self._exchange.wire_format, buffer.dtype.name, buffer.size, communicator.rank, communicator.size
        )
        stride = reduction.stride
        try:
            self._own_staging = memory.on_host("own", stride)
            self._others_staging = memory.on_host("others", stride * others)
            held = memory.on_device("others", stride * others)
            self._others = DeviceArray(held, (stride * others,), np.dtype(np.uint8))
            # The own term as it travels, if that is another than the buffer.
            self._encoded = None if reduction.encode_kernel is None else memory.on_device("encoded", stride)
        except BaseException:
            self._memory.close()
            raise
        self._terms = [
            self._others_staging[reduction.stride * index :][: reduction.term_bytes] for index in range(others)
        ]

    def submit(self, done: CudaEvent | None = None) -> None:
        """Submit it to the stream; what follows there, or waits for `done`, sees the sum. Returns at once."""
        if not self._alone:
            self._submit_sum()
        if done is not None:
            self._stream.record(done)

    def _submit_sum(self) -> None:
        stream, exchange = self._stream, self._exchange
        if exchange is None:
            whole = self._communicator.all_reduce
            ordered_collective(stream, whole, self._buffer, self._staging, None, "all_reduce")
            return
        reduction, buffer = self._reduction, self._buffer
        own = DeviceArray(buffer.address, (reduction.term_bytes,), np.dtype(np.uint8))
        if self._encoded is not None:
            assert reduction.encode_kernel is not None
            own = DeviceArray(self._encoded, own.shape, own.dtype)
            arguments = reduction.encode_arguments(buffer.address, own.address)
            stream.launch(SOURCES, reduction.encode_kernel, reduction.blocks, THREADS, arguments)
        payload = self._own_staging[: reduction.term_bytes]
        stream.copy_out(own, payload)
        stream.submit(lambda: exchange.exchange_terms(payload, self._terms, buffer.dtype), "all_reduce")
        stream.copy_back(self._others_staging, self._others)
        arguments = reduction.sum_arguments(own.address, self._others.address, buffer.address)
        stream.launch(SOURCES, reduction.sum_kernel, reduction.blocks, THREADS, arguments)

    def close(self) -> None:
        """Free its own memory. The stream must have come to the end of the last sum."""
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
