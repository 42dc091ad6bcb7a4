"""A request's life: it goes to the leader of its session, deltas come back, an error or a last delta ends it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field

from motley.orchestrator.control import Control
from motley.orchestrator.nodes import Node
from motley.orchestrator.serving.errors import ServingError, refusal, unready
from motley.orchestrator.sessions import Session, State
from motley.protocol.mesh_pb2 import Cancel, Delta, Failure, Generate, OrchestratorMessage

ANSWER_S = 300.0
"""A leader with requests says something about one of them at least this often."""


@dataclass
class _Request:
    """A request under way. Its queue is bounded by the length of the answer: at most `context` deltas."""

    id: str
    session: Session
    deltas: asyncio.Queue[Delta] = field(default_factory=asyncio.Queue)


class Requests:
    """All requests that are being answered."""

    def __init__(self, control: Control, clock: Callable[[], float]) -> None:
        self._control = control
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        """By id."""
        self._heard: dict[str, float] = {}
        """By session: when its leader last said something about a request."""

    @contextlib.asynccontextmanager
    async def generate(self, session: Session, generate: Generate) -> AsyncIterator[AsyncIterator[Delta]]:
        """Run a request. Leaving the context before the last delta cancels it.

        Yields the deltas; the last one has ``finish`` "stop" or "length".

        Raises:
            ServingError: the session is not ready. The iterator raises it where the answer breaks off.
        """
        if session.state is not State.READY:
            raise unready(session)
        request = _Request(secrets.token_hex(8), session)
        generate.request_id, generate.session = request.id, session.id
        leader = session.leader.node_id
        self._requests[request.id] = request
        self._control.send(leader, OrchestratorMessage(generate=generate))
        try:
            async with contextlib.aclosing(self._deltas(request)) as deltas:
                yield deltas
        finally:
            if self._requests.pop(request.id, None) is not None:
                self._control.send(leader, OrchestratorMessage(cancel=Cancel(request_id=request.id)))

    def on_delta(self, node: Node, delta: Delta) -> None:
        """A node says the next part of an answer; ignored if the request was cancelled or is not of that node."""
        request = self._requests.get(delta.request_id)
        if request is None or request.session.leader.node_id != node.id:
            return
        self._heard[request.session.id] = self._clock()
        request.deltas.put_nowait(delta)
        if delta.finish or delta.HasField("failure"):
            del self._requests[request.id]

    def end(self, session: Session, failure: Failure) -> None:
        """End all requests of a session with this failure."""
        for request in [request for request in self._requests.values() if request.session is session]:
            del self._requests[request.id]
            request.deltas.put_nowait(Delta(request_id=request.id, finish="error", failure=failure))

    def forget(self, session: Session) -> None:
        """A session without requests is over."""
        self._heard.pop(session.id, None)

    async def _deltas(self, request: _Request) -> AsyncGenerator[Delta, None]:
        started = self._clock()
        while True:
            try:
                async with asyncio.timeout(1.0):
                    delta = await request.deltas.get()
            except TimeoutError:
                silent = self._clock() - max(started, self._heard.get(request.session.id, 0.0))
                if silent < ANSWER_S:  # it may be busy with requests that came before
                    continue
                leader = request.session.leader
                raise refusal("timed_out", f"{leader} has said nothing for {silent:.0f} s") from None
            yield delta
            if delta.HasField("failure"):
                raise ServingError(delta.failure)
            if delta.finish in ("stop", "length"):
                return
            if delta.finish:
                raise refusal("cancelled", f"{request.session.leader} ended the request ({delta.finish})")
