"""The headers by which a client takes up an answer whose connection has died."""

from __future__ import annotations

import hashlib
import json
import re

from aiohttp import web

from motley.orchestrator.api.errors import ApiError
from motley.orchestrator.api.schema import read_json

_KEY = re.compile(r"[\x21-\x7e]{1,255}")


def idempotency_key(http: web.Request) -> str:
    """What the client calls its request, so that it can make it again; empty: it does not.

    Raises:
        ApiError: 400, it is no key.
    """
    key = http.headers.get("Idempotency-Key", "")
    if key and not _KEY.fullmatch(key):
        raise ApiError(400, "Idempotency-Key must be 1 to 255 printable ASCII characters without spaces")
    return key


async def digest_of(http: web.Request) -> str:
    """Tells requests apart by what they ask for; the order of fields, and spaces, are no difference."""
    asked = json.dumps([http.path, await read_json(http)], sort_keys=True)
    return hashlib.sha256(asked.encode()).hexdigest()


def last_event(http: web.Request) -> int:
    """The number of the last event that the client has of an answer; 0: it wants all.

    Raises:
        ApiError: 400, it is no number.
    """
    told = http.headers.get("Last-Event-ID", "0")
    if not re.fullmatch(r"[0-9]{1,9}", told):
        raise ApiError(400, f"Last-Event-ID must be the number of an event, not {told[:50]!r}")
    return int(told)
