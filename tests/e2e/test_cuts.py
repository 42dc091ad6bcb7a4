"""A machine that is cut off from the network for a few seconds, again and again, while an answer is streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path

import psutil
import pytest

from motley.cli.client import Client
from tests.e2e.house import CAN_BE_BUILT, House, house
from tests.e2e.processes import BUNDLED, Mesh, mesh

pytestmark = pytest.mark.skipif(not CAN_BE_BUILT, reason="machines that can be cut off are made by root on Linux")

MACHINES = ("a", "b", "c")
MEMORY_BYTES = 20e6
LOG_BYTES = 100e3
PAUSE_S = 4.0
"""From a cut to the next: by then TCP has repeated for gRPC what the first has lost; else they would be one."""
WHOLE_S = 20.0
"""So much later at most an answer is whole that would be in an instant."""


class Stream:
    """Answers that are asked for one after another, for as long as this lasts; each has the same text."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._end = asyncio.Event()
        self._grown = asyncio.Condition()
        self._events = 0
        self.whole = 0
        self.talking = asyncio.create_task(self._talk())

    async def grow(self, by: int) -> None:
        """Wait until so many more pieces of answers have come."""
        until = self._events + by
        async with asyncio.timeout(WHOLE_S), self._grown:
            while self._events < until:
                if self.talking.done():
                    await self.talking
                await self._grown.wait()

    async def end(self) -> None:
        """Wait until the answer under way is whole; errors as of any that came before."""
        self._end.set()
        async with asyncio.timeout(WHOLE_S):
            await self.talking

    async def _talk(self) -> None:
        request = {"model": BUNDLED.name, "prompt": "ROMEO:", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
        texts = set()
        try:
            while not self._end.is_set():
                pieces = []
                async for event in self._client.stream("/v1/completions", request):
                    pieces.append(event["choices"][0])
                    async with self._grown:
                        self._events += 1
                        self._grown.notify_all()
                assert pieces[-1]["finish_reason"] == "length"
                texts.add("".join(piece["text"] for piece in pieces))
                self.whole += 1
            assert len(texts) == 1
        finally:
            async with self._grown:
                self._grown.notify_all()


@asynccontextmanager
async def streamed(folder: Path) -> AsyncIterator[tuple[House, Mesh]]:
    """A house where all machines are ranks of one session, which the orchestrator on this one has made."""
    with house(*MACHINES) as home:
        async with mesh(folder, host=home.address) as there:
            for machine in MACHINES:
                await there.join(machine, on=home.on(machine))
            session = await there.session(nodes=list(MACHINES))
            assert [rank["node"] for rank in session["ranks"]] == list(MACHINES)
            yield home, there


async def cut(home: House, there: Mesh, machine: str, times: int, seconds: float) -> None:
    """Cut a machine off so many times, for so long, always while tokens come."""
    async with Client(there.url) as client:
        stream = Stream(client)
        await stream.grow(60)
        before = {process: process.memory_info().rss for process in processes(there)}
        for number in range(times):
            await asyncio.sleep(PAUSE_S if number else 0.0)
            home.cut_off(machine)
            await asyncio.sleep(seconds)
            home.bring_back(machine)
            await stream.grow(60)
        await stream.end()
        assert stream.whole
        for process in processes(there):
            assert process.memory_info().rss - before[process] < MEMORY_BYTES
        assert {node["state"] for node in (await client.call("GET", "/api/nodes"))["nodes"]} == {"alive"}
        (session,) = await client.sessions()
        assert session["state"] == "ready"
    said = "\n".join(chain(*(one.lines for one in (there.orchestrator, *there.nodes.values()))))
    assert len(said) < LOG_BYTES
    assert " is lost" not in said
    assert "lost the orchestrator" not in said


def processes(there: Mesh) -> list[psutil.Process]:
    return [member for one in (there.orchestrator, *there.nodes.values()) for member in one.family()]


@pytest.mark.soak
@pytest.mark.parametrize("machine", MACHINES)
async def test_twenty_cuts_of_three_seconds_lose_no_stream(tmp_path: Path, machine: str) -> None:
    async with streamed(tmp_path) as (home, there):
        await cut(home, there, machine, 20, 3.0)
