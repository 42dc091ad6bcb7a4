"""The daemon's conversation with the orchestrator, over one stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import grpc
import grpc.aio

from motley.daemon.machine.gpus import gpus
from motley.daemon.machine.memory import available_memory
from motley.daemon.node.budget import set_budget
from motley.daemon.node.joining.outbox import LIMIT_BYTES, Outbox
from motley.daemon.node.lending import lend
from motley.daemon.node.network.probing import Unreachable, probe_link
from motley.daemon.node.network.relaying import Relays
from motley.daemon.node.settings import NodeSettings
from motley.daemon.node.survey.describe import answer, look
from motley.daemon.node.workers.leasing import Leasing
from motley.daemon.node.workers.ranks import Ranks
from motley.daemon.node.workers.training import Trainings
from motley.daemon.node.workers.worker import prepare_workers
from motley.protocol import mesh_pb2 as pb
from motley.protocol import worker_pb2 as wp
from motley.protocol.address import is_loopback
from motley.protocol.mesh_pb2_grpc import MeshStub
from motley.protocol.pairing import NAME
from motley.protocol.release import release
from motley.protocol.versions import VERSION
from motley.protocol.versions import told as versions
from motley.protocol.wording import human_bytes

logger = logging.getLogger(__name__)

WELCOME_S = 10.0
"""The orchestrator has so many seconds to answer a node that wants to join."""
LEAVE_S = 1.0
"""The orchestrator has so many seconds to take note that a node leaves."""
END: object = grpc.aio.EOF  # type: ignore[attr-defined]
ENDED = {grpc.StatusCode.ABORTED, grpc.StatusCode.DEADLINE_EXCEEDED}
"""The orchestrator's ways to end a stream with a reason; with other codes, the reason is gRPC's."""


class JoinRefused(Exception):
    """The orchestrator does not take this node; trying again will not help."""


class TokenRefused(JoinRefused):
    """The orchestrator does not know what this node has shown, or not any more."""


class NameTaken(JoinRefused):
    """The name is taken: by another node, or by this one a moment ago, which has not been missed yet."""


class OrchestratorLost(Exception):
    """The stream to the orchestrator ended."""


REFUSALS = {
    grpc.StatusCode.ALREADY_EXISTS: NameTaken,
    grpc.StatusCode.UNAUTHENTICATED: TokenRefused,
    grpc.StatusCode.FAILED_PRECONDITION: JoinRefused,
    grpc.StatusCode.INVALID_ARGUMENT: JoinRefused,
}
"""The orchestrator's ways to say that trying again is of no use."""


class AskedToLeave(Exception):
    """Somebody wants this node to leave the mesh."""


