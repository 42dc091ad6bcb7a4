"""A disk that keeps a part of the caches fails while answers are computed: they go on, and nobody's worker ends."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from motley.cli.reaching.client import Client
from tests.e2e.losses.test_cache_holders import PROMPT, answer_of, until
from tests.e2e.losses.test_survival import worker_of
from tests.e2e.processes import Mesh

NEAR = 512
"""Tokens in memory: one answer has room, four have not."""


@pytest.mark.skipif(sys.platform != "linux", reason="files without a name are found in /proc")
@pytest.mark.soak
@pytest.mark.parametrize("node", ["a", "b"])
async def test_a_disk_that_cannot_be_read_any_more_shows_in_no_text(node: str, there: Mesh) -> None:
    asked = [{"prompt": f"{name}:\n{PROMPT}"[:500], "max_tokens": 250} for name in ("ROMEO", "KING", "DUKE", "NURSE")]
    near = {"nodes": ["a", "b"], "shares": [3, 2], "context": NEAR, "cache_tokens": NEAR}
    async with Client(there.url) as client:
        session = await there.session(**near)
        alone = [(await answer_of(client, **each))["choices"] for each in asked]
        await client.call("DELETE", f"/api/sessions/{session['id']}")
        session = await there.session(**near, cache_disk_tokens=3 * NEAR)
        where = f"/api/sessions/{session['id']}"
        answers = [asyncio.create_task(answer_of(client, **each)) for each in asked]
        await until(client, where, lambda told: bool((told["activity"] or {}).get("far_blocks_used")))
        assert not all(answer.done() for answer in answers)
        file, *_ = files_without_a_name(worker_of(there.nodes[node]).pid, there.cache)
        os.truncate(file, 0)
        assert [(await answer)["choices"] for answer in answers] == alone
        told = await until(client, where, lambda told: bool(told["activity"]))
        assert (told["state"], told["epoch"], told["losses"]) == ("ready", 1, [])
        told = await until(client, where, lambda told: told["activity"]["far_blocks"] == 0)
        rank = ["a", "b"].index(node)
        assert f"far cache blocks are lost (rank {rank}: KV caches cannot be read" in told["activity"]["trouble"]


def files_without_a_name(pid: int, folder: Path) -> list[Path]:
    """Those that a process has open which were made in a folder."""
    opened = [Path(f"/proc/{pid}/fd", name) for name in os.listdir(f"/proc/{pid}/fd")]
    return [each for each in opened if (end := os.readlink(each)).startswith(f"{folder}/") and "(deleted)" in end]
