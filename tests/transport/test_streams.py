from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.transport import Communicator, PeerLost, UsageError
from motley.transport.streams import Event, HostEvent, HostStream, Stream, ordered_collective

Run = Callable[..., list[Any]]
DEADLINE_S = 20.0


class Gate(threading.Event):
    """Opened by the test; passing it never waits for ever."""

    def pass_through(self) -> None:
        assert self.wait(DEADLINE_S), "the gate was never opened"


@pytest.fixture
def stream() -> Iterator[HostStream]:
    with HostStream("compute") as stream:
        yield stream


def test_the_host_stream_fulfils_the_contract(stream: HostStream) -> None:
    contract: Stream[np.ndarray[Any, Any], HostEvent] = stream
    event: Event = HostEvent()
    assert contract is stream
    assert event.done()


def test_work_runs_in_submission_order_beside_the_caller(stream: HostStream) -> None:
    gate, seen, event = Gate(), list[int](), HostEvent()
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


def test_a_wait_for_an_event_that_was_never_recorded_is_no_wait(stream: HostStream) -> None:
    event = HostEvent()
    stream.wait(event)
    event.synchronise(0)
    stream.synchronise(DEADLINE_S)


def test_a_wait_captures_the_recording_that_was_there_at_submission(stream: HostStream) -> None:
    first, second, seen, event = Gate(), Gate(), list[str](), HostEvent()
    with HostStream("other") as other:
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


@given(
    st.lists(st.tuples(st.sampled_from(["work", "record", "wait"]), st.integers(0, 2), st.integers(0, 2)), max_size=30)
)
def test_any_program_runs_and_respects_every_captured_recording(program: list[tuple[str, int, int]]) -> None:
    """Whatever is recorded and waited for: it ends, and work sees all that stood before the recording it waits for."""
    streams = [HostStream(str(index)) for index in range(3)]
    events = [HostEvent() for _ in range(3)]
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


def compute(rank: int) -> np.ndarray[Any, Any]:
    return np.arange(1000, dtype=np.float32) + 1000 * rank


def test_an_event_that_a_worker_records_later_gives_wrong_sums(run_ranks: Run) -> None:
    """The classic mistake, slowed down by gates: every rank consumes its own values where the sum should be."""

    def work(communicator: Communicator) -> np.ndarray[Any, Any]:
        buffer, result = np.zeros(1000, np.float32), np.zeros(1000, np.float32)
        computed, summed, consumed = HostEvent(), HostEvent(), Gate()

        with HostStream("compute") as stream, HostStream("side") as side:

            def exchange_then_record() -> None:
                computed.synchronise(DEADLINE_S)
                total = buffer.copy()
                communicator.all_reduce(total)
                consumed.pass_through()  # however fast the worker is, the wait was submitted before this record
                side.copy_back(total, buffer)
                side.record(summed)

            stream.submit(lambda: np.copyto(buffer, compute(communicator.rank)), "the layer before")
            stream.record(computed)
            worker = threading.Thread(target=exchange_then_record)
            worker.start()
            stream.wait(summed)  # not recorded yet: a no-op
            stream.submit(lambda: np.copyto(result, buffer), "the layer after")
            stream.submit(consumed.set, "a gate")
            worker.join(DEADLINE_S)
            side.synchronise(DEADLINE_S)
        assert buffer.tobytes() == (compute(0) + compute(1)).tobytes()  # the exchange itself was right
        return result

    results = run_ranks(2, work)
    for rank in range(2):
        assert results[rank].tobytes() == compute(rank).tobytes()  # no sum: each has only its own


@pytest.mark.parametrize("same_stream", [True, False])
def test_an_ordered_collective_gives_right_sums(run_ranks: Run, same_stream: bool) -> None:
    """The same layers, as slow as above: the exchange begins only when everything has been submitted."""

    def work(communicator: Communicator) -> np.ndarray[Any, Any]:
        buffer, staging, result = (np.zeros(1000, np.float32) for _ in range(3))
        summed, submitted = HostEvent(), Gate()

        def exchange(values: np.ndarray[Any, Any]) -> None:
            submitted.pass_through()
            communicator.all_reduce(values)

        with HostStream("compute") as stream, HostStream("side") as side:
            stream.submit(lambda: np.copyto(buffer, compute(communicator.rank)), "the layer before")
            ordered_collective(stream, exchange, buffer, staging, summed)
            consumer = stream if same_stream else side
            consumer.wait(summed)
            consumer.submit(lambda: np.copyto(result, buffer), "the layer after")
            assert not summed.done()
            submitted.set()
        return result

    results = run_ranks(2, work)
    assert [result.tobytes() for result in results] == [(compute(0) + compute(1)).tobytes()] * 2


