"""The kernels, the streams and the collectives of `motley.transport.cuda` on a real device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from motley.transport import Algorithm, Communicator, WireFormat
from motley.transport.cuda.all_reduce import AllReduce
from motley.transport.cuda.driver import CudaDriver
from motley.transport.cuda.errors import CudaError
from motley.transport.cuda.host_step import HostStep
from motley.transport.cuda.stream import CudaStream, measure_host_steps
from motley.transport.schedules.forecast import Network
from tests.transport.conftest import run_ranks as run_ranks
from tests.transport.cuda.captured import captured_sums, expected_sums
from tests.transport.cuda.memory import Memory

Array = np.ndarray[Any, Any]
Run = Callable[..., list[Any]]
DEADLINE_S = 20.0
DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
SIZES = (1, 7, 8, 64, 65, 2048, 5000, 1 << 16)


@pytest.fixture
def memory(gpu: CudaDriver) -> Iterator[Memory]:
    with Memory(gpu) as memory:
        yield memory


def values(rank: int, elements: int, dtype: str = "float32") -> Array:
    numbers = np.random.default_rng(rank).standard_normal(elements) * 10.0 ** (rank % 3)
    return numbers.astype(DTYPES[dtype])


def sums_on_the_host(communicator: Communicator, count: int, elements: int = 64) -> list[float]:
    """What a rank without a GPU sees of so many sums, to each of which it gives one more than to that before."""
    seen = []
    for index in range(count):
        own = np.full(elements, index + communicator.rank, np.float32)
        communicator.all_reduce(own)
        seen.append(float(own[-1]))
    return seen


@pytest.mark.parametrize("wire_format", WireFormat)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_device_sums_the_host_s_bits(
    gpu: CudaDriver, run_ranks: Run, form: HostStep, wire_format: WireFormat, dtype: str
) -> None:
    """One rank sums on the device, the others on the host, in all sizes."""

    def work(communicator: Communicator) -> list[int]:
        sums = []
        if communicator.rank != 1:
            for elements in SIZES:
                own = values(communicator.rank, elements, dtype)
                communicator.all_reduce(own, Algorithm.ONE_SHOT)
                sums.append(hash(own.tobytes()))
            return sums
        communicator.network = Network([[1.0] * 3] * 3, [[1e12] * 3] * 3)  # one-shot throughout
        gpu.attach()
        with Memory(gpu) as memory, CudaStream(gpu, form) as stream:
            for elements in SIZES:
                buffer, staging = memory.device(elements, DTYPES[dtype]), memory.pinned(elements, DTYPES[dtype])
                staging[:] = values(communicator.rank, elements, dtype)
                stream.copy_back(staging, buffer)
                with AllReduce(stream, communicator, buffer) as summed:
                    assert summed._exchange is not None
                    summed.submit(memory.event())
                    stream.copy_out(buffer, staging)
                    stream.synchronise(DEADLINE_S)
                sums.append(hash(staging.tobytes()))
        return sums

    first, second, third = run_ranks(3, work, wire_format=wire_format)
    assert first == second == third


def test_many_sums_of_one_buffer_stay_in_order(gpu: CudaDriver, run_ranks: Run, form: HostStep) -> None:
    """More than any queue of the driver takes, submitted ahead: none is lost, none deadlocks with Python's lock."""

    def work(communicator: Communicator) -> list[float]:
        if communicator.rank:
            return sums_on_the_host(communicator, 1000)
        gpu.attach()
        seen: list[float] = []
        with Memory(gpu) as memory, CudaStream(gpu, form) as stream:
            buffer, before, after = memory.device(64), memory.pinned(64), memory.pinned(64)
            done = memory.event()
            with AllReduce(stream, communicator, buffer) as summed:
                for _ in range(1000):
                    stream.submit(lambda: before.fill(len(seen)), "the layer before")
                    stream.copy_back(before, buffer)
                    summed.submit(done)
                    stream.copy_out(buffer, after)
                    stream.submit(lambda: seen.append(float(after[-1])), "the layer after")
                stream.synchronise(60.0)
        return seen

    assert run_ranks(2, work) == [[2.0 * index + 1 for index in range(1000)]] * 2


def test_captured_sums_are_taken_anew_at_every_run(gpu: CudaDriver, run_ranks: Run, form: HostStep) -> None:
    expected = expected_sums(layers=50, runs=20)

    def work(communicator: Communicator) -> list[float]:
        if communicator.rank:
            return sums_on_the_host(communicator, len(expected), elements=300)
        return captured_sums(communicator, gpu, form, layers=50, runs=20)

    assert run_ranks(2, work) == [expected] * 2


def test_an_event_that_a_worker_records_later_gives_wrong_sums(gpu: CudaDriver, memory: Memory, form: HostStep) -> None:
    """The classic mistake: the wait is submitted before the record, and holds nothing back."""
    consumed, late = threading.Event(), memory.event()
    buffer, before, after = memory.device(300), memory.pinned(300), memory.pinned(300)
    total = memory.pinned(300)
    before[:], total[:] = 1, 2
    with CudaStream(gpu, form, name="compute") as stream, CudaStream(gpu, form, name="side") as side:
        stream.copy_back(before, buffer)
        stream.wait(late)
        stream.copy_out(buffer, after)
        stream.submit(consumed.set, "consumed")
        assert consumed.wait(DEADLINE_S)
        side.copy_back(total, buffer)
        side.record(late)
        side.synchronise(DEADLINE_S)
    assert (after == 1).all()  # not 2: nothing failed, and it is wrong


def test_the_error_of_a_host_step_comes_out_where_the_caller_waits(gpu: CudaDriver, form: HostStep) -> None:
    def fail() -> None:
        raise ValueError("a broken layer")

    with pytest.raises(ValueError, match="a broken layer"), CudaStream(gpu, form) as stream:
        stream.submit(fail, "a layer")


def test_a_form_of_the_host_step_is_found(gpu: CudaDriver) -> None:
    seconds = measure_host_steps(gpu)
    assert HostStep.FUNCTION in seconds


def test_memory_that_is_not_there_is_told_with_the_numbers(gpu: CudaDriver) -> None:
    free, total = gpu.memory()
    with pytest.raises(CudaError, match=rf"out of memory: {2 * total} bytes are needed, \d+ of {total} are free"):
        gpu.allocate(2 * total)
    assert free <= total
