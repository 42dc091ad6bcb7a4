"""The adapters of sessions as clients add, see, pin and remove them."""

from __future__ import annotations

from typing import Annotated, Any

from aiohttp import web
from pydantic import Field, TypeAdapter

from motley.orchestrator.adapters import NamedAdapter, served_name
from motley.orchestrator.api.errors import ApiError
from motley.orchestrator.api.schema import Body, Text, read, read_json
from motley.orchestrator.serving.adapters import Adapters
from motley.orchestrator.sessions.session import Session
from motley.orchestrator.sessions.table import SessionTable


class AdapterBody(Body):
    """The body of ``POST /api/adapters``."""

    model: Annotated[Text, Field(min_length=1)]
    """The name of a model that is served."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    """What requests call the adapter, behind the model's name and a colon."""
    folder: Annotated[Text, Field(min_length=1, max_length=4096)]
    """A folder in PEFT's format, on any node of the session. The others are sent what is in it."""
    pinned: bool = False
    """Keep it loaded."""


class PinBody(Body):
    """The body of ``POST /api/adapters/{model}/{name}/pin``."""

    pinned: bool = True
    """False: it may give way to others again."""


ADAPTER = TypeAdapter(AdapterBody)
PIN = TypeAdapter(PinBody)


class AdaptersApi:
    def __init__(self, sessions: SessionTable, adapters: Adapters) -> None:
        self._sessions = sessions
        self._adapters = adapters

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/api/adapters", self.adapters),
            web.post("/api/adapters", self.add),
            web.delete("/api/adapters/{model}/{name}", self.remove),
            web.post("/api/adapters/{model}/{name}/pin", self.pin),
        ]

    async def adapters(self, _: web.Request) -> web.Response:
        """The adapters that requests may name."""
        told = [each for session in self._sessions if session.alive for each in adapters_json(session)]
        return web.json_response({"adapters": told})

    async def add(self, request: web.Request) -> web.Response:
        """Have a session know an adapter: 201 once every rank has its files and finds that they fit the model."""
        wanted = read(ADAPTER, await read_json(request))
        session = self._session(wanted.model, "model")
        added = await self._adapters.add(session, wanted.name, wanted.folder, wanted.pinned)
        return web.json_response(_adapter_json(session, added), status=201)

    async def pin(self, request: web.Request) -> web.Response:
        """Keep an adapter loaded, or let it give way to others."""
        wanted = read(PIN, await read_json(request) if request.can_read_body else {})
        session = self._session(request.match_info["model"])
        changed = await self._adapters.pin(session, request.match_info["name"], wanted.pinned)
        return web.json_response(_adapter_json(session, changed))

    async def remove(self, request: web.Request) -> web.Response:
        """Forget an adapter: requests under way are answered with it to their end, new ones are refused."""
        session = self._session(request.match_info["model"])
        removed = await self._adapters.remove(session, request.match_info["name"])
        return web.json_response(_adapter_json(session, removed))

    def _session(self, model: str, param: str | None = None) -> Session:
        session = self._sessions.named(model)
        if session is None:
            raise ApiError(404, f"no model named {model!r} is served", param=param, code="model_not_found")
        return session


def adapters_json(session: Session) -> list[dict[str, Any]]:
    """The adapters of a session as clients see them."""
    return [_adapter_json(session, each) for each in session.adapters.values()]


def _adapter_json(session: Session, adapter: NamedAdapter) -> dict[str, Any]:
    loaded = session.activity.adapters if session.activity else ()
    return {
        "model": session.name,
        "name": adapter.name,
        "served_as": served_name(session.name, adapter.name),
        "folder": adapter.source,
        "fingerprint": adapter.fingerprint,
        "rank": adapter.rank,
        "bytes": adapter.bytes,
        "pinned": adapter.pinned,
        "loaded": adapter.fingerprint in loaded,
    }
