"""The expert host as a process of its own: what it answers, what it holds, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from motley.daemon.experts.holding import hosted as hosted_message
from motley.daemon.experts.keys import ExpertKey, keys_of
from motley.daemon.experts.wire import Answer, Call, ExpertWire, Part, Refusal, RefusalCode
from motley.daemon.models.cutting.units import units
from motley.daemon.models.description.model import Model
from motley.daemon.models.files import OpenModel, open_model
from motley.daemon.models.graph.expert_graph import build_expert_graph
from motley.daemon.node.workers.worker import RankWorker
from motley.daemon.weights.cache import ShareCache
from motley.daemon.weights.checkpoints.safetensors_checkpoint import SafetensorsCheckpoint
from motley.daemon.weights.share_file import write_share
from motley.daemon.weights.spec import SHARE_FILE
from motley.daemon.worker.membership import membership, with_hosts
from motley.plugins.engine import F32, EngineOptions
from motley.plugins.reference.engine import ReferenceExperts
from motley.protocol import mesh_pb2 as pb
from motley.protocol import worker_pb2 as wp
from motley.transport import Connected, Lost, Message, Messenger, Plain, WireFormat
from tests.models.cases import Case, expert_cases, whole_share

CASE = next(case for case in expert_cases() if str(case) == "qwen2-moe")  # layer 1 has no experts
ROOT = Path(__file__).parents[3]
SESSION = "s"
DEADLINE_S = 60.0


def assignment(
    case: Case, hosts: Sequence[Iterable[ExpertKey]], *, trunk: int = 1, quantisation: str = "fp32", wire: str = "fp32"
) -> pb.Assignment:
    share = whole_share(units(case.model, quantisation, 32))
    whole = pb.Share(
        attention_split=1,
        attention=pb.Range(stop=share.attention.stop),
        mlp=pb.Range(stop=share.mlp.stop),
        vocabulary=pb.Range(stop=share.vocabulary.stop),
    )
    with SafetensorsCheckpoint(case.folder) as checkpoint:
        return pb.Assignment(
            model=pb.ModelSpec(source=str(case.folder), quantisation=quantisation, block=32),
            fingerprint=checkpoint.fingerprint(),
            size=trunk,
            shares=[whole] * trunk,
            context=32,
            engine="onnxruntime",
            threads=1,
            secret=bytes(range(32)),
            plain=pb.Empty(),
            wire=wire,
            hosts=[experts(keys) for keys in hosts],
        )


def experts(keys: Iterable[ExpertKey]) -> pb.HostedExperts:
    message = pb.HostedExperts()
    for layer, index in keys:
        message.sets.add(layer=layer, indices=[index])
    return message


@dataclass
class HostProcess:
    """A host, driven as its daemon drives it."""

    order: pb.Assignment
    number: int
    worker: RankWorker
    port: int = 0
    events: asyncio.Queue[wp.WorkerEvent] = field(default_factory=asyncio.Queue)
    seen: list[str] = field(default_factory=list)
    """The bodies of all events so far."""

    @property
    def rank(self) -> int:
        return self.order.size + self.number

    def start(self, order: pb.Assignment) -> wp.Start:
        return wp.Start(session=SESSION, epoch=1, rank=self.rank, assignment=order)

    def send(self, **body: Any) -> None:
        self.worker.send(wp.WorkerCommand(**body))

    async def read(self) -> None:
        async for event in self.worker.events():
            await self.events.put(event)

    async def until(self, body: str) -> wp.WorkerEvent:
        """The next event of this kind; that the host failed is no other."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                event = await self.events.get()
                kind = event.WhichOneof("body")
                assert kind is not None
                self.seen.append(kind)
                if kind == body:
                    return event
                assert kind != "failed", event.failed


@asynccontextmanager
async def started(
    order: pb.Assignment, cache: Path, number: int = 0, entry: Sequence[str] = ("motley.daemon.worker.process",)
) -> AsyncIterator[HostProcess]:
    """A host that listens and knows its peers."""
    worker = await RankWorker.start(cache=ShareCache(cache), host="127.0.0.1", entry=entry)
    host = HostProcess(order, number, worker)
    reading = asyncio.create_task(host.read())
    try:
        host.send(start=host.start(order))
        host.port = int((await host.until("listening")).listening)
        host.send(peers=pb.Peers(addresses=["127.0.0.1:1"] * (order.size + len(order.hosts))))
        yield host
    finally:
        await worker.stop()
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading


