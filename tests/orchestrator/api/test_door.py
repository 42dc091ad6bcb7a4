"""How many clients are let in at a time, and how long one may say nothing."""

from __future__ import annotations

import asyncio
import errno
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from motley.orchestrator.api import schema
from motley.orchestrator.api.access import door
from motley.orchestrator.api.access.door import Door
from motley.orchestrator.api.errors import errors_as_json
from motley.orchestrator.api.schema import read_json
from motley.transport.certificates import self_signed

DEADLINE_S = 20.0
GET = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 9\r\n\r\n"


async def _answer(request: web.Request) -> web.Response:
    if request.method == "POST":
        await read_json(request)
    return web.Response(text="hello")


@asynccontextmanager
async def opened(
    connections: int = 10, of_one_address: int = 10, idle_s: float = 60.0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """A server behind a door on loopback; its port."""
    app = web.Application(middlewares=[errors_as_json])
    app.router.add_route("*", "/", _answer)
    runner = web.AppRunner(app, keepalive_timeout=idle_s, shutdown_timeout=0.1)
    await runner.setup()
    assert runner.server is not None
    behind = Door(runner.server, connections, of_one_address)
    try:
        yield await behind.open("127.0.0.1", 0, tls)
    finally:
        await behind.close()
        await runner.cleanup()


async def dial(port: int, *, source: str = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0))


async def first_line(reader: asyncio.StreamReader) -> bytes:
    """What a connection is told first; empty if it is closed or reset."""
    async with asyncio.timeout(DEADLINE_S):
        try:
            return await reader.readline()
        except ConnectionResetError:
            return b""


async def served(port: int, *, source: str = "127.0.0.1") -> bool:
    """Whether a client gets an answer; its connection is closed then."""
    reader, writer = await dial(port, source=source)
    try:
        writer.write(GET)
        return b"200" in await first_line(reader)
    finally:
        writer.close()


async def until_served(port: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if await served(port):
                return
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("limits", [{"connections": 3}, {"of_one_address": 3}])
async def test_what_is_beyond_the_limit_is_closed_until_others_have_gone(
    limits: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(**limits) as port:
        held = [await dial(port) for _ in range(3)]
        for reader, writer in held:
            writer.write(GET)
            assert b"200" in await first_line(reader)
        reader, refused = await dial(port)
        assert await first_line(reader) == b""
        refused.close()
        assert "3 connections to the API; further ones are closed" in caplog.text
        held.pop()[1].close()
        await until_served(port)
        for _, writer in held:
            writer.close()


async def test_who_holds_all_connections_that_an_address_may_have_leaves_some_for_others() -> None:
    async with opened(connections=6, of_one_address=3) as port:
        held = [(await dial(port, source="127.0.0.2"))[1] for _ in range(9)]
        assert await served(port, source="127.0.0.3")
        assert not await served(port, source="127.0.0.2")
        for writer in held:
            writer.close()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: he", GET + b"GET / HT"])
async def test_a_connection_without_a_whole_request_ends(said: bytes) -> None:
    async with opened(idle_s=0.2) as port:
        reader, writer = await dial(port)
        writer.write(said)
        async with asyncio.timeout(DEADLINE_S):
            answer = await reader.read()
        assert answer.count(b"200 OK") == (GET in said)
        writer.close()


async def test_a_body_that_does_not_come_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "BODY_S", 0.1)
    async with opened() as port:
        reader, writer = await dial(port)
        writer.write(POST + b"[")
        assert b"408" in await first_line(reader)
        writer.close()


async def test_a_process_without_a_file_left_says_so_and_goes_on_when_it_has_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(door, "PAUSE_S", 0.01)
    loop = asyncio.get_running_loop()
    accept, failures = loop.sock_accept, [OSError(errno.EMFILE, "Too many open files")] * 3

    async def fail_at_first(listener: Any) -> Any:
        if failures:
            raise failures.pop()
        return await accept(listener)

    monkeypatch.setattr(loop, "sock_accept", fail_at_first)
    async with opened() as port:
        assert await served(port)
    assert [record.getMessage() for record in caplog.records] == [
        "a client could not be let in: [Errno 24] Too many open files"
    ] * 3


async def test_who_does_not_agree_on_tls_holds_nobody_up_and_counts_as_a_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "HANDSHAKE_S", 1.0)
    papers, file = self_signed("here"), tmp_path / "here.pem"
    file.write_bytes(papers.certificate + papers.key)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(file)
    client = ssl.create_default_context(cadata=papers.certificate.decode())

    async def asked(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client, server_hostname="here")
        writer.write(GET)
        line = await first_line(reader)
        writer.close()
        return line

    async with opened(connections=4, of_one_address=4, tls=server) as port:
        idle = [await dial(port) for _ in range(3)]
        assert b"200" in await asked(port)
        idle.append(await dial(port))
        with pytest.raises(OSError):  # noqa: PT011  (as the system has it: reset, or an end in the handshake)
            await asked(port)
        for reader, writer in idle:  # all are cut off, and make room
            assert await first_line(reader) == b""
            writer.close()
        assert b"200" in await asked(port)
        _, noise = await dial(port)
        noise.write(bytes(100_000))
        assert b"200" in await asked(port)
        noise.close()
