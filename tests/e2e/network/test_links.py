"""Real daemons measure the links between them, and a session without names is planned by what they find."""

from __future__ import annotations

import asyncio
from typing import Any

from motley.cli.reaching.client import Client
from tests.e2e.processes import BUNDLED, START_S, Mesh, MotleyProcess, in_thread


async def links(there: Mesh, wanted: int) -> dict[tuple[str, str], dict[str, Any]]:
    """The links between nodes a, b and c and others, once so many are known."""
    async with Client(there.url) as client, asyncio.timeout(START_S):
        while True:
            nodes = (await client.call("GET", "/api/nodes"))["nodes"]
            alive = [node for node in nodes if node["state"] == "alive"]
            found = {(node["name"], link["to"]): link for node in alive for link in node["links"]}
            if len(found) >= wanted:
                return found
            await asyncio.sleep(0.1)


async def test_pairs_measure_their_links_and_a_session_is_planned_as_was_told(there: Mesh) -> None:
    found = await links(there, 6)
    for link in found.values():
        assert link["failure"] is None
        assert 0 <= link["latency_ms"] < 50
        assert link["bandwidth"] > 1e6
    _, out, _ = await in_thread("status", "--url", there.url)
    assert "Mbit/s" in out
    assert "int4 10, int8 10, fp32 10 GB/s" in out
    session = await there.session()
    async with Client(there.url) as client:
        await client.call("DELETE", f"/api/sessions/{session['id']}")
        told = await client.call("POST", "/api/plan", {"model": str(BUNDLED), "quantisation": "fp32"})
    assert [rank["node"] for rank in told["plan"]["ranks"]] == [rank["node"] for rank in session["ranks"]]
    assert told["forecast"] == session["forecast"]
    session = await there.session()
    status, out, _ = await in_thread("run", session["name"], "ROMEO:", "--raw", "--max-tokens", "8", "--url", there.url)
    assert status == 0
    _, out, _ = await in_thread("status", "--url", there.url)
    assert "forecast: about" in out


async def test_a_node_that_nobody_reaches_is_named_with_its_address(there: Mesh) -> None:
    where = ("--name", "shut", "--memory", "1GB", "--threads", "1", "--advertise", "192.0.2.1")
    there.nodes["shut"] = await MotleyProcess.start(
        "join", there.target, *where, "--cache", str(there.cache), entry="tests.e2e.node", MOTLEY_TOKEN=there.token
    )
    found = await links(there, 12)
    for name in "abc":
        assert "192.0.2.1:" in found[name, "shut"]["failure"]
    _, out, _ = await in_thread("status", "--url", there.url)
    assert "a cannot reach shut: " in out