class TrunkRank:
    """What a rank of the trunk does towards one host."""

    def __init__(self, host: HostProcess, rank: int = 0) -> None:
        self.host = host
        order = host.order
        start = wp.Start(session=SESSION, epoch=1, rank=rank, assignment=order)
        self.messenger = Messenger(with_hosts(membership(start)), Plain(), listener=None)
        self.wire = ExpertWire(CASE.model.hidden, WireFormat(order.wire))
        self.connect()

    def connect(self) -> None:
        self.messenger.connect(self.host.rank, f"127.0.0.1:{self.host.port}", 30.0)
        assert self.event() == Connected(self.host.rank)

    def event(self) -> Connected | Message | Lost:
        """The next one."""
        until = time.monotonic() + DEADLINE_S
        while time.monotonic() < until:
            for event in self.messenger.receive(1.0):
                return event
        raise TimeoutError

    def answer(self) -> Answer | Refusal:
        event = self.event()
        assert isinstance(event, Message), event
        return self.wire.read_answer(event.data)

    def ask(self, call: Call) -> Answer | Refusal:
        self.send(self.wire.write_call(call))
        return self.answer()

    def send(self, parts: Sequence[Any]) -> None:
        self.messenger.send(self.host.rank, parts)

    def close(self) -> None:
        self.messenger.close()


def a_call(number: int, layer: int, parts: Sequence[tuple[int, int]], reply_to: int = 1) -> Call:
    rows = sum(count for _, count in parts)
    x = np.random.default_rng(number).standard_normal((rows, CASE.model.hidden), np.float32)
    return Call(number, layer, reply_to, [Part(*part) for part in parts], x)


def right(call: Call, folder: Path, quantisation: str = "fp32", case: Case = CASE) -> F32:
    """What the reference makes of a call."""
    with open_model(case.folder) as opened:
        return made_of(opened, call, folder, quantisation)


def made_of(opened: OpenModel, call: Call, folder: Path, quantisation: str = "fp32") -> F32:
    """What the reference makes of a call, by the experts of an open model, which are written to a folder of its own."""
    results, start = [], 0
    cut = units(opened.model, quantisation, 32, opened.stored)
    for index, count, _ in call.parts:
        declared = build_expert_graph(opened.model, cut, call.layer, index)
        file = folder / f"{quantisation} {call.layer} {index}" / SHARE_FILE
        if not file.exists():
            file.parent.mkdir(parents=True)
            write_share(opened.source, declared.weights, declared.share_bytes, file)
        expert = ReferenceExperts(EngineOptions()).open(declared.bind(file))
        results.append(expert(call.rows[start : start + count]))
        start += count
    return np.concatenate(results)


def close_to(got: F32, expected: F32, limit: float) -> bool:
    return float(np.linalg.norm(got - expected)) < limit * float(np.linalg.norm(expected))


def every_expert(model: Model) -> list[ExpertKey]:
    assert model.experts
    return [(layer, index) for layer in model.expert_layers for index in range(model.experts.count)]


@pytest.mark.parametrize(
    ("quantisation", "wire", "limit"),
    [("fp32", "fp32", 1e-5), ("int4", "bf16", 0.05)],
)
async def test_calls_are_answered(quantisation: str, wire: str, limit: float, tmp_path: Path) -> None:
    order = assignment(CASE, [every_expert(CASE.model)], quantisation=quantisation, wire=wire)
    async with started(order, tmp_path / "cache") as host:
        said = (await host.until("hosted")).hosted
        ready = (await host.until("ready")).ready
        assert list(keys_of(said)) == every_expert(CASE.model)
        assert len(set(said.digests)) == len(said.digests) == 12
        assert ready.share_bytes > 0
        assert ready.rss_bytes > 0
        with closing(TrunkRank(host)) as trunk:
            for number, (layer, parts) in enumerate(
                [(0, [(3, 1)]), (2, [(5, 1)]), (0, [(1, 4), (0, 1), (5, 3)]), (2, [(0, 64)]), (0, [(3, 1), (4, 1)])]
            ):
                call = a_call(number, layer, parts)
                answer = trunk.ask(call)
                assert isinstance(answer, Answer)
                assert (answer.number, answer.layer, list(answer.parts)) == (number, layer, list(call.parts))
                assert answer.busy_s > 0
                assert close_to(answer.rows, right(call, tmp_path, quantisation), limit)
        host.send(release=pb.Release())
        async with asyncio.timeout(DEADLINE_S):
            assert await host.worker.exit_status() == 0


