"""Ending a process: at once, without what the interpreter would still do, or with its owner."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
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


def wait_for_owner_end() -> None:
    """Read standard input to its end: it is a pipe, which ends when this process's owner does, however that ends."""
    while os.read(0, 4096):
        pass


def end_with_owner() -> None:
    """Make this process end when its owner does, whatever it is doing."""

    def wait_and_end() -> None:
        wait_for_owner_end()
        os._exit(1)

    threading.Thread(target=wait_and_end, daemon=True).start()