class Control:
    """One stay of a node in the mesh, from the stream's first message to its end. Not to be used again."""

    def __init__(
        self, settings: NodeSettings, ranks: Ranks, leasing: Leasing, relays: Relays, trainings: Trainings
    ) -> None:
        """
        Args:
            ranks: that the node holds, also between two stays.
            leasing: of the machine, likewise.
            relays: that it is for others, likewise.
            trainings: that it takes part in, likewise.
        """
        self._trainings = trainings
        self._relays = relays
        self._settings = settings
        self._ranks = ranks
        self._leasing = leasing
        self._outbox = Outbox()
        self._overflow = asyncio.Event()
        """The outbox was full, so something was not said: the conversation must end."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._gpus: list[pb.Gpu] = []
        self._leaves = False
        """It was asked to leave, and has said that it does."""
        self._describing: dict[str, asyncio.Task[None]] = {}
        """By the orchestrator's id: models that are being described."""

    def hello(self, settings: NodeSettings) -> pb.Hello:
        """What this node says first."""
        return pb.Hello(
            protocol=VERSION,
            version=release(),
            name=settings.name,
            address=settings.address,
            capabilities=settings.capabilities,
            held=self._ranks.told,
            failed=self._ranks.failed,
            lease=self._leasing.told,
            jobs=self._trainings.told,
            kept_jobs=self._trainings.kept,
            process=settings.process,
        )

    async def stay(
        self, channel: grpc.aio.Channel, secret: str, joined: Callable[[pb.Welcome, NodeSettings], None]
    ) -> None:
        """Join and do what the orchestrator says until the stream ends.

        Args:
            joined: called with the orchestrator's welcome, and what this node brings.

        Raises:
            TokenRefused: the secret is not, or no longer, valid.
            JoinRefused: wrong version or name.
            AskedToLeave: `motley leave` was run.
            OrchestratorLost: the stream broke or was closed.
        """
        call = MeshStub(channel).Join(  # type: ignore[no-untyped-call]
            metadata=(*versions(), ("motley-token", secret))
        )
        talk: list[asyncio.Task[None]] = []
        patience = WELCOME_S
        try:
            settings = self._settings = _reachable(self._settings, await _admitted(call, patience))
            self._ranks.attach(self, settings)
            self._trainings.attach(self.say, settings)
            hello = self.hello(settings)
            await call.write(pb.NodeMessage(hello=hello))
            first = await _read(call, patience)
            if first is END or first.WhichOneof("body") != "welcome":
                raise OrchestratorLost("the orchestrator answered without a welcome")
            self._ranks.heard(hello.failed)
            joined(first.welcome, settings)
            if settings.capabilities.gpus:
                self._spawn(self._watch_gpus(first.welcome.heartbeat_s))
            patience = first.welcome.silence_s
            listener = asyncio.create_task(self._listen(call, patience))
            sender = asyncio.create_task(self._send(call, first.welcome.heartbeat_s, first.welcome.takes_several))
            overflow = asyncio.create_task(self._watch_outbox())
            talk = [listener, sender, overflow]
            try:
                await asyncio.wait(talk, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait({listener}, timeout=LEAVE_S)  # it knows why, where it is the stream that has ended
            except asyncio.CancelledError:
                # The listener was not cancelled, which would end the stream.
                self.say(leaving=pb.Empty())
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
            if self._leaves:
                raise AskedToLeave from None
            raise _meaning(error) from error
        except asyncio.InvalidStateError as error:  # a write met a stream that had ended
            raise OrchestratorLost("the connection to it broke") from error
        finally:
            call.cancel()
            for task in talk:
                task.cancel()
            self._trainings.detach()
            await self._ranks.detach()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, *talk, return_exceptions=True)

    async def _listen(self, call: Any, patience: float) -> None:
        """Do what the orchestrator says, for as long as it does."""
        while (message := await _read(call, patience)) is not END:
            self._obey(message)
        raise OrchestratorLost("the orchestrator closed the stream")

    async def _send(self, call: Any, heartbeat_s: float, several: bool = False) -> None:
        """Send what is in the outbox, and a heartbeat when it is due, however much is waiting.

        Args:
            several: what waits may go as one message; many cost both sides more than what they say.
        """
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            if loop.time() >= due:
                message = pb.NodeMessage(heartbeat=self.heartbeat())
                due = loop.time() + heartbeat_s
            else:
                try:
                    async with asyncio.timeout_at(due):
                        message = await self._outbox.get()
                    if several:
                        message = self._outbox.with_more(message)
                except TimeoutError:
                    continue
            await call.write(message)

    def heartbeat(self) -> pb.Heartbeat:
        """What is free on this machine now."""
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

    def say(self, **body: Any) -> None:
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
                self._ranks.command(message.rank)
            case "generate":
                self._ranks.answering.begin(message.generate.request_id)
                self._spawn(self._ranks.answering.answer(message.generate))
            case "cancel":
                if describing := self._describing.pop(message.cancel.request_id, None):
                    describing.cancel()
                self._ranks.answering.cancel(message.cancel.request_id)
            case "hold":
                self._ranks.answering.to_worker_of(message.hold.request_id, wp.WorkerCommand(hold=message.hold))
            case "involved":
                self._ranks.involve(message.involved)
            case "probe":
                self._spawn(self._probe(message.probe))
            case "lend":
                self._spawn(self._lend(message.lend))
            case "leave":
                self._leaves = True
                self.say(leaving=pb.Empty())
            case "lease_order":
                self._spawn(self._lease(message.lease_order))
            case "job":
                self._spawn(self._trainings.command(message.job))
            case "relay":
                self._spawn(self._relay(message.relay))
            case "budget_order":
                self._spawn(self._budget(message.budget_order))

    async def _lease(self, order: pb.LeaseOrder) -> None:
        self.say(done=await self._leasing.order(order))

    async def _relay(self, order: pb.Relay) -> None:
        self.say(relayed=await self._relays.open(order, self._settings.address, self._settings.ports))

    async def _budget(self, order: pb.BudgetOrder) -> None:
        capabilities, workers = self._settings.capabilities, self._ranks.processes()
        self.say(budget=await asyncio.to_thread(set_budget, order, capabilities, workers))
        self.say(done=pb.Done(id=order.id))

    async def _probe(self, probe: pb.Probe) -> None:
        """Measure the link to another node, and tell what became of it."""
        loop = asyncio.get_running_loop()

        def listening(address: str) -> None:
            loop.call_soon_threadsafe(lambda: self.say(probed=pb.Probed(id=probe.id, listening=address)))

        try:
            link = await asyncio.to_thread(probe_link, probe, self._settings.address, listening, self._settings.ports)
        except Unreachable as error:
            self.say(probed=pb.Probed(id=probe.id, failure=str(error)))
        except Exception as error:
            logger.exception("measuring a link")
            self.say(probed=pb.Probed(id=probe.id, failure=f"{type(error).__name__}: {error}"))
        else:
            self.say(probed=pb.Probed(id=probe.id, latency_s=link.latency_s, bandwidth=link.bandwidth))

    async def _lend(self, order: pb.Lend) -> None:
        """Lend a model's files until nobody borrows them any more."""
        try:
            async with lend(order, self._settings) as lent:
                self.say(lent=lent)
        except Exception as error:
            logger.exception("lending %s", order.source)
            self.say(lent=pb.Lent(id=order.id, failure=f"{type(error).__name__}: {error}"))

    async def _describe(self, request: pb.Describe) -> None:
        try:
            await asyncio.to_thread(prepare_workers)  # whoever asks this may want a rank here next
            if request.only_here:
                described = await asyncio.to_thread(look, request.model, self._settings.models, self._settings.cache)
            else:
                described = await answer(request, self._settings.models, self._settings.cache)
        except Exception as error:
            logger.exception("describing %s", request.model.source)
            failure = pb.Failure(code="internal_error", message=f"{type(error).__name__}: {error}")
            described = pb.Described(failure=failure)
        finally:
            self._describing.pop(request.request_id, None)
        described.request_id = request.request_id
        self.say(described=described)


