"""The orchestrator's end of the control plane: one gRPC stream per node, for as long as the node is in the mesh."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol
from urllib.parse import unquote

import grpc
import grpc.aio

from motley.orchestrator.identity import Identity
from motley.orchestrator.limits import HELLO_BYTES
from motley.orchestrator.nodes import (
    CONNECTION_ENDED,
    HEARTBEAT_S,
    LEFT,
    SILENCE_S,
    HelloError,
    NameTakenError,
    Node,
    NodeTable,
    what_became,
)
from motley.protocol import PROTOCOL, VERSION
from motley.protocol.address import is_loopback
from motley.protocol.mesh_pb2 import Empty, HeldRank, Hello, NodeMessage, OrchestratorMessage, Welcome
from motley.protocol.mesh_pb2_grpc import MeshServicer

STOPS = "the orchestrator stops"
HELLO_S = 10.0
"""A node that was let in says Hello this soon."""
OUTBOX = 10_000
"""So many messages may wait for a node to read them; with more it is lost."""

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[NodeMessage, OrchestratorMessage]


class Listener(Protocol):
    """What is called with everything that nodes say."""

    def on_message(self, node: Node, message: NodeMessage) -> None:
        """A node says something that is not about its being there."""

    def on_joined(self, node: Node, held: Sequence[HeldRank]) -> None:
        """A node is there, with ranks that it has kept since it was there before."""

    def on_offer(self, node: Node) -> None:
        """What ranks may have on a node has changed: its devices, or how much memory."""

    def on_lost(self, node: Node) -> None:
        """A node is gone, for the reason in `node.lost`."""


class _Refusal(NamedTuple):
    """Why a node may not join. It is handed on and not raised: a traceback would keep the Hello in memory."""

    code: grpc.StatusCode
    why: str


@dataclass
class _Stream:
    """The stream to one node, for as long as that is in the mesh."""

    outbox: asyncio.Queue[OrchestratorMessage] = field(default_factory=lambda: asyncio.Queue(OUTBOX))
    leash: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    reason: str = CONNECTION_ENDED
    """Why the node is lost, once it is."""

    def end(self, reason: str) -> None:
        """End the stream, for this reason unless it had one already."""
        if not self.leash.expired():
            self.reason = reason
            self.leash.reschedule(0)


class Control(MeshServicer):
    """Accepts nodes and keeps a stream to each; `listener` must be set before the server starts."""

    listener: Listener

    def __init__(self, identity: Identity, nodes: NodeTable, address_here: Callable[[], str]) -> None:
        """
        Args:
            address_here: the address under which other machines may reach nodes on this one, or "".
        """
        self._identity = identity
        self._nodes = nodes
        self._address_here = address_here
        self._streams: dict[str, _Stream] = {}

    def send(self, node_id: str, message: OrchestratorMessage) -> None:
        """Queue a message; lost silently if the node is (its loss is reported by itself)."""
        if stream := self._streams.get(node_id):
            try:
                stream.outbox.put_nowait(message)
            except asyncio.QueueFull:
                stream.end(f"it has not read {OUTBOX} messages")

    def drop_silent(self) -> None:
        """End the streams of nodes that show no life."""
        for node in self._nodes.overdue():
            self._streams[node.id].end(f"no heartbeat for {SILENCE_S:.0f} s")

    def drop_all(self) -> None:
        """End all streams."""
        for stream in self._streams.values():
            stream.end(STOPS)

    async def Join(self, _: AsyncIterator[NodeMessage], context: Context) -> None:
        """The conversation with one node, from its token until it ends. Nothing is read of one without a token.

        Messages are read from `context`: gRPC's iterator outlives the stream, and keeps the last one.
        """
        admitted = await self._admit(context)
        if isinstance(admitted, _Refusal):
            _log.warning("refused %s: %s", _address_of(context), admitted.why)
            _end(context, admitted.code, admitted.why)
            return
        node, held = admitted
        _log.info("node %s joined (%s)", node.name, node.address, extra={"node": node.name})
        stream = self._streams[node.id] = _Stream()
        self.send(
            node.id, OrchestratorMessage(welcome=Welcome(node_id=node.id, heartbeat_s=HEARTBEAT_S, silence_s=SILENCE_S))
        )
        self.listener.on_joined(node, held)
        writer = asyncio.create_task(_write(context, stream))
        try:
            with contextlib.suppress(TimeoutError):
                async with stream.leash:
                    await self._read(context, node, stream)
        finally:
            writer.cancel()
            del self._streams[node.id]
            self._nodes.lose(node.id, stream.reason)
            level = logging.DEBUG if node.lost == STOPS else logging.INFO if node.left else logging.WARNING
            _log.log(level, "node %s %s", node.name, what_became(node.lost), extra={"node": node.name})
            self.listener.on_lost(node)
        _end(context, grpc.StatusCode.ABORTED, f"this node is out of the mesh: {stream.reason}")

    async def _admit(self, context: Context) -> tuple[Node, Sequence[HeldRank]] | _Refusal:
        """Have a node show its token, then say Hello, and register it; with it, what it says that it holds."""
        told = dict(context.invocation_metadata() or ())
        if wrong := _wrong_version(str(told.get(PROTOCOL, ""))):
            return _Refusal(grpc.StatusCode.FAILED_PRECONDITION, wrong)
        token = told.get("motley-token", "")
        if not isinstance(token, str) or not self._identity.admits(token):
            why = "wrong join token; use the one that `motley up` prints"
            return _Refusal(grpc.StatusCode.UNAUTHENTICATED, why)
        from_here = is_loopback(_address_of(context).rpartition(":")[0].strip("[]"))
        here = self._address_here() if from_here else ""
        await context.send_initial_metadata([("motley-address", here)])
        hello = await _hello(context)
        if isinstance(hello, _Refusal):
            return hello
        if is_loopback(hello.address) and not from_here:
            why = f"no other machine can reach this node at {hello.address}; give --advertise another address of it"
            return _Refusal(grpc.StatusCode.INVALID_ARGUMENT, why)
        try:
            return self._nodes.join(hello), hello.held
        except HelloError as error:
            return _Refusal(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except NameTakenError as error:
            return _Refusal(grpc.StatusCode.ALREADY_EXISTS, str(error))

    async def _read(self, context: Context, node: Node, stream: _Stream) -> None:
        """Pass on what the node says, until the stream ends."""
        while (message := await _next(context)) is not None:
            self._nodes.show_life(node.id)
            match message.WhichOneof("body"):
                case "hello":
                    stream.end("it said Hello twice")
                case "leaving":
                    stream.end(LEFT)
                case "heartbeat":
                    beat = message.heartbeat
                    self._nodes.heartbeat(node.id, beat.memory_available_bytes, beat.gpus)
                    self.send(node.id, OrchestratorMessage(beat=Empty()))
                case "lease":
                    node.lease = message.lease
                    self.listener.on_offer(node)
                case "budget":
                    self._nodes.offer(node.id, message.budget)
                    self.listener.on_offer(node)
                case _:
                    self.listener.on_message(node, message)


async def _next(context: Context) -> NodeMessage | None:
    """What a node says next; None when it has ended the stream."""
    message = await context.read()
    return message if isinstance(message, NodeMessage) else None


async def _hello(context: Context) -> Hello | _Refusal:
    try:
        async with asyncio.timeout(HELLO_S):
            first = await _next(context)
    except TimeoutError:
        return _Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, f"no Hello within {HELLO_S:.0f} s")
    if first is None or first.WhichOneof("body") != "hello":
        return _Refusal(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be a Hello")
    if first.ByteSize() > HELLO_BYTES:
        why = f"the Hello is {first.ByteSize()} bytes long; no machine needs more than {HELLO_BYTES}"
        return _Refusal(grpc.StatusCode.INVALID_ARGUMENT, why)
    return first.hello


def _wrong_version(told: str) -> str:
    """Why a node may not join that tells this version of the protocol, or none; empty: it may."""
    if told == str(VERSION):
        return ""
    theirs = int(told) if told.isdecimal() and len(told) < 9 else 0
    older = "the orchestrator" if theirs > VERSION else "this node"
    return (
        f"this node speaks protocol version {theirs or 'before 4'}, the orchestrator version {VERSION};"
        f" install the same motley on both: {older} has the older one"
    )


async def _write(context: Context, stream: _Stream) -> None:
    """Send a node what is in its outbox, until its stream ends; end that if it cannot be sent."""
    try:
        while True:
            await context.write(await stream.outbox.get())
    except (grpc.RpcError, asyncio.InvalidStateError):  # the stream's end is the reader's to report
        pass
    except Exception as error:
        _log.exception("cannot send to a node")
        stream.end(f"sending to it failed: {type(error).__name__}: {error}")


def _end(context: Context, code: grpc.StatusCode, why: str) -> None:
    """Say why the stream ends, when its handler returns. `context.abort` would raise what gRPC keeps for long, and with
    its traceback all that was said on the stream.
    """
    context.set_code(code)
    context.set_details(why)


def _address_of(context: Context) -> str:
    """``host:port`` from which a node dialled, IPv6 hosts in brackets."""
    return unquote(context.peer()).partition(":")[2]  # after gRPC's name for its kind
