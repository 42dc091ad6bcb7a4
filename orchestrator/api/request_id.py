"""``x-request-id``: what a client and the logs call a request, on every answer: the client's own word, or a new one."""

from __future__ import annotations

import re
import secrets

from aiohttp import web

_HEADER = "X-Request-Id"
_FIT = re.compile(r"[A-Za-z0-9._-]{1,128}")


async def tell_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Put the id into an answer that is about to be sent; a client's own that is no plain word is not repeated."""
    asked = request.headers.get(_HEADER, "")
    response.headers[_HEADER] = asked if _FIT.fullmatch(asked) else f"req_{secrets.token_hex(12)}"
