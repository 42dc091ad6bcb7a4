"""What goes wrong in the background, told to people: a line for each kind of trouble, with the time, and no flood.

Whoever knows a port of a machine can cause the same trouble ten thousand times, and a bug in a loop can too.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

LINES = 3
"""Lines that a kind of trouble may have within `WINDOW_S`."""
WINDOW_S = 60.0
KINDS = 100
"""Kinds that are told apart within `WINDOW_S`; all further ones are one kind."""
LENGTH = 1000
"""Characters of a message that are shown."""
FOREIGN = ("aiohttp", "grpc")
"""Libraries that say with a traceback what strangers sent; a line is enough."""

_VARYING = re.compile(r"0x[0-9a-f]+|\d+")

Kind = tuple[object, ...]


@dataclass
class _Told:
    """What was told of a kind of trouble since `since`."""

    since: float
    lines: int = 0
    left_out: int = 0


class TroubleLog(logging.Handler):
    """Writes log records as lines, few of each kind. The first error of a kind has its traceback below it.

    Of the same kind is what comes from the same place in the code, with the same text but for numbers, and about the
    same node (`extra={"node": name}`).
    """

    def __init__(self, write: Callable[[str, int], None], clock: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            write: is given each text, and its level.
            clock: seconds.
        """
        super().__init__(logging.INFO)
        self._write = write
        self._clock = clock
        self._told: dict[Kind, _Told] = {}
        self._traced: set[Kind] = set()

    def listen(self) -> None:
        """Take what the whole process logs, from warnings on."""
        logging.getLogger().addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._tell(record)
        except Exception:  # of a record that cannot be formatted, or a stream that has gone
            self.handleError(record)

    def _tell(self, record: logging.LogRecord) -> None:
        now = self._clock()
        kind = self._kind(record, now)
        told = self._told.setdefault(kind, _Told(now))
        left_out = 0
        if now - told.since > WINDOW_S:
            left_out = told.left_out
            told = self._told[kind] = _Told(now)
        told.lines += 1
        if told.lines > LINES:
            told.left_out += 1
            return
        note = f" ({left_out} more like this were left out)" if left_out else ""
        if told.lines == LINES:
            note += f" (more like this are left out for {WINDOW_S:.0f} s)"
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        self._write(f"{when} {_line(record)}{note}{self._traceback(record, kind)}", record.levelno)

    def _kind(self, record: logging.LogRecord, now: float) -> Kind:
        """What kind of trouble it is; `KINDS` are remembered at most."""
        text = _VARYING.sub("#", str(record.msg).partition("\n")[0])[:LENGTH]
        error = record.exc_info[0] if record.exc_info else None
        kind = (record.name, record.lineno, text, error, getattr(record, "node", None))
        if kind not in self._told and len(self._told) >= KINDS:
            self._told = {known: told for known, told in self._told.items() if now - told.since <= WINDOW_S}
        return kind if kind in self._told or len(self._told) < KINDS else ("others",)

    def _traceback(self, record: logging.LogRecord, kind: Kind) -> str:
        """The traceback of an error of a kind that had none yet, on lines of its own."""
        foreign = record.name.partition(".")[0] in FOREIGN
        if not record.exc_info or foreign or kind in self._traced or len(self._traced) >= KINDS:
            return ""
        self._traced.add(kind)
        return "\n" + logging.Formatter().formatException(record.exc_info)


def _line(record: logging.LogRecord) -> str:
    """A record on one line, without the time; of what is not ours it says whose it is."""
    text = record.getMessage().partition("\n")[0]
    if record.exc_info and record.exc_info[1] is not None:
        error = record.exc_info[1]
        text += f": {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if len(text) > LENGTH:
        text = f"{text[:LENGTH]}..."
    # What strangers say must not steer the terminal.
    text = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
    return text if record.name.startswith("motley.") else f"{record.name}: {text}"
