"""Ending a process at once, without what the interpreter would still do."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn


def end_process(status: int = 0) -> NoReturn:
    """End this process at once with an exit status, when all that must be closed is closed.

    To end as Python does takes apart all that has been imported, 0.1 s of a processor for what the system gives back
    anyway, and waits for threads.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream:  # a process without a window has none, on Windows
            with contextlib.suppress(OSError):  # whoever read it has gone
                stream.flush()
    os._exit(status)
