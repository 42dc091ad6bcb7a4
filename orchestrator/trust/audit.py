"""A file of who was let in and shut out: a line of JSON for every join, revocation, token and key, without secrets."""

from __future__ import annotations

import datetime
import json
import logging
import os
from pathlib import Path
from typing import IO

FILE = "audit.log"
"""In the state folder, which only its owner can read."""
ROTATE_BYTES = 4 << 20
"""A file of this length is renamed (`FILE` and ``.1``), in the place of the one before."""

_log = logging.getLogger(__name__)


class Audit:
    """Appends to the file; what cannot be written goes to the log, and stops nobody."""

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / FILE

    def note(self, what: str, **about: str | float | None) -> None:
        """Write a line.

        Args:
            what: as in ``node joined``.
            about: whom or what, by whom, from where.
        """
        at = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"at": at, "what": what, **about})
        try:
            with self._open() as file:
                file.write(f"{line}\n")
        except OSError as error:
            _log.warning("%s: this was not written (%s): %s", self._path, error, line)

    def _open(self) -> IO[str]:
        if self._path.exists() and self._path.stat().st_size >= ROTATE_BYTES:
            os.replace(self._path, self._path.with_name(f"{FILE}.1"))
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return open(descriptor, "a", encoding="utf-8")
