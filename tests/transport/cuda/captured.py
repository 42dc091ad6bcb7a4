"""Sums that are recorded once and run often: the same on a GPU and on what stands for one."""

from __future__ import annotations

from motley.transport import Communicator
from motley.transport.cuda.all_reduce import AllReduce
from motley.transport.cuda.driver import Driver
from motley.transport.cuda.host_step import HostStep
from motley.transport.cuda.stream import CudaStream
from tests.transport.cuda.memory import Memory


def captured_sums(communicator: Communicator, driver: Driver, form: HostStep, layers: int, runs: int) -> list[float]:
    """What a rank sees of `layers` sums that are captured together: run so often, and submitted once in between."""
    driver.attach()
    seen: list[float] = []
    with Memory(driver) as memory, CudaStream(driver, form) as stream:
        buffer, before, after = memory.device(300), memory.pinned(300), memory.pinned(300)
        with AllReduce(stream, communicator, buffer) as summed:

            def submit() -> None:
                for _ in range(layers):
                    stream.submit(lambda: before.fill(len(seen) + communicator.rank), "the layer before")
                    stream.copy_back(before, buffer)
                    summed.submit()
                    stream.copy_out(buffer, after)
                    stream.submit(lambda: seen.append(float(after[7])), "the layer after")

            graph = stream.capture(submit)
            assert not seen
            for _ in range(runs):
                stream.replay(graph)
            submit()  # it can still be submitted as ever
            stream.replay(graph)
            stream.synchronise(60.0)
            graph.close()
    return seen


def expected_sums(layers: int, runs: int) -> list[float]:
    """Of two ranks."""
    return [2.0 * index + 1 for index in range(layers * (runs + 2))]
