"""A client of an orchestrator that breaks off: in the middle of an answer, and between two."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from motley.cli.errors import CliError
from motley.cli.reaching.client import Client, Refused, Unreachable

End = Callable[[web.StreamResponse, web.Request], Awaitable[None]]
EVENT = b'data: {"choices": []}\n\n'


async def without_a_word(response: web.StreamResponse, _: web.Request) -> None:
    await response.write_eof()


async def within_an_event(response: web.StreamResponse, _: web.Request) -> None:
    await response.write(b'data: {"choi')
    await response.write_eof()


async def within_a_letter(response: web.StreamResponse, _: web.Request) -> None:
    await response.write(b'data: {"choices": "\xc3')
    await response.write_eof()


async def as_killed(_: web.StreamResponse, request: web.Request) -> None:
    assert request.transport is not None
    request.transport.abort()


@asynccontextmanager
async def client_of(end: End) -> AsyncIterator[tuple[Client, TestServer]]:
    """A client of a server that sends one event of an answer and ends it so."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b": still there\n\n" + EVENT)
        await end(response, request)
        return response

    async def sessions(_: web.Request) -> web.Response:
        return web.json_response({"sessions": []})

    app = web.Application()
    app.add_routes([web.post("/v1/completions", answer), web.get("/api/sessions", sessions)])
    async with TestServer(app) as server, Client(str(server.make_url(""))) as client:
        yield client, server


async def events(client: Client) -> list[dict[str, Any]]:
    return [event async for event in client.stream("/v1/completions", {})]


@pytest.mark.parametrize("end", [without_a_word, within_an_event, within_a_letter, as_killed])
async def test_an_answer_that_breaks_off_is_told_in_one_line(end: End) -> None:
    async with client_of(end) as (client, _):
        with pytest.raises(CliError, match=f"the orchestrator at {client.url} has gone or cannot be reached") as told:
            await events(client)
        assert "\n" not in str(told.value)


async def test_comments_and_what_follows_the_end_are_no_events() -> None:
    async def done(response: web.StreamResponse, _: web.Request) -> None:
        await response.write(b"data: [DONE]\n\n" + EVENT)

    async with client_of(done) as (client, _):
        assert await events(client) == [{"choices": []}]


async def test_an_error_in_an_answer_keeps_its_code() -> None:
    async def fail(response: web.StreamResponse, _: web.Request) -> None:
        await response.write(b'data: {"error": {"message": "a is lost", "code": "node_lost", "param": null}}\n\n')

    async with client_of(fail) as (client, _):
        with pytest.raises(Refused, match="a is lost") as refusal:
            await events(client)
        assert refusal.value.code == "node_lost"


async def test_who_has_answered_before_has_gone_and_was_not_absent() -> None:
    """`motley run` makes a mesh of its own where there is none, but not where one dies."""
    async with client_of(without_a_word) as (client, server):
        assert await client.sessions() == []
        await server.close()
        with pytest.raises(CliError, match="has gone or cannot be reached any more") as told:
            await client.sessions()
        assert not isinstance(told.value, Unreachable)
        async with Client(client.url) as another:
            with pytest.raises(Unreachable):
                await another.sessions()


async def test_an_answer_is_taken_up_where_it_stood(monkeypatch: pytest.MonkeyPatch) -> None:
    """The orchestrator is killed in the middle, then its nodes are not back yet, then they are."""
    monkeypatch.setattr("motley.cli.reaching.client.AGAIN_S", 0.0)
    asked: list[tuple[str, str | None]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append((request.headers["Idempotency-Key"], request.headers.get("Last-Event-ID")))
        if len(asked) == 2:
            error = {"message": "not ready", "code": "session_not_ready", "param": None}
            return web.json_response({"error": error}, status=503)
        response = web.StreamResponse()
        await response.prepare(request)
        first = 1 if len(asked) == 1 else 2
        await response.write(f'id: {first}\ndata: {{"piece": {first}}}\n\n'.encode())
        if len(asked) == 1:
            assert request.transport is not None
            request.transport.abort()
        else:
            await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.add_routes([web.post("/v1/completions", answer)])
    async with TestServer(app) as server, Client(str(server.make_url(""))) as client:
        events = [event async for event in client.stream("/v1/completions", {}, back_within_s=60)]
    assert events == [{"piece": 1}, {"piece": 2}]
    assert [after for _, after in asked] == [None, "1", "1"]
    assert len({key for key, _ in asked}) == 1
