"""What a node makes of requests to the sessions that it leads: the trouble of one is nobody else's."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any, cast

import pytest

from motley.daemon.lease.file import LeaseFile
from motley.daemon.node.answering import rendering
from motley.daemon.node.answering.rendering import TemplateApart
from motley.daemon.node.joining.control import Control
from motley.daemon.node.network.relaying import Relays
from motley.daemon.node.settings import NodeSettings
from motley.daemon.node.workers.held_rank import HeldRank
from motley.daemon.node.workers.leasing import Leasing
from motley.daemon.node.workers.ranks import Ranks
from motley.daemon.node.workers.training import Trainings
from motley.daemon.node.workers.worker import RankWorker
from motley.daemon.text.templates import ChatTemplate
from motley.daemon.text.tokenizer import Tokenizer
from motley.daemon.weights.cache import ShareCache
from motley.orchestrator.trust.limits import HELLO_BYTES
from motley.protocol import mesh_pb2 as pb
from motley.protocol import worker_pb2 as wp
from tests.daemon.node.test_rendering import ENDLESS
from tests.daemon.text.made_tokenizers import bytes_tokenizer

SAMPLING = pb.Sampling(top_p=1.0, repetition_penalty=1.0)


class Panic(BaseException):
    """As the tokenizer library's: no `Exception`."""


Panic.__name__ = "PanicException"


class Backend:
    """A tokenizer that fails over one token."""

    def __init__(self, error: BaseException) -> None:
        self._backend = bytes_tokenizer()
        self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> Any:
        if 66 in ids:
            raise self._error
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)


class Worker:
    """Takes what the worker of rank 0 is told."""

    def __init__(self) -> None:
        self.told: list[wp.WorkerCommand] = []

    def send(self, command: wp.WorkerCommand) -> None:
        self.told.append(command)


class Node:
    """A node that leads some sessions, and what the orchestrator hears of it."""

    def __init__(self, folder: Path, **tokenizers: Tokenizer) -> None:
        settings = NodeSettings("pc", "127.0.0.1", pb.Capabilities(), None, ShareCache(folder), 1)
        self.ranks = Ranks(settings, lambda role, event: None)
        leasing = Leasing("pc", self.ranks, LeaseFile())
        trainings = Trainings(settings, leasing, Path("tickets"))
        self.control = Control(settings, self.ranks, leasing, Relays(), trainings)
        self.ranks.attach(self.control, settings)
        self.workers: dict[str, Worker] = {}
        for session, tokenizer in tokenizers.items():
            worker = self.workers[session] = Worker()
            command = pb.RankCommand(session=session, assign=pb.Assignment(context=1000, size=1))
            rank = HeldRank(command, worker=cast(RankWorker, worker), tokenizer=tokenizer)
            self.ranks._held[session, 0] = rank

    async def generate(self, request_id: str, session: str, content: str) -> None:
        messages = json.dumps([{"role": "user", "content": content}])
        request = pb.Generate(request_id=request_id, session=session, messages_json=messages, sampling=SAMPLING)
        self.ranks.answering.begin(request.request_id)
        await self.ranks.answering.answer(request)

    def tokens(self, session: str, request_id: str, *ids: int, finish: str = "") -> None:
        self.ranks.answering.on_tokens(
            self.ranks._held[session, 0], wp.Tokens(request_id=request_id, ids=ids, finish=finish)
        )

    def heard(self) -> list[pb.Delta]:
        """What the orchestrator was told of requests since the last time."""
        outbox = self.control._outbox
        return [outbox.get_nowait().delta for _ in range(outbox.qsize())]


def made_tokenizer(backend: Any, template: str) -> Tokenizer:
    return Tokenizer(backend, vocabulary=259, template=ChatTemplate(template))


async def test_a_request_that_is_cancelled_at_once_is_not_answered(tmp_path: Path) -> None:
    """The orchestrator's two messages have come together."""
    node = Node(tmp_path, s=made_tokenizer(bytes_tokenizer(), "{{ messages[0].content }}"))
    request = pb.Generate(request_id="short-lived", session="s", prompt="ROMEO:", sampling=SAMPLING)
    node.control._obey(pb.OrchestratorMessage(generate=request))
    node.control._obey(pb.OrchestratorMessage(cancel=pb.Cancel(request_id="short-lived")))
    await asyncio.gather(*node.control._tasks)
    assert [(delta.request_id, delta.finish) for delta in node.heard()] == [("short-lived", "cancelled")]
    assert node.workers["s"].told == []


async def test_the_worker_is_told_that_a_request_is_held_and_goes_on(tmp_path: Path) -> None:
    node = Node(tmp_path, s=made_tokenizer(bytes_tokenizer(), "{{ messages[0].content }}"))
    await node.generate("slow", "s", "a")
    for request_id, held in (("slow", True), ("unknown", True), ("slow", False)):
        node.control._obey(pb.OrchestratorMessage(hold=pb.Hold(request_id=request_id, held=held)))
    _, first, second = node.workers["s"].told
    assert (first.hold, second.hold) == (pb.Hold(request_id="slow", held=True), pb.Hold(request_id="slow"))


