"""Sessions outlive the orchestrator: a file for each, of which one that is started again takes it up.

The ranks of one that was ready go on computing meanwhile, and their nodes come back with them. What is not back in time
is lost, and then the session is planned anew, as after any loss. One that was not ready yet, or has experts on hosts,
is begun anew (`motley.orchestrator.serving.reopening`), and so are all where the orchestrator was not killed but
stopped, as then it ends them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from pathlib import Path

from motley.orchestrator.adapters import NamedAdapter
from motley.orchestrator.sessions.facts import State
from motley.orchestrator.sessions.files import SessionFileError, Wanted, pack, pack_wanted, read, read_wanted
from motley.orchestrator.sessions.session import Session
from motley.orchestrator.sessions.table import SessionTable
from motley.orchestrator.workers import Away
from motley.protocol.files import write_private

FOLDER = "sessions"
"""In the state folder."""
READY, WANTED = ".json", ".wanted"
"""How the names of files end: of a session that can be taken up, and of one that is to be begun anew."""
RETURN_S = 30.0
"""Nodes have so long to come back to an orchestrator that was started again: they try every 8 s at least."""
LOADS_S = 60.0
"""How often the loads of a session's experts are written while it serves."""

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
        """By session, as the files of those that can be taken up have them."""
        self._wanted: dict[str, int] = {}
        """Sessions of which a file says what is wanted, and the time of its loads of experts, in `LOADS_S`."""

    def take_up(self, sessions: SessionTable, now: float) -> dict[str, Wanted]:
        """Add the sessions that were kept; a file that holds none stays, and is named in the log.

        Returns:
            those that are to be begun anew, by their ids.
        """
        if self._folder is None:
            return {}
        away = Away(now, RETURN_S, "it has not come back since the orchestrator was started again")
        wanted: dict[str, Wanted] = {}
        for file in sorted(self._folder.glob("*.*")):
            try:
                if file.suffix == WANTED:
                    wanted[file.stem] = own = read_wanted(file.read_bytes())
                    name = own.request.name or own.request.model
                    _log.info("session %s (%s) is begun anew when its nodes are back", file.stem, name)
                elif file.suffix == READY:
                    session = read(file.read_bytes(), away)
                    sessions.add(session)
                    self._kept[session.id] = _version_of(session)
                    _log.info("session %s (%s) goes on when its nodes are back", session.id, session.name)
            except (OSError, SessionFileError) as error:
                _log.warning("%s: this session cannot be taken up: %s", file, error)
        self._wanted = dict.fromkeys(wanted, 0)
        return {key: own for key, own in wanted.items() if key not in self._kept}

    def note(self, session: Session) -> None:
        """Keep a session as it is planned now; forget it when it has ended."""
        if self._folder is None:
            return
        if not session.alive:
            self.forget(session.id)
        elif session.state is State.READY and not session.experts:
            version = _version_of(session)
            if self._kept.get(session.id) != version and self._write(session.id, READY, pack(session)):
                self._kept[session.id] = version
                self._remove(session.id, WANTED)
                self._wanted.pop(session.id, None)
        elif session.workers and session.id not in self._kept:
            counted = int(session.experts.loads.counted_at // LOADS_S) if session.experts else 0
            if self._wanted.get(session.id) != counted:
                self._wanted[session.id] = counted
                self._write(session.id, WANTED, pack_wanted(session))

    def stop(self, sessions: Iterable[Session]) -> None:
        """The orchestrator stops, and ends all sessions: at its next start it begins those anew that are wanted now.
        Nothing is noted any more."""
        if self._folder is None:
            return
        for session in sessions:
            if session.alive and session.workers and self._write(session.id, WANTED, pack_wanted(session)):
                self._remove(session.id, READY)
        self._folder, self._kept, self._wanted = None, {}, {}

    def forget(self, session_id: str) -> None:
        """A session is not wanted any more."""
        if self._kept.pop(session_id, None) is not None:
            self._remove(session_id, READY)
        if self._wanted.pop(session_id, None) is not None:
            self._remove(session_id, WANTED)

    def _write(self, session_id: str, suffix: str, content: bytes) -> bool:
        """Write a file of a session; whether it could be written."""
        assert self._folder is not None, "what keeps nothing writes nothing"
        try:
            write_private(self._folder / f"{session_id}{suffix}", content)
        except OSError as error:
            _log.warning("%s: session %s would not outlive the orchestrator: %s", self._folder, session_id, error)
            return False
        return True

    def _remove(self, session_id: str, suffix: str) -> None:
        assert self._folder is not None, "what keeps nothing removes nothing"
        with contextlib.suppress(OSError):
            (self._folder / f"{session_id}{suffix}").unlink()


def _version_of(session: Session) -> _Version:
    return session.epoch, tuple(session.adapters.values())
