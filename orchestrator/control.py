"""The orchestrator's end of the control plane: one gRPC stream per node, for as long as the node is in the mesh."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn, Protocol
from urllib.parse import unquote

import grpc
import grpc.aio

from motley.orchestrator.identity import Identity
from motley.orchestrator.nodes import (
    HEARTBEAT_S,
    LEFT,
    SILENCE_S,
    HelloError,
    NameTakenError,
    Node,
    NodeTable,
    what_became,
)
from motley.protocol import VERSION
from motley.protocol.mesh_pb2 import Empty, Hello, NodeMessage, OrchestratorMessage, Welcome
from motley.protocol.mesh_pb2_grpc import MeshServicer

STOPS = "the orchestrator stops"
HELLO_S = 10.0
"""A node that has dialled says Hello this soon."""
OUTBOX = 10_000
"""So many messages may wait for a node to read them; with more it is lost."""

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[NodeMessage, OrchestratorMessage]


class Listener(Protocol):
    """Who wants to know what nodes say."""

    def on_message(self, node: Node, message: NodeMessage) -> None:
        """A node says something that is not about its being there."""

    def on_lost(self, node: Node) -> None:
        """A node is gone, for the reason in `node.lost`."""


@dataclass
class _Stream:
    """The stream to one node, for as long as that is in the mesh."""

    outbox: asyncio.Queue[OrchestratorMessage] = field(default_factory=lambda: asyncio.Queue(OUTBOX))
    leash: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    reason: str = "its connection ended"
    """Why the node is lost, once it is."""

    def end(self, reason: str) -> None:
        """End the stream, for this reason unless it had one already."""
        if not self.leash.expired():
            self.reason = reason
            self.leash.reschedule(0)


class Control(MeshServicer):
    """Accepts nodes and keeps a stream to each; `listener` must be set before the server starts."""

    listener: Listener

    def __init__(self, identity: Identity, nodes: NodeTable) -> None:
        self._identity = identity
        self._nodes = nodes
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

    async def Join(self, requests: AsyncIterator[NodeMessage], context: Context) -> None:
        """The conversation with one node, from Hello until it ends."""
        hello = await _hello(requests, context)  # first: a refusal that overtakes the Hello can be lost at the node
        metadata = dict(context.invocation_metadata() or ())
        token = metadata.get("motley-token", "")
        if not isinstance(token, str) or not self._identity.admits(token):
            await _refuse(
                context,
                grpc.StatusCode.UNAUTHENTICATED,
                "wrong join token; use the one that `motley up` prints",
            )
        try:
            node = self._nodes.join(hello)
        except HelloError as error:
            await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except NameTakenError as error:
            await _refuse(context, grpc.StatusCode.ALREADY_EXISTS, str(error))
        _log.info("node %s joined (%s)", node.name, node.address, extra={"node": node.name})
        stream = self._streams[node.id] = _Stream()
        self.send(
            node.id, OrchestratorMessage(welcome=Welcome(node_id=node.id, heartbeat_s=HEARTBEAT_S, silence_s=SILENCE_S))
        )
        writer = asyncio.create_task(_write(context, stream))
        try:
            with contextlib.suppress(TimeoutError):
                async with stream.leash:
                    await self._read(requests, node, stream)
        finally:
            writer.cancel()
            del self._streams[node.id]
            self._nodes.lose(node.id, stream.reason)
            level = logging.DEBUG if node.lost == STOPS else logging.INFO if node.left else logging.WARNING
            _log.log(level, "node %s %s", node.name, what_became(node.lost), extra={"node": node.name})
            self.listener.on_lost(node)
        await context.abort(grpc.StatusCode.ABORTED, f"this node is out of the mesh: {stream.reason}")

    async def _read(self, requests: AsyncIterator[NodeMessage], node: Node, stream: _Stream) -> None:
        """Pass on what the node says, until the stream ends."""
        async for message in requests:
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
                case _:
                    self.listener.on_message(node, message)


async def _hello(requests: AsyncIterator[NodeMessage], context: Context) -> Hello:
    try:
        async with asyncio.timeout(HELLO_S):
            first = await anext(requests, None)
    except TimeoutError:
        await _refuse(context, grpc.StatusCode.DEADLINE_EXCEEDED, f"no Hello within {HELLO_S:.0f} s")
    if first is None or first.WhichOneof("body") != "hello":
        await _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "the first message must be a Hello")
    if first.hello.protocol != VERSION:
        older = "this node" if first.hello.protocol < VERSION else "the orchestrator"
        await _refuse(
            context,
            grpc.StatusCode.FAILED_PRECONDITION,
            f"this node (motley {first.hello.version}) speaks protocol version {first.hello.protocol}, the"
            f" orchestrator version {VERSION}; install the same motley on both, {older} has the older one",
        )
    return first.hello


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


async def _refuse(context: Context, code: grpc.StatusCode, why: str) -> NoReturn:
    _, _, address = unquote(context.peer()).partition(":")  # after gRPC's name for its kind
    _log.warning("refused %s: %s", address, why)
    await context.abort(code, why)
