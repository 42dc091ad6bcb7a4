"""Server-sent events to one client: written whole, with comments between them while there is nothing to say."""

from __future__ import annotations

import asyncio

from aiohttp import web

from motley.orchestrator.api.access.slow_clients import Patience, finish

COMMENT_S = 10.0
"""A stream on which nothing was written for so long gets a comment, so that no proxy takes it for dead."""


class EventStream:
    """The answer to one request, as a stream of events. Its headers go out with what is written first.

    All methods raise ConnectionError once the client has gone.
    """

    def __init__(self, http: web.Request, patience: Patience, after: int | None = None) -> None:
        """
        Args:
            patience: entered; told what is written.
            after: events have numbers, from 1 on, and those up to this one the client has; None: they have none.
        """
        self._after = after
        self._number = 0
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        self.response = web.StreamResponse(headers=headers)
        self._http = http
        self._patience = patience
        self._clock = asyncio.get_running_loop().time
        self._written_at = self._clock()

    @property
    def begun(self) -> bool:
        """Whether the client has been told that the answer is a stream."""
        return self.response.prepared

    @property
    def quiet_s(self) -> float:
        """Seconds until a comment is due, unless something is written before."""
        return max(0.0, self._written_at + COMMENT_S - self._clock())

    async def event(self, data: str, kind: str = "") -> None:
        """Write an event, unless the client has it; `data` is one line.

        Args:
            kind: its name; empty: it has none.
        """
        self._number += 1
        named = f"event: {kind}\n" if kind else ""
        if self._after is None:
            await self._write(f"{named}data: {data}\n\n")
        elif self._number > self._after:
            await self._write(f"id: {self._number}\n{named}data: {data}\n\n")

    async def comment(self) -> None:
        """Write a line that clients ignore."""
        await self._write(": still at it\n\n")

    async def end(self) -> None:
        """Nothing more is written; wait until the client has taken everything."""
        if not self.begun:
            await self.response.prepare(self._http)
        await finish(self._http, self.response)

    async def _write(self, text: str) -> None:
        if not self.begun:
            await self.response.prepare(self._http)
        data = text.encode()
        self._patience.written += len(data)
        self._written_at = self._clock()
        await self.response.write(data)
        self._written_at = self._clock()
