"""An event loop beside the main thread, which thereby can wait for a key, and for Ctrl-C, wherever it is."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

LOOK_S = 0.1
"""On Windows a thread sees Ctrl-C only between two waits."""
END_S = 30.0
"""What was interrupted has so many seconds to clean up after itself."""


class Background:
    """Runs coroutines on an event loop in a thread of its own; use as a context."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="background", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_S)
        if not self._thread.is_alive():
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine, in the main thread. Ctrl-C cancels it.

        Raises:
            KeyboardInterrupt: it was interrupted, and has cleaned up.
            Exception: what the coroutine raises.
        """
        task: asyncio.Task[T] | None = None

        async def run() -> T:
            nonlocal task
            task = asyncio.ensure_future(work)
            return await task

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return _result(future)
        except KeyboardInterrupt:
            self._loop.call_soon_threadsafe(lambda: task and task.cancel())
            with contextlib.suppress(Exception):  # whatever came of it, it was to end
                future.result(END_S)
            raise


def _result(future: concurrent.futures.Future[T]) -> T:
    while True:
        concurrent.futures.wait([future], LOOK_S)
        if future.done():
            return future.result()
