"""Sessions outlive the orchestrator: a file for each that is ready, of which one that is started again takes it up.

Its ranks go on computing meanwhile, and their nodes come back with them. What is not back in time is lost, and then the
session is planned anew, as after any loss.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from motley.orchestrator.adapters import NamedAdapter
from motley.orchestrator.files import write_private
from motley.orchestrator.session_files import SessionFileError, pack, read
from motley.orchestrator.session_table import SessionTable
from motley.orchestrator.sessions import Session, State
from motley.orchestrator.workers import Away

FOLDER = "sessions"
"""In the state folder."""
RETURN_S = 30.0
"""Nodes have so long to come back to an orchestrator that was started again: they try every 8 s at least."""

_log = logging.getLogger(__name__)


_Version = tuple[int, tuple[NamedAdapter, ...]]
"""What a session has that changes while it serves: its epoch, and its adapters."""


class KeptSessions:
    """The sessions that are kept in a state folder."""

    def __init__(self, state_dir: Path | None) -> None:
        """
        Args:
            state_dir: None: nothing is kept.
        """
        self._folder = state_dir / FOLDER if state_dir else None
        self._kept: dict[str, _Version] = {}
        """By session, as the files have them."""

    def take_up(self, sessions: SessionTable, now: float) -> None:
        """Add the sessions that were kept; a file that holds none stays, and is named in the log."""
        if self._folder is None:
            return
        away = Away(now, RETURN_S, "it has not come back since the orchestrator was started again")
        for file in sorted(self._folder.glob("*.json")):
            try:
                session = read(file.read_bytes(), away)
            except (OSError, SessionFileError) as error:
                _log.warning("%s: this session cannot be taken up: %s", file, error)
                continue
            sessions.add(session)
            self._kept[session.id] = _version_of(session)
            _log.info("session %s (%s) waits for its nodes", session.id, session.name)

    def note(self, session: Session) -> None:
        """Keep a session as it is planned now, once that is ready; forget it when it has ended."""
        if self._folder is None:
            return
        file = self._folder / f"{session.id}.json"
        if not session.alive:
            if self._kept.pop(session.id, None) is not None:
                with contextlib.suppress(OSError):
                    file.unlink()
        elif (
            session.state is State.READY
            and not session.experts
            and self._kept.get(session.id) != (version := _version_of(session))
        ):
            self._kept[session.id] = version
            try:
                write_private(file, pack(session))
            except OSError as error:
                _log.warning("%s: session %s would not outlive the orchestrator: %s", file, session.id, error)


def _version_of(session: Session) -> _Version:
    return session.epoch, tuple(session.adapters.values())
