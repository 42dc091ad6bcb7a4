"""All sessions, by id and by name, and the memory that their plans promise to them. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

from motley.orchestrator.session_request import SessionRequest
from motley.orchestrator.sessions.facts import State
from motley.orchestrator.sessions.session import Session
from motley.protocol.mesh_pb2 import Gpu


class NameInUseError(Exception):
    """The name is taken: another session serves a model under it."""


class SessionTable:
    """The sessions there are; one that has ended stays until it is removed."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}

    def __iter__(self) -> Iterator[Session]:
        """All sessions, oldest first; safe against changes while iterating."""
        return iter(list(self._sessions.values()))

    def get(self, session_id: str) -> Session | None:
        """The session with this id, if there is one."""
        return self._sessions.get(session_id)

    def named(self, name: str) -> Session | None:
        """The session that serves `name`; a failed one if there is none alive."""
        namesakes = [session for session in self if session.name == name and session.state is not State.CLOSING]
        return max(namesakes, key=lambda session: session.alive, default=None)

    def open(self, request: SessionRequest, created: float) -> Session:
        """A new session in planning.

        Raises:
            NameInUseError: the request has a name, and it is taken.
        """
        session = Session(secrets.token_hex(4), request, "", created)
        if request.name:
            self.rename(session, request.name)
        self.add(session)
        return session

    def add(self, session: Session) -> None:
        self._sessions[session.id] = session

    def rename(self, session: Session, name: str) -> None:
        """Name a session; a failed one of that name gives way.

        Raises:
            NameInUseError: a live session has the name.
        """
        for other in self:
            if other.name != name or other is session:
                continue
            if other.alive:
                raise NameInUseError(
                    f"session {other.id} serves a model named {name!r} already; use it, delete it, or choose"
                    ' another "name"'
                )
            other.state = State.CLOSING
        session.name = name

    def remove(self, session: Session) -> None:
        self._sessions.pop(session.id, None)

    def reserved(self, node_id: str) -> int:
        """Bytes of a node's own memory that the plans of running workers give to them."""
        return sum(
            worker.host_bytes
            for session in self
            for worker in session.workers
            if worker.node_id == node_id and not worker.gone
        )

    def held(self, node_id: str) -> int:
        """Bytes of a node's own memory that processes of running workers have held, as far as they have told."""
        return sum(worker.rss_bytes for session in self for worker in session.workers if worker.node_id == node_id)

    def promised(self, node_id: str) -> int:
        """Bytes that running workers may yet take of a node's own memory, beyond what they have taken of it."""
        return sum(
            worker.host_bytes_to_come for session in self for worker in session.workers if worker.node_id == node_id
        )

    def reserved_gpu(self, node_id: str) -> int:
        """Bytes of a node's GPU that the plans of running ranks give to them."""
        return sum(
            rank.gpu_bytes for session in self for rank in session.ranks if rank.node_id == node_id and not rank.gone
        )

    def promised_gpu(self, node_id: str, gpu: Gpu) -> int:
        """Bytes that running ranks may yet take of a node's GPU.

        Args:
            gpu: as it is now.
        """
        return sum(rank.gpu_to_come(gpu) for session in self for rank in session.ranks if rank.node_id == node_id)
