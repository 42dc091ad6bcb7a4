"""Logs for programs: every record is one line of JSON."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime

from motley.daemon.machine.json_log import JsonLog


def test_a_record_is_one_line_of_json_whatever_it_says() -> None:
    lines: list[str] = []
    log = JsonLog(lines.append)
    about = {"request": "r-1", "session": "s", "rank": 2, "unknown": 3}
    try:
        raise ValueError("two\nlines")
    except ValueError:
        values = ("motley.x", logging.ERROR, __file__, 1, "said %s", ("a\nb\x1b\u2028",), sys.exc_info())
        log.emit(logging.getLogger().makeRecord(*values, extra=about))
    (line,) = lines
    assert line.isascii()
    assert line.isprintable()
    told = json.loads(line)
    assert datetime.fromisoformat(told.pop("time")).tzinfo
    assert told.pop("error").endswith("ValueError: two\nlines")
    assert told == {
        "level": "error",
        "logger": "motley.x",
        "message": "said a\nb\x1b\u2028",
        "request": "r-1",
        "session": "s",
        "rank": 2,
    }
