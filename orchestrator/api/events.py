"""Server-sent events to one client: written whole, with comments between them while there is nothing to say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress

from aiohttp import web

from motley.orchestrator.api.access.slow_clients import Patience, finish
from motley.orchestrator.serving.answering.requests import Answers
from motley.orchestrator.serving.errors import ServingError
from motley.protocol.mesh_pb2 import Delta

COMMENT_S = 10.0
"""A stream on which nothing was written for so long gets a comment, so that no proxy takes it for dead."""
AT_ONCE_BYTES = 1 << 14
"""Events do not wait for others to be written with them that have so many bytes together."""

as_json = json.JSONEncoder(ensure_ascii=False).encode
"""What an event tells, as one line. (`json.dumps` would make an encoder each time.)"""


class EventStream:
    """The answer to one request, as a stream of events. Its headers go out with what is written first.

    Events that are told at once are written at once, as a write costs more than an event: they go out before anything
    is waited for.
    """

    def __init__(self, http: web.Request, patience: Patience, after: int | None = None) -> None:
        """
        Args:
            patience: entered; told what is written.
            after: events have numbers, from 1 on, and those up to this one the client has; None: they have none.
        """
        self._after = after
        self._number = 0
        self._unwritten = bytearray()
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        self.response = web.StreamResponse(headers=headers)
        self._http = http
        self._patience = patience
        self._clock = asyncio.get_running_loop().time
        self._written_at = self._clock()

    @property
    def number(self) -> int:
        """How many events were told, with those that the client has."""
        return self._number

    @property
    def begun(self) -> bool:
        """Whether the client is told that the answer is a stream."""
        return self.response.prepared or bool(self._unwritten)

    def event(self, data: str, kind: str = "") -> None:
        """Tell an event, unless the client has it; `data` is one line.

        Args:
            kind: its name; empty: it has none.
        """
        self._number += 1
        named = f"event: {kind}\n" if kind else ""
        if self._after is None:
            self._tell(f"{named}data: {data}\n\n")
        elif self._number > self._after:
            self._tell(f"id: {self._number}\n{named}data: {data}\n\n")

    def comment(self) -> None:
        """Tell a line that clients ignore."""
        self._tell(": still at it\n\n")

    async def next(self, answers: Answers) -> tuple[int, Delta] | None:
        """What comes next of answers, and of which; None: nothing yet, so the client is to be told something.

        Raises:
            ServingError: an answer breaks off.
            ConnectionError: the client has gone.
        """
        if self._unwritten and (not answers.waiting or len(self._unwritten) >= AT_ONCE_BYTES):
            if not self.response.prepared:
                await self.response.prepare(self._http)
            self._written_at = self._clock()
            await self.response.write(self._taken())
            self._written_at = self._clock()
        return await answers.next(max(0.0, self._written_at + COMMENT_S - self._clock()))

    async def end(self) -> None:
        """Nothing more is told; wait until the client has taken everything.

        Raises:
            ConnectionError: the client has gone.
        """
        if not self.response.prepared:
            await self.response.prepare(self._http)
        await finish(self._http, self.response, self._taken())

    def _tell(self, text: str) -> None:
        self._unwritten += text.encode()

    def _taken(self) -> bytes:
        """What is to be written, which counts as written."""
        data = bytes(self._unwritten)
        self._unwritten.clear()
        self._patience.written += len(data)
        return data


async def stream_answer(
    http: web.Request,
    after: int | None,
    write: Callable[[EventStream], Awaitable[None]],
    fail: Callable[[EventStream, ServingError], None],
) -> web.StreamResponse:
    """Answer a request with a stream. The first delta is awaited before the headers go out, for as long as a stream may
    be silent, so that an answer that fails at once has a status of its own. If the client goes, this returns.

    Args:
        after: see `EventStream`.
        write: tells the events of the answer; errors as `EventStream.next`.
        fail: tells, as the last event, why an answer breaks off of which the client has been told something.

    Raises:
        ServingError: the answer breaks off, and the client was told nothing.
    """
    with Patience(http) as patience, suppress(ConnectionError):  # a client has gone: leaving cancels the request
        events = EventStream(http, patience, after)
        try:
            await write(events)
        except ServingError as error:
            if not events.begun:
                raise
            fail(events, error)
        await events.end()
    return events.response
