"""The daemon's conversation with the orchestrator, over one stream, and the workers that it starts for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from motley.daemon.lending.mirror import borrowed_place
from motley.daemon.lending.wire import LendingError
from motley.daemon.machine.gpus import gpus
from motley.daemon.machine.memory import available_memory
from motley.daemon.models.files import load_tokenizer
from motley.daemon.node.address import listening_host
from motley.daemon.node.answering import Answering
from motley.daemon.node.describe import DescribeError, describe_apart, look
from motley.daemon.node.held_rank import HeldRank, RankKey
from motley.daemon.node.lending import lend
from motley.daemon.node.outbox import LIMIT_BYTES, Outbox
from motley.daemon.node.probing import Unreachable, probe_link
from motley.daemon.node.rendering import TemplateApart
from motley.daemon.node.worker import RankWorker, WorkerError
from motley.daemon.text.tokenizer import Tokenizer, TokenizerError
from motley.daemon.weights.cache import ShareCache
from motley.daemon.weights.hub import ModelNotFound, resolve
from motley.protocol import PROTOCOL, VERSION
from motley.protocol import mesh_pb2 as pb
from motley.protocol import worker_pb2 as wp
from motley.protocol.address import is_loopback, join_address
from motley.protocol.mesh_pb2_grpc import MeshStub
from motley.protocol.wording import human_bytes

logger = logging.getLogger(__name__)

WELCOME_S = 10.0
"""The orchestrator has so many seconds to answer a node that wants to join."""
LEAVE_S = 1.0
"""The orchestrator has so many seconds to take note that a node leaves."""
END: object = grpc.aio.EOF  # type: ignore[attr-defined]
REFUSALS = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
}
"""The orchestrator's ways to say that trying again is of no use."""
ENDED = {grpc.StatusCode.ABORTED, grpc.StatusCode.DEADLINE_EXCEEDED}
"""The orchestrator's ways to end a stream with a reason; with other codes, the reason is gRPC's."""


PASSED_ON = {"peers", "placement", "host"}
"""Commands to a rank that go to its worker as they come."""


class JoinRefused(Exception):
    """The orchestrator does not take this node; trying again will not help."""


class NameTaken(JoinRefused):
    """The name is taken: by another node, or by this one a moment ago, which has not been missed yet."""


class OrchestratorLost(Exception):
    """The stream to the orchestrator ended."""


@dataclass(frozen=True)
class NodeSettings:
    """What a node brings to the mesh.

    Attributes:
        address: address under which other nodes reach this one's rank workers; a loopback one only where no other
            machine takes part, or none is known.
        threads: compute threads of each rank.
    """

    name: str
    address: str
    capabilities: pb.Capabilities
    models: Path | None
    cache: ShareCache
    threads: int


RankObserver = Callable[[str, pb.RankEvent], None]
"""Called with what a rank is on this node (`HeldRank.role`), and what the orchestrator is told of it."""


