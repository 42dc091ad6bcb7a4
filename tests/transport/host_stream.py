"""Streams of the host, with CUDA's rules: they stand for CUDA's where there is no GPU.

A `HostStream` fulfils the contract of `motley.transport.streams` for NumPy arrays: a thread of its own runs what was
submitted. The driver of the tests (tests/transport/cuda/host_driver.py) is made of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from motley.transport import UsageError

Array = npt.NDArray[Any]

WAIT_S = 600.0
"""Longest wait in a stream for an event of another one: a host step has a shorter deadline of its own."""
CLOSE_S = 10.0
"""How long closing a stream waits for the step that is running."""


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
    """A place in a `HostStream`."""

    def __init__(self) -> None:
        self._latest: _Recording | None = None

    def done(self) -> bool:
        return self._latest is None or self._latest.reached.is_set()

    def synchronise(self, deadline_s: float) -> None:
        if self._latest is not None:
            self._latest.wait(deadline_s)


class HostStream:
    """A stream of NumPy arrays, whose work runs on a thread of its own.

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
