"""A request's life: it goes to the leader of its session, deltas come back, an error or a last delta ends it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field

from motley.orchestrator.control import Control
from motley.orchestrator.nodes import Node
from motley.orchestrator.serving.errors import BusyError, ServingError, refusal, unready
from motley.orchestrator.serving.places import Places
from motley.orchestrator.sessions import Session, State
from motley.protocol.mesh_pb2 import Cancel, Delta, Failure, Generate, OrchestratorMessage
from motley.protocol.wording import counted

ANSWER_S = 300.0
"""A leader says of every request at least this often that it lives, also while that waits."""


@dataclass
class _Request:
    """A request under way. Its queue is bounded by the length of the answer: at most `context` deltas.

    Attributes:
        heard: when the leader last said something of it, or when it began.
    """

    id: str
    session: Session
    heard: float
    deltas: asyncio.Queue[Delta] = field(default_factory=asyncio.Queue)


class Requests:
    """All requests that are being answered."""

    def __init__(self, control: Control, clock: Callable[[], float]) -> None:
        self._control = control
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        """By id."""
        self._places: dict[str, Places] = {}
        """By session."""

    @contextlib.asynccontextmanager
    async def generate(self, session: Session, generate: Generate) -> AsyncIterator[AsyncIterator[Delta]]:
        """Run a request. Leaving the context before the last delta cancels it.

        Yields the deltas; the last one has ``finish`` "stop" or "length".

        Raises:
            BusyError: the session has as many requests as it takes; its nodes have heard nothing of this one.
            ServingError: the session is not ready. The iterator raises it where the answer breaks off.
        """
        if session.state is not State.READY:
            raise unready(session)
        places = self._places_of(session)
        if not places.take():
            raise self._busy(session, places)
        request = _Request(secrets.token_hex(8), session, heard=self._clock())
        generate.request_id, generate.session = request.id, session.id
        leader = session.leader.node_id
        self._requests[request.id] = request
        self._control.send(leader, OrchestratorMessage(generate=generate))
        try:
            async with contextlib.aclosing(self._deltas(request)) as deltas:
                yield deltas
        finally:
            if self._remove(request):
                self._control.send(leader, OrchestratorMessage(cancel=Cancel(request_id=request.id)))

    def on_delta(self, node: Node, delta: Delta) -> None:
        """A node says the next part of an answer; ignored if the request was cancelled or is not of that node."""
        request = self._requests.get(delta.request_id)
        if request is None or request.session.leader.node_id != node.id:
            return
        request.heard = self._clock()
        request.deltas.put_nowait(delta)
        if delta.finish or delta.HasField("failure"):
            self._remove(request)

    def end(self, session: Session, failure: Failure) -> None:
        """End all requests of a session with this failure."""
        for request in [request for request in self._requests.values() if request.session is session]:
            self._remove(request)
            request.deltas.put_nowait(Delta(request_id=request.id, finish="error", failure=failure))

    def forget(self, session: Session) -> None:
        """A session without requests is over."""
        self._places.pop(session.id, None)

    def _places_of(self, session: Session) -> Places:
        if session.id not in self._places:
            self._places[session.id] = Places(session.request.sequences + session.request.queue)
        return self._places[session.id]

    def _busy(self, session: Session, places: Places) -> BusyError:
        asked, wait = session.request, places.retry_after(self._clock())
        limits = f"{asked.sequences} under way and {asked.queue} that wait"
        message = f"{session.name!r} has {counted(places.taken, 'request')}, as many as its session takes ({limits})"
        return BusyError(f"{message}; try again in {counted(wait, 'second')}", wait)

    def _remove(self, request: _Request) -> bool:
        """A request has ended, which frees its place; False: it had already."""
        if self._requests.pop(request.id, None) is None:
            return False
        self._places_of(request.session).leave(self._clock())
        return True

    async def _deltas(self, request: _Request) -> AsyncGenerator[Delta, None]:
        while True:
            try:
                async with asyncio.timeout(1.0):
                    delta = await request.deltas.get()
            except TimeoutError:
                silent = self._clock() - request.heard
                if silent < ANSWER_S:  # it may be busy with requests that came before
                    continue
                leader = request.session.leader
                raise refusal("timed_out", f"{leader} has said nothing of this request for {silent:.0f} s") from None
            yield delta
            if delta.HasField("failure"):
                raise ServingError(delta.failure)
            if delta.finish in ("stop", "length"):
                return
            if delta.finish:
                raise refusal("cancelled", f"{request.session.leader} ended the request ({delta.finish})")
