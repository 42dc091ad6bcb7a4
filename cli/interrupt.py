"""Running a command that lasts: Ctrl-C and a polite kill end it cleanly, and everything it started with it."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from motley.cli.errors import EXIT_INTERRUPTED

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main`; on SIGINT or SIGTERM cancel it, wait for its clean-up, and exit with status 130."""

    async def cancellable() -> T:
        task = asyncio.ensure_future(main)
        if sys.platform != "win32":  # there, asyncio.run does the same for Ctrl-C, and SIGTERM does not exist
            for kind in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(kind, task.cancel)
        return await task

    try:
        return asyncio.run(cancellable())
    except (asyncio.CancelledError, KeyboardInterrupt):
        sys.exit(EXIT_INTERRUPTED)
