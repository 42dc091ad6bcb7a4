"""What sessions decide is carried out: commands go to nodes, and whoever waits for a session is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from motley.orchestrator.control import Control
from motley.orchestrator.serving.answering.requests import Requests
from motley.orchestrator.serving.errors import SHUTTING_DOWN, ServingError, refusal
from motley.orchestrator.serving.kept_sessions import KeptSessions
from motley.orchestrator.serving.relays import Relays
from motley.orchestrator.sessions.facts import State
from motley.orchestrator.sessions.session import Command, Session
from motley.orchestrator.sessions.table import SessionTable
from motley.protocol.mesh_pb2 import OrchestratorMessage


class Carrier:
    """Must be given everything that a session returns."""

    def __init__(
        self, sessions: SessionTable, control: Control, requests: Requests, kept: KeptSessions, relays: Relays
    ) -> None:
        self._sessions = sessions
        self._kept = kept
        self._control = control
        self._requests = requests
        self._relays = relays
        self._changed = asyncio.Event()
        self.stopping = False
        """The orchestrator shuts down, which is why sessions are closed."""

    def carry_out(self, session: Session, commands: Iterable[Command]) -> None:
        """Send what a session decided, end its requests if it has ended, have them wait while it recovers and go on
        when it has, and forget it once it is over."""
        for node_id, command in commands:
            if not self._relays.send(session, (node_id, command)):
                self._control.send(node_id, OrchestratorMessage(rank=command))
        self._kept.note(session)
        if session.explained or session.state is State.CLOSING:  # soon: whoever is to blame is released
            self._requests.end(session, session.failure or self.closed(session).failure)
        elif why := session.paused_for_long:
            self._requests.end(session, why)
        elif session.state is State.RECOVERING and session.interruption and session.interruption.lost:
            self._requests.suspend(session)
        elif session.answers:
            self._requests.resume(session)
        elif session.serves and session.alive:
            self._requests.set_aside(session)
        if session.state is State.CLOSING and session.over:
            self._sessions.remove(session)
            self._requests.forget(session)
            for other in self._sessions:
                if other.experts is not None:
                    other.experts.retry()
        self.look()

    def look(self) -> None:
        """Have whoever waits in `until` look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition on sessions or nodes holds."""
        while not condition():
            await self._changed.wait()

    def check_running(self) -> None:
        """Make sure that sessions may still begin.

        Raises:
            ServingError: the orchestrator shuts down.
        """
        if self.stopping:
            raise refusal("session_closed", SHUTTING_DOWN)

    def check_planning(self, session: Session) -> None:
        """Make sure that a session is still wanted while it is planned.

        Raises:
            ServingError: it was closed meanwhile.
        """
        if not session.unplanned:
            raise self.closed(session)

    def closed(self, session: Session) -> ServingError:
        """The error to raise where a session was closed."""
        message = f"session {session.id} ({session.request.model}) was closed"
        if self.stopping:
            message = SHUTTING_DOWN
        return refusal("session_closed", message)
