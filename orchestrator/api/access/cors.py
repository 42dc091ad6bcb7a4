"""Web pages of other origins: none may read what the API answers, but those that were named (`--cors-origin`)."""

from __future__ import annotations

import re
from collections.abc import Collection

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

METHODS = "GET, POST, PUT, DELETE"
KNOWN_S = 600
"""A browser need not ask again for so long what it may do."""
_ORIGIN = re.compile(r"https?://[^/\s?#@*]+")


def check_origin(origin: str) -> None:
    """
    Raises:
        ValueError: it is not what a browser sends as `Origin`.
    """
    if not _ORIGIN.fullmatch(origin):
        raise ValueError(f"{origin!r} is not an origin such as https://chat.example or http://localhost:3000")


class Cors:
    """Tells browsers which pages may read answers. Whoever calls must still show a key, where one is wanted."""

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = origins

    def middleware(self) -> Middleware:
        """Answers what browsers ask before they send a request; that carries no key."""

        @web.middleware
        async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
            asks = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
            if asks and request.headers.get("Origin") in self._origins:
                return web.Response(status=204)
            return await handler(request)

        return answer

    async def tell(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the headers to an answer that is about to be sent. A page that was named may send any: clients of OpenAI
        and Anthropic have a dozen of their own, and more with each version."""
        response.headers["Vary"] = "Origin"
        origin = request.headers.get("Origin")
        if origin is not None and origin in self._origins:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Allow-Methods"] = METHODS
            if asked := request.headers.get("Access-Control-Request-Headers"):
                response.headers["Access-Control-Allow-Headers"] = asked
            response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"
            response.headers["Access-Control-Max-Age"] = str(KNOWN_S)