@pytest.mark.parametrize("error", [ValueError("no such byte"), Panic("no such byte")])
async def test_tokens_that_cannot_become_text_end_their_request_alone(error: BaseException, tmp_path: Path) -> None:
    node = Node(tmp_path, s=made_tokenizer(Backend(error), "{{ messages[0].content }}"))
    await node.generate("good", "s", "a")
    await node.generate("bad", "s", "a")
    node.tokens("s", "good", 70)
    node.tokens("s", "bad", 66)
    node.tokens("s", "bad", 70)
    node.tokens("s", "good", 70, finish="length")
    first, failed, last = node.heard()
    assert (first.request_id, first.finish, last.request_id, last.finish) == ("good", "", "good", "length")
    assert (failed.request_id, failed.finish, failed.failure.code) == ("bad", "error", "internal_error")
    assert "cannot be turned into text" in failed.failure.message
    assert "no such byte" in failed.failure.message
    told = node.workers["s"].told
    assert [command.WhichOneof("body") for command in told] == ["decode", "decode", "cancel"]
    assert told[-1].cancel == "bad"


async def test_a_template_that_never_ends_holds_no_other_session_and_its_own_for_a_while_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = made_tokenizer(bytes_tokenizer(), ENDLESS)
    monkeypatch.setattr(rendering, "RENDER_S", 3.0)
    template = hanging.template = TemplateApart(ChatTemplate(ENDLESS))
    node = Node(tmp_path, a=hanging, b=made_tokenizer(bytes_tokenizer(), "{{ messages[0].content }}"))
    try:
        async with asyncio.timeout(60):
            hung = asyncio.create_task(node.generate("hung", "a", "hang"))
            after = asyncio.create_task(node.generate("after", "a", "fine"))
            await asyncio.sleep(0)
            await node.generate("other", "b", "fine")
            assert not hung.done()
            assert [command.decode.request_id for command in node.workers["b"].told] == ["other"]
            await asyncio.gather(hung, after)
    finally:
        await asyncio.to_thread(template.close)
    (failed,) = node.heard()
    assert (failed.request_id, failed.failure.code, failed.failure.param) == ("hung", "invalid_request", "messages")
    assert "the model's chat template has not ended within 3 s" in failed.failure.message
    assert [command.decode.request_id for command in node.workers["a"].told] == ["after"]


async def test_a_rank_that_does_not_lead_tells_by_name_what_it_computes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "motley")
    node = Node(tmp_path, s=made_tokenizer(bytes_tokenizer(), ""))
    rank = node.ranks._held["s", 1] = HeldRank(pb.RankCommand(session="s", rank=1))
    for name, ended in (("r-1", False), ("r-1", False), ("r-2", False), ("r-1", True), ("r-2", True)):
        involved = pb.Involved(name=name, session="s", rank=1, ended=ended)
        node.control._obey(pb.OrchestratorMessage(involved=involved))
    node.control._obey(pb.OrchestratorMessage(involved=pb.Involved(name="r-3", session="gone", rank=1)))
    assert rank.involved == {"r-1": 1}  # one of two answers has ended
    about = [(vars(record)["request"], vars(record)["rank"], record.getMessage()) for record in caplog.records]
    assert about[0] == ("r-1", 1, "request r-1: rank 1 of session s computes its part of it")
    assert about[-1] == ("r-2", 1, "request r-2: rank 1 of session s has ended with it")
    assert len(about) == 5


def test_failures_are_told_again_until_they_are_heard(tmp_path: Path) -> None:
    """A stay may have ended before that is noticed; and what a node says first is short enough to be read."""
    settings = NodeSettings("pc", "127.0.0.1", pb.Capabilities(), None, ShareCache(tmp_path), 1)
    ranks = Ranks(settings, lambda role, event: None)
    leasing = Leasing("pc", ranks, LeaseFile(tmp_path / "lease.json"))
    control = Control(settings, ranks, leasing, Relays(), Trainings(settings, leasing, tmp_path / "tickets"))
    rank = HeldRank(pb.RankCommand(session="s", epoch=2, rank=1, assign=pb.Assignment()))
    ranks._rank_event(rank, rank.event(ready=pb.Ready()))
    for number in range(200):
        failure = pb.Failure(code="peer_lost", lost_rank=number, message=5000 * "x")
        ranks._rank_event(rank, rank.event(failed=failure))
    hello = control.hello(settings)
    assert hello.failed[-1].failed.lost_rank == 199
    assert hello.ByteSize() < HELLO_BYTES / 4
    later = rank.event(failed=pb.Failure(code="peer_lost", lost_rank=7))
    ranks._rank_event(rank, later)
    ranks.heard(hello.failed)
    assert [*control.hello(settings).failed] == [later]
