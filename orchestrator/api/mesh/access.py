"""Who belongs to the mesh: API keys, join tokens, members, and codes of machines that want to join. For admins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from aiohttp import web
from pydantic import Field, TypeAdapter

from motley.orchestrator.api.access.guard import CALLER
from motley.orchestrator.api.errors import ApiError
from motley.orchestrator.api.schema import Body, read, read_json
from motley.orchestrator.control import Control
from motley.orchestrator.mesh.nodes import NodeTable
from motley.orchestrator.store.keys import Key, Keys, Scope
from motley.orchestrator.store.members import Members
from motley.orchestrator.store.store import StoreError
from motley.orchestrator.store.tokens import Token, Tokens
from motley.orchestrator.store.usage import Usage
from motley.orchestrator.trust.audit import Audit
from motley.orchestrator.trust.identity import Identity
from motley.orchestrator.trust.pairings import Pairings

YEAR_S = 366 * 86400.0
Note = Annotated[str, Field(max_length=100)]


class NewKey(Body):
    """The body of ``POST /api/keys``."""

    note: Note = ""
    scope: Literal["use", "admin"] = "use"


class NewToken(Body):
    """The body of ``POST /api/tokens``."""

    note: Note = ""
    expires_s: Annotated[float, Field(gt=0, le=YEAR_S)] | None = None
    uses: Annotated[int, Field(ge=1, le=10_000)] | None = None


NEW_KEY = TypeAdapter(NewKey)
NEW_TOKEN = TypeAdapter(NewToken)


class AccessApi:
    def __init__(
        self,
        identity: Identity,
        keys: Keys,
        tokens: Tokens,
        members: Members,
        pairings: Pairings,
        usage: Usage,
        nodes: NodeTable,
        control: Control,
        audit: Audit,
    ) -> None:
        self._identity = identity
        self._keys = keys
        self._tokens = tokens
        self._members = members
        self._pairings = pairings
        self._usage = usage
        self._nodes = nodes
        self._control = control
        self._audit = audit

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/api/keys", self.keys),
            web.post("/api/keys", self.create_key),
            web.delete("/api/keys/{id}", self.remove_key),
            web.get("/api/tokens", self.tokens),
            web.post("/api/tokens", self.create_token),
            web.delete("/api/tokens/{id}", self.remove_token),
            web.get("/api/members", self.members),
            web.delete("/api/members/{name}", self.revoke),
            web.get("/api/pairings", self.pairings),
            web.get("/api/usage", self.usage),
        ]

    async def keys(self, _: web.Request) -> web.Response:
        """All API keys, without their secrets, which nobody knows."""
        return web.json_response({"keys": [_key_json(key) for key in self._keys]})

    async def create_key(self, request: web.Request) -> web.Response:
        """Make an API key; it is told in this answer and never again."""
        asked = read(NEW_KEY, await read_json(request))
        with _store_told():
            key, secret = await self._keys.create(asked.note, Scope(asked.scope))
        self._audit.note("key created", id=key.id, note=key.note, scope=key.scope, by=request[CALLER].name)
        return web.json_response({**_key_json(key), "key": secret}, status=201)

    async def remove_key(self, request: web.Request) -> web.Response:
        """Make an API key invalid."""
        with _store_told():
            key = await self._keys.remove(request.match_info["id"])
        if key is None:
            raise ApiError(404, f"there is no API key {request.match_info['id']!r}", code="key_not_found")
        self._audit.note("key removed", id=key.id, note=key.note, by=request[CALLER].name)
        return web.json_response(_key_json(key))

    async def tokens(self, _: web.Request) -> web.Response:
        """The join tokens that are valid, without their secrets, which nobody knows."""
        return web.json_response({"tokens": [_token_json(token) for token in self._tokens]})

    async def create_token(self, request: web.Request) -> web.Response:
        """Make a join token; it is told in this answer and never again."""
        asked = read(NEW_TOKEN, await read_json(request))
        with _store_told():
            token, secret = await self._tokens.create(asked.note, asked.expires_s, asked.uses)
        self._audit.note("token created", id=token.id, note=token.note, uses=asked.uses, by=request[CALLER].name)
        return web.json_response({**_token_json(token), "token": self._identity.join_token(secret)}, status=201)

    async def remove_token(self, request: web.Request) -> web.Response:
        """Make a join token invalid; who has joined with it stays."""
        with _store_told():
            token = await self._tokens.remove(request.match_info["id"])
        if token is None:
            raise ApiError(404, f"there is no join token {request.match_info['id']!r}", code="token_not_found")
        self._audit.note("token removed", id=token.id, note=token.note, by=request[CALLER].name)
        return web.json_response(_token_json(token))

    async def members(self, _: web.Request) -> web.Response:
        """All machines that may come back, whether they are there or not."""
        there = {node.name: node for node in self._nodes if node.alive}
        told = [
            {
                "name": member.name,
                "token": member.token,
                "joined": member.joined,
                "alive": member.name in there,
                "address": there[member.name].address if member.name in there else None,
            }
            for member in self._members
        ]
        return web.json_response({"members": told})

    async def pairings(self, _: web.Request) -> web.Response:
        """Machines that want to join, with the codes to be typed there."""
        told = [
            {"name": each.name, "address": each.address, "code": each.code, "tries_left": each.tries_left}
            for each in self._pairings
        ]
        return web.json_response({"pairings": told})

    async def usage(self, _: web.Request) -> web.Response:
        """Requests and tokens by day, caller and model."""
        with _store_told():
            rows = await self._usage.rows()
        return web.json_response({"usage": [dict(row) for row in rows]})

    async def revoke(self, request: web.Request) -> web.Response:
        """Shut a machine out: its connection ends, and neither its own secret nor its join token is valid any more."""
        name = request.match_info["name"]
        try:
            with _store_told():
                member = await self._members.revoke(name)
        finally:
            self._control.shut_out(name)
        if member is None:
            raise ApiError(404, f"no machine of this mesh is called {name!r}", code="node_not_found")
        self._audit.note("node revoked", node=name, token=member.token, by=request[CALLER].name)
        return web.json_response({"name": name, "token": member.token})


@contextmanager
def _store_told() -> Iterator[None]:
    """Turns what goes wrong with the store into an answer (503)."""
    try:
        yield
    except StoreError as error:
        raise ApiError(503, str(error), code="store_failed") from error


def _key_json(key: Key) -> dict[str, Any]:
    return {"id": key.id, "note": key.note, "scope": key.scope, "created": key.created}


def _token_json(token: Token) -> dict[str, Any]:
    return {
        "id": token.id,
        "note": token.note,
        "created": token.created,
        "expires": token.expires,
        "uses_left": token.uses_left,
    }
