"""Ordering a collective against a compute stream.

A *stream* is a queue of work that runs in submission order, beside the thread that submits it: a CUDA stream, or the
`HostStream` here. An *event* marks a place in a stream; another stream can wait for it. The rule that everything rests
on is CUDA's: **a wait captures the event's state at submission**. It waits for the latest recording that had been
*submitted* when the wait was; for an event not recorded by then it waits for nothing.

So a collective belongs *in* the stream, in one submission order::

    copy out  ->  host step (the exchange)  ->  copy back  ->  record the event

`ordered_collective` submits exactly that. The tempting alternative, a worker thread that exchanges and records the
event when it is done, is wrong however fast the worker is: by then the consumer's wait has been submitted, as a no-op,
and the consumer reads what was there before. Nothing fails; the text is fluent nonsense.

`Stream` and `Event` are the contract. `HostStream` and `HostEvent` implement it for engines that compute on the host,
and make the rule testable without a GPU. `motley.transport.cuda` has CUDA streams behind the same contract, with pinned
staging, three forms of the host step, and an all-reduce that sums on the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from .errors import UsageError

Array = npt.NDArray[Any]
B_contra = TypeVar("B_contra", contravariant=True)
E_contra = TypeVar("E_contra", contravariant=True, bound="Event")
B = TypeVar("B")
E = TypeVar("E", bound="Event")

WAIT_S = 600.0
"""Longest wait in a stream for an event of another one: a host step has a shorter deadline of its own."""
CLOSE_S = 10.0
"""How long closing a stream waits for the step that is running."""


class Event(Protocol):
    """A place in a stream. It can be recorded again and again; the latest recording counts."""

    def done(self) -> bool:
        """Whether the stream has come past the latest recording; True if there is none."""
        ...

    def synchronise(self, deadline_s: float) -> None:
        """Wait, in the calling thread, for the latest recording; return at once if there is none.

        Raises:
            TimeoutError: it was not reached within `deadline_s` seconds.
            Exception: the error of a host step before it in its stream.
        """
        ...


class Stream(Protocol[B_contra, E_contra]):
    """Work in submission order on buffers of one kind (NumPy arrays, device arrays). No method waits but the last two.

    After a step has failed the rest of the stream is skipped, events are reached all the same, so that nobody hangs,
    and whoever waits for one, on the host or in another stream, gets the error.
    """

    def submit(self, work: Callable[[], object], what: str) -> None:
        """Run `work` on the host, in order. On a GPU's stream it must not call into the GPU. `what`: for errors."""
        ...

    def copy_out(self, buffer: B_contra, staging: Array) -> None:
        """Copy a buffer of the stream's kind to host memory of the same shape and type, in order."""
        ...

    def copy_back(self, staging: Array, buffer: B_contra) -> None:
        """Copy host memory to a buffer of the stream's kind, in order."""
        ...

    def record(self, event: E_contra) -> None:
        """Make `event` stand for this place in the stream, from now on."""
        ...

    def wait(self, event: E_contra) -> None:
        """Hold back what is submitted from now on until `event`, *as it is recorded now*, is reached."""
        ...

    def synchronise(self, deadline_s: float) -> None:
        """Wait, in the calling thread, for all that was submitted; raises as `Event.synchronise` does."""
        ...

    def close(self) -> None:
        """Drop the work that has not begun, wait for the step that has, and free what the stream holds."""
        ...


def ordered_collective(
    stream: Stream[B, E],
    exchange: Callable[[Array], object],
    buffer: B,
    staging: Array,
    done: E | None,
    what: str = "a collective",
) -> None:
    """Submit a collective on `buffer` so that what follows in the stream, or waits for `done`, sees its result.

    Returns at once. The host step runs beside the caller: the communicator belongs to the stream from here on.

    Args:
        exchange: the collective, in place: `Communicator.all_reduce`, or any call of it with its arguments bound.
        buffer: of the stream's kind, f32 of any shape.
        staging: host memory of the same shape, registered once and kept until `done`; pinned for a GPU.
        done: recorded behind the result. Wait for it *after* this call. None: nobody waits but this stream.
    """
    stream.copy_out(buffer, staging)
    stream.submit(lambda: exchange(staging), what)
    stream.copy_back(staging, buffer)
    if done is not None:
        stream.record(done)


@dataclass(eq=False, slots=True)
class _Recording:
    """One recording of an event; a wait holds on to it, whatever becomes of the event later."""

    stream: HostStream
    reached: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def wait(self, deadline_s: float) -> None:
        if not self.reached.wait(deadline_s):
            raise TimeoutError(f"{self.stream} did not come to an event within {deadline_s:g} s")
        if self.error is not None:
            raise self.error


class HostEvent:
    """An event of host streams."""

    def __init__(self) -> None:
        self._latest: _Recording | None = None

    def done(self) -> bool:
        return self._latest is None or self._latest.reached.is_set()

    def synchronise(self, deadline_s: float) -> None:
        if self._latest is not None:
            self._latest.wait(deadline_s)


class HostStream:
    """A stream of NumPy arrays: one thread of its own runs the work.

    Use it as a context, which ends with `synchronise` (unless an error is on its way) and `close`.
    """

    def __init__(self, name: str = "stream") -> None:
        self.name = name
        self._queue: SimpleQueue[tuple[Callable[[], object], str] | _Recording | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._doing = "nothing"
        self._closed = False
        self._submitting = threading.Lock()  # nothing may be submitted behind the end
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<HostStream {self.name!r} at {self._doing}>"

    def submit(self, work: Callable[[], object], what: str) -> None:
        self._put((work, what))

    def copy_out(self, buffer: Array, staging: Array) -> None:
        self._copy(staging, buffer, "copy out")

    def copy_back(self, staging: Array, buffer: Array) -> None:
        self._copy(buffer, staging, "copy back")

    def record(self, event: HostEvent) -> None:
        recording = _Recording(self)
        self._put(recording)
        event._latest = recording

    def wait(self, event: HostEvent) -> None:
        recording = event._latest
        if recording is not None:
            self.submit(lambda: recording.wait(WAIT_S), f"a wait for {recording.stream.name!r}")

    def synchronise(self, deadline_s: float) -> None:
        event = HostEvent()
        self.record(event)
        event.synchronise(deadline_s)

    def close(self) -> None:
        with self._submitting:
            if not self._closed:
                self._closed = True
                self._error = self._error or UsageError(f"stream {self.name!r} was closed before this work began")
                self._queue.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            raise TimeoutError(f"{self} did not end within {CLOSE_S:g} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and not self._closed:
                self.synchronise(WAIT_S)
        finally:
            self.close()

    def _copy(self, target: Array, source: Array, what: str) -> None:
        if (target.shape, target.dtype) != (source.shape, source.dtype):
            raise UsageError(
                f"{what}: {source.dtype}{list(source.shape)} does not fit {target.dtype}{list(target.shape)}"
            )
        self.submit(lambda: np.copyto(target, source), what)

    def _put(self, item: tuple[Callable[[], object], str] | _Recording) -> None:
        with self._submitting:
            if self._closed:
                raise UsageError(f"stream {self.name!r} is closed")
            self._queue.put(item)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, _Recording):
                item.error = self._error
                item.reached.set()
            elif self._error is None:
                work, self._doing = item
                try:
                    work()
                except BaseException as error:
                    # An error of the closing that came meanwhile is the lesser news.
                    self._error = error
                self._doing = "nothing"
            del item  # a stream at rest holds on to nobody's buffers