class Control:
    """One stay of a node in the mesh, from the stream's first message to its end. Not to be used again."""

    def __init__(self, settings: NodeSettings, observe: RankObserver) -> None:
        self._settings = settings
        self._observe = observe
        self._outbox = Outbox()
        self._overflow = asyncio.Event()
        """The outbox was full, so something was not said: the conversation must end."""
        self._ranks: dict[RankKey, HeldRank] = {}
        self._answering = Answering(self._ranks, self._say)
        self._tasks: set[asyncio.Task[None]] = set()
        self._gpus: list[pb.Gpu] = []
        self._describing: dict[str, asyncio.Task[None]] = {}
        """By the orchestrator's id: models that are being described."""

    async def stay(self, channel: grpc.aio.Channel, secret: str, joined: Callable[[str, NodeSettings], None]) -> None:
        """Join and do what the orchestrator says until the stream ends.

        Args:
            joined: called with the node's id, and what it brings, once the orchestrator has welcomed it.

        Raises:
            JoinRefused: wrong token, version or name.
            OrchestratorLost: the stream broke or was closed.
        """
        call = MeshStub(channel).Join(  # type: ignore[no-untyped-call]
            metadata=((PROTOCOL, str(VERSION)), ("motley-token", secret))
        )
        talk: list[asyncio.Task[None]] = []
        patience = WELCOME_S
        try:
            settings = self._settings = await _admitted(call, patience, self._settings)
            hello = pb.Hello(
                protocol=VERSION,
                version=version("motley"),
                name=settings.name,
                address=settings.address,
                capabilities=settings.capabilities,
            )
            await call.write(pb.NodeMessage(hello=hello))
            first = await _read(call, patience)
            if first is END or first.WhichOneof("body") != "welcome":
                raise OrchestratorLost("the orchestrator answered without a welcome")
            joined(first.welcome.node_id, settings)
            if settings.capabilities.gpus:
                self._spawn(self._watch_gpus(first.welcome.heartbeat_s))
            patience = first.welcome.silence_s
            listener = asyncio.create_task(self._listen(call, patience))
            sender = asyncio.create_task(self._send(call, first.welcome.heartbeat_s))
            overflow = asyncio.create_task(self._watch_outbox())
            talk = [listener, sender, overflow]
            try:
                await asyncio.wait(talk, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait({listener}, timeout=LEAVE_S)  # it knows why, where it is the stream that has ended
            except asyncio.CancelledError:
                # The listener was not cancelled, which would end the stream.
                self._say(leaving=pb.Empty())
                await asyncio.wait({listener}, timeout=LEAVE_S)
                raise
            if not listener.done():
                try:
                    await (overflow if overflow.done() else sender)
                except (OrchestratorLost, grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    raise
                except Exception as error:
                    logger.exception("cannot send to the orchestrator")
                    told = f"{type(error).__name__}: {error}"
                    raise OrchestratorLost(f"sending to the orchestrator failed: {told}") from error
            await listener
        except TimeoutError:
            raise OrchestratorLost(f"the orchestrator said nothing for {patience:.0f} s") from None
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.ALREADY_EXISTS:
                raise NameTaken(error.details()) from error
            if error.code() in REFUSALS:
                raise JoinRefused(error.details()) from error
            why = error.details() if error.code() in ENDED else "its connection is gone"
            raise OrchestratorLost(f"the stream to the orchestrator broke: {why}") from error
        except asyncio.InvalidStateError as error:  # a write met a stream that had ended
            raise OrchestratorLost("the stream to the orchestrator broke") from error
        finally:
            call.cancel()
            for task in talk:
                task.cancel()
            await asyncio.gather(*map(self._end, list(self._ranks.values())))
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, *talk, return_exceptions=True)

    async def _listen(self, call: Any, patience: float) -> None:
        """Do what the orchestrator says, for as long as it does."""
        while (message := await _read(call, patience)) is not END:
            self._obey(message)
        raise OrchestratorLost("the orchestrator closed the stream")

    async def _send(self, call: Any, heartbeat_s: float) -> None:
        """Send what is in the outbox, and a heartbeat when it is due, however much is waiting."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            if loop.time() >= due:
                message = pb.NodeMessage(heartbeat=self._heartbeat())
                due = loop.time() + heartbeat_s
            else:
                try:
                    async with asyncio.timeout_at(due):
                        message = await self._outbox.get()
                except TimeoutError:
                    continue
            await call.write(message)

    def _heartbeat(self) -> pb.Heartbeat:
        return pb.Heartbeat(memory_available_bytes=available_memory(), gpus=self._gpus)

    async def _watch_outbox(self) -> None:
        """
        Raises:
            OrchestratorLost: the outbox is full, when it is.
        """
        await self._overflow.wait()
        waiting = human_bytes(LIMIT_BYTES)
        raise OrchestratorLost(f"the orchestrator, or the network to it, is too slow: {waiting} wait to be sent to it")

    async def _watch_gpus(self, every_s: float) -> None:
        """Look now and then what is free on the GPUs, beside the heartbeats, as a driver may take its time."""
        while True:
            self._gpus = await asyncio.to_thread(gpus)
            await asyncio.sleep(every_s)

    def _say(self, **body: Any) -> None:
        """Send the orchestrator a message: a field of `NodeMessage`, by name. If too many wait, it is lost by that."""
        try:
            self._outbox.put_nowait(pb.NodeMessage(**body))
        except asyncio.QueueFull:
            self._overflow.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something beside the conversation, for as long as that lasts."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _obey(self, message: pb.OrchestratorMessage) -> None:
        match message.WhichOneof("body"):
            case "describe":
                self._describing[message.describe.request_id] = self._spawn(self._describe(message.describe))
            case "rank":
                self._command(message.rank)
            case "generate":
                self._answering.begin(message.generate.request_id)
                self._spawn(self._answering.answer(message.generate))
            case "cancel":
                if describing := self._describing.pop(message.cancel.request_id, None):
                    describing.cancel()
                self._answering.cancel(message.cancel.request_id)
            case "hold":
                self._answering.to_worker_of(message.hold.request_id, wp.WorkerCommand(hold=message.hold))
            case "probe":
                self._spawn(self._probe(message.probe))
            case "lend":
                self._spawn(self._lend(message.lend))

    async def _probe(self, probe: pb.Probe) -> None:
        """Measure the link to another node, and tell what became of it."""
        loop = asyncio.get_running_loop()

        def listening(address: str) -> None:
            loop.call_soon_threadsafe(lambda: self._say(probed=pb.Probed(id=probe.id, listening=address)))

        try:
            link = await asyncio.to_thread(probe_link, probe, self._settings.address, listening)
        except Unreachable as error:
            self._say(probed=pb.Probed(id=probe.id, failure=str(error)))
        except Exception as error:
            logger.exception("measuring a link")
            self._say(probed=pb.Probed(id=probe.id, failure=f"{type(error).__name__}: {error}"))
        else:
            self._say(probed=pb.Probed(id=probe.id, latency_s=link.latency_s, bandwidth=link.bandwidth))

    async def _lend(self, order: pb.Lend) -> None:
        """Lend a model's files until nobody borrows them any more."""
        settings = self._settings
        try:
            host = listening_host(settings.address)
            async with lend(order, settings.models, settings.address, host) as lent:
                self._say(lent=lent)
        except Exception as error:
            logger.exception("lending %s", order.source)
            self._say(lent=pb.Lent(id=order.id, failure=f"{type(error).__name__}: {error}"))

    async def _describe(self, request: pb.Describe) -> None:
        try:
            if request.only_here:
                described = await asyncio.to_thread(look, request.model, self._settings.models)
            else:
                described = await describe_apart(request.model, self._settings.models, request.tokens_of)
        except DescribeError as error:
            described = pb.Described(failure=pb.Failure(code=error.code, message=str(error)))
        except Exception as error:
            logger.exception("describing %s", request.model.source)
            failure = pb.Failure(code="internal_error", message=f"{type(error).__name__}: {error}")
            described = pb.Described(failure=failure)
        finally:
            self._describing.pop(request.request_id, None)
        described.request_id = request.request_id
        self._say(described=described)

    # ------------------------------------------------------------ ranks

    def _command(self, command: pb.RankCommand) -> None:
        key = (command.session, command.rank)
        body = command.WhichOneof("body")
        if body == "assign" and key in self._ranks and self._ranks[key].command.epoch == command.epoch:
            message = f"node {self._settings.name!r} holds rank {command.rank} of session {command.session} already"
            failure = pb.Failure(code="internal_error", message=message)
            self._say(rank=pb.RankEvent(session=key[0], epoch=command.epoch, rank=key[1], failed=failure))
        elif body == "assign":
            before = self._ranks.get(key)
            self._ranks[key] = HeldRank(command)
            self._spawn(self._hold(key, self._ranks[key], before))
        elif (rank := self._ranks.get(key)) is None or rank.command.epoch != command.epoch:
            if body == "release":
                gone = pb.RankEvent(session=key[0], epoch=command.epoch, rank=key[1], released=pb.Empty())
                self._say(rank=gone)
        elif body == "release":
            self._spawn(self._end(rank))
        elif rank.worker is not None and body in PASSED_ON:
            rank.worker.send(wp.WorkerCommand(**{body: getattr(command, body)}))

    async def _hold(self, key: RankKey, rank: HeldRank, before: HeldRank | None) -> None:
        """See a rank's worker through its life, then report its end, whatever ended it.

        Args:
            before: the same rank in an epoch before, which must end first.
        """
        command = rank.command
        try:
            if before is not None:
                await self._end(before)
            failure = await self._serve(rank)
        except (WorkerError, TokenizerError, ModelNotFound, LendingError) as error:
            failure = pb.Failure(code="load_failed", message=str(error))
        except Exception as error:
            logger.exception("rank %d of session %s", command.rank, command.session)
            failure = pb.Failure(code="internal_error", message=f"{type(error).__name__}: {error}")
        finally:
            asked = rank.releasing
            if rank.template is not None:
                await asyncio.to_thread(rank.template.close)
            if rank.worker is not None:
                await rank.worker.stop()
            if self._ranks.get(key) is rank:
                del self._ranks[key]
        self._say(heartbeat=self._heartbeat())  # what is planned next counts on the memory that is free now
        if failure is None or asked:
            self._rank_event(rank, rank.event(released=pb.Empty()))
        else:
            self._rank_event(rank, rank.event(failed=failure))  # the orchestrator asks another rank 0 for its requests

    async def _serve(self, rank: HeldRank) -> pb.Failure | None:
        """Start a rank's worker and pass on what it says until it is gone; why it ended, if it was not asked to."""
        settings, command = self._settings, rank.command
        worker = rank.worker = await RankWorker.start(
            cache=settings.cache,
            models=settings.models,
            host=listening_host(settings.address),
            threads=settings.threads,
        )
        if rank.releasing:
            return None
        start = wp.Start(session=command.session, epoch=command.epoch, rank=command.rank, assignment=command.assign)
        worker.send(wp.WorkerCommand(start=start))
        async for event in worker.events():
            match event.WhichOneof("body"):
                case None:
                    pass
                case "tokens":
                    self._answering.on_tokens(rank, event.tokens)
                case "failed":
                    return event.failed
                case "released":
                    return None
                case "listening":
                    self._rank_event(rank, rank.event(listening=join_address(settings.address, event.listening)))
                case body:
                    if body == "ready" and command.rank == 0:
                        tokenizer = await asyncio.to_thread(_load_tokenizer, command.assign, settings)
                        if tokenizer.template is not None:
                            rank.template = await asyncio.to_thread(TemplateApart, tokenizer.template)
                            tokenizer.template = rank.template
                        rank.tokenizer = tokenizer
                    self._rank_event(rank, rank.event(**{body: getattr(event, body)}))
        await worker.stop()  # it hung up: nothing more can come
        status = await worker.exit_status()
        return pb.Failure(code="worker_died", message=_how_died(status))

    async def _end(self, rank: HeldRank) -> None:
        """Have a rank's worker end; `_hold` reports it."""
        rank.releasing = True
        if rank.worker is not None:
            await rank.worker.stop()

    def _rank_event(self, rank: HeldRank, event: pb.RankEvent) -> None:
        self._observe(rank.role, event)
        self._say(rank=event)


async def _admitted(call: Any, patience: float, settings: NodeSettings) -> NodeSettings:
    """Wait until the orchestrator has taken the token; the settings, with an address that other machines can reach
    where the orchestrator knows one and the node does not.

    Raises:
        grpc.aio.AioRpcError: it has not.
        OrchestratorLost: it ended the stream without a word, or says nothing, as one does that knows no tokens in
            metadata and waits for a Hello.
    """
    try:
        async with asyncio.timeout(patience):
            metadata = dict(await call.initial_metadata())
    except TimeoutError:
        why = f"the orchestrator has not taken the join token within {patience:.0f} s"
        raise OrchestratorLost(f"{why}; if an older motley runs there, install the same on both") from None
    if "motley-address" not in metadata:
        await _read(call, patience)
        raise OrchestratorLost("the orchestrator answered without a welcome")
    known = str(metadata["motley-address"])
    return replace(settings, address=known) if known and is_loopback(settings.address) else settings


async def _read(call: Any, patience: float) -> Any:
    """The next message. Not by `asyncio.wait_for`: that can lose a cancellation that meets an error (Python 3.11)."""
    async with asyncio.timeout(patience):
        return await call.read()


def _load_tokenizer(assigned: pb.Assignment, settings: NodeSettings) -> Tokenizer:
    """The tokenizer of a model whose rank 0 is here: that may have borrowed it."""
    if assigned.HasField("loan"):
        return load_tokenizer(borrowed_place(settings.cache.folder, assigned.loan.files))
    return load_tokenizer(resolve(assigned.model.source, settings.models))


def _how_died(status: int) -> str:
    how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
    return f"its worker process {how}"
