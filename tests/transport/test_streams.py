"""The contract of `motley.transport.streams`: streams of the host, and CUDA's on a driver made of host streams."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.transport import Communicator, PeerLost, UsageError
from motley.transport.cuda.host_step import ASYNCHRONOUS, HostStep
from motley.transport.cuda.stream import CudaEvent, CudaStream, DeviceArray
from motley.transport.streams import Event, Stream, ordered_collective
from tests.transport.cuda.host_driver import HostDriver
from tests.transport.cuda.memory import Memory
from tests.transport.host_stream import HostEvent, HostStream

Run = Callable[..., list[Any]]
Array = np.ndarray[Any, Any]
DEADLINE_S = 60.0


class Gate(threading.Event):
    """Opened by the test; passing it never waits for ever."""

    def pass_through(self) -> None:
        assert self.wait(DEADLINE_S), "the gate was never opened"


class Streams(ExitStack):
    """Streams of one kind, with their events and memory; when it ends, nothing of them may be left."""

    def __init__(self, form: HostStep | None) -> None:
        """`form`: of CUDA's host steps; None: streams of the host."""
        super().__init__()
        self._form = form
        self._driver = HostDriver()
        self._memory = self.enter_context(Memory(self._driver))

    def stream(self, name: str = "compute") -> Any:
        """Closed by the caller."""
        return HostStream(name) if self._form is None else CudaStream(self._driver, self._form, name=name)

    def event(self) -> Any:
        return HostEvent() if self._form is None else self._memory.event()

    def buffer(self, elements: int) -> Any:
        return np.zeros(elements, np.float32) if self._form is None else self._memory.device(elements)

    def staging(self, elements: int) -> Array:
        return np.zeros(elements, np.float32) if self._form is None else self._memory.pinned(elements)

    def __exit__(self, *error: Any) -> Any:
        result = super().__exit__(*error)
        assert self._driver.live == 0
        return result


@pytest.fixture(params=[None, *ASYNCHRONOUS], ids=lambda form: form or "host")
def form(request: pytest.FixtureRequest) -> HostStep | None:
    kind: HostStep | None = request.param
    return kind


@pytest.fixture
def streams(form: HostStep | None) -> Iterator[Streams]:
    before = set(threading.enumerate())
    with Streams(form) as streams:
        yield streams
    assert set(threading.enumerate()) <= before


@pytest.fixture
def stream(streams: Streams) -> Iterator[Any]:
    with streams.stream() as stream:
        yield stream


def test_both_kinds_fulfil_the_contract() -> None:
    driver = HostDriver()
    with Memory(driver) as memory, HostStream("host") as host, CudaStream(driver, name="device") as device:
        host_contract: Stream[Array, HostEvent] = host
        device_contract: Stream[DeviceArray, CudaEvent] = device
        events: list[Event] = [HostEvent(), memory.event()]
        host_contract.synchronise(DEADLINE_S)
        device_contract.synchronise(DEADLINE_S)
        assert all(event.done() for event in events)


def test_work_runs_in_submission_order_beside_the_caller(streams: Streams, stream: Any) -> None:
    gate, seen, event = Gate(), list[int](), streams.event()
    stream.submit(gate.pass_through, "a gate")
    for number in range(100):
        stream.submit(partial(seen.append, number), "a note")
    stream.record(event)
    assert not seen
    assert not event.done()
    gate.set()
    event.synchronise(DEADLINE_S)
    assert event.done()
    assert seen == list(range(100))


def test_a_wait_for_an_event_that_was_never_recorded_is_no_wait(streams: Streams, stream: Any) -> None:
    event = streams.event()
    stream.wait(event)
    event.synchronise(0)
    stream.synchronise(DEADLINE_S)


def test_a_wait_captures_the_recording_that_was_there_at_submission(streams: Streams, stream: Any) -> None:
    first, second, seen, event = Gate(), Gate(), list[str](), streams.event()
    with streams.stream("other") as other:
        other.submit(first.pass_through, "the first gate")
        other.record(event)
        stream.wait(event)
        stream.submit(lambda: seen.append("released"), "a note")
        other.submit(second.pass_through, "the second gate")
        other.record(event)  # the wait above must not see this one
        assert not seen
        first.set()
        stream.synchronise(DEADLINE_S)
        assert seen == ["released"]
        assert not event.done()
        second.set()
        event.synchronise(DEADLINE_S)


@pytest.mark.parametrize("form", [None, *ASYNCHRONOUS], ids=lambda form: form or "host")  # no fixture beside Hypothesis
@given(
    program=st.lists(
        st.tuples(st.sampled_from(["work", "record", "wait"]), st.integers(0, 2), st.integers(0, 2)), max_size=30
    )
)
@settings(deadline=None)
def test_any_program_runs_and_respects_every_captured_recording(
    form: HostStep | None, program: list[tuple[str, int, int]]
) -> None:
    """Whatever is recorded and waited for: it ends, and work sees all that stood before the recording it waits for."""
    with Streams(form) as kind:
        check_program(kind, program)


