"""Who may call the HTTP API.

With a secret (`motley.orchestrator.api.access.callers`), whoever shows it. Without one, programs on this machine, over
plain HTTP on loopback, where that is open to them; but no web page that happens to be open in a browser here: neither
one whose name was rebound to a loopback address (its `Host` gives it away) nor one that posts across origins (its
`Origin` does, unless it was named).

The page itself is public; what it shows comes from calls that are guarded.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from motley.orchestrator.api.access.callers import LOCAL, Caller, Callers
from motley.orchestrator.api.errors import ApiError
from motley.orchestrator.store.keys import Scope
from motley.protocol.address import is_loopback

CALLER = web.RequestKey("caller", Caller)
"""Where a request has its `Caller`."""
ADMIN_PATHS = ("/api/keys", "/api/tokens", "/api/members", "/api/pairings", "/api/usage")
"""Who belongs to the mesh, and who has used it how much: these, and what is below them, are for admins."""
_HOST = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:]+)]|(?P<name>[^:\[\]]+))(?::\d+)?")


@dataclass(frozen=True)
class Guard:
    """
    Attributes:
        open_on_loopback: the API listens on loopback without TLS, and is open there.
        public: paths that need no secret.
        origins: of web pages that may use an API that is open.
    """

    callers: Callers
    open_on_loopback: bool
    public: Collection[str] = ()
    origins: Collection[str] = ()

    def middleware(self) -> Middleware:
        """Checks every request, before anything but its head is read."""

        @web.middleware
        async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
            if self.open_on_loopback and not request.secure:
                request[CALLER] = _admitted(request, self._local_caller(request))
            elif request.path not in self.public:
                request[CALLER] = _admitted(request, self._caller(request))
            return await handler(request)

        return check

    def _caller(self, request: web.Request) -> Caller:
        scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
        shown = bearer.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        caller = self.callers.find(shown) if shown else None
        if caller is None:
            message = "missing or wrong API key; send it as `Authorization: Bearer KEY`, or as `x-api-key: KEY`"
            raise ApiError(401, message, code="invalid_api_key")
        return caller

    def _local_caller(self, request: web.Request) -> Caller:
        host = _HOST.fullmatch(request.host)
        if host is None or not is_loopback(host["v6"] or host["name"]):
            message = f"this server answers to localhost only, not to {request.host!r}; use http://127.0.0.1"
            raise ApiError(403, message, code="wrong_host")
        origin = request.headers.get("Origin")
        if origin is None or origin == f"http://{request.host}":
            return LOCAL
        if origin not in self.origins:
            raise ApiError(403, f"a web page of {origin} may not use this server", code="wrong_origin")
        return Caller(f"a page of {origin}", Scope.USE)


def _admitted(request: web.Request, caller: Caller) -> Caller:
    """
    Raises:
        ApiError: 403, the path is not for this caller.
    """
    if caller.scope is not Scope.ADMIN and _is_below(request.path, ADMIN_PATHS):
        message = f"{caller.name} may use the mesh, but not say who belongs to it: that takes a key of scope admin"
        raise ApiError(403, message, code="insufficient_scope")
    return caller


def _is_below(path: str, parents: Collection[str]) -> bool:
    return any(path == parent or path.startswith(f"{parent}/") for parent in parents)
