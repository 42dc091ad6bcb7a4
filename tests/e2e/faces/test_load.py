"""Many streams and many idle connections at once: none fails, nothing grows, the event loop is never away for long."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

import aiohttp
import numpy as np
import psutil
import pytest

from motley.cli.reaching.client import Client
from tests.e2e.processes import BUNDLED, ROOT, mesh

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(sys.platform != "linux", reason="limits of files, and many addresses of loopback"),
]

STREAMS = 200
SECONDS = 60.0
IDLE = 2000
GROWTH = 30e6
"""Bytes that a process may take more at the end than it had after the first seconds."""
DELAY_S = 0.05
"""The 99th percentile of how long the event loop is away."""


async def test_200_streams_for_a_minute_beside_2000_idle_connections(tmp_path: Path) -> None:
    """How long the loop is away is told from outside: by how long it takes to say that it lives, of which the way, and
    waiting for ranks that compute on the same processor, are a part."""
    async with mesh(tmp_path, "a", "b") as there:
        await there.session(nodes=["a", "b"], sequences=64, queue=256, cache_tokens=40_000, context=500)
        orchestrator = psutil.Process(there.orchestrator.process.pid)
        port = there.url.rpartition("/")[2].rpartition(":")[2]
        stranger = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.e2e.network.stranger", "idle", f"127.0.0.1:{port}", str(IDLE)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        assert stranger.stdout is not None
        assert stranger.stdin is not None
        try:
            assert await stranger.stdout.readline() == b"sent\n"
            async with aiohttp.ClientSession() as http:
                alone = await delays(http, there.url, 10.0)
                end = time.monotonic() + SECONDS
                talks = [asyncio.create_task(talk(there.url, number, end)) for number in range(STREAMS)]
                await asyncio.sleep(15.0)
                before = orchestrator.memory_info().rss
                beside = await delays(http, there.url, SECONDS - 20.0)
                grown = orchestrator.memory_info().rss - before
                answers = sum(await asyncio.gather(*talks))
        finally:
            stranger.stdin.close()
            await stranger.wait()
        quiet, busy = (1e3 * float(np.percentile(each, 99)) for each in (alone, beside))
        print(f"{answers} answers, health p99 {quiet:.1f} ms, beside streams {busy:.1f} ms, {grown / 1e6:.1f} MB more")
        assert answers >= STREAMS
        assert grown < GROWTH
        assert max(quiet, busy) < 1e3 * DELAY_S
        async with Client(there.url) as client:
            assert {node["state"] for node in (await client.call("GET", "/api/nodes"))["nodes"]} == {"alive"}
            assert not (await client.call("GET", "/api/requests"))["requests"]


async def delays(http: aiohttp.ClientSession, url: str, seconds: float) -> list[float]:
    """How long each of many questions takes, whether the orchestrator lives."""
    found = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        async with http.get(f"{url}/health") as response:
            assert response.status == 200
            await response.read()
        found.append(time.perf_counter() - began)
        await asyncio.sleep(0.02)
    return found


async def talk(url: str, number: int, end: float) -> int:
    """Ask for one stream after another until the time is over; how many have come whole."""
    whole = 0
    body = {"model": BUNDLED.name, "prompt": f"ROMEO {number}:", "max_tokens": 40, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=240)) as http:
        while not whole or time.monotonic() < end:
            async with http.post(f"{url}/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                lines = [line.decode().removeprefix("data: ").strip() async for line in response.content]
            events = [line for line in lines if line and not line.startswith(":")]
            assert events[-1] == "[DONE]"
            assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
            whole += 1
    return whole