def check_program(kind: Streams, program: list[tuple[str, int, int]]) -> None:
    """Submit what a program says, run it, and compare what was seen with what it promises."""
    streams = [kind.stream(str(index)) for index in range(3)]
    events = [kind.event() for _ in range(3)]
    log: list[tuple[int, int]] = []
    counts = [0, 0, 0]
    marks: list[tuple[int, int] | None] = [None] * 3  # what an event stands for: so much work of that stream
    needed: list[list[tuple[int, int]]] = [[], [], []]  # what the next work of a stream must find in the log
    promises: list[tuple[tuple[int, int], list[tuple[int, int]]]] = []
    for action, index, other in program:
        match action:
            case "work":
                entry = (index, counts[index])
                counts[index] += 1
                promises.append((entry, list(needed[index])))
                streams[index].submit(partial(log.append, entry), "a note")
            case "record":
                streams[index].record(events[other])
                marks[other] = (index, counts[index])
            case "wait":
                streams[index].wait(events[other])
                if (mark := marks[other]) is not None:
                    needed[index].append(mark)
    for stream in streams:
        stream.synchronise(DEADLINE_S)
        stream.close()
    for entry, marks_before in promises:
        before = log[: log.index(entry)]
        assert all((index, number) in before for index, count in marks_before for number in range(count))


# -- a collective in a stream ---------------------------------------------------------------------------------------


def values(rank: int) -> Array:
    return np.arange(1000, dtype=np.float32) + 1000 * rank


def load(stream: Any, buffer: Any, staging: Array, numbers: Array) -> None:
    """The layer before, in order."""
    stream.submit(lambda: np.copyto(staging, numbers), "the layer before")
    stream.copy_back(staging, buffer)


def test_an_event_that_a_worker_records_later_gives_wrong_sums(run_ranks: Run, form: HostStep | None) -> None:
    """The classic mistake, slowed down by gates: every rank consumes its own values where the sum should be."""

    def work(communicator: Communicator) -> bytes:
        with Streams(form) as streams, streams.stream() as stream, streams.stream("side") as side:
            buffer, (before, staging, after) = streams.buffer(1000), (streams.staging(1000) for _ in range(3))
            computed, summed, consumed = streams.event(), streams.event(), Gate()

            def exchange_then_record() -> None:
                computed.synchronise(DEADLINE_S)
                side.copy_out(buffer, staging)
                side.synchronise(DEADLINE_S)
                communicator.all_reduce(staging)
                consumed.pass_through()  # however fast the worker is, the wait was submitted before this record
                side.copy_back(staging, buffer)
                side.record(summed)

            load(stream, buffer, before, values(communicator.rank))
            stream.record(computed)
            worker = threading.Thread(target=exchange_then_record)
            worker.start()
            stream.wait(summed)  # not recorded yet: a no-op
            stream.copy_out(buffer, after)
            stream.submit(consumed.set, "a gate")
            worker.join(DEADLINE_S)
            side.synchronise(DEADLINE_S)
            assert staging.tobytes() == (values(0) + values(1)).tobytes()  # the exchange itself was right
            return after.tobytes()

    assert run_ranks(2, work) == [values(rank).tobytes() for rank in range(2)]  # no sum: each has only its own


@pytest.mark.parametrize("same_stream", [True, False])
def test_an_ordered_collective_gives_right_sums(run_ranks: Run, form: HostStep | None, same_stream: bool) -> None:
    """The same layers, as slow as above: the exchange begins only when everything has been submitted."""

    def work(communicator: Communicator) -> bytes:
        with Streams(form) as streams, streams.stream() as stream, streams.stream("side") as side:
            buffer, (before, staging, after) = streams.buffer(1000), (streams.staging(1000) for _ in range(3))
            summed, submitted = streams.event(), Gate()

            def exchange(numbers: Array) -> None:
                submitted.pass_through()
                communicator.all_reduce(numbers)

            load(stream, buffer, before, values(communicator.rank))
            ordered_collective(stream, exchange, buffer, staging, summed)
            consumer = stream if same_stream else side
            consumer.wait(summed)
            consumer.copy_out(buffer, after)
            assert not summed.done()
            submitted.set()
            consumer.synchronise(DEADLINE_S)
            return after.tobytes()

    assert run_ranks(2, work) == [(values(0) + values(1)).tobytes()] * 2