async def ask_in(channel: grpc.aio.Channel, secret: str, name: str) -> None:
    """Hear whether the orchestrator would take a node, before what takes the node long.

    Args:
        name: of the node; an older orchestrator looks at it only when the node joins.

    Raises:
        JoinRefused: it would not.
        OrchestratorLost: it does not say.
    """
    told = (*versions(), ("motley-token", secret), (NAME, quote(name, safe="")))
    call = MeshStub(channel).Join(metadata=told)  # type: ignore[no-untyped-call]
    try:
        await _admitted(call, WELCOME_S)
    except grpc.aio.AioRpcError as error:
        raise _meaning(error) from error
    finally:
        call.cancel()


def _meaning(error: grpc.aio.AioRpcError) -> JoinRefused | OrchestratorLost:
    """What the end of a stream means."""
    if refused := REFUSALS.get(error.code()):
        return refused(error.details())
    return OrchestratorLost(error.details() if error.code() in ENDED else "the connection to it broke")


async def _admitted(call: Any, patience: float) -> str:
    """Wait until the orchestrator has taken the token; an address where other machines reach this one, or "": it knows
    none.

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
    return str(metadata["motley-address"])


def _reachable(settings: NodeSettings, known: str) -> NodeSettings:
    """The settings, with an address that the orchestrator knows where the node's is of no use to other machines."""
    return replace(settings, address=known) if known and is_loopback(settings.address) else settings


async def _read(call: Any, patience: float) -> Any:
    """The next message. Not by `asyncio.wait_for`: that can lose a cancellation that meets an error (Python 3.11)."""
    async with asyncio.timeout(patience):
        return await call.read()
