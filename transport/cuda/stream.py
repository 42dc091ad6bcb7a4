"""A CUDA stream behind the contract of `motley.transport.streams`.

Copies and kernels are only submitted, and CUDA runs them in order; host steps are called in their place among them
(`motley.transport.cuda.host_step`). A host step that fails cannot stop the stream: what follows on the device computes
on what is there, later host steps are skipped, and whoever waits for an event behind it gets the error.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from .driver import Driver, Handle
from .errors import CudaError
from .host_step import ASYNCHRONOUS, CLOSE_S, HostStep, Pause, open_host_steps

Array = npt.NDArray[Any]

MEASURED_STEPS = 100
MEASURE_S = 5.0
"""A form of the host step that takes longer than this for all its steps is not there."""


@dataclass(frozen=True)
class DeviceArray:
    """Elements on the device, C-contiguous; somebody else keeps the memory."""

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """How many elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes."""
        return self.size * self.dtype.itemsize


class CudaEvent:
    """A place in a `CudaStream`. One event of CUDA's serves all its recordings: a wait captures the one before it."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._handle = driver.create_event()
        self._recorded: tuple[CudaStream, int] | None = None  # the stream, and the place in it
        self._finalizer = weakref.finalize(self, driver.destroy_event, self._handle)

    def done(self) -> bool:
        return self._recorded is None or self._driver.reached(self._handle)

    def synchronise(self, deadline_s: float) -> None:
        """See `motley.transport.streams.Event`; also raises `CudaError` if the device has failed."""
        if self._recorded is None:
            return
        stream, place = self._recorded
        self._wait(deadline_s, "come to an event")
        if (error := stream._error_before(place)) is not None:
            raise error

    def _wait(self, deadline_s: float, what: str) -> None:
        give_up_at = time.monotonic() + deadline_s
        pause = Pause()
        while not self._driver.reached(self._handle):
            if time.monotonic() > give_up_at:
                assert self._recorded is not None
                raise TimeoutError(f"{self._recorded[0]} did not {what} within {deadline_s:g} s")
            pause()

    def close(self) -> None:
        """Destroy it; CUDA keeps what streams still wait for."""
        self._finalizer()


@dataclass(eq=False)
class CudaGraph:
    """Work that a `CudaStream` has recorded and can run again and again; see `CudaStream.capture`.

    Attributes:
        launches: the driver's graphs, in order, each with the host steps in it, or after it where these are split off.
        steps: those of the graph that is being recorded.
    """

    launches: list[tuple[Handle, list[Callable[[], None]]]] = field(default_factory=list)
    steps: list[Callable[[], None]] = field(default_factory=list)
    parts: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """Destroy it. The stream must have come to the end of its last run."""
        self.parts.close()


