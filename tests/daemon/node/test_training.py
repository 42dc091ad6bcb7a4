"""A node's part of trainings: tickets, the lease that a worker has, and what is told of a worker that ends."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from motley.daemon.lease.file import LeaseFile
from motley.daemon.lease.lease import Holder, Lease
from motley.daemon.node.settings import NodeSettings
from motley.daemon.node.workers.leasing import Leasing
from motley.daemon.node.workers.ranks import Ranks
from motley.daemon.node.workers.training import Trainings, tickets_of
from motley.daemon.weights.cache import ShareCache
from motley.protocol import mesh_pb2 as pb

JOB = "12345678"
TICKET = "0" * 32
DEADLINE_S = 60.0


class Node:
    """A node's trainings, and what they say."""

    def __init__(self, folder: Path) -> None:
        settings = NodeSettings("pc", "127.0.0.1", pb.Capabilities(), None, ShareCache(folder / "cache"), 1)
        self.file = LeaseFile(folder / "lease.json")
        self.leasing = Leasing("pc", Ranks(settings, lambda role, event: None), self.file)
        self.trainings = Trainings(settings, self.leasing, tickets_of(self.file))
        self.trainings.attach(self.hear, settings)
        self.said: list[pb.JobEvent] = []
        self._heard = asyncio.Event()

    def hear(self, job: pb.JobEvent) -> None:
        self.said.append(job)
        self._heard.set()

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not true():
                self._heard.clear()
                await self._heard.wait()

    async def until_told(self, kinds: list[str]) -> None:
        """Wait until that is what the next stay would begin with."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                if [event.WhichOneof("body") for event in self.trainings.told] == kinds:
                    return
                await asyncio.sleep(0.02)

    def kinds(self) -> list[str | None]:
        return [event.WhichOneof("body") for event in self.said]


@asynccontextmanager
async def node_in(folder: Path) -> AsyncIterator[Node]:
    node = Node(folder)
    following = asyncio.create_task(node.leasing.follow())
    try:
        yield node
    finally:
        await node.trainings.end()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def start(member: int, mode: str = "merge", **body: Any) -> pb.JobOrder:
    told = pb.JobStart(name="letters", mode=mode, model="none", members=2, ticket=TICKET if member == 0 else "", **body)
    return pb.JobOrder(job=JOB, epoch=1, member=member, start=told)


async def test_only_what_somebody_on_this_machine_wants_is_led_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def replace_in_one_file_system(source: Path, place: Path) -> None:
        if source.parent != place.parent:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        replace(source, place)

    monkeypatch.setattr(os, "replace", replace_in_one_file_system)
    async with node_in(tmp_path) as node:
        await node.trainings.command(start(0))
        await node.until(lambda: len(node.said) == 1)
        assert node.said[0].failed.startswith("nobody on the machine of node 'pc' has asked for this job")
        ticket = tickets_of(node.file) / f"{TICKET}.json"
        ticket.parent.mkdir(parents=True)
        ticket.write_text(json.dumps({"no": "ticket"}))
        await node.trainings.command(start(0))
        await node.until(lambda: node.kinds()[1:] == ["failed"])
        assert "the ticket is none" in node.said[1].failed, "a real worker has read it"
        assert not ticket.exists()
        assert node.trainings.kept == [JOB]
        await node.trainings.command(pb.JobOrder(job=JOB, forget=pb.Empty()))
        assert node.trainings.kept == []
        other = start(0)
        other.job = "87654321"
        await node.trainings.command(other)
        await node.until(lambda: len(node.said) == 3)
        assert node.said[2].failed.startswith("nobody on the machine")


async def test_who_offers_data_to_a_job_has_a_ticket_too(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        beside = start(1, mode="chain")
        beside.start.ticket = TICKET
        await node.trainings.command(beside)
        await node.until(lambda: len(node.said) == 1)
        assert node.said[0].failed.startswith("nobody on the machine of node 'pc' has asked for this job")


@pytest.mark.parametrize(
    ("offered", "member", "mode"), [(True, 0, "merge"), (True, 0, "chain"), (True, 1, "merge"), (False, 1, "chain")]
)
async def test_data_is_for_no_other_job_than_its_owner_said(
    offered: bool, member: int, mode: str, tmp_path: Path
) -> None:
    """Whoever knows an offer's name could begin a job by which this machine deals the examples out."""
    async with node_in(tmp_path) as node:
        ticket = tickets_of(node.file) / f"{TICKET}.json"
        ticket.parent.mkdir(parents=True)
        ticket.write_text(json.dumps({"offered": offered}))
        other = start(member, mode=mode)
        other.start.ticket = TICKET
        await node.trainings.command(other)
        await node.until(lambda: len(node.said) == 1)
        assert "has asked for is another job" in node.said[0].failed
        assert ticket.exists(), "it waits for the right one"


