"""A machine's owner takes it back while an answer is written: its text is that of an undisturbed run."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from motley.cli.reaching.client import Client
from tests.e2e.losses.test_survival import GREEDY, SAMPLED, streamed, undisturbed
from tests.e2e.processes import Mesh, in_thread, mesh


async def until(there: Mesh, state: str, nodes: list[str]) -> dict[str, Any]:
    """The only session, once it is in a state and has ranks on these nodes."""
    async with Client(there.url) as client, asyncio.timeout(120):
        while True:
            (told,) = await client.sessions()
            if (told["state"], [rank["node"] for rank in told["ranks"]]) == (state, nodes):
                return told
            await asyncio.sleep(0.1)


@pytest.mark.soak
async def test_a_machine_is_taken_back_and_given_again(tmp_path: Path) -> None:
    """By its owner, by a program that ends, and both machines at once."""
    files = {name: tmp_path / name / "lease.json" for name in "ab"}
    async with mesh(tmp_path) as there:
        await asyncio.gather(*(there.join(name, MOTLEY_LEASE=str(file)) for name, file in files.items()))

        async def lease(name: str, *words: str) -> str:
            status, out, err = await in_thread("lease", *words, MOTLEY_LEASE=str(files[name]))
            assert status == 0, err
            return out

        session = await there.session(nodes=["a", "b"], exact=True)
        expected = [await undisturbed(there.url, body) for body in (GREEDY, SAMPLED)]

        taking: list[asyncio.Task[str]] = []
        text, _ = await streamed(
            there.url,
            SAMPLED,
            20,
            lambda: taking.append(asyncio.create_task(lease("a", "take", "--reason", "game", "--for", "5m"))),
        )
        assert text == expected[1], "though it was rank 0 that went"
        assert (await taking[0]).endswith("node a: leased\n")
        told = await until(there, "ready", ["b"])
        assert (told["losses"], told["epoch"]) == ([], 2)
        assert not there.nodes["a"].workers(), "its worker is gone"
        shown = json.loads(await lease("a", "show", "--json"))
        assert (shown["lease"]["device"], shown["lease"]["reason"]) == ("all", "game")
        assert shown["daemons"] == [{"node": "a", "state": "leased", "trouble": None}]

        assert (await lease("a", "give")).startswith("given back: the whole machine")
        assert (await until(there, "ready", ["a", "b"]))["epoch"] == 3

        holder = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=subprocess.PIPE)
        await lease("b", "take", "--cpu", "--pid", str(holder.pid))
        await until(there, "ready", ["a"])
        await lease("a", "take")
        async with Client(there.url) as client:
            waiting = asyncio.create_task(undisturbed(there.url, GREEDY))
            told = await client.call("GET", f"/api/sessions/{session['id']}")
            assert "node 'a' has lent the whole machine to" in told["interrupted_by"]
        await holder.communicate(b"\n")
        assert await waiting == expected[0], "on the machine whose lease has ended with its holder"
        await until(there, "ready", ["b"])
        files["a"].write_text("{damaged")
        await until(there, "ready", ["a", "b"])
        await there.nodes["a"].line("the file of leases is not followed: .*holds no lease")
        assert await undisturbed(there.url, SAMPLED) == expected[1]
