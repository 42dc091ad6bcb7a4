"""The control plane over a network that breaks: a proxy between a node and its orchestrator."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from motley.cli.reaching.client import Client
from tests.e2e.processes import START_S, Mesh, MotleyProcess, mesh

RESET = struct.pack("ii", 1, 0)


class Proxy:
    """Passes bytes on, until told otherwise."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._writers: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._open = asyncio.Event()
        self._open.set()
        self.port = 0

    def reset_clients(self) -> None:
        """Reset the connections towards the node; the orchestrator is told nothing."""
        for client, _ in self._writers:
            if client.is_closing():  # it only asked for the certificate
                continue
            client.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            client.transport.abort()

    def swallow(self) -> None:
        """Pass nothing on any more, and end nothing."""
        self._open.clear()

    def pass_on(self) -> None:
        self._open.set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._target)
        self._writers.append((writer, back))
        await asyncio.gather(self._pump(reader, back), self._pump(there, writer))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                await self._open.wait()
                sink.write(data)

    def close(self) -> None:
        for pair in self._writers:
            for writer in pair:
                writer.transport.abort()


@asynccontextmanager
async def proxied(there: Mesh) -> AsyncIterator[Proxy]:
    host, _, port = there.target.rpartition(":")
    proxy = Proxy(host, int(port))
    server = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        proxy.pass_on()
        proxy.close()
        server.close()


async def join_through(proxy: Proxy, there: Mesh, cache: Path) -> MotleyProcess:
    where = f"127.0.0.1:{proxy.port}"
    node = await MotleyProcess.start("join", where, "--name", "n", "--cache", str(cache), MOTLEY_TOKEN=there.token)
    await node.line("joined as")
    return node


async def times_joined(node: MotleyProcess, count: int) -> None:
    deadline = time.monotonic() + START_S
    while sum("joined as" in line for line in node.lines) < count:
        assert time.monotonic() < deadline, node.lines
        assert node.process.returncode is None, node.lines
        await asyncio.sleep(0.05)


@pytest.mark.soak
async def test_a_node_that_was_cut_off_comes_back_though_its_name_is_still_taken(tmp_path: Path) -> None:
    async with mesh(tmp_path) as there, proxied(there) as proxy:
        node = await join_through(proxy, there, tmp_path)
        proxy.reset_clients()
        await times_joined(node, 2)
        async with Client(there.url) as client:
            nodes = (await client.call("GET", "/api/nodes"))["nodes"]
        assert [one["name"] for one in nodes if one["state"] == "alive"] == ["n"]
        await node.end()


async def test_both_sides_notice_a_silent_network(tmp_path: Path) -> None:
    async with mesh(tmp_path) as there, proxied(there) as proxy:
        node = await join_through(proxy, there, tmp_path)
        proxy.swallow()
        async with Client(there.url) as client:
            deadline = time.monotonic() + START_S
            while (await client.call("GET", "/api/nodes"))["nodes"][0]["state"] == "alive":
                assert time.monotonic() < deadline
                await asyncio.sleep(0.1)
        await node.line("lost the orchestrator")
        proxy.pass_on()
        await times_joined(node, 2)
        await node.end()
