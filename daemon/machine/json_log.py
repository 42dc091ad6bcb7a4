"""What a process logs, as a line of JSON for each record, for programs that collect logs."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime

VARIABLE = "MOTLEY_LOG"
"""The variable of the environment that says how this process and its children log: "json", or else "text"."""
ABOUT = ("node", "session", "rank", "request")
"""What a record may be about (`extra=`), which then are fields of the line."""


class JsonLog(logging.Handler):
    """Writes a line for each record, from INFO on; what is not Motley's own from WARNING on.

    A line has ``time``, ``level``, ``logger``, ``message``, of `ABOUT` what the record is about, and ``error`` with a
    traceback where there is one.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        """
        Args:
            write: is given each line, without its end.
        """
        super().__init__(logging.INFO)
        self._write = write

    def listen(self) -> None:
        """Take what the whole process logs."""
        logging.getLogger().addHandler(self)
        logging.getLogger("motley").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._write(json_line(record))
        except Exception:  # of a record that cannot be formatted, or a stream that has gone
            self.handleError(record)


def json_line(record: logging.LogRecord) -> str:
    """A record as a line of JSON, without its end; characters beyond ASCII are escaped, and so are ends of lines."""
    told: dict[str, object] = {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": record.getMessage(),
    }
    told |= {name: getattr(record, name) for name in ABOUT if hasattr(record, name)}
    if record.exc_info:
        told["error"] = logging.Formatter().formatException(record.exc_info)
    return json.dumps(told, default=str)