async def test_answers_go_to_all_ranks_that_shall_have_them(tmp_path: Path) -> None:
    order = assignment(CASE, [[(0, 0)]], trunk=3)
    async with started(order, tmp_path) as host:
        await host.until("ready")
        ranks = [TrunkRank(host, rank) for rank in range(2)]  # the third is not there
        answer = ranks[0].ask(a_call(1, 0, [(0, 2)], reply_to=0b111))
        other = ranks[1].answer()
        assert isinstance(answer, Answer)
        assert isinstance(other, Answer)
        assert (other.number, other.rows.tobytes()) == (1, answer.rows.tobytes())
        ranks[1].send(ranks[1].wire.write_call(a_call(2, 0, [(0, 1)], reply_to=0b001)))
        assert ranks[0].answer().number == 2
        assert isinstance(ranks[1].ask(a_call(3, 0, [(1, 1)], reply_to=0b011)), Refusal)
        assert ranks[0].ask(a_call(4, 0, [(0, 1)])).number == 4  # a refusal is for who has asked alone
        for rank in ranks:
            rank.close()


async def test_what_is_held_changes_while_it_serves(tmp_path: Path) -> None:
    """An expert comes, another goes, and one comes back: from the cache, with the same digest."""
    order = assignment(CASE, [[(0, 0), (0, 1)], [(0, 2)]])
    async with started(order, tmp_path / "cache") as host, started(order, tmp_path / "cache", 1) as other:
        first = (await host.until("hosted")).hosted
        elsewhere = (await other.until("hosted")).hosted
        await host.until("ready")
        with closing(TrunkRank(host)) as trunk:
            host.send(host=experts([(0, 1), (0, 2), (2, 3)]))
            number, told = 0, pb.HostedExperts()
            while list(keys_of(told)) != [(0, 1), (0, 2), (2, 3)]:  # it may tell in between
                while host.events.empty():
                    number += 1
                    answer = trunk.ask(a_call(number, 0, [(1, 1)]))  # it is held before and after
                    assert isinstance(answer, Answer)
                    await asyncio.sleep(0)
                event = await host.events.get()
                assert event.WhichOneof("body") in ("hosted", "loading")
                if event.WhichOneof("body") == "hosted":
                    told = event.hosted
            assert number
            assert told.digests[0] == first.digests[1]
            assert told.digests[1] == elsewhere.digests[0]
            call = a_call(1000, 2, [(3, 2)])
            answer = trunk.ask(call)
            assert isinstance(answer, Answer)
            assert close_to(answer.rows, right(call, tmp_path), 1e-5)
            gone = trunk.ask(a_call(1001, 0, [(0, 1)]))
            assert isinstance(gone, Refusal)
            assert gone.code is RefusalCode.NOT_HERE
            assert "layer 0 experts [0]" in gone.reason

            shares = {entry.key for entry in ShareCache(tmp_path / "cache").entries()}
            host.send(host=experts([(0, 0)]))
            while list(keys_of(told)) != [(0, 0)]:
                told = (await host.until("hosted")).hosted
            assert list(told.digests) == [first.digests[0]]
            assert isinstance(trunk.ask(a_call(1002, 0, [(0, 1)])), Answer)
            assert {entry.key for entry in ShareCache(tmp_path / "cache").entries()} == shares

            host.send(host=pb.HostedExperts())  # nothing is a set too
            assert not (await host.until("hosted")).hosted.sets
            assert isinstance(trunk.ask(a_call(1003, 0, [(0, 1)])), Refusal)


