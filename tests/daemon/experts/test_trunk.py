"""Rank workers as the trunk of a session: the text does not show that experts are elsewhere, or that hosts die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
import pytest

from motley.daemon.experts.asked_host import SILENT_S
from motley.daemon.models.cutting.share import Share
from motley.daemon.models.cutting.units import units
from motley.daemon.node.workers.worker import RankWorker
from motley.daemon.weights.cache import ShareCache
from motley.daemon.weights.checkpoints.safetensors_checkpoint import SafetensorsCheckpoint
from motley.daemon.worker.membership import membership, with_hosts
from motley.protocol import mesh_pb2 as pb
from motley.protocol import worker_pb2 as wp
from tests.daemon.experts.expert_server import Leaves, Server, ServerThread, after, expert_of, never
from tests.models.cases import GOLDEN, golden_cases, uneven_shares

CASE = next(case for case in golden_cases() if case.folder == GOLDEN / "qwen2-moe")  # it has a shared expert
assert CASE.model.experts is not None
EXPERTS = CASE.model.experts
EVERY = [(layer, expert) for layer in CASE.model.expert_layers for expert in range(EXPERTS.count)]
DEADLINE_S = 60.0


@dataclass
class Worker:
    """A rank of the trunk, and what it has said."""

    rank: int
    process: RankWorker
    events: list[wp.WorkerEvent] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def listen(self) -> None:
        async for event in self.process.events():
            self.events.append(event)
            self.news.set()

    def send(self, **body: object) -> None:
        self.process.send(wp.WorkerCommand(**body))

    def told(self, body: str) -> list[wp.WorkerEvent]:
        return [event for event in self.events if event.WhichOneof("body") == body]

    async def until(self, enough: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not enough():
                assert not self.told("failed"), self.told("failed")
                self.news.clear()
                await self.news.wait()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.told('listening')[0].listening}"

    @property
    def tokens(self) -> list[int]:
        return [token for event in self.told("tokens") for token in event.tokens.ids]


class Session:
    def __init__(self, workers: Sequence[Worker], servers: Sequence[ServerThread]) -> None:
        self.workers = workers
        self.servers = servers

    def generate(self) -> None:
        prompt, answer = CASE.tokens[: CASE.prompt], len(CASE.tokens) - CASE.prompt
        sampling = pb.Sampling(top_p=1.0, repetition_penalty=1.0)
        decode = wp.Decode(request_id="r", prompt=prompt, sampling=sampling, max_tokens=answer)
        self.workers[0].send(decode=decode)

    async def text(self) -> list[int]:
        """The tokens of the answer, once it is complete."""
        leader = self.workers[0]
        await leader.until(lambda: any(event.tokens.finish for event in leader.told("tokens")))
        return leader.tokens

    def place(self, held: Sequence[Sequence[tuple[int, int]]], alive: Sequence[bool]) -> None:
        addresses = [server.address for server in self.servers]
        placement = pb.Placement(version=1, hosts=map(hosted, held), addresses=addresses, alive=alive)
        for worker in self.workers:
            worker.send(placement=placement)


def hosted(experts: Sequence[tuple[int, int]]) -> pb.HostedExperts:
    layers = sorted({layer for layer, _ in experts})
    sets = [pb.ExpertSet(layer=at, indices=[expert for layer, expert in experts if layer == at]) for at in layers]
    return pb.HostedExperts(sets=sets)


def proto(share: Share) -> pb.Share:
    def stretch(units: range) -> pb.Range:
        return pb.Range(start=units.start, stop=units.stop)

    return pb.Share(
        attention_split=share.attention_split,
        attention=stretch(share.attention),
        mlp=stretch(share.mlp),
        vocabulary=stretch(share.vocabulary),
    )


def assignment(size: int, held: Sequence[Sequence[tuple[int, int]]]) -> pb.Assignment:
    with SafetensorsCheckpoint(CASE.folder) as checkpoint:
        fingerprint = checkpoint.fingerprint()
    return pb.Assignment(
        model=pb.ModelSpec(source=str(CASE.folder), quantisation="fp32", block=32),
        fingerprint=fingerprint,
        size=size,
        shares=map(proto, uneven_shares(units(CASE.model, "fp32", 32), size)),
        context=CASE.model.context,
        cache_blocks=CASE.model.context // 32,
        cache_block_tokens=32,
        sequences=4,
        engine="onnxruntime",
        threads=1,
        secret=bytes(32),
        plain=pb.Empty(),
        wire="fp32",
        hosts=map(hosted, held),
    )


async def started(stack: AsyncExitStack, order: pb.Assignment, ranks: range, folder: Path) -> list[Worker]:
    """Workers that listen, until the stack ends."""
    workers = []
    for rank in ranks:
        process = await RankWorker.start(cache=ShareCache(folder / f"shares {rank}"), host="127.0.0.1")
        stack.push_async_callback(process.stop)
        worker = Worker(rank, process)
        listening = asyncio.create_task(worker.listen())
        stack.callback(listening.cancel)
        worker.send(start=wp.Start(session="s", epoch=1, rank=rank, assignment=order))
        workers.append(worker)
    for worker in workers:
        await worker.until(partial(worker.told, "listening"))
    return workers


async def ready(workers: Sequence[Worker], addresses: Sequence[str]) -> None:
    for worker in workers:
        worker.send(peers=pb.Peers(addresses=addresses))
    for worker in workers:
        await worker.until(partial(worker.told, "ready"))


@asynccontextmanager
async def session(
    size: int, held: Sequence[Sequence[tuple[int, int]]], folder: Path, leaves: Sequence[Leaves]
) -> AsyncIterator[Session]:
    """A trunk of workers, and a host for each of `held` that could compute every expert."""
    order = assignment(size, held)
    async with AsyncExitStack() as stack:
        checkpoint = stack.enter_context(SafetensorsCheckpoint(CASE.folder))
        servers = []
        for number in range(len(held)):
            compute = partial(expert_of, checkpoint)
            options = {"hidden": CASE.model.hidden, "compute": compute, "leaves": leaves[number]}
            server = Server(number, size, len(held), **options)
            agreed = membership(wp.Start(session="s", epoch=1, rank=size + number, assignment=order))
            server.admit(with_hosts(agreed))
            servers.append(stack.enter_context(ServerThread(server)))
        workers = await started(stack, order, range(size), folder)
        await ready(workers, [each.address for each in (*workers, *servers)])
        yield Session(workers, servers)


@pytest.mark.parametrize("size", [1, 2])
async def test_the_text_is_the_models_and_does_not_change_when_a_host_leaves(size: int, tmp_path: Path) -> None:
    async with session(size, [EVERY] * 3, tmp_path, [after(8)] * 3) as mesh:
        leader = mesh.workers[0]
        mesh.generate()
        assert await mesh.text() == CASE.tokens[CASE.prompt :]
        await leader.until(lambda: len(leader.told("experts")) >= 2)
        lost, last = leader.told("experts")[0].experts, leader.told("experts")[-1].experts
        (gone,) = (number for number, host in enumerate(lost.hosts) if "it left the session" in host.lost)
        assert [bool(host.lost) for host in last.hosts] == [number == gone for number in range(3)]
        for worker in mesh.workers[1:]:
            await worker.until(lambda worker=worker: len(worker.told("experts")) >= 2)
        reports = [worker.told("experts")[-1].experts for worker in mesh.workers]
        rows = sum(sum(load.rows) for report in reports for load in report.loads)
        assert rows == (len(CASE.tokens) - 1) * EXPERTS.chosen.axis.size * len(CASE.model.expert_layers)
        timing = leader.told("timing")[-1].timing
        assert timing.wait_s > 0


@pytest.mark.parametrize("size", [1, 2])
async def test_a_step_without_an_expert_waits_for_a_placement(size: int, tmp_path: Path) -> None:
    even = [(layer, expert) for layer, expert in EVERY if expert % 2 == 0]
    odd = [(layer, expert) for layer, expert in EVERY if expert % 2]
    async with session(size, [even, odd], tmp_path, [after(8), never]) as mesh:
        leader = mesh.workers[0]
        mesh.generate()
        await leader.until(lambda: leader.told("starved"))
        assert leader.told("starved")[0].starved.index % 2 == 0
        mesh.place([[], EVERY], [False, True])
        assert await mesh.text() == CASE.tokens[CASE.prompt :]


async def test_a_trunk_that_starves_can_be_released(tmp_path: Path) -> None:
    async with session(1, [EVERY], tmp_path, [after(8)]) as mesh:
        (leader,) = mesh.workers
        mesh.generate()
        await leader.until(lambda: leader.told("starved"))
        leader.send(release=pb.Release())
        async with asyncio.timeout(DEADLINE_S):
            assert await leader.process.exit_status() == 0


@pytest.mark.parametrize("size", [1, 2])
async def test_workers_that_hold_experts_die_and_the_text_goes_on(size: int, tmp_path: Path) -> None:
    """Two of three hosts are killed, one after the other, while tokens are computed."""
    hosts = 3
    order = assignment(size, [EVERY] * hosts)
    async with AsyncExitStack() as stack:
        workers = await started(stack, order, range(size + hosts), tmp_path)
        await ready(workers, [worker.address for worker in workers])
        mesh, leader = Session(workers[:size], []), workers[0]
        mesh.generate()
        for tokens, victim in ((2, workers[size]), (5, workers[size + 1])):
            await leader.until(lambda tokens=tokens: len(leader.tokens) >= tokens)
            psutil.Process(victim.process.pid).kill()
        assert await mesh.text() == CASE.tokens[CASE.prompt :]
        await leader.until(lambda: len(leader.told("experts")) >= 3)
        assert [bool(host.lost) for host in leader.told("experts")[-1].experts.hosts] == [True, True, False]
        stalls = [
            stall
            for worker in mesh.workers
            for event in worker.told("experts")
            for host in event.experts.hosts
            for stall in host.stalls_s
        ]
        assert all(stall < SILENT_S for stall in stalls), "nobody waits for what is known to be lost"
