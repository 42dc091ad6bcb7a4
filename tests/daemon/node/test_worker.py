"""The daemon's end of a worker's pipe."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from motley.daemon.node import child
from motley.daemon.node.workers.worker import RankWorker
from motley.daemon.pipe.framing import LENGTH
from motley.daemon.rank.decode_times import DecodeTimes
from motley.daemon.worker import rank
from motley.daemon.worker.rank import Rank
from motley.protocol import mesh_pb2 as pb
from motley.protocol.worker_pb2 import WorkerEvent


async def events(pid: int, *told: WorkerEvent) -> list[WorkerEvent]:
    """What comes out of what a worker has told before its end."""
    reader = asyncio.StreamReader()
    for event in told:
        body = event.SerializeToString()
        reader.feed_data(LENGTH.pack(len(body)) + body)
    reader.feed_eof()
    worker = RankWorker(cast(Any, SimpleNamespace(pid=pid)), reader, cast(Any, None))
    return [event async for event in worker.events()]


async def test_the_daemon_looks_up_the_memory_of_a_worker() -> None:
    listening, timing = await events(os.getpid(), WorkerEvent(listening=7), WorkerEvent(timing=pb.Timing(tokens=3)))
    assert listening == WorkerEvent(listening=7)
    assert timing.timing.tokens == 3
    assert timing.timing.peak_rss_bytes > 10_000_000


@pytest.fixture
def ended() -> int:
    """The number of a process that was."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


async def test_a_worker_that_has_ended_holds_no_memory(ended: int) -> None:
    (timing,) = await events(ended, WorkerEvent(timing=pb.Timing(tokens=3)))
    assert timing.timing == pb.Timing(tokens=3)


def test_a_rank_looks_up_no_memory_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError("the system is asked between two steps")

    monkeypatch.setattr(rank, "resident_bytes", refuse)
    told: list[pb.Timing] = []
    worker = SimpleNamespace(
        daemon=SimpleNamespace(tell=lambda timing: told.append(timing)),
        start=SimpleNamespace(assignment=pb.Assignment(), rank=0),
    )
    executor = SimpleNamespace(times=DecodeTimes(tokens=2))
    Rank(cast(Any, worker))._report(cast(Any, executor), [1.0, 2.0])
    assert [(timing.tokens, list(timing.step_ms)) for timing in told] == [(2, [1.0, 2.0])]


async def test_a_process_that_stays_though_it_was_killed_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one does that waits for a driver which hangs."""
    monkeypatch.setattr(child, "GONE_S", 0.01)
    killed: list[bool] = []

    async def never() -> int:
        await asyncio.Event().wait()
        return 0

    stuck = SimpleNamespace(pid=7, returncode=None, kill=lambda: killed.append(True), wait=never)
    await child.kill_child(cast(Any, stuck))
    assert killed == [True]
    assert "process 7 was killed, and is there" in caplog.text
