"""Workers that are one expert host together: the bits of one that has all slices, and one fate."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path

import numpy as np
import pytest

from motley.daemon.experts.dispatch import Dispatcher
from motley.daemon.experts.group import Group
from motley.daemon.experts.keys import ExpertKey, keys_of
from motley.daemon.experts.loading import slices_of
from motley.daemon.experts.wire import Answer, Buffer, Call, ExpertWire, Part, Refusal, RefusalCode
from motley.daemon.node.workers.worker import RankWorker
from motley.daemon.weights.cache import ShareCache
from motley.daemon.worker.membership import membership, with_hosts
from motley.plugins.engine import F32
from motley.plugins.mixture import Sent
from motley.protocol import MAX_RANKS
from motley.protocol import mesh_pb2 as pb
from motley.protocol import worker_pb2 as wp
from motley.transport import MAX_MESSAGE, Lost, Messenger, Plain, ProtocolError, WireFormat
from tests.daemon.experts.test_host import (
    CASE,
    DEADLINE_S,
    ROOT,
    SESSION,
    HostProcess,
    TrunkRank,
    a_call,
    assignment,
    close_to,
    every_expert,
    experts,
    right,
    started,
)
from tests.models.cases import Case, expert_cases

HOST = ("motley.daemon.worker.process",)


MIXTRAL = next(case for case in expert_cases() if str(case) == "mixtral")  # its experts have three blocks of int4


def sliced(*hosts: Iterable[ExpertKey], slices: int = 4, case: Case = CASE, **options: str) -> pb.Assignment:
    """Every expert is cut in so many slices."""
    order = assignment(case, hosts, **options)  # type: ignore[arg-type]
    order.expert_slices = slices
    return order


class GroupWorker(HostProcess):
    """One of a group."""

    @property
    def rank(self) -> int:
        return self.order.group.ranks[self.number]


@asynccontextmanager
async def group(
    order: pb.Assignment, cache: Path, slices: Sequence[int], entries: Sequence[Sequence[str]] = ()
) -> AsyncIterator[list[GroupWorker]]:
    """The workers of a group that know each other; the last one leads."""
    async with AsyncExitStack() as stack:
        workers = []
        ranks = [*range(MAX_RANKS, MAX_RANKS + len(slices) - 1), order.size]
        for member in range(len(slices)):
            own = pb.Assignment()
            own.CopyFrom(order)
            own.group.CopyFrom(pb.Group(host=0, member=member, slices=slices, ranks=ranks, secret=bytes(32)))
            worker = GroupWorker(own, member, await start(cache, entries[member] if entries else HOST))
            stack.push_async_callback(end, worker, asyncio.create_task(worker.read()))
            worker.send(start=worker.start(own))
            worker.port = int((await worker.until("listening")).listening)
            workers.append(worker)
        peers = pb.Peers(
            addresses=["127.0.0.1:1"] * (1 + len(order.hosts)), group=[f"127.0.0.1:{worker.port}" for worker in workers]
        )
        for worker in workers:
            worker.send(peers=peers)
        yield workers


async def start(cache: Path, entry: Sequence[str]) -> RankWorker:
    return await RankWorker.start(cache=ShareCache(cache), host="127.0.0.1", entry=entry)


async def end(worker: GroupWorker, reading: asyncio.Task[None]) -> None:
    await worker.worker.stop()
    await reading


async def ready(workers: Sequence[HostProcess]) -> list[pb.HostedExperts]:
    """What all say that they hold, once they do."""
    held = [(await worker.until("hosted")).hosted for worker in workers]
    for worker in workers:
        assert (await worker.until("ready")).ready.share_bytes > 0
    return held


CALLS = [(0, [(3, 1)]), (-1, [(5, 1)]), (0, [(1, 4), (0, 1), (5, 3)]), (-1, [(0, 64)]), (0, [(3, 1), (4, 1)])]
"""The first layer with experts, or the last; its experts, each with its rows."""


@pytest.mark.parametrize(
    ("case", "quantisation", "wire", "limit", "cuts"),
    [
        (CASE, "fp32", "fp32", 1e-5, [(4,), (1, 2, 1)]),
        (MIXTRAL, "int4", "bf16", 0.05, [(3,), (2, 1)]),
    ],
    ids=str,
)
async def test_a_group_answers_with_the_bits_of_one_that_has_all_slices(
    case: Case, quantisation: str, wire: str, limit: float, cuts: list[tuple[int, ...]], tmp_path: Path
) -> None:
    keys = every_expert(case.model)
    assert case.model.hidden == CASE.model.hidden
    order = sliced(keys, slices=sum(cuts[0]), case=case, quantisation=quantisation, wire=wire)
    answers = []
    for cut in cuts:
        alone = started(order, tmp_path / "cache") if len(cut) == 1 else group(order, tmp_path / "cache", cut)
        async with alone as host:
            workers: list[HostProcess] = [*host] if isinstance(host, list) else [host]
            held = await ready(workers)
            assert [len(own.digests) for own in held] == [12 * count for count in cut]
            assert all(list(keys_of(own)) == keys for own in held)
            digests = [
                own.digests[count * at : count * (at + 1)]
                for at in range(12)
                for own, count in zip(held, cut, strict=True)
            ]
            answers.append([digest for own in digests for digest in own])
            with closing(TrunkRank(workers[-1])) as trunk:
                for number, (place, parts) in enumerate(CALLS):
                    layer = keys[place][0]
                    call = a_call(number, layer, parts)
                    answer = trunk.ask(call)
                    assert isinstance(answer, Answer)
                    assert (answer.number, answer.layer, list(answer.parts)) == (number, layer, list(call.parts))
                    assert answer.busy_s > 0
                    assert close_to(answer.rows, right(call, tmp_path, quantisation, case), limit)
                    answers[-1].append(answer.rows.tobytes())
    assert answers == answers[:1] * len(cuts)


async def test_a_long_call_and_what_is_not_held(tmp_path: Path) -> None:
    order = sliced([(0, 0), (0, 1)])
    async with group(order, tmp_path, (2, 2)) as workers:
        await ready(workers)
        with closing(TrunkRank(workers[-1])) as trunk:
            call = a_call(1, 0, [(0, 20_000), (1, 10_000)])  # more than a connection takes at once
            answer = trunk.ask(call)
            assert isinstance(answer, Answer)
            assert close_to(answer.rows, right(call, tmp_path / "right"), 1e-5)
            workers[0].send(host=experts([(0, 0)]))  # the leader has the other still
            assert list(keys_of((await workers[0].until("hosted")).hosted)) == [(0, 0)]
            refusal = trunk.ask(a_call(2, 0, [(0, 1), (1, 1)]))
            assert isinstance(refusal, Refusal)
            assert (refusal.code, refusal.number) == (RefusalCode.NOT_HERE, 2)
            assert isinstance(trunk.ask(a_call(3, 0, [(0, 1)])), Answer)
            for worker in workers:
                worker.send(host=experts([(2, 3)]))
            for worker in workers:
                while list(keys_of((await worker.until("hosted")).hosted)) != [(2, 3)]:
                    pass
            call = a_call(4, 2, [(3, 2)])
            answer = trunk.ask(call)
            assert isinstance(answer, Answer)
            assert close_to(answer.rows, right(call, tmp_path / "right"), 1e-5)


async def test_sums_that_are_longer_than_a_message_go_in_several(tmp_path: Path) -> None:
    """The call's rows are int8, the sums of its slices FP32."""
    order = sliced([(0, 0), (0, 1)], wire="int8")
    rows = MAX_MESSAGE // (4 * CASE.model.hidden) + 1001
    async with group(order, tmp_path, (1, 2, 1)) as workers:
        await ready(workers)
        with closing(TrunkRank(workers[-1])) as trunk:
            call = a_call(1, 0, [(1, 3), (0, rows)])
            answer = trunk.ask(call)
            assert isinstance(answer, Answer)
            assert list(answer.parts) == list(call.parts)
            ends = np.r_[0:103, -100:0]
            call = Call(1, 0, call.reply_to, [Part(1, 3), Part(0, 200)], call.rows[ends])
            assert close_to(answer.rows[ends], right(call, tmp_path / "right"), 0.05)