def test_many_collectives_reuse_one_buffer(run_ranks: Run, form: HostStep | None) -> None:
    def work(communicator: Communicator) -> Sequence[float]:
        seen = list[float]()
        with Streams(form) as streams, streams.stream() as stream:
            buffer, (before, staging, after) = streams.buffer(10), (streams.staging(10) for _ in range(3))
            done = streams.event()
            for _ in range(50):
                stream.submit(lambda: before.fill(len(seen) + communicator.rank), "the layer before")
                stream.copy_back(before, buffer)
                ordered_collective(stream, communicator.all_reduce, buffer, staging, done)
                stream.copy_out(buffer, after)
                stream.submit(lambda: seen.append(float(after[0])), "the layer after")
            done.synchronise(DEADLINE_S)
            stream.synchronise(DEADLINE_S)
        return seen

    assert run_ranks(3, work) == [[3.0 * index + 3 for index in range(50)]] * 3


# -- errors, deadlines and the end -----------------------------------------------------------------------------------


def test_the_error_of_a_host_step_comes_out_where_the_caller_waits(run_ranks: Run, form: HostStep | None) -> None:
    gone = threading.Event()

    def work(communicator: Communicator) -> Any:
        if communicator.rank == 1:
            communicator.close()
            gone.set()
            return None
        assert gone.wait(DEADLINE_S)
        ran, blamed = list[int](), list[int]()
        with Streams(form) as streams:
            stream, other, early, done = streams.stream(), streams.stream("other"), streams.event(), streams.event()
            stream.submit(lambda: ran.append(0), "the layer before")
            stream.record(early)
            ordered_collective(stream, communicator.all_reduce, streams.buffer(10), streams.staging(10), done)
            stream.submit(lambda: ran.append(1), "the layer after")
            other.wait(done)
            other.submit(lambda: ran.append(2), "the layer after")
            for wait in (done.synchronise, stream.synchronise, stream.synchronise, other.synchronise):
                with pytest.raises(PeerLost) as caught:
                    wait(DEADLINE_S)
                blamed.append(caught.value.rank)
            early.synchronise(0)  # what was before it is right
            stream.close()
            other.close()
        return blamed, ran

    assert run_ranks(2, work)[0] == ([1, 1, 1, 1], [0])


def test_streams_that_wait_for_each_other_find_an_error(streams: Streams) -> None:
    one, two, event = streams.stream("one"), streams.stream("two"), streams.event()

    def fail() -> None:
        raise ValueError("a broken layer")

    for stream, next_stream in ((one, two), (two, one), (one, two)):
        stream.submit(lambda: None, "a layer")
        stream.record(event)
        next_stream.wait(event)
    one.submit(fail, "a layer")
    two.synchronise(DEADLINE_S)
    one.record(event)
    two.wait(event)
    for stream in (one, two):
        with pytest.raises(ValueError, match="a broken layer"):
            stream.synchronise(DEADLINE_S)
        stream.close()


def test_a_deadline_names_the_stream_and_what_it_is_at(streams: Streams, stream: Any) -> None:
    gate, running, event = Gate(), Gate(), streams.event()
    stream.submit(running.set, "a gate")
    stream.submit(gate.pass_through, "the slow layer")
    stream.record(event)
    running.pass_through()
    try:
        for wait in (event.synchronise, stream.synchronise):
            with pytest.raises(TimeoutError, match=r"'compute' at .* within 0\.01 s"):
                wait(0.01)
    finally:
        gate.set()


def test_closing_drops_what_has_not_begun(streams: Streams) -> None:
    stream, gate, seen = streams.stream(), Gate(), list[int]()
    early, event = streams.event(), streams.event()
    stream.submit(gate.pass_through, "the slow layer")
    stream.record(early)
    stream.submit(lambda: seen.append(1), "never begun")
    stream.record(event)
    while stream._doing != "the slow layer":
        pass
    closing = threading.Thread(target=stream.close)
    closing.start()
    while not (stream._error if isinstance(stream, HostStream) else stream._failure):
        pass
    gate.set()
    closing.join(DEADLINE_S)
    assert not seen
    if isinstance(stream, CudaStream):
        early.synchronise(DEADLINE_S)
    with pytest.raises(UsageError, match="closed before"):
        event.synchronise(DEADLINE_S)
    for call in (
        lambda: stream.submit(lambda: None, "too late"),
        lambda: stream.record(event),
        lambda: stream.wait(event),
        lambda: stream.synchronise(0),
    ):
        with pytest.raises(UsageError, match="'compute' is closed"):
            call()
    stream.close()


def test_a_stream_ends_with_its_context_even_in_an_error(streams: Streams) -> None:
    def fail() -> None:
        raise ValueError("a broken layer")

    with pytest.raises(ValueError, match="a broken layer"), streams.stream() as stream:
        stream.submit(fail, "a layer")
    with pytest.raises(KeyError), streams.stream():
        raise KeyError


def test_buffers_that_do_not_fit_are_refused_at_submission(streams: Streams, stream: Any) -> None:
    with pytest.raises(UsageError, match=r"copy out: float32\[3\] does not fit float32\[4\]"):
        ordered_collective(stream, lambda _: None, streams.buffer(3), streams.staging(4), streams.event())
