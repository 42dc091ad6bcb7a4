"""CUDA streams on a driver made of host streams: the contract of `motley.transport.streams`, for every host step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from motley.transport import Algorithm, Communicator, PeerLost, UsageError, WireFormat
from motley.transport.cuda.all_reduce import AllReduce
from motley.transport.cuda.driver import Driver
from motley.transport.cuda.errors import CudaError
from motley.transport.cuda.host_step import HostStep
from motley.transport.cuda.stream import CudaEvent, CudaStream, DeviceArray, measure_host_steps
from motley.transport.streams import Event, Stream, ordered_collective
from tests.transport.cuda.host_driver import HostDriver
from tests.transport.cuda.memory import Memory

Run = Callable[..., list[Any]]
Array = np.ndarray[Any, Any]
DEADLINE_S = 20.0
DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


class Gate(threading.Event):
    """Opened by the test; passing it never waits for ever."""

    def pass_through(self) -> None:
        assert self.wait(DEADLINE_S), "the gate was never opened"


@pytest.fixture(params=HostStep)
def form(request: pytest.FixtureRequest) -> HostStep:
    return HostStep(request.param)


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    driver = HostDriver()
    yield driver
    assert driver.live == 0
    assert not [thread for thread in threading.enumerate() if thread.name in ("device", "host steps")]


@pytest.fixture
def stream(driver: HostDriver, form: HostStep) -> Iterator[CudaStream]:
    with CudaStream(driver, form, name="compute") as stream:
        yield stream


@pytest.fixture
def memory(driver: HostDriver) -> Iterator[Memory]:
    with Memory(driver) as memory:
        yield memory


def test_it_fulfils_the_contracts(stream: CudaStream, memory: Memory, driver: HostDriver) -> None:
    contract: Stream[DeviceArray, CudaEvent] = stream
    event: Event = memory.event()
    below: Driver = driver
    assert contract is stream
    assert below is driver
    assert event.done()


def test_work_runs_in_submission_order_beside_the_caller(stream: CudaStream, memory: Memory) -> None:
    gate, seen, event = Gate(), list[int](), memory.event()
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


def test_a_wait_for_an_event_that_was_never_recorded_is_no_wait(stream: CudaStream, memory: Memory) -> None:
    event = memory.event()
    stream.wait(event)
    event.synchronise(0)
    stream.synchronise(DEADLINE_S)


def test_a_wait_captures_the_recording_that_was_there_at_submission(
    driver: HostDriver, stream: CudaStream, memory: Memory, form: HostStep
) -> None:
    first, second, seen, event = Gate(), Gate(), list[str](), memory.event()
    with CudaStream(driver, form, name="other") as other:
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


# -- collectives ----------------------------------------------------------------------------------------------------


def values(rank: int, elements: int = 300, dtype: str = "float32") -> Array:
    numbers = np.random.default_rng(rank).standard_normal(elements) * 10.0**rank
    return numbers.astype(DTYPES[dtype])


def load(stream: CudaStream, array: DeviceArray, staging: Array, numbers: Array) -> None:
    """The layer before, in order."""
    stream.submit(lambda: np.copyto(staging, numbers), "the layer before")
    stream.copy_back(staging, array)


@pytest.mark.parametrize("wire_format", WireFormat)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_ranks_and_host_ranks_hold_the_same_bits(
    run_ranks: Run, form: HostStep, wire_format: WireFormat, dtype: str
) -> None:
    """Rank 1 sums on the host, the others on the device; one buffer, several times."""

    def work(communicator: Communicator) -> list[bytes]:
        results = []
        if communicator.rank == 1:
            for call in range(3):
                own = values(communicator.rank + call, dtype=dtype)
                communicator.all_reduce(own, Algorithm.ONE_SHOT)
                results.append(own.tobytes())
            return results
        driver = HostDriver()
        with Memory(driver) as memory, CudaStream(driver, form) as stream:
            buffer, done = memory.device(300, DTYPES[dtype]), memory.event()
            before, after = memory.pinned(300, DTYPES[dtype]), memory.pinned(300, DTYPES[dtype])
            with AllReduce(stream, communicator, buffer) as summed:
                for call in range(3):
                    load(stream, buffer, before, values(communicator.rank + call, dtype=dtype))
                    summed.submit(done)
                    stream.copy_out(buffer, after)
                    stream.submit(lambda: results.append(after.tobytes()), "the layer after")
                done.synchronise(DEADLINE_S)
                stream.synchronise(DEADLINE_S)
        assert driver.live == 0
        return results

    first, second, third = run_ranks(3, work, wire_format=wire_format)
    assert first == second == third
    assert len(set(first)) == 3


def test_a_payload_that_is_not_summed_in_one_shot(run_ranks: Run, form: HostStep) -> None:
    """Large enough that the mesh would let each rank sum a part."""
    elements = 1 << 18

    def work(communicator: Communicator) -> bytes:
        communicator.network = two_shot_network()
        own = values(communicator.rank, elements)
        if communicator.rank:
            communicator.all_reduce(own, Algorithm.TWO_SHOT)
            return own.tobytes()
        driver = HostDriver()
        with Memory(driver) as memory, CudaStream(driver, form) as stream:
            buffer, staging, done = memory.device(elements), memory.pinned(elements), memory.event()
            with AllReduce(stream, communicator, buffer) as summed:
                assert summed._exchange is None
                load(stream, buffer, staging, own)
                summed.submit(done)
                stream.copy_out(buffer, staging)
                stream.synchronise(DEADLINE_S)
            return staging.tobytes()

    results = run_ranks(3, work)
    assert len({hash(result) for result in results}) == 1  # not all of it in a message


def two_shot_network() -> Any:
    from motley.transport.schedule import Network

    return Network([[1e-5] * 3] * 3, [[1e8] * 3] * 3)


def test_a_rank_alone_keeps_its_values(run_ranks: Run, form: HostStep) -> None:
    def work(communicator: Communicator) -> bool:
        driver = HostDriver()
        with Memory(driver) as memory, CudaStream(driver, form) as stream:
            buffer, staging, done = memory.device(300), memory.pinned(300), memory.event()
            load(stream, buffer, staging, values(1))
            with AllReduce(stream, communicator, buffer) as summed:
                summed.submit(done)
                stream.copy_out(buffer, staging)
                stream.synchronise(DEADLINE_S)
            return staging.tobytes() == values(1).tobytes()

    assert run_ranks(1, work) == [True]


def test_an_event_that_a_worker_records_later_gives_wrong_sums(run_ranks: Run, form: HostStep) -> None:
    """The classic mistake, slowed down by gates: every rank consumes its own values where the sum should be."""

    def work(communicator: Communicator) -> bytes:
        driver = HostDriver()
        with (
            Memory(driver) as memory,
            CudaStream(driver, form, name="compute") as stream,
            CudaStream(driver, form, name="side") as side,
        ):
            buffer, before, after = memory.device(300), memory.pinned(300), memory.pinned(300)
            staging, computed, summed, consumed = memory.pinned(300), memory.event(), memory.event(), Gate()

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

    assert run_ranks(2, work) == [values(rank).tobytes() for rank in range(2)]


@pytest.mark.parametrize("same_stream", [True, False])
def test_an_ordered_collective_gives_right_sums(run_ranks: Run, form: HostStep, same_stream: bool) -> None:
    """The same layers, as slow as above: the exchange begins only when everything has been submitted."""

    def work(communicator: Communicator) -> bytes:
        driver = HostDriver()
        with (
            Memory(driver) as memory,
            CudaStream(driver, form, name="compute") as stream,
            CudaStream(driver, form, name="side") as side,
        ):
            buffer, before, after = memory.device(300), memory.pinned(300), memory.pinned(300)
            staging, summed, submitted = memory.pinned(300), memory.event(), Gate()

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


# -- errors ---------------------------------------------------------------------------------------------------------


def test_the_error_of_a_host_step_comes_out_where_the_caller_waits(run_ranks: Run, form: HostStep) -> None:
    gone = threading.Event()

    def work(communicator: Communicator) -> Any:
        if communicator.rank == 1:
            communicator.close()
            gone.set()
            return None
        assert gone.wait(DEADLINE_S)
        driver, ran = HostDriver(), list[int]()
        with Memory(driver) as memory:
            stream, other = CudaStream(driver, form, name="compute"), CudaStream(driver, form, name="other")
            buffer, early, done = memory.device(300), memory.event(), memory.event()
            stream.submit(lambda: ran.append(0), "the layer before")
            stream.record(early)
            with AllReduce(stream, communicator, buffer) as summed:
                summed.submit(done)
                stream.submit(lambda: ran.append(1), "the layer after")
                other.wait(done)
                other.submit(lambda: ran.append(2), "the layer after")
                blamed = []
                for wait in (done.synchronise, stream.synchronise, stream.synchronise, other.synchronise):
                    with pytest.raises(PeerLost) as caught:
                        wait(DEADLINE_S)
                    blamed.append(caught.value.rank)
                early.synchronise(0)  # what was before it is right
                stream.close()
                other.close()
        return blamed, ran, driver.live

    assert run_ranks(2, work)[0] == ([1, 1, 1, 1], [0], 0)


def test_streams_that_wait_for_each_other_find_an_error(driver: HostDriver, memory: Memory, form: HostStep) -> None:
    one, two, event = CudaStream(driver, form, name="one"), CudaStream(driver, form, name="two"), memory.event()

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


def test_a_lost_device_is_told_and_leaves_nothing(form: HostStep) -> None:
    driver = HostDriver()
    stream = CudaStream(driver, form)
    stream.submit(lambda: None, "a layer")
    stream.synchronise(DEADLINE_S)
    driver.lost = True
    with pytest.raises(CudaError, match="the device is lost"):
        stream.synchronise(DEADLINE_S)
    with pytest.raises(CudaError, match="the device is lost"):
        stream.close()
    assert driver.live == 0


def test_a_deadline_names_the_stream_and_what_it_is_at(stream: CudaStream, memory: Memory) -> None:
    gate, running, event = Gate(), Gate(), memory.event()
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


def test_closing_drops_what_has_not_begun(driver: HostDriver, memory: Memory, form: HostStep) -> None:
    stream, gate, running, seen = CudaStream(driver, form, name="compute"), Gate(), Gate(), list[int]()
    early, event = memory.event(), memory.event()
    stream.submit(running.set, "a gate")
    stream.submit(gate.pass_through, "the slow layer")
    stream.record(early)
    stream.submit(lambda: seen.append(1), "never begun")
    stream.record(event)
    running.pass_through()
    while stream._doing != "the slow layer":
        pass
    closing = threading.Thread(target=stream.close)
    closing.start()
    while not stream._failure:
        pass
    gate.set()
    closing.join(DEADLINE_S)
    assert not seen
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


def test_a_stream_ends_with_its_context_even_in_an_error(driver: HostDriver, form: HostStep) -> None:
    def fail() -> None:
        raise ValueError("a broken layer")

    with pytest.raises(ValueError, match="a broken layer"), CudaStream(driver, form) as stream:
        stream.submit(fail, "a layer")
    with pytest.raises(KeyError), CudaStream(driver, form):
        raise KeyError


def test_buffers_that_do_not_fit_are_refused_at_submission(stream: CudaStream, memory: Memory) -> None:
    with pytest.raises(UsageError, match=r"copy out: float32\[3\] does not fit float32\[4\]"):
        ordered_collective(stream, lambda _: None, memory.device(3), memory.pinned(4), memory.event())


def test_a_stream_of_somebody_else_is_left_open(driver: HostDriver, form: HostStep) -> None:
    handle, seen = driver.create_stream(), list[int]()
    with CudaStream(driver, form, handle=handle) as stream:
        stream.submit(lambda: seen.append(1), "a layer")
    handle.submit(lambda: seen.append(2), "another one's work")
    handle.synchronise(DEADLINE_S)
    driver.destroy_stream(handle)
    assert seen == [1, 2]


# -- which form -----------------------------------------------------------------------------------------------------


def test_the_forms_that_work_are_measured(driver: HostDriver) -> None:
    seconds = measure_host_steps(driver)
    assert set(seconds) == set(HostStep)
    assert list(seconds.values()) == sorted(seconds.values())
    assert all(0 < each < 1 for each in seconds.values())


def test_a_form_that_the_driver_does_not_know_is_left_out() -> None:
    driver = HostDriver(spins=False)
    assert set(measure_host_steps(driver)) == {HostStep.FUNCTION, HostStep.MEMORY}
    driver.lost = True
    with pytest.raises(CudaError, match=r"no form of the host step works on this driver: function: .*lost; spinning: "):
        measure_host_steps(driver)
    assert driver.live == 0
