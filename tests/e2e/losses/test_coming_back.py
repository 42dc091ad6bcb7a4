"""A machine whose connection is gone on its side alone, as when it changes networks, is back at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from motley.cli.reaching.client import Client
from tests.e2e.processes import Mesh, MotleyProcess


class Detour:
    """A way to the orchestrator on which connections can end at the near end alone."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._near: list[asyncio.StreamWriter] = []
        self._far: list[asyncio.StreamWriter] = []
        self._copying: set[asyncio.Task[None]] = set()
        self.target = ""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        async with await asyncio.start_server(self._connected, "127.0.0.1", 0) as server:
            self.target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield
            for writer in self._near + self._far:
                writer.transport.abort()
            await asyncio.gather(*self._copying, return_exceptions=True)

    def break_near(self) -> None:
        """End all connections where they begin; the orchestrator hears nothing of that."""
        for task in self._copying:
            task.cancel()
        for writer in self._near:
            writer.transport.abort()
        self._near.clear()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far = await asyncio.open_connection(self._host, self._port)
        self._near.append(writer)
        self._far.append(far)
        for from_, to in ((reader, far), (far_reader, writer)):
            task = asyncio.create_task(_copy(from_, to))
            self._copying.add(task)
            task.add_done_callback(self._copying.discard)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
    writer.transport.abort()


async def test_a_machine_is_back_before_its_old_connection_was_missed(there: Mesh) -> None:
    detour = Detour(there.target)
    async with detour.open(), Client(there.url) as client:
        arguments = ("join", detour.target, "--name", "d", "--memory", "2GB", "--threads", "1")
        node = await MotleyProcess.start(
            *arguments, "--cache", str(there.cache), entry="tests.e2e.node", MOTLEY_TOKEN=there.token
        )
        there.nodes["d"] = node
        await node.line("joined as")
        session = await there.session(nodes=["d"])
        node.lines.clear()
        detour.break_near()
        await node.line("joined as")
        assert [line for line in node.lines if "in the mesh already" in line] == []
        (after,) = [each for each in await client.sessions() if each["id"] == session["id"]]
        assert (after["state"], after["epoch"], after["losses"]) == ("ready", session["epoch"], [])
