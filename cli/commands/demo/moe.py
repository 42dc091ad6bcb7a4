"""`motley demo --moe`: experts on several "machines", two replicas of each, and the death of one in mid-sentence."""

from __future__ import annotations

import asyncio
import logging
import time
from itertools import pairwise
from typing import Any

from motley.cli.bundled import FOLDER
from motley.cli.commands.demo.mesh import (
    check_text,
    completion,
    kill_halfway,
    mesh_of_processes,
    node_names,
    single_process,
)
from motley.cli.errors import CliError
from motley.cli.reaching.client import Client
from motley.cli.shown.show import console, loading_bars, session_table
from motley.protocol.wording import counted

MODEL = FOLDER / "shakespeare-moe-1.5m"
MEMORY = 10**9
"""Bytes that every daemon may use: two processes of 0.2 GB, and experts."""
REPLICAS = 2
LEAST_TOKENS = 10
"""The shortest text that has a middle, in which a machine is killed."""
HEALED_S = 30.0


async def demo_moe(daemons: int, prompt: str, tokens: int, seed: int, quiet: bool) -> dict[str, Any]:
    """Write a text on so many daemons, and kill one that has experts only in the middle of it."""
    if daemons <= REPLICAS or tokens < LEAST_TOKENS:
        raise CliError(f"--moe wants at least {REPLICAS + 1} --ranks, as one is killed, and {LEAST_TOKENS} --tokens")
    logging.getLogger("motley").setLevel(logging.ERROR)  # the death is told here, and not in between
    async with mesh_of_processes([MEMORY] * daemons) as mesh:
        client = mesh.client
        session = await _load(client, node_names(daemons))
        console.print(session_table(session))
        leader = session["ranks"][0]["node"]
        victim = max((host for host in session["hosts"] if host["node"] != leader), key=lambda host: host["experts"])
        found = await client.call("GET", f"/api/sessions/{session['id']}/experts")
        layers = sum(len(group["layers"]) for group in found["groups"])
        console.print(
            f"[bold]{leader}[/] has the trunk (attention, routers, head); {found['experts_per_token']} of "
            f"{found['experts']} experts in each of {layers} layers compute a token, each on one of its {REPLICAS} "
            f"machines. Halfway, [bold]{victim['node']}[/] is killed with its {counted(victim['experts'], 'expert')}\n"
        )
        body = completion(MODEL, prompt, tokens, seed)
        text, times, killed_at = await kill_halfway(mesh, victim["node"], body, quiet)
        gaps = [1e3 * (after - before) for before, after in pairwise(times)]
        usual_ms = sorted(gaps)[len(gaps) // 2]
        stall_ms = max(gaps[killed_at:]) - usual_ms
        console.print(
            f"{victim['node']} was killed in the middle, and [bold]a token came {stall_ms:.0f} ms late[/] "
            f"(usually one takes {usual_ms:.0f} ms)"
        )
        await _heal(client, session["id"], min(REPLICAS, daemons - 1))
    identical = check_text(text, await single_process(MODEL, prompt, tokens, seed))
    return {
        "ranks": daemons,
        "experts": found["experts"],
        "replicas": REPLICAS,
        "killed": [victim["node"]],
        "stall_ms": round(stall_ms, 1),
        "tokens": tokens,
        "text": text,
        "identical_to_single_process": identical,
    }


async def _load(client: Client, nodes: list[str]) -> dict[str, Any]:
    console.print(f"[bold]{counted(len(nodes), 'daemon')}[/] joined; loading [bold]{MODEL.name}[/]")
    wanted = {
        "model": str(MODEL),
        "quantisation": "fp32",
        "nodes": nodes,
        "experts": "parallel",
        "replicas": REPLICAS,
    }
    with loading_bars() as bars:
        return await client.wait_ready(await client.call("POST", "/api/sessions", wanted), bars.advance_to)


async def _heal(client: Client, session: str, replicas: int) -> None:
    """Wait until what was lost is elsewhere, and show that."""
    deadline = time.monotonic() + HEALED_S
    while True:
        found = await client.call("GET", f"/api/sessions/{session}/experts")
        if found["replicas"]["least"] >= replicas and not found["moves"]:
            break
        if time.monotonic() > deadline:
            raise CliError(f"what was lost is not elsewhere after {HEALED_S:.0f} s: this is a bug, please report it")
        await asyncio.sleep(0.1)
    left = [host["node"] for host in found["hosts"] if host["state"] == "ready"]
    console.print(f"every expert has {counted(replicas, 'replica')} again, on {', '.join(left)}")
