"""What CUDA streams do beyond the contract of all streams (test_streams.py), on a driver made of host streams."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from motley.transport import Algorithm, Communicator, UsageError, WireFormat
from motley.transport.cuda.all_reduce import AllReduce
from motley.transport.cuda.driver import Driver
from motley.transport.cuda.errors import CudaError
from motley.transport.cuda.host_step import ASYNCHRONOUS, HostFunctions, HostStep
from motley.transport.cuda.stream import CudaStream, DeviceArray, measure_host_steps
from tests.transport.cuda.captured import captured_sums, expected_sums
from tests.transport.cuda.host_driver import HostDriver
from tests.transport.cuda.memory import Memory

Run = Callable[..., list[Any]]
Array = np.ndarray[Any, Any]
DEADLINE_S = 60.0
DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


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


def test_the_driver_of_the_tests_fulfils_the_contract_of_drivers(driver: HostDriver) -> None:
    contract: Driver = driver
    assert contract.number == 0


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


def test_what_was_captured_sums_anew_whenever_it_runs(run_ranks: Run, form: HostStep) -> None:
    def work(communicator: Communicator) -> list[float]:
        driver = HostDriver()
        sums = captured_sums(communicator, driver, form, layers=1, runs=3)
        assert driver.live == 0
        return sums

    assert run_ranks(2, work) == [expected_sums(layers=1, runs=3)] * 2


def test_a_stream_that_cannot_capture_goes_on(driver: HostDriver, memory: Memory, form: HostStep) -> None:
    seen, event = list[str](), memory.event()
    with CudaStream(driver, form) as stream:
        stream.submit(lambda: seen.append("submitted"), "a note")
        for misuse in (lambda: stream.record(event), lambda: stream.wait(event), lambda: stream.synchronise(0)):
            with pytest.raises(UsageError, match="is capturing: no event"):
                stream.capture(misuse)
        stream.synchronise(DEADLINE_S)
    assert seen == ["submitted"]


def test_the_error_of_a_captured_step_comes_out_where_the_caller_waits(driver: HostDriver, form: HostStep) -> None:
    seen = list[int]()
    with CudaStream(driver, form) as stream:

        def note() -> None:
            seen.append(len(seen))
            if len(seen) == 2:
                raise ValueError("a broken layer")

        graph = stream.capture(lambda: (stream.submit(note, "a note"), stream.submit(note, "another")))
        stream.replay(graph)
        with pytest.raises(ValueError, match="a broken layer"):
            stream.synchronise(DEADLINE_S)
        stream.replay(graph)
        with pytest.raises(ValueError, match="a broken layer"):
            stream.synchronise(DEADLINE_S)
        stream.close()
    assert seen == [0, 1]


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
    from motley.transport.schedules.forecast import Network

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


# -- errors ---------------------------------------------------------------------------------------------------------


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


def test_a_step_that_was_let_go_of_may_still_be_come_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a device that is lost, say, in the middle of a captured graph."""
    comes: list[Callable[[], object]] = []

    class Late:
        def launch_host(self, stream: object, address: int, ticket: int, *, spinning: bool) -> None:
            comes.append(partial(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address), ticket))

    raised: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", raised.append)
    works: list[str] = []
    late: Any = Late()
    steps = HostFunctions(late, 1, spinning=False)
    let_go = steps.capture(lambda: works.append("done"))
    comes[0]()
    let_go()
    comes[0]()
    assert (works, raised) == (["done"], [])


def test_a_stream_of_somebody_else_is_left_open(driver: HostDriver, form: HostStep) -> None:
    handle, seen = driver.create_stream(), list[int]()
    with CudaStream(driver, form, handle=handle) as stream:
        stream.submit(lambda: seen.append(1), "a layer")
    handle.submit(lambda: seen.append(2), "another one's work")
    handle.synchronise(DEADLINE_S)
    driver.destroy_stream(handle)
    assert seen == [1, 2]


def test_a_stream_that_its_owner_has_destroyed_is_not_used_at_close(driver: HostDriver, form: HostStep) -> None:
    handle, seen = driver.create_stream(), list[int]()
    stream = CudaStream(driver, form, handle=handle)
    stream.submit(lambda: seen.append(1), "a layer")
    stream.synchronise(DEADLINE_S)
    driver.destroy_stream(handle)
    stream.close()
    assert seen == [1]
    assert driver.live == 0


# -- which form -----------------------------------------------------------------------------------------------------


def test_the_forms_that_work_are_measured(driver: HostDriver) -> None:
    seconds = measure_host_steps(driver)
    assert set(seconds) == set(ASYNCHRONOUS)
    assert list(seconds.values()) == sorted(seconds.values())
    assert all(0 < each < 1 for each in seconds.values())


def test_a_form_that_the_driver_does_not_know_is_left_out() -> None:
    driver = HostDriver(spins=False)
    assert set(measure_host_steps(driver)) == {HostStep.FUNCTION, HostStep.MEMORY}
    driver.lost = True
    with pytest.raises(CudaError, match=r"no form of the host step works on this driver: function: .*lost; spinning: "):
        measure_host_steps(driver)
    assert driver.live == 0
