"""Who may call the HTTP API.

With an API key, whoever shows it. Without one (only when bound to loopback), programs on this machine, but no web
page that happens to be open in a browser here: neither one whose name was rebound to a loopback address (its `Host`
gives it away) nor one that posts across origins (its `Origin` does).

The page itself is public; what it shows comes from calls that are guarded.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from motley.orchestrator.api.errors import ApiError
from motley.protocol.address import is_loopback

_HOST = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:]+)]|(?P<name>[^:\[\]]+))(?::\d+)?")


def guard(api_key: str | None, public: Collection[str] = ()) -> Middleware:
    """Checks every request; `api_key` None means bound to loopback and open to it. `public` paths need no key."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if api_key is None:
            _check_local(request)
        elif request.path not in public:
            scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
            shown = bearer.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
            if not hmac.compare_digest(shown.encode(errors="replace"), api_key.encode()):
                message = "missing or wrong API key; send it as `Authorization: Bearer KEY`, or as `x-api-key: KEY`"
                raise ApiError(401, message, code="invalid_api_key")
        return await handler(request)

    return check


def _check_local(request: web.Request) -> None:
    host = _HOST.fullmatch(request.host)
    if host is None or not is_loopback(host["v6"] or host["name"]):
        message = f"this server answers to localhost only, not to {request.host!r}; use http://127.0.0.1"
        raise ApiError(403, message, code="wrong_host")
    origin = request.headers.get("Origin")
    if origin is not None and origin != f"http://{request.host}":
        raise ApiError(403, f"a web page of {origin} may not use this server", code="wrong_origin")
