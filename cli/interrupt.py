"""Running a command that lasts: Ctrl-C and a polite kill end it cleanly, and everything it started with it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from motley.cli.errors import EXIT_INTERRUPTED
from motley.daemon.machine.ending import wait_for_owner_end

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T], *, end_with_stdin: bool = False) -> T:
    """Run `main`; on SIGINT or SIGTERM cancel it, wait for its clean-up, and exit with status 130.

    Args:
        end_with_stdin: the end of standard input counts as an interrupt, so that a process started for another one
            ends with it, however that ends.
    """

    async def cancellable() -> T:
        task = asyncio.ensure_future(main)

        def cancel_once() -> None:
            # Only once: an impatient second Ctrl-C must not break into the clean-up, which is bounded in time.
            if not task.cancelling():
                task.cancel()

        if sys.platform != "win32":  # there, asyncio.run does the same for Ctrl-C, and SIGTERM does not exist
            for kind in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(kind, cancel_once)
        if end_with_stdin:
            loop = asyncio.get_running_loop()
            threading.Thread(target=_at_end_of_stdin, args=(loop, cancel_once), daemon=True).start()
        return await task

    try:
        return asyncio.run(cancellable())
    except (asyncio.CancelledError, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to do that could be interrupted
        sys.exit(EXIT_INTERRUPTED)


def _at_end_of_stdin(loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> None:
    wait_for_owner_end()
    with contextlib.suppress(RuntimeError):  # the loop has ended by itself
        loop.call_soon_threadsafe(act)