async def test_a_worker_that_cannot_compute_refuses_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
    faulty = ("tests.daemon.experts.faulty_host", "breaks")
    for entries in ([faulty, HOST], [HOST, faulty]):
        async with group(sliced([(0, 3), (0, 4)]), tmp_path, (3, 1), entries) as workers:
            await ready(workers)
            with closing(TrunkRank(workers[-1])) as trunk:
                call = a_call(1, 0, [(4, 2), (3, 1)])
                call.rows[2, 0] = 2000  # the second expert's
                refusal = trunk.ask(call)
                assert isinstance(refusal, Refusal)
                assert (refusal.code, refusal.reason) == (RefusalCode.FAILED, "a kernel has failed")
                assert isinstance(trunk.ask(a_call(2, 0, [(3, 1), (4, 2)])), Answer)


async def test_a_worker_that_computes_wrongly_is_found_before_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
    entries = [("tests.daemon.experts.faulty_host", "wrong"), HOST]
    async with group(sliced([(0, 0)]), tmp_path, (1, 3), entries) as workers:
        failed = await failure(workers[0])
        assert failed.code == "wrong_results"
        assert "layers.0.mlp.experts.0.slice.0.of.4 of 5 rows differs from the reference" in failed.message


class Says:
    """The mesh of a group of two, in which the other worker says the same to everything."""

    rank, size, deadline_s = 1, 2, DEADLINE_S

    def __init__(self, words: bytes) -> None:
        self._words = words

    def broadcast_message(self, data: Buffer, root: int, deadline_s: float | None) -> Buffer:
        return data

    def flush(self) -> None:
        pass

    def recv(self, source: int, deadline_s: float) -> bytes:
        return self._words