async def test_orders_that_follow_each_other_closely_end_in_the_last(tmp_path: Path) -> None:
    order = assignment(CASE, [[]])
    async with started(order, tmp_path) as host:
        assert not (await host.until("hosted")).hosted.sets
        assert not (await host.until("ready")).ready.share_bytes
        everything = every_expert(CASE.model)
        for keys in (everything, everything[6:], everything[:2], everything[5:8]):
            host.send(host=experts(keys))
        told = pb.HostedExperts()
        while list(keys_of(told)) != everything[5:8]:
            told = (await host.until("hosted")).hosted
        with closing(TrunkRank(host)) as trunk:
            assert isinstance(trunk.ask(a_call(1, 0, [(5, 1)])), Answer)
            assert isinstance(trunk.ask(a_call(2, 0, [(4, 1)])), Refusal)


async def test_bad_calls(tmp_path: Path) -> None:
    order = assignment(CASE, [[(0, 0), (2, 1)]])
    async with started(order, tmp_path) as host:
        await host.until("ready")
        with closing(TrunkRank(host)) as trunk:
            for parts, layer, missing in (([(5, 1)], 0, [5]), ([(0, 1), (4, 2)], 0, [4]), ([(0, 1)], 1, [0])):
                refusal = trunk.ask(a_call(7, layer, parts))
                assert isinstance(refusal, Refusal)
                assert (refusal.number, refusal.layer, refusal.code) == (7, layer, RefusalCode.NOT_HERE)
                assert refusal.reason == f"this host does not hold layer {layer} experts {missing}"
            refusal = trunk.ask(a_call(8, 0, [(0, 1)], reply_to=0b11))
            assert isinstance(refusal, Refusal)
            assert (refusal.code, refusal.number) == (RefusalCode.BAD_CALL, 8)

            whole = b"".join(bytes(part) for part in trunk.wire.write_call(a_call(9, 0, [(0, 2)])))
            narrow = ExpertWire(8, WireFormat.FP32).write_call(
                Call(9, 0, 1, [Part(0, 1)], np.zeros((1, 8), np.float32))
            )
            answer = b"".join(
                map(bytes, trunk.wire.write_answer(Answer(1, 0, 0.0, [Part(0, 1)], np.zeros((1, 64), "f4"))))
            )
            for garbage in (b"", b"x", whole[:-1], whole + b"x", b"".join(map(bytes, narrow)), answer):
                trunk.send([garbage])
                event = trunk.event()
                assert isinstance(event, Lost)
                assert "it has sent what is no call" in event.reason
                trunk.connect()  # and is heard again
                assert isinstance(trunk.ask(a_call(10, 0, [(0, 1)])), Answer)


async def test_results_that_are_not_finite_are_answered(tmp_path: Path) -> None:
    """Whose rows are broken must see it: the host does not judge."""
    order = assignment(CASE, [[(0, 0)]])
    async with started(order, tmp_path) as host:
        await host.until("ready")
        with closing(TrunkRank(host)) as trunk:
            call = a_call(1, 0, [(0, 1)])
            call.rows[0, 3] = np.nan
            answer = trunk.ask(call)
            assert isinstance(answer, Answer)
            assert np.isnan(answer.rows).all()


async def test_a_lost_rank_may_come_back_and_strangers_disturb_nobody(tmp_path: Path) -> None:
    order = assignment(CASE, [[(0, 0)]], trunk=2)
    async with started(order, tmp_path) as host:
        await host.until("ready")
        with closing(TrunkRank(host, 1)) as steady:
            for number in range(3):
                trunk = TrunkRank(host, 0)
                trunk.send(trunk.wire.write_call(a_call(number, 0, [(0, 256)], reply_to=0b11)))
                trunk.close()  # it does not wait for the answer
                assert steady.answer().number == number
            with socket.create_connection(("127.0.0.1", host.port)) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                assert isinstance(steady.ask(a_call(9, 0, [(0, 1)], reply_to=0b10)), Answer)


