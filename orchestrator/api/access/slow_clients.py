"""Who takes nothing of its answer any more loses its connection; who takes it slowly does not."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from aiohttp import web

TAKE_S = 60.0
"""A client takes something of what was written to it at least this often."""
LOOKS = 4
"""How often that is looked at within this time."""

_log = logging.getLogger(__name__)


class Patience:
    """Ends a client's connection when it has taken nothing for `TAKE_S`; use as a context while an answer is written.

    What waits to write then meets a ConnectionError, or is cancelled.

    Attributes:
        written: bytes that were handed to the connection in this context, as far as whoever writes counts them.
    """

    def __init__(self, http: web.Request) -> None:
        self.written = 0
        self._http = http
        self._taken = 0
        """Bytes that have left this process, when that was last looked at."""
        self._looks_left = LOOKS

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(TAKE_S / LOOKS, self._look)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        transport = self._http.transport
        if transport is None:
            return
        left = transport.get_write_buffer_size()
        before, self._taken = self._taken, self.written - left
        self._looks_left = self._looks_left - 1 if left and self._taken <= before else LOOKS
        if self._looks_left:
            self._timer = self._loop.call_later(TAKE_S / LOOKS, self._look)
        else:
            _log.warning(
                "%s has taken nothing of its answer for %.0f s: its connection is ended", self._http.remote, TAKE_S
            )
            transport.abort()


async def finish(http: web.Request, response: web.StreamResponse, rest: bytes = b"") -> None:
    """End an answer, and wait until the client has taken all of it.

    Args:
        rest: of a stream, what comes last.

    Raises:
        ConnectionError: the client has gone.
    """
    transport = http.transport
    if transport is None:
        raise ConnectionResetError("the client has gone")
    transport.set_write_buffer_limits(0)  # what is drained is empty
    try:
        await response.write_eof(rest)
    finally:
        transport.set_write_buffer_limits()


async def give(http: web.Request, body: Any) -> web.Response:
    """Answer with JSON, and wait until the client has taken it, or is gone.

    What is large is written in a thread of its own, so that others are answered meanwhile.
    """
    response = web.json_response(text=await asyncio.to_thread(json.dumps, body))
    with Patience(http), suppress(ConnectionError):
        await response.prepare(http)
        await finish(http, response)
    return response
