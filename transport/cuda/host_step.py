"""How a CUDA stream calls the host: four forms behind one interface.

================  ===================================================================================================
form              what happens at the step's place in the stream
================  ===================================================================================================
function          `cuLaunchHostFunc`: the driver wakes a thread of its own, which calls the function
spinning          `cuLaunchHostFunc_v2`: the same thread spins until it is called (CUDA 13.2)
memory            the stream raises a flag in pinned memory and waits for another one there; a thread of ours spins
split             nothing: the caller waits for the stream, and runs the step itself before it submits what follows
================  ===================================================================================================

With all but the last one the work runs on another thread than the caller's, and must not call CUDA. The driver may call
host functions of all streams of a process one after another, so those of streams that wait for each other (ranks that
are threads of one process) must have one of the last two forms. No wait on the GPU is longer than it computes with
*split*: Windows ends what keeps a GPU of its displays for 2 s.

The work needs the interpreter's lock, so nobody may hold that while waiting for a stream, or the two would wait for
each other for ever: whoever waits for a stream here asks again and again whether it has come so far, and lets go of the
lock in between.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from ..links.waiting import give_way
from .driver import Driver, Handle

SPIN_S = 2e-3
"""How long a wait spins before it sleeps..."""
NAP_S = 50e-6
"""...for so long at a time."""
CLOSE_S = 10.0
"""How long closing waits for the thread to end: the work that runs has a deadline of its own."""
LET_GO_S = 1.0
"""How long steps that a stream has not come to are waited for when it is closed."""
ABANDONED_NAP_S = 0.05
"""How long at a time whoever lets an abandoned stream through sleeps: it may come at any time, or never."""
COME_S = 1200.0
"""How long a stream may take to come to a step that its caller waits for."""

Work = Callable[[], None]


class HostStep(StrEnum):
    """The forms of a host step; see the table above."""

    FUNCTION = "function"
    SPINNING = "spinning"
    MEMORY = "memory"
    SPLIT = "split"


ASYNCHRONOUS = (HostStep.FUNCTION, HostStep.SPINNING, HostStep.MEMORY)
"""The forms with which a stream goes on without its caller."""


class HostSteps(Protocol):
    """The host steps of one stream.

    Attributes:
        splits: a step is never in a captured graph: it runs between that and the next one.
    """

    splits: bool

    def submit(self, work: Work) -> None:
        """Have `work` called at this place in the stream, which goes on when it returns. It raises nothing."""
        ...

    def capture(self, work: Work) -> Callable[[], object]:
        """Have `work` called at this place of the graph that the stream is capturing, or at its end, whenever it runs.

        Returns:
            What lets go of `work`, to be called when the graph is gone.
        """
        ...

    def launched(self, works: Sequence[Work]) -> None:
        """Say that a graph has just been submitted in which these steps were captured."""
        ...

    def close(self) -> None:
        """Let go of everything. The stream must have come to its end, or it is let go on."""
        ...


def open_host_steps(form: HostStep, driver: Driver, stream: Handle) -> HostSteps:
    """Host steps of this form for one stream; the caller closes them.

    Raises:
        CudaError: no memory for them.
    """
    if form is HostStep.MEMORY:
        return StreamMemory(driver, stream)
    if form is HostStep.SPLIT:
        return BetweenLaunches(driver, stream)
    return HostFunctions(driver, stream, spinning=form is HostStep.SPINNING)


class HostFunctions:
    """`HostSteps` that the driver calls, each with a ticket in a pointer's place, by which its work is found."""

    splits = False

    def __init__(self, driver: Driver, stream: Handle, *, spinning: bool) -> None:
        self._driver = driver
        self._stream = stream
        self._spinning = spinning
        self._ticket = 0
        self._works: dict[int, Work] = {}
        # One C function for all steps, kept as long as this object: the driver holds only its address.
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._run)
        self._address = ctypes.cast(self._function, ctypes.c_void_p).value or 0

    def submit(self, work: Work) -> None:
        ticket = self._ticket + 1

        def once() -> None:
            try:
                work()
            finally:
                del self._works[ticket]  # after it: what is here has not returned

        self._launch(once)

    def capture(self, work: Work) -> Callable[[], object]:
        return partial(self._works.pop, self._launch(work))

    def launched(self, works: Sequence[Work]) -> None:
        pass  # the driver calls them

    def close(self) -> None:
        # Nothing to end. Steps of a stream that is stuck keep their function alive: they may still be called.
        if self._works:
            _called_for_ever.append(self)

    def _launch(self, work: Work) -> int:
        self._ticket += 1
        self._works[self._ticket] = work
        try:
            self._driver.launch_host(self._stream, self._address, self._ticket, spinning=self._spinning)
        except BaseException:
            del self._works[self._ticket]
            raise
        return self._ticket

    def _run(self, ticket: int) -> None:
        work = self._works.get(ticket)
        if work is not None:  # else its graph is gone, to which a device that is lost still comes
            work()