async def test_a_worker_has_the_processor_by_a_lease_and_waits_for_it(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        now = time.time()
        node.file.take(Lease(holder=Holder(name="game"), granted_at=now, expires_at=now + 600, device="cpu"), 7200)
        await node.trainings.command(start(1, computes=True))
        await node.until(lambda: node.kinds() == ["waits"])
        assert "'game' has a lease of the processor" in node.said[0].waits
        assert node.trainings.told[0].waits == node.said[0].waits
        node.file.give()
        await node.until(lambda: "failed" in node.kinds())
        await node.until_told([])
        assert node.file.read() is None, "given back as the worker has ended: there is no such model, or no torch"


async def test_of_two_jobs_for_one_device_the_second_says_which_has_it_and_waits(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        async with node.leasing.lent_to("training poems (87654321)", "cpu", lambda why: None):
            await node.trainings.command(start(1, computes=True))
            await node.until(lambda: node.kinds() == ["waits"])
            assert "'training poems (87654321)' has a lease of the processor" in node.said[0].waits
        await node.until(lambda: "failed" in node.kinds())  # its turn has come: there is no such model, or no torch


async def test_a_device_that_somebody_takes_is_lost_and_had_again(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        reasons: list[str] = []
        async with node.leasing.lent_to("training letters", "cpu", reasons.append) as lost:
            lease = node.file.read()
            assert lease is not None
            assert (lease.holder.name, lease.device) == ("training letters", "cpu")
            assert node.leasing.told.state == "leased"
            game = lease.model_copy(update={"holder": Holder(name="game")})
            node.file.give()
            node.file.take(game, 7200)
            async with asyncio.timeout(DEADLINE_S):
                await lost.wait()
        assert node.file.read() == game, "it is left alone"
        assert "'game' has a lease" in reasons[-1]


async def test_a_device_that_is_taken_while_ranks_make_way_is_waited_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node_in(tmp_path) as node:
        busy, reasons = [("session", 0)], []
        monkeypatch.setattr(node.leasing, "_on", lambda device: busy)

        def hear(why: str) -> None:
            reasons.append(why)
            busy.clear()
            node.file.give()  # the game ends, too

        async def lend() -> None:
            async with node.leasing.lent_to("training letters", "cpu", hear):
                lease = node.file.read()
                assert lease is not None
                assert lease.holder.name == "training letters"

        async with asyncio.timeout(DEADLINE_S):
            lending = asyncio.create_task(lend())
            while True:
                if (lease := node.file.read()) is not None:
                    break
                await asyncio.sleep(0.02)
            node.file.give()
            node.file.take(lease.model_copy(update={"holder": Holder(name="game")}), 7200)
            await lending
        assert "'game' has a lease" in reasons[0]


async def test_what_becomes_of_a_worker_between_two_stays_is_told_at_the_next(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        node.trainings.detach()
        await node.trainings.command(start(0))
        await node.until_told(["failed"])
        await node.trainings.command(pb.JobOrder(job=JOB, forget=pb.Empty()))
        assert node.trainings.told == []
