"""Clients that read slowly, or not at all, or go while a prompt is computed: over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from motley.orchestrator.api import events
from motley.orchestrator.api.access import slow_clients
from motley.orchestrator.serving.answering import requests
from motley.protocol.mesh_pb2 import Delta, Generate

from ..conftest import ScriptedNode, say

DEADLINE_S = 30.0

PIECE = "a" * 8192
"""Text of a delta: a client that reads nothing fills the system's buffers with few of them."""
MUCH = 16 << 20
"""Bytes that no buffers of the system and of this process hold together."""


@asynccontextmanager
async def asked(mesh: Any, **body: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client that has asked for a completion and has read nothing; it buffers little."""
    where = urlsplit(mesh.orchestrator.http_url)
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plain.setblocking(False)
    await asyncio.get_running_loop().sock_connect(plain, (where.hostname, where.port))
    reader, writer = await asyncio.open_connection(sock=plain, limit=4096)
    data = json.dumps({"model": "bard", "prompt": "Hi", **body}).encode()
    kind = "Content-Type: application/json\r\nConnection: close"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {where.netloc}\r\n{kind}\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    try:
        yield reader, writer
    finally:
        writer.close()


class Talker:
    """What a node answers: pieces for as long as it is not held, up to so many.

    Attributes:
        said: bytes of text so far.
        paused: whether it has been held.
    """

    def __init__(self, node: ScriptedNode, pieces: int) -> None:
        self.said = 0
        self.paused = asyncio.Event()
        self._node = node
        self._pieces = pieces

    async def __call__(self, generate: Generate) -> AsyncIterator[Delta]:
        for _ in range(self._pieces):
            if generate.request_id in self._node.held:
                self.paused.set()
                await self._node.until(lambda: generate.request_id not in self._node.held)
            self.said += len(PIECE)
            yield Delta(text=PIECE, ids=[1])
            await asyncio.sleep(0)
        yield Delta(finish="length", completion_tokens=self._pieces)


async def test_an_answer_waits_for_a_client_that_reads_slowly_and_comes_whole(mesh: Any, bard: Any) -> None:
    talker = bard.answer = Talker(bard, MUCH // len(PIECE))
    async with asyncio.timeout(DEADLINE_S), asked(mesh, stream=True) as (reader, _):
        await talker.paused.wait()
        assert talker.said < MUCH // 2, "it fills no memory"
        bard.answer = say
        status, body = await mesh.call("POST", "/v1/completions", {"model": "bard", "prompt": "Hi"})
        assert (status, body["choices"][0]["text"]) == (200, "Hello, world"), "it holds nobody up"
        text = bytearray()
        while data := await reader.read(1 << 16):
            text += data
    assert text.count(b"aaaa" * 2048) == MUCH // len(PIECE)
    assert text.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert not bard.held
    assert bard.cancelled.empty()


async def test_a_client_that_takes_nothing_is_ended_and_its_request_cancelled(
    mesh: Any, bard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_clients, "TAKE_S", 1.0)
    talker = bard.answer = Talker(bard, MUCH // len(PIECE))
    async with asyncio.timeout(DEADLINE_S), asked(mesh, stream=True) as (reader, _):
        await talker.paused.wait()
        assert await bard.cancelled.get() == bard.generated[0].request_id
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(2 * MUCH)


async def test_a_client_that_takes_little_at_a_time_is_not_ended(
    mesh: Any, bard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes far longer for what is buffered than a client may take nothing."""
    monkeypatch.setattr(slow_clients, "TAKE_S", 3.0)
    talker = bard.answer = Talker(bard, MUCH // len(PIECE))
    async with asyncio.timeout(DEADLINE_S), asked(mesh, stream=True) as (reader, _):
        await talker.paused.wait()
        began = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() < began + 6.0:
            await reader.read(1 << 15)
            await asyncio.sleep(0.01)
        assert bard.cancelled.empty()
        while await reader.read(1 << 20):
            pass
    assert bard.cancelled.empty()


async def test_a_whole_answer_that_nobody_takes_ends_its_connection(
    mesh: Any, bard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_clients, "TAKE_S", 1.0)
    hung_up = asyncio.Event()
    monkeypatch.setattr(slow_clients._log, "warning", lambda *_: hung_up.set())
    talker = bard.answer = Talker(bard, MUCH // len(PIECE))
    async with asyncio.timeout(DEADLINE_S), asked(mesh) as (reader, _):
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        assert talker.said == MUCH
        await hung_up.wait()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(2 * MUCH)


async def test_a_client_that_goes_before_the_first_token_cancels(
    mesh: Any, bard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "COMMENT_S", 0.2)

    async def mute(_: Generate) -> AsyncIterator[Delta]:
        await asyncio.Event().wait()
        yield Delta()

    bard.answer = mute
    async with asyncio.timeout(DEADLINE_S):
        async with asked(mesh, stream=True) as (_, writer):
            await bard.until(lambda: bard.generated)
            writer.transport.abort()
            assert await bard.cancelled.get() == bard.generated[0].request_id
        async with asked(mesh, stream=True) as (reader, writer):
            await reader.readuntil(b": still at it\n\n")
            writer.transport.abort()
            assert await bard.cancelled.get() == bard.generated[1].request_id


async def test_comments_fill_the_silence_between_events(mesh: Any, bard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "COMMENT_S", 0.5)
    said = asyncio.Event()

    async def slow(_: Generate) -> AsyncIterator[Delta]:
        for text in ("first", "second"):
            await said.wait()
            said.clear()
            for _ in range(3):  # signs of life are no news for the client
                yield Delta()
            yield Delta(text=text, ids=[1])
        yield Delta(finish="stop", completion_tokens=2)

    bard.answer = slow
    asked_for = {"model": "bard", "prompt": "Hi", "stream": True}
    async with asyncio.timeout(DEADLINE_S), mesh.http.post("/v1/completions", json=asked_for) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        lines: list[bytes] = []

        async def until_comments(number: int) -> None:
            while sum(line == b": still at it\n" for line in lines) < number:
                lines.append(await response.content.readline())

        await until_comments(2)
        assert lines == [b": still at it\n", b"\n", b": still at it\n"], "nothing else comes before the first token"
        said.set()
        await until_comments(3)
        said.set()
        lines += (await response.content.read()).splitlines(keepends=True)
    kinds = [line[:4] for line in lines if line != b"\n"]
    assert kinds == [b": st", b": st", b"data", b": st", b"data", b"data", b"data"]
    assert lines[1::2] == [b"\n"] * (len(lines) // 2), "each has a line of its own, between events"


async def test_a_failure_after_a_comment_is_an_event(mesh: Any, bard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "COMMENT_S", 0.2)
    monkeypatch.setattr(requests, "ANSWER_S", 1.0)

    async def mute(_: Generate) -> AsyncIterator[Delta]:
        await asyncio.Event().wait()
        yield Delta()

    bard.answer = mute
    asked_for = {"model": "bard", "prompt": "Hi", "stream": True}
    async with asyncio.timeout(DEADLINE_S), mesh.http.post("/v1/completions", json=asked_for) as response:
        assert response.status == 200
        *_, last = (await response.text()).strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timed_out"
