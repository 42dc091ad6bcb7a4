"""How a CUDA stream calls the host: three forms behind one interface.

================  ===================================================================================================
form              what happens at the step's place in the stream
================  ===================================================================================================
function          `cuLaunchHostFunc`: the driver wakes a thread of its own, which calls the function
spinning          `cuLaunchHostFunc_v2`: the same thread spins until it is called (CUDA 13.2)
memory            the stream writes a number to pinned memory and waits for the answer there; a thread of ours spins
================  ===================================================================================================

Whichever it is, the work runs on another thread than the caller's, and must not call CUDA. It needs the interpreter's
lock, so nobody may hold that while waiting for a stream, or the two would wait for each other for ever: whoever waits
for a stream here asks again and again whether it has come so far, and lets go of the lock in between.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from ..links.waiting import give_way
from .driver import Driver, Handle
from .errors import CudaError

SPIN_S = 2e-3
"""How long a wait spins before it sleeps..."""
NAP_S = 50e-6
"""...for so long at a time."""
CLOSE_S = 10.0
"""How long closing waits for the thread to end: the work that runs has a deadline of its own."""

Work = Callable[[], None]


class HostStep(StrEnum):
    """The forms of a host step; see the table above."""

    FUNCTION = "function"
    SPINNING = "spinning"
    MEMORY = "memory"


class HostSteps(Protocol):
    """The host steps of one stream."""

    def submit(self, work: Work) -> None:
        """Have `work` called at this place in the stream, which goes on when it returns. It raises nothing."""
        ...

    def capture(self, work: Work) -> Callable[[], object]:
        """Have `work` called at this place of the graph that the stream is capturing, whenever that runs.

        Returns:
            What lets go of `work`, to be called when the graph is gone.

        Raises:
            CudaError: steps of this form cannot be captured.
        """
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
    return HostFunctions(driver, stream, spinning=form is HostStep.SPINNING)


class HostFunctions:
    """`HostSteps` that the driver calls, each with a ticket in a pointer's place, by which its work is found."""

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
        self._works[ticket]()


_called_for_ever: list[HostFunctions] = []


class StreamMemory:
    """`HostSteps` that are asked for and answered in two words of pinned memory, without the driver's help.

    The stream writes the step's ticket as the *request* and waits until the *answer* has come to it; the thread does
    the opposite. Tickets count around.
    """

    def __init__(self, driver: Driver, stream: Handle) -> None:
        self._driver = driver
        self._stream = stream
        self._ticket = 0
        self._memory = driver.allocate_pinned(8)
        self._words = self._memory.host.data.cast("I")  # request, answer
        self._due: SimpleQueue[tuple[int, Work] | None] = SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="host steps", daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> None:
        ticket = (self._ticket + 1) & 0xFFFFFFFF
        request, answer = self._memory.device, self._memory.device + 4
        self._driver.write_value(self._stream, request, ticket)
        self._driver.wait_value(self._stream, answer, ticket)
        self._ticket = ticket
        self._due.put((ticket, work))

    def capture(self, work: Work) -> Callable[[], object]:
        raise CudaError("a host step by stream memory operations cannot be captured: its tickets are never the same")

    def close(self) -> None:
        self._closing = True
        self._due.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            raise TimeoutError(f"a host step did not end within {CLOSE_S:g} s")
        # Should the stream still stand at a wait, it is let go on; it has read the answer before the memory is freed,
        # which waits for it.
        self._words[1] = self._ticket
        self._words.release()
        self._driver.free_pinned(self._memory)

    def _run(self) -> None:
        while (step := self._due.get()) is not None:
            ticket, work = step
            pause = Pause()
            while self._words[0] != ticket:
                if self._closing:
                    return
                pause()
            work()
            self._words[1] = ticket
            del step, work  # at rest it holds on to nobody's buffers


class Pause:
    """Passes the time between two looks at something: lets others have the interpreter, and sleeps after a while."""

    def __init__(self) -> None:
        self._sleeps_from = time.perf_counter() + SPIN_S

    def __call__(self) -> None:
        if time.perf_counter() < self._sleeps_from:
            give_way()
        else:
            time.sleep(NAP_S)
