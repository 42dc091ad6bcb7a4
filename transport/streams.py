"""Ordering a collective against a compute stream.

A *stream* is a queue of work that runs in submission order, beside the thread that submits it, as CUDA's streams. An
*event* marks a place in a stream; another stream can wait for it. The rule that everything rests on is CUDA's: **a wait
captures the event's state at submission**. It waits for the latest recording that had been *submitted* when the wait
was; for an event not recorded by then it waits for nothing.

So a collective belongs *in* the stream, in one submission order::

    copy out  ->  host step (the exchange)  ->  copy back  ->  record the event

`ordered_collective` submits exactly that. The tempting alternative, a worker thread that exchanges and records the
event when it is done, is wrong however fast the worker is: by then the consumer's wait has been submitted, as a no-op,
and the consumer reads what was there before. Nothing fails; the text is fluent nonsense.

`Stream` and `Event` are the contract. `motley.transport.cuda` has CUDA streams behind it, with pinned staging, several
forms of the host step, and an all-reduce that sums on the device; the tests have streams of the host, which make the
rule testable without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy.typing as npt

Array = npt.NDArray[Any]
B_contra = TypeVar("B_contra", contravariant=True)
E_contra = TypeVar("E_contra", contravariant=True, bound="Event")
B = TypeVar("B")
E = TypeVar("E", bound="Event")


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
