"""Two sums may be under way at a time: with the results of one after the other; and what goes wrong is told."""

from __future__ import annotations

import random
import threading
from time import monotonic, perf_counter, sleep

import numpy as np
import pytest

from motley.transport import Algorithm, Communicator, PeerLost, PeerTimeout, UsageError
from motley.transport.collectives import Pending
from motley.transport.schedules.schedule import ALGORITHMS, Operation
from tests.transport.ranks import LIMIT_S, Run, shrink_buffers, values

SIZES = (0, 1, 7, 1000, 60_000)
SUMS = 24


def sums_to_take(seed: int) -> list[tuple[int, Algorithm]]:
    """Random sizes and algorithms, the same on all ranks."""
    draw = random.Random(seed)
    return [(draw.choice(SIZES), draw.choice([*ALGORITHMS[Operation.ALL_REDUCE]])) for _ in range(SUMS)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("small", [False, True], ids=["", "small buffers"])
def test_results_are_those_of_one_after_the_other(run_ranks: Run, ranks: int, small: bool) -> None:
    """The second of two is started at once or later, and ranks come at times of their own."""
    plan = sums_to_take(ranks)

    def work(communicator: Communicator) -> bool:
        if small:
            shrink_buffers(communicator)
        late = random.Random(communicator.rank)
        expected = [values(communicator.rank, elements) + number for number, (elements, _) in enumerate(plan)]
        got = [buffer.copy() for buffer in expected]
        for buffer, (_, algorithm) in zip(expected, plan, strict=True):
            communicator.all_reduce(buffer, algorithm)
        started: list[Pending] = []
        for buffer, (_, algorithm) in zip(got, plan, strict=True):
            if late.random() < 0.3:
                sleep(late.random() / 500)
            if started and late.random() < 0.5:
                started[0].advance()
            if len(started) == 2:
                started.pop(0).finish()
            started.append(communicator.all_reduce_start(buffer, algorithm))
        for pending in started:
            pending.finish()
        communicator.barrier()
        same: list[bool] = [bool((one == other).all()) for one, other in zip(got, expected, strict=True)]
        return all(same) and communicator.stats.snapshot().collectives >= 2 * SUMS

    assert run_ranks(ranks, work) == [True] * ranks


@pytest.mark.parametrize("algorithm", [Algorithm.TWO_SHOT, Algorithm.RING])
def test_later_hops_are_passed_on_while_a_rank_computes(algorithm: Algorithm, run_ranks: Run) -> None:
    """Nobody finishes before everybody has all that is to come."""
    ready = threading.Barrier(3, timeout=30)

    def work(communicator: Communicator) -> bool:
        buffer = values(communicator.rank, 3000)
        started = communicator.all_reduce_start(buffer, algorithm)
        until = monotonic() + 30
        while started.receives and monotonic() < until:
            started.advance()
            sleep(1e-4)
        assert not started.receives
        ready.wait()
        started.finish()
        with pytest.raises(UsageError, match="finished already"):
            started.advance()
        return bool((buffer == sum((values(rank, 3000) for rank in range(1, 3)), values(0, 3000))).all())

    assert run_ranks(3, work) == [True] * 3


def test_some_are_alone_and_some_are_two(run_ranks: Run) -> None:
    """Plans are used again by whoever is first or second."""

    def work(communicator: Communicator) -> list[float]:
        one, two = np.ones(5, np.float32), np.ones(5, np.float32)
        for turn in range(20):
            first = communicator.all_reduce_start(one, Algorithm.TWO_SHOT)
            if turn % 3:
                second = communicator.all_reduce_start(two, Algorithm.TWO_SHOT)
                first.finish()
                first = communicator.all_reduce_start(one, Algorithm.ONE_SHOT)
                second.finish()
            first.finish()
            one[:] = two[:] = 1
        communicator.all_reduce(one)
        return [float(value) for value in one]

    assert run_ranks(3, work) == [[3.0] * 5] * 3


def test_how_two_can_be_used_wrongly(run_ranks: Run) -> None:
    def work(communicator: Communicator) -> None:
        buffers = [np.ones(3, np.float32) for _ in range(3)]
        first, second = (communicator.all_reduce_start(buffer) for buffer in buffers[:2])
        with pytest.raises(UsageError, match="2 collectives are under way"):
            communicator.all_reduce_start(buffers[2])
        with pytest.raises(UsageError, match="started before this one must be finished first"):
            second.finish()
        first.finish()
        with pytest.raises(UsageError, match="finished already"):
            first.finish()
        with pytest.raises(UsageError, match="must be finished before the next call"):
            communicator.barrier()
        second.finish()
        communicator.barrier()
        assert all((buffer == communicator.size).all() for buffer in buffers[:2])

    assert run_ranks(2, work) == [None] * 2
    assert run_ranks(1, alone) == [None]


def alone(communicator: Communicator) -> None:
    """A rank without peers has its sums at once."""
    buffer = np.ones(3, np.float32)
    first, second = communicator.all_reduce_start(buffer), communicator.all_reduce_start(buffer)
    first.finish()
    second.finish()
    assert (buffer == 1).all()


def test_a_rank_that_dies_beside_two_sums_is_named(run_ranks: Run) -> None:
    class Died(Exception):
        pass

    def work(communicator: Communicator) -> None:
        buffers = [np.ones(1000, np.float32) for _ in range(2)]
        first = communicator.all_reduce_start(buffers[0], Algorithm.RING)
        if communicator.rank == 1:
            with communicator:
                raise Died
        second = communicator.all_reduce_start(buffers[1], Algorithm.RING)
        first.finish()
        second.finish()

    errors = run_ranks(3, work)
    assert isinstance(errors[1], Died)
    for error in (errors[0], errors[2]):
        assert isinstance(error, PeerLost)
        assert error.rank == 1


def test_a_silent_peer_beside_two_sums_is_named(run_ranks: Run) -> None:
    """Rank 1 begins the first sum, then waits; the deadline is for what is to come."""
    noticed = threading.Event()

    def work(communicator: Communicator) -> None:
        buffers = [np.ones(100, np.float32) for _ in range(2)]
        first = communicator.all_reduce_start(buffers[0])
        if communicator.rank == 1:
            noticed.wait(LIMIT_S)
            return
        communicator.deadline_s = 0.3
        second = communicator.all_reduce_start(buffers[1])
        first.finish()
        try:
            second.finish()
        finally:
            noticed.set()

    error = run_ranks(2, work)[0]
    assert isinstance(error, PeerTimeout)
    assert error.rank == 1


def test_no_time_is_counted_twice(run_ranks: Run) -> None:
    """Of two sums under way, what is computed meanwhile is computing, once."""

    def work(communicator: Communicator) -> float:
        one, two = np.ones(4, np.float32), np.ones(4, np.float32)
        communicator.barrier()
        communicator.stats.reset()
        began = perf_counter()
        first = communicator.all_reduce_start(one)
        sleep(0.02)
        second = communicator.all_reduce_start(two)
        sleep(0.02)
        first.finish()
        second.finish()
        passed, taken = perf_counter() - began, communicator.stats.snapshot()
        assert taken.collectives == 2
        assert taken.compute_s + taken.wait_s + taken.wire_s <= passed + 1e-3
        return taken.compute_s

    for computed in run_ranks(2, work):
        assert isinstance(computed, float)
        assert computed >= 0.04
