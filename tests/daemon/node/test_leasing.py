"""A node follows the lease of its machine: it tells how, and ends the ranks that do not make way."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, cast

import pytest

from motley.daemon.lease import states
from motley.daemon.lease.file import LeaseFile
from motley.daemon.lease.lease import Holder, Lease
from motley.daemon.node.budget import set_budget
from motley.daemon.node.settings import NodeSettings
from motley.daemon.node.workers.held_rank import HeldRank
from motley.daemon.node.workers.leasing import Leasing
from motley.daemon.node.workers.ranks import Ranks
from motley.daemon.node.workers.worker import RankWorker
from motley.daemon.weights.cache import ShareCache
from motley.protocol import mesh_pb2 as pb

GPU_ENGINE = pb.Engine(name="webgpu", on_gpu=True)


class Worker:
    """Ends when it is told to."""

    ended = False

    async def stop(self) -> None:
        self.ended = True


class Node:
    """A node with a rank on its processor and one on its GPU, and what the orchestrator hears."""

    def __init__(self, folder: Path) -> None:
        settings = NodeSettings("pc", "127.0.0.1", pb.Capabilities(engines=[GPU_ENGINE]), None, ShareCache(folder), 1)
        self.file = LeaseFile(folder / "lease.json")
        self.ranks = Ranks(settings, lambda role, event: None)
        self.ranks.attach(self, settings)
        self.leasing = Leasing("pc", self.ranks, self.file, shares=settings.cache.folder)
        self.heard: asyncio.Queue[pb.Lease] = asyncio.Queue()
        self.workers = {}
        for number, engine in enumerate(("onnxruntime", "webgpu")):
            worker = self.workers[engine] = Worker()
            command = pb.RankCommand(session="s", rank=number, assign=pb.Assignment(engine=engine, size=2))
            self.ranks._held["s", number] = HeldRank(command, worker=cast(RankWorker, worker))

    def say(self, **body: Any) -> None:
        self.heard.put_nowait(body["lease"])

    async def hears(self, state: str, trouble: str) -> None:
        """Wait until the orchestrator hears of a state, and of what is wrong."""
        while (told := await self.heard.get()).state != state or trouble not in told.trouble:
            pass

    def heartbeat(self) -> pb.Heartbeat:
        return pb.Heartbeat()

    def take(self, device: str) -> None:
        now = time.time()
        lease = Lease(holder=Holder(name="game"), granted_at=now, expires_at=now + 60, device=device, reason="fun")
        self.file.take(lease, 60)


async def test_ranks_that_do_not_make_way_are_ended_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(tmp_path)
    node.take("gpu:0")
    await node.leasing.look()
    told = node.leasing.told
    assert (told.state, told.device, told.holder, told.reason) == ("draining", "gpu:0", "game", "fun")
    assert told.expires_at > time.time()
    assert not any(worker.ended for worker in node.workers.values())
    monkeypatch.setattr(states, "DRAIN_S", 0.0)
    await node.leasing.look()
    assert [worker.ended for worker in node.workers.values()] == [False, True]
    why = node.ranks._held["s", 1].taken_away
    assert why is not None
    assert (why.code, why.message) == ("device_leased", "'game' has taken the GPU of node 'pc' back")
    del node.ranks._held["s", 1]
    await node.leasing.look()
    assert node.leasing.told.state == "leased"


async def test_it_tells_whenever_something_changes(tmp_path: Path) -> None:
    node = Node(tmp_path)
    following = asyncio.create_task(node.leasing.follow())
    try:
        async with asyncio.timeout(30):
            for do, state, trouble in (
                (lambda: None, "normal", ""),
                (lambda: node.take("gpu:1"), "leased", ""),
                (lambda: node.file.path.write_text("[]"), "restoring", "holds no lease"),
            ):
                do()
                await node.hears(state, trouble)
                (daemon,) = await asyncio.to_thread(node.file.told)
                assert (daemon.node, daemon.shares) == ("pc", str(tmp_path))
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    assert node.file.told() == [], "it tells nothing any more"


async def test_what_is_ordered_from_elsewhere(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for wrong in (
        pb.LeaseOrder(id="o", device="tpu", holder="me", seconds=60),
        pb.LeaseOrder(id="o", device="cpu", holder="me", seconds=1e6),
        pb.LeaseOrder(id="o", device="cpu", seconds=60),
        pb.LeaseOrder(id="o", device="cpu", holder="two\nlines", seconds=60),
    ):
        done = await node.leasing.order(wrong)
        assert done.id == "o"
        assert done.failure.startswith("node 'pc': ")
    assert node.file.read() is None
    order = pb.LeaseOrder(id="o", device="cpu", holder="me", reason="night", seconds=60)
    assert await node.leasing.order(order) == pb.Done(id="o")
    lease = node.file.read()
    assert lease is not None
    assert (lease.holder.name, lease.device, lease.reason) == ("me", "cpu", "night")
    other = await node.leasing.order(pb.LeaseOrder(id="p", device="cpu", holder="you", seconds=60))
    assert "'me' has a lease of the processor" in other.failure
    assert await node.leasing.order(pb.LeaseOrder(id="q", give=True)) == pb.Done(id="q")
    assert node.file.read() is None


def test_a_budget_is_no_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motley.daemon.node.budget.available_memory", lambda: 1000)
    monkeypatch.setattr("motley.daemon.node.budget._resident", lambda pid: pid)
    it = pb.Capabilities(memory_bytes=5)
    assert set_budget(pb.BudgetOrder(memory_bytes=800), it, [20, 30]) == pb.Budget(memory_bytes=800)
    assert set_budget(pb.BudgetOrder(gpu_bytes=70), it, []) == pb.Budget(memory_bytes=800, gpu_bytes=70)
    assert set_budget(pb.BudgetOrder(memory_bytes=0, gpu_bytes=0), it, [20, 30]) == pb.Budget(memory_bytes=1050)
    assert set_budget(pb.BudgetOrder(memory_bytes=2000), it, [20]) == pb.Budget(memory_bytes=1020)
    assert it.memory_bytes == 1020