class Ones:
    """Holds an expert's second slice, whose sums are all 1."""

    def sums(self, call: Call) -> list[list[F32]]:
        return [[np.ones((part.rows, 8), np.float32)] for part in call.parts]


@pytest.mark.parametrize(
    ("number", "layer", "part"), [(7, 0, Part(3, 2)), (8, 1, Part(3, 2)), (8, 0, Part(4, 2)), (8, 0, Part(3, 2, 1))]
)
def test_a_worker_that_answers_what_it_was_not_asked_is_named(number: int, layer: int, part: Part) -> None:
    call = Call(8, 0, 1, [Part(3, 2)], np.zeros((2, 8), np.float32))
    wire = ExpertWire(8, WireFormat.FP32)

    def result(words: bytes) -> F32:
        return Group(Says(words), [1, 1]).compute(call, b"the call", Ones())  # type: ignore[arg-type]

    def answer(number: int, layer: int, part: Part) -> bytes:
        return b"".join(wire.write_answer(Answer(number, layer, 0.0, [part], np.ones((2, 8), np.float32))))

    assert (result(answer(8, 0, Part(3, 2))) == 2).all()
    with pytest.raises(ProtocolError, match="rank 0 broke the protocol: it has answered something else than call 8"):
        result(answer(number, layer, part))
    with pytest.raises(ProtocolError, match="rank 0 broke the protocol: it has sent what is no answer"):
        result(b"noise" * 8)


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.soak), 2])
async def test_the_loss_of_a_worker_is_the_loss_of_all(victim: int, tmp_path: Path) -> None:
    """All name it; the trunk loses its link to the host."""
    async with group(sliced([(0, 0)]), tmp_path, (1, 2, 1)) as workers:
        await ready(workers)
        with closing(TrunkRank(workers[-1])) as trunk:
            assert isinstance(trunk.ask(a_call(1, 0, [(0, 1)])), Answer)
            os.kill(workers[victim].worker.pid, 9)
            for worker in workers:
                if worker is not workers[victim]:
                    failed = await failure(worker)
                    assert (failed.code, failed.lost_rank) == ("peer_lost", workers[victim].rank + 1)
            assert isinstance(trunk.event(), Lost)


async def test_a_call_goes_on_elsewhere_when_a_worker_dies_in_it(tmp_path: Path) -> None:
    """A group and a node that is one alone have the same experts; the bits do not tell who has computed them."""
    keys = [(0, index) for index in range(6)]
    order = sliced(keys, keys)
    async with group(order, tmp_path, (1, 2, 1)) as workers, started(order, tmp_path, 1) as other:
        await ready([*workers, other])
        everyone = with_hosts(membership(wp.Start(session=SESSION, epoch=1, assignment=order)))
        told: list[pb.ExpertReport] = []
        dispatcher = Dispatcher(
            0,
            1,
            Messenger(everyone, Plain(), listener=None),
            pb.Placement(
                hosts=order.hosts,
                addresses=[f"127.0.0.1:{host.port}" for host in (workers[-1], other)],
                alive=[True, True],
            ),
            hidden=CASE.model.hidden,
            wire_format=WireFormat.FP32,
            look=lambda _: None,
            tell=lambda **body: told.extend([body["experts"]] if "experts" in body else []),
        )
        with closing(dispatcher):
            dispatcher.meet(lambda: None)
            x = np.random.default_rng(1).standard_normal((4, CASE.model.hidden), np.float32)
            sent = [Sent(index, np.arange(1 + index % 4), np.zeros(1 + index % 4, np.int64)) for index in range(6)]
            results = []
            until = time.monotonic() + DEADLINE_S
            while not dispatcher.report().hosts[0].lost:
                assert time.monotonic() < until
                under_way = dispatcher.experts(0)(x, sent)
                if len(results) == 30:
                    os.kill(workers[0].worker.pid, 9)
                results.append([rows.tobytes() for rows in under_way])
            assert len(results) > 30
            assert results == results[:1] * len(results)
            together, alone = dispatcher.report().hosts
            assert together.rows > 0
            assert (alone.rows > 0, alone.lost) == (True, "")
            assert any(host.lost for report in told for host in report.hosts)


async def failure(worker: GroupWorker) -> pb.Failure:
    async with asyncio.timeout(DEADLINE_S):
        while (event := await worker.events.get()).WhichOneof("body") != "failed":
            assert event.WhichOneof("body") != "ready"
    return event.failed


def test_whose_slices_are_whose() -> None:
    order = pb.Assignment()
    assert slices_of(order) == (range(1), 1)
    order.expert_slices = 8
    assert slices_of(order) == (range(8), 8)
    order.group.CopyFrom(pb.Group(member=1, slices=[3, 4, 1]))
    assert slices_of(order) == (range(3, 7), 8)
