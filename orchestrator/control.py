"""The orchestrator's end of the control plane: one gRPC stream per node, for as long as the node is in the mesh."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol
from urllib.parse import unquote

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from motley.orchestrator.mesh.nodes import (
    CONNECTION_ENDED,
    HEARTBEAT_S,
    LEFT,
    REVOKED,
    SILENCE_S,
    HelloError,
    NameTakenError,
    Node,
    NodeTable,
    what_became,
)
from motley.orchestrator.store.members import Member, Members
from motley.orchestrator.store.store import StoreError
from motley.orchestrator.store.tokens import Token, Tokens
from motley.orchestrator.trust.audit import Audit
from motley.orchestrator.trust.limits import HELLO_BYTES
from motley.orchestrator.trust.pairings import LIFE_S, Pairing, PairingError, Pairings
from motley.protocol.address import is_loopback
from motley.protocol.mesh_pb2 import Empty, HeldRank, Hello, NodeMessage, OrchestratorMessage, Welcome
from motley.protocol.mesh_pb2_grpc import MeshServicer
from motley.protocol.pairing import GIVES_UP, NAME, PAIRING, PAKE, SEALED, WAITS, WrongCode, hand_over
from motley.protocol.versions import NEWEST, PROTOCOL, disagreement

PAIRED_S = 600.0
"""A join token that was got by a code is valid for so long."""
STOPS = "`motley up` was ended there"
CAME_BACK = f"{CONNECTION_ENDED}: it has come back on another"
"""The reason of a node whose machine has another connection now."""
_NO_TROUBLE = {STOPS: logging.DEBUG, CAME_BACK: logging.INFO}
"""How loudly it is told that a node is gone for such a reason, which asks for nothing."""
HELLO_S = 10.0
"""A node that was let in says Hello this soon."""
OUTBOX = 10_000
"""So many messages may wait for a node to read them; with more it is lost."""

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[NodeMessage, OrchestratorMessage]


class Listener(Protocol):
    """What is called with everything that nodes say."""

    def on_message(self, node: Node, kind: str | None, message: NodeMessage) -> None:
        """A node says something that is not about its being there; `kind`: which of its bodies the message has."""

    def on_joined(self, node: Node, held: Sequence[HeldRank]) -> None:
        """A node is there, with ranks that it has kept since it was there before."""

    def on_offer(self, node: Node) -> None:
        """What ranks may have on a node has changed: its devices, or how much memory."""

    def on_lost(self, node: Node) -> None:
        """A node is gone, for the reason in `node.lost`."""


class Listeners:
    """Several listeners that hear everything, in order."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = listeners

    def on_message(self, node: Node, kind: str | None, message: NodeMessage) -> None:
        for each in self._listeners:
            each.on_message(node, kind, message)

    def on_joined(self, node: Node, held: Sequence[HeldRank]) -> None:
        for each in self._listeners:
            each.on_joined(node, held)

    def on_offer(self, node: Node) -> None:
        for each in self._listeners:
            each.on_offer(node)

    def on_lost(self, node: Node) -> None:
        for each in self._listeners:
            each.on_lost(node)


@dataclass(frozen=True)
class ForNodes:
    """What nodes are told of the orchestrator's machine.

    Attributes:
        join_token: makes one of a secret.
        address: where other machines may reach nodes on this one, or "".
        api_url: where a node reaches the API, or "": nowhere; by whether it is on this machine.
        api_trust: the certificate by which it knows the API, in PEM; empty: the mesh's authority has signed it.
    """

    join_token: Callable[[str], str]
    address: Callable[[], str]
    api_url: Callable[[bool], str]
    api_trust: Callable[[], bytes]


