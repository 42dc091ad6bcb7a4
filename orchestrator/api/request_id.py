"""``x-request-id``: what a client and all logs call a request, on every answer: the client's own word, or a new one."""

from __future__ import annotations

import logging
import re
import secrets

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

_HEADER = "X-Request-Id"
_FIT = re.compile(r"[A-Za-z0-9._-]{1,128}")
_ID = web.RequestKey("id", str)


def request_id(request: web.BaseRequest) -> str:
    """What a request is called, from its first line in a log to its last; a client's word that is no plain one is not
    repeated."""
    if _ID not in request:
        asked = request.headers.get(_HEADER, "")
        request[_ID] = asked if _FIT.fullmatch(asked) else f"req_{secrets.token_hex(12)}"
    return request[_ID]


async def tell_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Put the id into an answer that is about to be sent."""
    response.headers[_HEADER] = request_id(request)


class AccessLog(AbstractAccessLogger):
    """A line for each answer, where somebody reads what is said at that level."""

    @property
    def enabled(self) -> bool:
        return self.logger.isEnabledFor(logging.INFO)

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        """Note that an answer was given, in `time` seconds; of those who just look, as the page does, only refusals."""
        if request.method == "GET" and response.status < 400:
            return
        told = f"{request.method} {request.path}: {response.status} in {time:.3f} s"
        self.logger.info("%s", told, extra={"request": request_id(request)})
