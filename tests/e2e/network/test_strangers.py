"""Whoever knows a port of the orchestrator, and has no token or key, costs it a line in the log."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from motley.cli.reaching.client import Client
from tests.e2e.network.stranger import is_let_in
from tests.e2e.processes import BUNDLED, END_S, ROOT, START_S, Mesh, mesh

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of files, and many addresses of loopback")

PORTS = ("nodes", "clients", "public")
MEMORY_BYTES = 40e6
"""Connections that shake hands take 27 MB at most, however often strangers come back; their hellos are 64."""
LOG_BYTES = 100e3
SILENCE_S = 10.0
"""The API answers within this, whatever strangers do."""


class Siege:
    """An orchestrator that strangers bother: what it has taken since `begin`."""

    def __init__(self, there: Mesh) -> None:
        self.there = there
        self._orchestrator = psutil.Process(there.orchestrator.process.pid)
        self._memory = self._orchestrator.memory_info().rss
        self._port = {"nodes": there.target, "clients": there.url.removeprefix("http://")}
        for line in there.orchestrator.lines:
            if public := re.search(r"API https://\S+:(\d+)/v1", line):
                self._port["public"] = f"127.0.0.1:{public[1]}"

    async def bother(self, what: str, whom: str, count: int, size: int = 0, until_cut_off: bool = False) -> None:
        """Have a stranger do something to a port until all is sent, or until all its connections were closed; ask who
        is in the mesh meanwhile.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.e2e.network.stranger", what, self._port[whom], str(count), str(size)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            for line in (b"sent\n", b"cut off\n")[: 1 + until_cut_off]:
                told = asyncio.create_task(process.stdout.readline())
                while not told.done():
                    await self.nodes()
                    await asyncio.wait({told}, timeout=0.2)
                assert told.result() == line
        finally:
            process.stdin.close()
            async with asyncio.timeout(END_S):
                await process.wait()

    async def nodes(self) -> list[str]:
        """The states of all nodes, as the API tells them."""
        async with asyncio.timeout(SILENCE_S), Client(self.there.url) as client:
            return [node["state"] for node in (await client.call("GET", "/api/nodes"))["nodes"]]

    async def check(self) -> None:
        """It has taken little, nobody is lost, and nodes and clients are served."""
        async with asyncio.timeout(START_S):
            await self._let_in()
        assert set(await self.nodes()) == {"alive"}
        said = "\n".join(self.there.orchestrator.lines)
        assert len(said) < LOG_BYTES
        assert " is lost" not in said
        assert self._orchestrator.memory_info().rss - self._memory < MEMORY_BYTES
        assert self._orchestrator.num_fds() < 100

    async def _let_in(self) -> None:
        """Wait until there is room for whoever has the token."""
        while True:
            with contextlib.suppress(OSError):  # all connections are taken
                if await is_let_in(self.there.target, self.there.token):
                    return
            await asyncio.sleep(0.1)


@asynccontextmanager
async def besieged(folder: Path, files: int) -> AsyncIterator[Siege]:
    """An orchestrator that may have so many files open, for other machines, too, with a node."""
    async with mesh(folder, "a", host="0.0.0.0", entry="tests.e2e.faces.few_files", FILES=str(files)) as there:
        assert await is_let_in(there.target, there.token)
        yield Siege(there)


async def test_strangers_are_a_line_in_the_log(tmp_path: Path) -> None:
    async with besieged(tmp_path, files=256) as siege:
        await siege.bother("hellos", "nodes", 4, 16 << 20)
        all_ports = [siege.bother(what, whom, 300) for what in ("idle", "noise") for whom in PORTS]
        within_tls = [siege.bother(what, "public", 50) for what in ("slow-tls", "noise-tls")]
        await asyncio.gather(*all_ports, *within_tls, siege.bother("slow", "clients", 150))
        await siege.check()


@pytest.mark.soak
async def test_many_strangers_are_a_line_in_the_log_and_no_stream_is_lost(tmp_path: Path) -> None:
    async with besieged(tmp_path, files=1024) as siege:
        await siege.there.session()
        async with Client(siege.there.url) as client:
            stop = asyncio.Event()
            talking = asyncio.create_task(_talk(client, stop))
            await siege.bother("hellos", "nodes", 79, 60_000_000)
            for whom in PORTS:
                await siege.bother("idle", whom, 1500, until_cut_off=True)
                await siege.check()
                await siege.bother("noise", whom, 2000)
            for what, whom in (("slow", "clients"), ("slow-tls", "public")):
                await siege.bother(what, whom, 300, until_cut_off=True)
            await siege.check()
            stop.set()
            assert await talking > 0
        await siege.check()


async def _talk(client: Client, stop: asyncio.Event) -> int:
    """Ask for one answer after another; how many have come whole."""
    whole = 0
    while not stop.is_set():
        request = {"model": BUNDLED.name, "prompt": "ROMEO:", "max_tokens": 200, "ignore_eos": True}
        events = [event async for event in client.stream("/v1/completions", request)]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        whole += 1
    return whole
