"""A machine that is cut off from the network for a few seconds, again and again, or stands still, while an answer is
streamed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import pytest

from motley.cli.reaching.client import Client
from tests.e2e.network.house import CAN_BE_BUILT, House, house
from tests.e2e.processes import BUNDLED, Mesh, mesh

pytestmark = pytest.mark.skipif(not CAN_BE_BUILT, reason="machines that can be cut off are made by root on Linux")

MACHINES = ("a", "b", "c")
MEMORY_BYTES = 20e6
LOG_BYTES = 100e3
PAUSE_S = 4.0
"""From a cut to the next: by then TCP has repeated for gRPC what the first has lost; else they would be one."""
BACK_S = 60.0
"""A machine that can be reached again is in the mesh again so soon."""
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
@pytest.mark.parametrize("seconds", [1.0, 3.0])
@pytest.mark.parametrize("machine", MACHINES)
async def test_twenty_short_cuts_lose_no_stream(tmp_path: Path, machine: str, seconds: float) -> None:
    async with streamed(tmp_path) as (home, there):
        await cut(home, there, machine, 20, seconds)


@pytest.mark.soak
@pytest.mark.parametrize("seconds", [10.0, 30.0])
@pytest.mark.parametrize("machine", ["a", "c"])
async def test_answers_go_on_without_a_machine_that_is_cut_off_for_longer(
    tmp_path: Path, machine: str, seconds: float
) -> None:
    """Also without the leader's; and the machine is there again afterwards, by itself."""
    async with streamed(tmp_path) as (home, there), Client(there.url) as client:
        stream = Stream(client)
        await stream.grow(60)
        until = asyncio.get_running_loop().time() + seconds
        home.cut_off(machine)
        await stream.grow(200)
        await asyncio.sleep(until - asyncio.get_running_loop().time())
        home.bring_back(machine)
        assert (await whole_again(stream, client))["epoch"] > 1


@pytest.mark.soak
@pytest.mark.parametrize("machine", ["a", "c"])
async def test_answers_go_on_without_a_machine_that_stands_still(tmp_path: Path, machine: str) -> None:
    """As one that sleeps, and wakes: nothing of it ends, nor does anybody hear of it."""
    async with streamed(tmp_path) as (_, there), Client(there.url) as client:
        stream = Stream(client)
        await stream.grow(60)
        stopped = there.nodes[machine].family()
        for process in stopped:
            process.suspend()
        await stream.grow(200)
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        assert (await whole_again(stream, client))["epoch"] > 1


async def whole_again(stream: Stream, client: Client) -> dict[str, Any]:
    """The session once all machines are in the mesh again, and the answers that were asked for have come."""
    async with asyncio.timeout(BACK_S):
        while not await all_alive(client):  # noqa: ASYNC110  the API tells it, and no event
            await asyncio.sleep(0.2)
    await stream.grow(60)
    await stream.end()
    assert stream.whole
    (session,) = await client.sessions()
    assert session["state"] == "ready"
    return dict(session)


async def all_alive(client: Client) -> bool:
    """Whether all machines are in the mesh."""
    nodes = (await client.call("GET", "/api/nodes"))["nodes"]
    return sorted(node["name"] for node in nodes if node["state"] == "alive") == list(MACHINES)
