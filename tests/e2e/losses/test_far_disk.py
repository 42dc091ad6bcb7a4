"""A disk that keeps a part of the caches fails, or fills, while answers are computed: they go on, and nobody's worker
ends. What is on other nodes stays in use."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from motley.cli.reaching.client import Client
from tests.e2e.losses.test_cache_holders import PROMPT, all_are_used, answer_of, until
from tests.e2e.losses.test_survival import worker_of
from tests.e2e.processes import Mesh

NEAR = 512
"""Tokens in memory: one answer has room, four have not."""
PLAN = {"nodes": ["a", "b"], "shares": [3, 2], "context": NEAR, "cache_tokens": NEAR}
ASKED = [{"prompt": f"{name}:\n{PROMPT}"[:500], "max_tokens": 250} for name in ("ROMEO", "KING", "DUKE", "NURSE")]


@pytest.mark.skipif(sys.platform != "linux", reason="files without a name are found in /proc")
@pytest.mark.soak
@pytest.mark.parametrize(("node", "on_nodes"), [("a", 0), ("b", 0), ("b", 2 * NEAR)])
async def test_a_disk_that_cannot_be_read_any_more_shows_in_no_text(node: str, on_nodes: int, there: Mesh) -> None:
    async with Client(there.url) as client:
        session = await there.session(**PLAN)
        alone = [(await answer_of(client, **each))["choices"] for each in ASKED]
        await client.call("DELETE", f"/api/sessions/{session['id']}")
        session = await there.session(**PLAN, cache_disk_tokens=3 * NEAR - on_nodes, cache_node_tokens=on_nodes)
        where = f"/api/sessions/{session['id']}"
        answers = [asyncio.create_task(answer_of(client, **each)) for each in ASKED]
        await until(client, where, all_are_used)
        assert not all(answer.done() for answer in answers)
        file, *_ = files_without_a_name(worker_of(there.nodes[node]).pid, there.cache)
        os.truncate(file, 0)
        assert [(await answer)["choices"] for answer in answers] == alone
        told = await until(client, where, lambda told: bool(told["activity"]))
        assert (told["state"], told["epoch"], told["losses"]) == ("ready", 1, [])
        told = await until(client, where, lambda told: told["activity"]["far_blocks"] == on_nodes // 128)
        assert [tier["place"] for tier in told["activity"]["far_tiers"]] == ["nodes"] * bool(on_nodes)
        assert not any(holder["lost"] for holder in told["cache_holders"])
        rank = ["a", "b"].index(node)
        assert f"far cache blocks are lost (rank {rank}: KV caches cannot be read" in told["activity"]["trouble"]


@pytest.mark.skipif(sys.platform != "linux", reason="another process's limits are set by prlimit")
async def test_a_disk_that_fills_leaves_blocks_to_other_nodes(there: Mesh) -> None:
    """A limit has writing fail. It is told, and no text changes."""
    import resource  # there is none on Windows

    plan = {**PLAN, "context": 384, "cache_tokens": 384}
    asked = [{**each, "max_tokens": 60} for each in ASKED[:2]]
    async with Client(there.url) as client:
        session = await there.session(**plan)
        alone = [(await answer_of(client, **each))["choices"] for each in asked]
        await client.call("DELETE", f"/api/sessions/{session['id']}")
        session = await there.session(**plan, cache_disk_tokens=384, cache_node_tokens=384)
        unlimited = resource.RLIM_INFINITY
        resource.prlimit(worker_of(there.nodes["b"]).pid, resource.RLIMIT_FSIZE, (0, unlimited))
        where = f"/api/sessions/{session['id']}"
        answers = [asyncio.create_task(answer_of(client, **each)) for each in asked]
        told = await until(client, where, lambda told: bool((told["activity"] or {}).get("far_blocks_used")))
        assert [(await answer)["choices"] for answer in answers] == alone
        assert {tier["place"]: bool(tier["blocks_used"]) for tier in told["activity"]["far_tiers"]} == {
            "disk": False,
            "nodes": True,
        }
        assert "rank 1: cache blocks cannot be moved: [Errno 27]" in told["activity"]["trouble"]
        assert (told["state"], told["epoch"]) == ("ready", 1)


def files_without_a_name(pid: int, folder: Path) -> list[Path]:
    """Those that a process has open which were made in a folder."""
    opened = [Path(f"/proc/{pid}/fd", name) for name in os.listdir(f"/proc/{pid}/fd")]
    return [each for each in opened if (end := os.readlink(each)).startswith(f"{folder}/") and "(deleted)" in end]