_called_for_ever: list[HostFunctions] = []


class StreamMemory:
    """`HostSteps` that are asked for and answered by two flags in pinned memory, without the driver's help.

    The stream raises the *request* and waits for the *answer*, which it takes back; the thread does the opposite. As
    nothing of that depends on the step, it can be captured and run again.
    """

    splits = False

    def __init__(self, driver: Driver, stream: Handle) -> None:
        self._driver = driver
        self._stream = stream
        self._memory = driver.allocate_pinned(8)
        self._words = self._memory.host.data.cast("I")  # request, answer
        self._due: SimpleQueue[Work | None] = SimpleQueue()
        self._closing_since: float | None = None
        self._abandoned = False
        """Whether the stream had not come to all steps when it was closed; it is let through them, without the work."""
        self._over = threading.Event()
        threading.Thread(target=self._run, name="host steps", daemon=True).start()

    def submit(self, work: Work) -> None:
        self._ask()
        self._due.put(work)

    def capture(self, work: Work) -> Callable[[], object]:
        self._ask()
        return lambda: None

    def launched(self, works: Sequence[Work]) -> None:
        for work in works:
            self._due.put(work)

    def close(self) -> None:
        self._closing_since = time.monotonic()
        self._due.put(None)
        if not self._over.wait(CLOSE_S):
            raise TimeoutError(f"a host step did not end within {CLOSE_S:g} s")
        if not self._abandoned:  # else the stream may come yet, and the thread answers by this memory
            self._words.release()
            self._driver.free_pinned(self._memory)

    def _ask(self) -> None:
        request, answer = self._memory.device, self._memory.device + 4
        self._driver.write_value(self._stream, request, 1)
        self._driver.wait_value(self._stream, answer, 1)
        self._driver.write_value(self._stream, answer, 0)

    def _run(self) -> None:
        while (work := self._due.get()) is not None:
            pause = Pause()
            while not self._words[0]:
                since = self._closing_since
                if since is not None and time.monotonic() > since + LET_GO_S:
                    self._abandoned = True
                    self._over.set()
                    time.sleep(ABANDONED_NAP_S)
                pause()
            self._words[0] = 0
            if not self._abandoned:
                work()
            self._words[1] = 1
            del work  # at rest it holds on to nobody's buffers
        self._over.set()


class BetweenLaunches:
    """`HostSteps` that the caller runs when the stream has come to them."""

    splits = True

    def __init__(self, driver: Driver, stream: Handle) -> None:
        self._driver = driver
        self._stream = stream
        self._event = driver.create_event()

    def submit(self, work: Work) -> None:
        self._driver.record(self._event, self._stream)
        give_up_at = time.monotonic() + COME_S
        pause = Pause()
        while not self._driver.reached(self._event):
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"a stream did not come to a host step within {COME_S:g} s")
            pause()
        work()

    def capture(self, work: Work) -> Callable[[], object]:
        return lambda: None

    def launched(self, works: Sequence[Work]) -> None:
        for work in works:
            self.submit(work)

    def close(self) -> None:
        self._driver.destroy_event(self._event)


class Pause:
    """Passes the time between two looks at something: lets others have the interpreter, and sleeps after a while."""

    def __init__(self) -> None:
        self._sleeps_from = time.perf_counter() + SPIN_S

    def __call__(self) -> None:
        if time.perf_counter() < self._sleeps_from:
            give_way()
        else:
            time.sleep(NAP_S)
