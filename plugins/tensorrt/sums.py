"""The two ways in which a rank that computes with TensorRT gets its sums over all ranks.

`BetweenEngines`: the graph is cut at its sums. Each goes to the stream behind the engine that makes its operand.
`InsideEngine`: the graph is one engine, which calls NCCL for its sums. What it calls is ours, with a communicator that
leads to where the session's collectives go.

Neither has yet been run on a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

from motley.plugins import nccl
from motley.plugins.engine import F32, Collectives, EngineError, transport
from motley.transport.cuda.all_reduce import AllReduce
from motley.transport.cuda.driver import Driver
from motley.transport.cuda.host_step import HostStep
from motley.transport.cuda.stream import CudaStream, DeviceArray

CAPSULE = b"ncclComm_t"
"""What TensorRT wants a communicator's address wrapped in."""


class BetweenEngines:
    """Sums that this rank submits itself, each of one buffer, in place, on the GPU."""

    def __init__(self, stream: CudaStream, collectives: Collectives, operands: Iterable[DeviceArray]) -> None:
        """`operands`: f32[max_rows, D], of which a step sums the rows that it has."""
        self._stream = stream
        self._collectives = collectives
        self._summing = transport(collectives)
        self._operands = list(dict.fromkeys(operands))
        self._ready: dict[tuple[int, int], dict[int, list[AllReduce]]] = {}
        """The sums of each micro-chunk, by T and the number of micro-chunks, and then by the address of the operand.
        Those of decode steps are kept, and those of the last other step."""
        self._now: dict[int, list[AllReduce]] = {}

    def begin(self, tokens: int, chunks: Sequence[slice]) -> None:
        """Make ready for a step of so many rows, once the stream has finished the last step."""
        if self._summing is not transport(self._collectives):
            self.close()
            self._summing = transport(self._collectives)
        key = tokens, len(chunks)
        if key not in self._ready:
            for other in [other for other in self._ready if other[0] != 1 and tokens != 1]:
                _close(self._ready.pop(other))
            self._ready[key] = {
                operand.address: [AllReduce(self._stream, self._summing, rows_of(operand, chunk)) for chunk in chunks]
                for operand in self._operands
            }
        self._now = self._ready[key]

    def submit(self, operand: DeviceArray) -> None:
        """Sum the step's rows of an operand, at this place in the stream."""
        for each in self._now[operand.address]:
            each.submit()

    def check(self) -> None:
        """Does nothing, unlike `InsideEngine.check`: the stream raises the error of a sum that fails."""

    def close(self) -> None:
        while self._ready:
            _close(self._ready.popitem()[1])


class InsideEngine:
    """Sums that TensorRT calls for while it runs: `motley.plugins.nccl.Sums`.

    A step's first sum that fails is kept, and those after it are not begun: NCCL has no way to stop a stream.
    """

    def __init__(self, driver: Driver, form: HostStep, collectives: Collectives, hidden: int) -> None:
        """
        Args:
            form: of the host steps that sum.
            hidden: D, the width of what is summed.

        Raises:
            motley.plugins.nccl.NcclError: the library that TensorRT calls is missing, or there is another NCCL here.
        """
        self.rank = collectives.rank
        self.size = collectives.size
        self._collectives = collectives
        self._hidden = hidden
        self._chunks: Sequence[slice] = ()
        self._failure: BaseException | None = None
        self._device = nccl.CudaDevice(form=form, driver=driver)
        self._handle = nccl.bind(self, device=self._device)

    def attach(self, context: Any) -> bool:
        """Give an execution context the communicator; False if TensorRT does not take it."""
        if not hasattr(context, "set_communicator"):  # an older TensorRT
            return False
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return bool(context.set_communicator(new(self._handle, CAPSULE, None)))

    def begin(self, tokens: int, chunks: Sequence[slice]) -> None:
        """Make ready for a step of so many rows, once the stream has finished the last step."""
        self._chunks = chunks
        self._failure = None

    def all_reduce(self, buffer: F32) -> None:
        """Sum f32[T * D] over all ranks in place, a micro-chunk after the other, as every rank does."""
        if self._failure is not None:
            raise self._failure
        tokens = self._chunks[-1].stop if self._chunks else 0
        try:
            if buffer.size != tokens * self._hidden:
                what = f"{buffer.size} numbers, in a step of {tokens} rows of {self._hidden}"
                raise EngineError(f"TensorRT asks for a sum of {what}; use engine 'tensorrt', which sums by itself")
            rows = buffer.reshape(tokens, self._hidden)
            for chunk in self._chunks:
                transport(self._collectives).all_reduce(rows[chunk])
        except BaseException as error:
            self._failure = error
            raise

    def check(self) -> None:
        """Raise what the step's sums failed with, once the stream has finished the step."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Give the communicator back; no context has it any more."""
        nccl.release(self._handle)
        self._device.close()


def rows_of(place: DeviceArray, chunk: slice) -> DeviceArray:
    row = place.nbytes // place.shape[0]
    return DeviceArray(place.address + chunk.start * row, (chunk.stop - chunk.start, *place.shape[1:]), place.dtype)


def _close(sums: dict[int, list[AllReduce]]) -> None:
    for chunks in sums.values():
        for each in chunks:
            each.close()