class CudaStream:
    """`motley.transport.streams.Stream` of `DeviceArray`s. One thread submits.

    Use it as a context, which ends with `synchronise` (unless an error is on its way) and `close`. With the split form
    of the host step, `submit` and `replay` return when the steps have run.

    Staging is pinned memory (`Driver.allocate_pinned`): copies to and from other memory would wait.
    """

    def __init__(
        self, driver: Driver, form: HostStep = HostStep.FUNCTION, *, handle: Handle = None, name: str = "stream"
    ) -> None:
        """`handle`: a stream of somebody else (CuPy's) to submit to; otherwise it gets one of its own."""
        self.name = name
        self.driver = driver
        self._owned = handle is None
        self.handle = driver.create_stream() if handle is None else handle
        self._host_steps = open_host_steps(form, driver, self.handle)
        self._places = 0  # of steps, recordings and waits
        self._pending: deque[int] = deque()  # places of the steps that have not begun
        self._doing = "nothing"
        self._failure: tuple[int, BaseException] | None = None  # the place of the step, and its error
        self._waited_for: dict[CudaStream, tuple[int, int]] = {}  # since which place of ours, up to which of theirs
        self._end = CudaEvent(driver)
        self._capturing: CudaGraph | None = None
        self._graphs: set[CudaGraph] = set()
        self._closed = False

    def __cuda_stream__(self) -> tuple[int, int]:
        """How CuPy and others take it for a stream of theirs: version of the protocol, handle."""
        return 0, int(self.handle)

    def __repr__(self) -> str:
        return f"<CudaStream {self.name!r} at {self._doing}>"

    def submit(self, work: Callable[[], object], what: str) -> None:
        self._check_open()

        def run() -> None:
            place = self._pending[0]  # host steps begin in the order of their places
            dropped = self._error_before(place + 1) is not None
            self._doing = "nothing" if dropped else what
            self._pending.popleft()
            if dropped:
                return
            try:
                work()
            except BaseException as error:  # it would end in the driver's thread
                self._failure = place, error
            self._doing = "nothing"

        if (graph := self._capturing) is not None:
            graph.parts.callback(self._host_steps.capture(run))
            graph.steps.append(run)
            if self._host_steps.splits:
                self._end_launch(graph)
                self.driver.begin_capture(self.handle)
            return
        self._pending.append(self._next_place())
        try:
            self._host_steps.submit(run)
        except BaseException:
            self._pending.pop()
            raise

    def copy_out(self, buffer: DeviceArray, staging: Array) -> None:
        self._check_copy(buffer, staging, f"copy out: {_told(buffer)} does not fit {_told(staging)}")
        self.driver.copy(staging.ctypes.data, buffer.address, buffer.nbytes, self.handle)

    def copy_back(self, staging: Array, buffer: DeviceArray) -> None:
        self._check_copy(buffer, staging, f"copy back: {_told(staging)} does not fit {_told(buffer)}")
        self.driver.copy(buffer.address, staging.ctypes.data, buffer.nbytes, self.handle)

    def launch(
        self,
        sources: tuple[Path, ...],
        kernel: str,
        blocks: int,
        threads: int,
        arguments: Sequence[Any],
        *,
        early: bool = False,
    ) -> None:
        """Run a kernel, in order; `arguments` are values of ctypes. `early`: see `Driver.launch`."""
        self._check_open()
        function = self.driver.function(sources, kernel)
        self.driver.launch(function, blocks, threads, arguments, self.handle, early=early)

    def capture(self, submit: Callable[[], object]) -> CudaGraph:
        """Record what `submit` submits here, without running it: copies, kernels and host steps, and no events.

        Raises:
            CudaError: the driver cannot do that. The stream goes on as before.
        """
        self._check_open()
        self.driver.begin_capture(self.handle)
        graph = self._capturing = CudaGraph()
        try:
            try:
                submit()
            finally:
                self._capturing = None
                self._end_launch(graph)
        except BaseException:
            graph.close()
            raise
        self._graphs.add(graph)
        graph.parts.callback(self._graphs.remove, graph)
        return graph

    def replay(self, graph: CudaGraph) -> None:
        """Run, in order, what this stream has captured."""
        self._check_open()
        for handle, steps in graph.launches:
            places = [self._next_place() for _ in steps]
            self._pending.extend(places)
            try:
                self.driver.launch_graph(handle, self.handle)
                self._host_steps.launched(steps)
            except BaseException:
                for _ in places:
                    self._pending.pop()
                raise

    def call_host_by(self, form: HostStep) -> None:
        """Call the host in another way from now on. The stream must have come to its end, and have no graphs."""
        self._check_open()
        self._host_steps.close()
        self._host_steps = open_host_steps(form, self.driver, self.handle)

    def record(self, event: CudaEvent) -> None:
        self._check_open()
        self._check_not_capturing()
        self._record(event)

    def wait(self, event: CudaEvent) -> None:
        self._check_open()
        self._check_not_capturing()
        if event._recorded is not None:
            self.driver.wait(self.handle, event._handle)
            stream, theirs = event._recorded
            ours = self._next_place()
            since, known = self._waited_for.get(stream, (ours, 0))
            self._waited_for[stream] = since, max(known, theirs)

    def synchronise(self, deadline_s: float) -> None:
        self._check_open()
        self._check_not_capturing()
        self._record(self._end)
        self._end.synchronise(deadline_s)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._failure is None and self._pending:
            error = UsageError(f"stream {self.name!r} was closed before this work began")
            self._failure = self._pending[0], error
        with ExitStack() as parts:
            if self._owned:
                parts.callback(self.driver.destroy_stream, self.handle)
            parts.callback(self._end.close)
            parts.callback(self._host_steps.close)
            for graph in tuple(self._graphs):
                parts.callback(graph.close)
            if self._owned:
                self._record(self._end)
                self._end._wait(CLOSE_S, "end")
            else:
                self._wait_for_host_steps(CLOSE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and not self._closed:
                self.synchronise(600.0)
        finally:
            self.close()

    def _wait_for_host_steps(self, deadline_s: float) -> None:
        """Without a call of CUDA: somebody else's stream may be destroyed by now, though what is in it still runs."""
        give_up_at = time.monotonic() + deadline_s
        pause = Pause()
        while self._pending or self._doing != "nothing":
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"{self} did not come to its last host step within {deadline_s:g} s")
            pause()

    def _end_launch(self, graph: CudaGraph) -> None:
        """End what the driver records, as one of the graph's launches."""
        handle = self.driver.end_capture(self.handle)
        graph.parts.callback(self.driver.destroy_graph, handle)
        graph.launches.append((handle, graph.steps))
        graph.steps = []

    def _record(self, event: CudaEvent) -> None:
        self.driver.record(event._handle, self.handle)
        event._recorded = self, self._next_place()

    def _next_place(self) -> int:
        self._places += 1
        return self._places

    def _error_before(self, place: int, asking: tuple[CudaStream, ...] = ()) -> BaseException | None:
        """The error of a host step before this place, here or in a stream that was waited for."""
        if self._failure is not None and self._failure[0] < place:
            return self._failure[1]
        asking = (*asking, self)  # streams may wait for each other
        for stream, (since, theirs) in tuple(self._waited_for.items()):
            if since < place and stream not in asking:
                error = stream._error_before(theirs, asking)
                if error is not None:
                    return error
        return None

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"stream {self.name!r} is closed")

    def _check_not_capturing(self) -> None:
        if self._capturing is not None:
            raise UsageError(f"stream {self.name!r} is capturing: no event can be recorded or waited for")

    def _check_copy(self, buffer: DeviceArray, staging: Array, misfit: str) -> None:
        self._check_open()
        if (buffer.shape, buffer.dtype) != (staging.shape, staging.dtype):
            raise UsageError(misfit)
        if not staging.flags.c_contiguous:
            raise UsageError("staging must be C-contiguous")


def _told(array: DeviceArray | Array) -> str:
    return f"{array.dtype}{list(array.shape)}"


def measure_host_steps(driver: Driver) -> dict[HostStep, float]:
    """Seconds that an empty host step takes, for each asynchronous form that works here; the quickest comes first.

    Raises:
        CudaError: none works.
    """
    seconds: dict[HostStep, float] = {}
    failures: list[str] = []
    for form in ASYNCHRONOUS:
        try:
            with CudaStream(driver, form, name=form) as stream:
                stream.submit(lambda: None, "the first step")
                stream.synchronise(MEASURE_S)
                began = time.perf_counter()
                for _ in range(MEASURED_STEPS):
                    stream.submit(lambda: None, "a measured step")
                stream.synchronise(MEASURE_S)
                seconds[form] = (time.perf_counter() - began) / MEASURED_STEPS
        except (CudaError, TimeoutError) as error:
            failures.append(f"{form}: {error}")
    if not seconds:
        raise CudaError(f"no form of the host step works on this driver: {'; '.join(failures)}")
    return dict(sorted(seconds.items(), key=lambda item: item[1]))