def test_many_collectives_reuse_one_buffer(run_ranks: Run) -> None:
    def work(communicator: Communicator) -> list[float]:
        buffer, staging, done = np.zeros(10, np.float32), np.zeros(10, np.float32), HostEvent()
        seen: list[float] = []
        with HostStream() as stream:
            for _ in range(50):
                stream.submit(lambda: buffer.fill(len(seen) + communicator.rank), "the layer before")
                ordered_collective(stream, communicator.all_reduce, buffer, staging, done)
                stream.submit(lambda: seen.append(float(buffer[0])), "the layer after")
            done.synchronise(DEADLINE_S)
        return seen

    assert run_ranks(3, work) == [[3.0 * index + 3 for index in range(50)]] * 3


def test_the_error_of_a_host_step_comes_out_where_the_caller_waits(run_ranks: Run) -> None:
    gone = threading.Event()

    def work(communicator: Communicator) -> Any:
        if communicator.rank == 1:
            communicator.close()
            gone.set()
            return None
        assert gone.wait(DEADLINE_S)
        buffer, staging, done, after = np.ones(10, np.float32), np.zeros(10, np.float32), HostEvent(), list[int]()
        stream, other = HostStream("compute"), HostStream("other")
        ordered_collective(stream, communicator.all_reduce, buffer, staging, done)
        stream.submit(lambda: after.append(1), "the layer after")
        other.wait(done)
        other.submit(lambda: after.append(2), "the layer after")
        errors = []
        for wait in (done.synchronise, stream.synchronise, stream.synchronise, other.synchronise):
            with pytest.raises(PeerLost) as caught:
                wait(DEADLINE_S)
            errors.append(caught.value.rank)
        stream.close()
        other.close()
        return errors, after, buffer.tolist()

    assert run_ranks(2, work)[0] == ([1, 1, 1, 1], [], [1.0] * 10)


# -- deadlines and the end ------------------------------------------------------------------------------------------


def test_a_deadline_names_the_stream_and_what_it_is_at() -> None:
    gate, event = Gate(), HostEvent()
    running = Gate()
    with HostStream("compute") as stream:
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


def test_closing_drops_what_has_not_begun_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    stream, gate, running, seen, event = HostStream("compute"), Gate(), Gate(), list[int](), HostEvent()
    stream.submit(running.set, "a gate")
    stream.submit(gate.pass_through, "the slow layer")
    stream.submit(lambda: seen.append(1), "never begun")
    stream.record(event)
    running.pass_through()
    closing = threading.Thread(target=stream.close)
    closing.start()
    while not stream._closed:
        pass
    gate.set()
    closing.join(DEADLINE_S)
    assert set(threading.enumerate()) == before
    assert not seen
    with pytest.raises(UsageError, match="closed before"):
        event.synchronise(DEADLINE_S)
    with pytest.raises(UsageError, match="'compute' is closed"):
        stream.submit(lambda: None, "too late")
    stream.close()


def test_a_stream_ends_with_its_context_even_in_an_error() -> None:
    before = set(threading.enumerate())

    def fail() -> None:
        raise ValueError("a broken layer")

    with pytest.raises(ValueError, match="a broken layer"), HostStream() as stream:
        stream.submit(fail, "a layer")
    with pytest.raises(KeyError), HostStream():
        raise KeyError
    assert set(threading.enumerate()) == before


def test_buffers_that_do_not_fit_are_refused_at_submission(stream: HostStream) -> None:
    with pytest.raises(UsageError, match=r"copy out: float32\[3\] does not fit float32\[4\]"):
        ordered_collective(stream, lambda _: None, np.zeros(3, np.float32), np.zeros(4, np.float32), HostEvent())
