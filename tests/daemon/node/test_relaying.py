"""A relay forwards what comes to one address, both ways, and ends by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from motley.daemon.node.network import relaying
from motley.daemon.node.network.relaying import Relays
from motley.protocol import mesh_pb2 as pb
from motley.protocol.address import parse_address
from tests.ports import unanswered_port


@asynccontextmanager
async def echo() -> AsyncIterator[str]:
    """Where somebody says what he is told, until he is told no more."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(1000):
            writer.write(chunk)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.fixture
async def relays() -> AsyncIterator[Relays]:
    made = Relays()
    async with asyncio.timeout(30):
        yield made
        await made.end()


async def test_bytes_go_through_and_its_end_too(relays: Relays) -> None:
    async with echo() as target:
        opened = await relays.open(pb.Relay(id="r", target=target), "127.0.0.1")
        assert (opened.id, opened.failure) == ("r", "")

        async def through(text: bytes) -> bytes:
            reader, writer = await asyncio.open_connection(*parse_address(opened.listening))

            async def say() -> None:
                writer.write(text)
                await writer.drain()
                writer.write_eof()

            saying = asyncio.create_task(say())
            heard = await reader.read()
            await saying
            writer.close()
            return heard

        texts = [bytes([number]) * (1 << 20) for number in range(3)]
        assert await asyncio.gather(*map(through, texts)) == texts


async def test_who_does_not_answer_is_hung_up_on(relays: Relays) -> None:
    async with echo() as target:
        pass
    opened = await relays.open(pb.Relay(id="r", target=target), "127.0.0.1")
    reader, writer = await asyncio.open_connection(*parse_address(opened.listening))
    assert await reader.read() == b""
    writer.close()
    assert "is not an address" in (await relays.open(pb.Relay(id="r", target="nowhere"), "127.0.0.1")).failure


async def test_what_listens_on_this_machine_alone_is_nobody_else_s(relays: Relays) -> None:
    """Others reach this node under an address that is not loopback; its programs on loopback trust whoever connects."""
    async with echo() as target:
        opened = await relays.open(pb.Relay(id="r", target=target), "192.0.2.1")
        reader, writer = await asyncio.open_connection("127.0.0.1", parse_address(opened.listening)[1])
        writer.write(b"x")
        assert await reader.read() == b""
        writer.close()


async def test_it_listens_at_no_port_but_those_given(relays: Relays) -> None:
    with unanswered_port() as port:
        opened = await relays.open(pb.Relay(id="r", target="192.0.2.1:7"), "127.0.0.1", (port, port))
        assert "address already in use" in opened.failure


async def test_it_ends_when_it_has_been_of_no_use(relays: Relays, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaying, "UNUSED_S", 0.1)
    async with echo() as target:
        opened = await relays.open(pb.Relay(id="r", target=target), "127.0.0.1")
        await asyncio.gather(*relays._relays)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(*parse_address(opened.listening))


async def test_there_are_not_too_many(relays: Relays, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relaying, "RELAYS", 1)
    monkeypatch.setattr(relaying, "CONNECTIONS", 1)
    async with echo() as target:
        opened = await relays.open(pb.Relay(id="r", target=target), "127.0.0.1")
        assert "open here already" in (await relays.open(pb.Relay(id="q", target=target), "127.0.0.1")).failure
        reader, writer = await asyncio.open_connection(*parse_address(opened.listening))
        writer.write(b"x")
        assert await reader.read(1) == b"x"
        second, other = await asyncio.open_connection(*parse_address(opened.listening))
        assert await second.read() == b""
        writer.transport.abort()  # as a process that dies does
        other.close()