async def test_it_ends_with_its_daemon(tmp_path: Path) -> None:
    order = assignment(CASE, [[(0, 0)]])
    async with started(order, tmp_path) as host:
        await host.until("ready")
        with closing(TrunkRank(host)) as trunk:
            host.worker._writer.close()
            async with asyncio.timeout(DEADLINE_S):
                assert await host.worker.exit_status() == 0
            assert isinstance(trunk.event(), Lost)


# ---------------------------------------------------------------- what it refuses


async def failure(
    order: pb.Assignment, cache: Path, entry: Sequence[str] = ("motley.daemon.worker.process",)
) -> pb.Failure:
    async with started(order, cache, entry=entry) as host:
        async with asyncio.timeout(DEADLINE_S):
            while (event := await host.events.get()).WhichOneof("body") != "failed":
                assert event.WhichOneof("body") != "ready"
            assert await host.worker.exit_status() == 1
    return event.failed


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> str:
    """The module of a host with a fault."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
    return "tests.daemon.experts.faulty_host"


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("memory", "out_of_memory", "ran out of memory"),
        ("wrong", "wrong_results", "layers.0.mlp.experts.3 of 5 rows differs from the reference"),
    ],
)
async def test_an_expert_that_does_not_fit_or_is_wrong(
    fault: str, code: str, said: str, faulty: str, tmp_path: Path
) -> None:
    failed = await failure(assignment(CASE, [[(0, 3)]]), tmp_path, (faulty, fault))
    assert failed.code == code
    assert said in failed.message


async def test_a_call_that_cannot_be_computed(faulty: str, tmp_path: Path) -> None:
    """Its rank is told, and others are served."""
    async with started(assignment(CASE, [[(0, 3)]]), tmp_path, entry=(faulty, "breaks")) as host:
        await host.until("ready")
        with closing(TrunkRank(host)) as trunk:
            call = a_call(1, 0, [(3, 1)])
            call.rows[0, 0] = 2000
            refusal = trunk.ask(call)
            assert isinstance(refusal, Refusal)
            assert (refusal.code, refusal.reason) == (RefusalCode.FAILED, "a kernel has failed")
            assert isinstance(trunk.ask(a_call(2, 0, [(3, 1)])), Answer)


async def test_other_files_than_were_planned_for(tmp_path: Path) -> None:
    order = assignment(CASE, [[(0, 0)]])
    order.fingerprint = "0" * 64
    failed = await failure(order, tmp_path)
    assert failed.code == "load_failed"
    assert "not the ones this session was planned for" in failed.message


async def test_an_expert_is_missing_in_the_checkpoint(tmp_path: Path) -> None:
    """Also if this host shall not hold it."""
    folder = shutil.copytree(CASE.folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    missing = "model.layers.2.mlp.experts.4.up_proj.weight"
    del tensors[missing]
    save_file(tensors, folder / "model.safetensors")
    order = assignment(replace(CASE, folder=folder), [[(0, 0)]])
    failed = await failure(order, tmp_path / "cache")
    assert failed.code == "load_failed"
    assert missing in failed.message


async def test_a_checkpoint_that_changes_later(tmp_path: Path) -> None:
    """Found when an expert is wanted that is not in the cache: others of the old files would not fit it."""
    folder = shutil.copytree(CASE.folder, tmp_path / "model")
    order = assignment(replace(CASE, folder=folder), [[(0, 0)]])
    async with started(order, tmp_path / "cache") as host:
        await host.until("ready")
        os.utime(folder / "model.safetensors", (1e9, 1e9))
        host.send(host=experts([(0, 0), (0, 1)]))
        async with asyncio.timeout(DEADLINE_S):
            while (event := await host.events.get()).WhichOneof("body") != "failed":
                pass
        assert event.failed.code == "load_failed"
        assert "changed while it was read" in event.failed.message


def test_what_is_held_is_told_by_layer() -> None:
    assert hosted_message({}) == pb.HostedExperts()
    assert list(keys_of(pb.HostedExperts(sets=[pb.ExpertSet(layer=2, indices=[1, 5]), pb.ExpertSet(layer=4)]))) == [
        (2, 1),
        (2, 5),
    ]
