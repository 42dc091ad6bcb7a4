"""Where a rank's time went, and which rank holds the others up."""

from __future__ import annotations

import threading
from itertools import pairwise
from time import perf_counter, perf_counter_ns, sleep
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from motley.transport import (
    Algorithm,
    Communicator,
    Record,
    Stats,
    StatsSnapshot,
    UsageError,
)
from motley.transport import exchange as exchange_module
from motley.transport import stats as stats_module
from motley.transport.links.wire import Op
from motley.transport.stats import RECORDS
from tests.transport.ranks import LIMIT_S, Run, until

Array = npt.NDArray[Any]


def is_waiting(communicator: Communicator) -> bool:
    """It sleeps in a call until it hears of a peer."""
    assert communicator._pulse is not None
    return communicator._pulse.awaited is not tuple


class Clock:
    """Stands still until a test moves it on."""

    def __init__(self) -> None:
        self.now_ns = 10**9

    def __call__(self) -> int:
        return self.now_ns

    def move(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


def test_stats_tell_waiting_from_computing(run_ranks: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 idles until rank 1 begins a step, then computes while rank 1 waits for it in the collective."""
    clock, ranks = Clock(), dict[int, Communicator]()
    for module in (stats_module, exchange_module):
        monkeypatch.setattr(module, "perf_counter_ns", clock)

    def work(communicator: Communicator) -> StatsSnapshot:
        buffer = np.zeros(8, np.float32)
        ranks[communicator.rank] = communicator
        communicator.all_reduce(buffer)
        communicator.stats.reset()
        if communicator.rank == 0:
            communicator.recv(1, LIMIT_S)
            until(lambda: is_waiting(ranks[1]))
            clock.move(0.2)
        else:
            until(lambda: is_waiting(ranks[0]))
            clock.move(0.1)
            communicator.send(b"", 0)
        communicator.all_reduce(buffer)
        return communicator.stats.snapshot()

    stats_0, stats_1 = run_ranks(2, work)
    assert stats_0.collectives == stats_1.collectives == 1
    assert (stats_0.compute_s, stats_0.wait_s) == (0.2, 0)  # its wait for the message is in neither
    assert (stats_1.compute_s, stats_1.wait_s) == (0.1, 0.2)


def test_the_straggler_is_named(run_ranks: Run) -> None:
    """Rank 1 comes 30 ms after the others have heard of each other."""
    ranks, together = dict[int, Communicator](), threading.Barrier(3, timeout=LIMIT_S)

    def work(communicator: Communicator) -> StatsSnapshot:
        buffer = np.zeros(8, np.float32)
        ranks[communicator.rank] = communicator
        communicator.barrier()
        communicator.stats.reset()
        together.wait()  # all have left it
        before = perf_counter_ns()
        together.wait()
        for _ in range(5):
            if communicator.rank == 1:
                until(lambda since=before: min(ranks[0]._exchange.heard_ns[2], ranks[2]._exchange.heard_ns[0]) > since)
                sleep(0.03)
                before = perf_counter_ns()
            communicator.all_reduce(buffer, Algorithm.ONE_SHOT)
        return communicator.stats.snapshot()

    snapshots = run_ranks(3, work)
    assert [snapshot.straggler for snapshot in snapshots] == [1, 1, 1]
    for rank in (0, 2):
        snapshot = snapshots[rank]
        assert snapshot.waited_for_s[1] == pytest.approx(snapshot.wait_s)
        assert snapshot.wait_s >= snapshot.last_s[1] >= 0.15
        assert snapshot.last_s[2 - rank] == 0
        assert snapshot.waited_for_s[rank] == snapshot.last_s[rank] == 0
    assert snapshots[1].compute_s >= 0.15


def test_every_collective_is_recorded(run_ranks: Run) -> None:
    def work(communicator: Communicator) -> list[Record]:
        buffer = np.zeros(8, np.float32)
        communicator.barrier()
        communicator.stats.reset()
        for _ in range(3):
            if communicator.rank == 1:
                communicator.wait_message(0, LIMIT_S)  # it has begun
                sleep(0.03)
            communicator.all_reduce(buffer, Algorithm.ONE_SHOT)
        pending = communicator.all_reduce_start(buffer)
        sleep(0.03)
        pending.finish()
        communicator.barrier()
        return communicator.stats.records()

    records = run_ranks(2, work)
    for rank, own in enumerate(records):
        assert [record.operation for record in own] == [Op.ALL_REDUCE] * 4 + [Op.BARRIER]
        assert [record.sequence for record in own] == [record.sequence for record in records[0]]
        assert [b.sequence - a.sequence for a, b in pairwise(own)] == [1] * 4
        assert own[3].compute_s >= 0.03
        assert all(record.wire_s > 0 for record in own)
        for record in own[:3]:
            assert (record.waited_for == 1 and record.wait_s >= 0.03) if rank == 0 else record.compute_s >= 0.03


def test_a_refused_call_is_no_end_of_computing(run_ranks: Run) -> None:
    """The time before it would count twice."""

    def work(communicator: Communicator) -> tuple[float, float]:
        buffer = np.zeros(8, np.float32)
        communicator.all_reduce(buffer)
        began = perf_counter()
        communicator.stats.reset()
        pending = communicator.all_reduce_start(buffer)
        pending.finish()
        sleep(0.05)
        for wrong in (pending.finish, lambda: communicator.all_reduce(np.zeros(8, np.int32))):
            with pytest.raises(UsageError):
                wrong()
        communicator.all_reduce(buffer)
        return communicator.stats.snapshot().compute_s, perf_counter() - began

    for computed, elapsed in run_ranks(2, work):
        assert 0.05 <= computed <= elapsed


def test_the_last_records_are_kept() -> None:
    stats = Stats(rank=0, size=2)
    for sequence in range(RECORDS + 10):
        entered = stats.enter()
        stats.leave(entered, [0, entered + 100], op=Op.BROADCAST, sequence=sequence)
    records = stats.records()
    assert [record.sequence for record in records] == list(range(10, RECORDS + 10))
    assert {(record.operation, record.wait_s, record.waited_for) for record in records} == {(Op.BROADCAST, 1e-7, 1)}
    stats.reset()
    assert stats.records() == []
    stats.leave(stats.enter())  # of a rank that is alone
    assert stats.records() == []


def test_stats_charge_the_last_rank_with_what_it_alone_cost() -> None:
    stats = Stats(rank=0, size=4)
    entered = stats.enter()
    stats.leave(entered, [0, entered + 100, entered + 900, entered + 300])
    stats.leave(entered, [0, entered + 50, entered - 50, 0])
    snapshot = stats.snapshot()
    assert [round(seconds * 1e9) for seconds in snapshot.waited_for_s] == [0, 150, 900, 300]
    assert [round(seconds * 1e9) for seconds in snapshot.last_s] == [0, 50, 600, 0]
    assert round(snapshot.wait_s * 1e9) == 950
    assert (snapshot.straggler, snapshot.collectives) == (2, 2)
    for _ in range(3):
        stats.leave(entered, [0, entered + 1, entered + 1, entered + 1], prompt=True)
    assert stats.snapshot().straggler == 0  # mostly, the others were there before this rank
    stats.reset()
    assert stats.snapshot().straggler is None
    assert stats.snapshot().last_s == (0, 0, 0, 0)