class _Admitted(NamedTuple):
    """A node that may join, with what it says that it holds, and the secret by which it comes back, if that is new."""

    node: Node
    held: Sequence[HeldRank]
    key: str


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
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Everybody has heard that the node is lost."""

    @property
    def ends(self) -> bool:
        """Whether the node is to be lost: nothing more is heard from it."""
        return self.reason != CONNECTION_ENDED

    def end(self, reason: str) -> None:
        """End the stream, for this reason unless it had one already."""
        if not self.leash.expired():
            self.reason = reason
            self.leash.reschedule(0)


class Control(MeshServicer):
    """Accepts nodes and keeps a stream to each; `listener` must be set before the server starts."""

    listener: Listener

    def __init__(
        self,
        nodes: NodeTable,
        tokens: Tokens,
        members: Members,
        pairings: Pairings,
        audit: Audit,
        told: ForNodes,
        show_code: Callable[[Pairing], None],
    ) -> None:
        """
        Args:
            show_code: is to show whoever runs the orchestrator a machine's name and the code that it is asked for.
        """
        self._nodes = nodes
        self._pairings = pairings
        self._show_code = show_code
        self._tokens = tokens
        self._members = members
        self._audit = audit
        self._told = told
        self._joining = asyncio.Lock()
        """Of several nodes that want one name at a time, one gets it, and the others change nothing."""
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

    def shut_out(self, name: str) -> None:
        """End the stream of a node that may not come back."""
        node = self._nodes.known_as(name)
        if node is not None and (stream := self._streams.get(node.id)):
            stream.end(REVOKED)

    def drop_all(self) -> None:
        """End all streams."""
        for stream in self._streams.values():
            stream.end(STOPS)

    async def Join(self, _: AsyncIterator[NodeMessage], context: Context) -> None:
        """The conversation with one node, from its token until it ends. Nothing is read of one without a token.

        Messages are read from `context`: gRPC's iterator outlives the stream, and keeps the last one.
        """
        admitted = await self._admit(context)
        if admitted is None:
            return
        if isinstance(admitted, _Refusal):
            _log.warning("refused %s: %s", _address_of(context), admitted.why)
            _end(context, admitted.code, admitted.why)
            return
        node, held, key = admitted
        _log.info("node %s joined (%s)", node.name, node.address, extra={"node": node.name})
        stream = self._streams[node.id] = _Stream()
        welcome = Welcome(
            node_id=node.id,
            heartbeat_s=HEARTBEAT_S,
            silence_s=SILENCE_S,
            key=key,
            api_url=self._told.api_url(_from_here(context)),
            api_trust=self._told.api_trust(),
            takes_several=True,
        )
        self.send(node.id, OrchestratorMessage(welcome=welcome))
        self.listener.on_joined(node, held)
        writer = asyncio.create_task(_write(context, stream))
        try:
            with contextlib.suppress(TimeoutError):
                async with stream.leash:
                    await self._read(context, node, stream)
        except DecodeError as error:
            stream.reason = f"what it said is no message: {error}"
        finally:
            writer.cancel()
            del self._streams[node.id]
            self._nodes.lose(node.id, stream.reason)
            level = _NO_TROUBLE.get(stream.reason, logging.INFO if node.left else logging.WARNING)
            stays_away = not node.left and stream.reason not in (REVOKED, *_NO_TROUBLE)
            back = "; if Motley still runs there, it comes back by itself; if not, start `motley join` there again"
            hint = back if stays_away else ""
            _log.log(level, "node %s %s%s", node.name, what_became(node.lost), hint, extra={"node": node.name})
            try:
                self.listener.on_lost(node)
            finally:
                stream.ended.set()
        why = f"this node is out of the mesh: {stream.reason}"
        if stream.reason == REVOKED:  # looking for the mesh would be of no use to it
            anew = "to join anew: `motley join`, with a code or a new token"
            _end(context, grpc.StatusCode.UNAUTHENTICATED, f"{why}; {anew}")
        else:
            _end(context, grpc.StatusCode.ABORTED, why)

    async def Pair(self, _: AsyncIterator[Empty], context: Context) -> None:
        """A step of handing a join token to a machine whose owner types the code that is shown here. Nothing is read
        but metadata."""
        told = dict(context.invocation_metadata() or ())
        if wrong := _wrong_version(told):
            _end(context, grpc.StatusCode.FAILED_PRECONDITION, wrong)
            return
        try:
            if NAME in told:
                name = unquote(str(told[NAME]))
                self._nodes.check_free(name)  # before somebody goes and types a code
                pairing = self._pairings.ask(name, _address_of(context).rpartition(":")[0])
                self._show_code(pairing)
                context.set_trailing_metadata([(PAIRING, pairing.id)])  # what comes first may get lost
                return
            if GIVES_UP in told:
                if gone := self._pairings.give_up(str(told[GIVES_UP])):
                    if gone.tries_left:
                        _log.info("%s has given up joining: its code is void", gone.name)
                    else:
                        _log.warning("%s (%s) had wrong codes too often: its code is void", gone.name, gone.address)
                return
            if WAITS in told:
                await self._wait_with(str(told[WAITS]))
                return
            pairing = self._pairings.attempt(str(told.get(PAIRING, "")))
            message = told.get(PAKE, b"")
            if not pairing.token:
                pairing.token = await self._make_token(pairing)
            if not isinstance(message, bytes):
                raise WrongCode("that is no message of a key exchange")
            own, sealed = await asyncio.to_thread(hand_over, pairing.code, message, pairing.token)
            context.set_trailing_metadata([(PAKE, own), (SEALED, sealed)])
        except (PairingError, NameTakenError, WrongCode, StoreError) as error:
            _log.warning("refused %s: %s", _address_of(context), error)
            _end(context, grpc.StatusCode.PERMISSION_DENIED, str(error))

    async def _wait_with(self, pairing_id: str) -> None:
        """Wait as long as a machine is there that needs a code, which is void then: it has its token, or was ended."""
        if not self._pairings.is_open(pairing_id):
            return
        try:
            await asyncio.sleep(LIFE_S)
        finally:
            gone = self._pairings.give_up(pairing_id)
            if gone and not gone.token:
                _log.info("%s is gone: its code is void", gone.name)

    async def _make_token(self, pairing: Pairing) -> str:
        """
        Raises:
            StoreError: it cannot be written.
        """
        token, secret = await self._tokens.create(f"for {pairing.name}, by a code", PAIRED_S, 1)
        by = f"a code, from {pairing.address}"
        self._audit.note("token created", id=token.id, note=token.note, uses=1, by=by)
        return self._told.join_token(secret)

    async def _admit(self, context: Context) -> _Admitted | _Refusal | None:
        """Have a node show a join token, or its own secret, then say Hello, and register it; None: it only asks whether
        it could join, and could."""
        told = dict(context.invocation_metadata() or ())
        if wrong := _wrong_version(told):
            return _Refusal(grpc.StatusCode.FAILED_PRECONDITION, wrong)
        secret, _, _ = str(told.get("motley-token", "")).partition(".")
        shown = self._members.find(secret) or self._tokens.find(secret)
        if shown is None:
            why = (
                "wrong join token, or one that has expired or is used up; use the one that `motley up` prints, or make"
                " another there with `motley token create`. (A machine that was here before may have been revoked, or"
                " another has joined by its name: then it joins anew so, or with a code under another --name)"
            )
            return _Refusal(grpc.StatusCode.UNAUTHENTICATED, why)
        asks = NAME in told  # and joins later: first it measures what it brings
        try:
            if asks and self._own_old(name := unquote(str(told[NAME])), shown) is None:
                self._nodes.check_free(name)
        except NameTakenError as error:
            return _Refusal(grpc.StatusCode.ALREADY_EXISTS, str(error))
        from_here = _from_here(context)
        await context.send_initial_metadata([("motley-address", self._told.address() if from_here else "")])
        if asks:
            return None
        hello = await _hello(context)
        if isinstance(hello, _Refusal):
            return hello
        if is_loopback(hello.address) and not from_here:
            why = f"no other machine can reach this node at {hello.address}; give --advertise another address of it"
            return _Refusal(grpc.StatusCode.INVALID_ARGUMENT, why)
        try:
            async with self._joining:
                if old := self._own_old(hello.name, shown, hello.process):
                    self._streams[old.id].end(CAME_BACK)
                    await self._streams[old.id].ended.wait()
                self._nodes.check(hello)
                key = await self._let_in(hello.name, shown, secret)
                node = self._nodes.join(hello)
        except HelloError as error:
            return _Refusal(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except NameTakenError as error:
            return _Refusal(grpc.StatusCode.ALREADY_EXISTS, str(error))
        except StoreError as error:
            return _Refusal(grpc.StatusCode.ABORTED, f"it cannot be made a member: {error}")
        by = "its own secret" if isinstance(shown, Member) else f"token {shown.id}"
        self._audit.note("node joined", node=node.name, address=node.address, dialled=_address_of(context), by=by)
        return _Admitted(node, hello.held, key)

    def _own_old(self, name: str, shown: Member | Token, process: str = "") -> Node | None:
        """The node whose place a machine may take as it is its own: it has shown that node's secret, and the connection
        from which the node is known is of no use any more."""
        own = isinstance(shown, Member) and shown.name == name
        return self._nodes.cut_off(name, process) if own else None

    async def _let_in(self, name: str, shown: Member | Token, secret: str) -> str:
        """Make a node a member, unless it is; the secret by which it comes back, "" if it has one.

        Raises:
            HelloError: the secret is another machine's, or was revoked in this moment.
            StoreError: it cannot be made one.
        """
        if isinstance(shown, Token):
            return await self._members.admit(name, shown)
        if self._members.find(secret) is None:
            raise HelloError("this node was revoked")
        if shown.name != name:
            raise HelloError(
                f"this machine is known as {shown.name!r}; to be {name!r}, it takes a join token (--token)"
            )
        return ""

    async def _read(self, context: Context, node: Node, stream: _Stream) -> None:
        """Pass on what the node says, until the stream ends, or what it says is no message."""
        while (message := await _next(context)) is not None:
            self._nodes.show_life(node.id)
            for each in message.several.messages or (message,):
                if not stream.ends:
                    self._hear(node, stream, each)

    def _hear(self, node: Node, stream: _Stream, message: NodeMessage) -> None:
        kind = message.WhichOneof("body")
        match kind:
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
                self.listener.on_message(node, kind, message)


async def _next(context: Context) -> NodeMessage | None:
    """What a node says next; None when it has ended the stream.

    Raises:
        DecodeError: it is no message.
    """
    message = await context.read()
    return message if isinstance(message, NodeMessage) else None


async def _hello(context: Context) -> Hello | _Refusal:
    try:
        async with asyncio.timeout(HELLO_S):
            first = await _next(context)
    except TimeoutError:
        return _Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, f"no Hello within {HELLO_S:.0f} s")
    except DecodeError as error:
        return _Refusal(grpc.StatusCode.INVALID_ARGUMENT, f"the first message must be a Hello: {error}")
    if first is None or first.WhichOneof("body") != "hello":
        return _Refusal(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be a Hello")
    if first.ByteSize() > HELLO_BYTES:
        why = f"the Hello is {first.ByteSize()} bytes long; no machine needs more than {HELLO_BYTES}"
        return _Refusal(grpc.StatusCode.INVALID_ARGUMENT, why)
    return first.hello


def _wrong_version(told: Mapping[str, str | bytes]) -> str:
    """Why a node may not join that tells this in its metadata; empty: it may."""
    return disagreement(str(told.get(PROTOCOL, "")), str(told.get(NEWEST, "")))


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


def _from_here(context: Context) -> bool:
    """Whether a node is on this machine."""
    return is_loopback(_address_of(context).rpartition(":")[0].strip("[]"))


def _address_of(context: Context) -> str:
    """``host:port`` from which a node dialled, IPv6 hosts in brackets."""
    return unquote(context.peer()).partition(":")[2]  # after gRPC's name for its kind
