"""`motley demo --survive`: three "machines" write together, one dies in mid-sentence, and the text goes on."""

from __future__ import annotations

import contextlib
import logging
from itertools import pairwise
from typing import Any

from motley.cli.bundled import FIRST, FOLDER
from motley.cli.commands.demo.mesh import (
    completion,
    kill_halfway,
    mesh_of_processes,
    node_names,
    written,
)
from motley.cli.errors import CliError
from motley.cli.shown.show import console, loading_bars, session_table
from motley.protocol.wording import counted

MODEL = FOLDER / FIRST
MEMORY = 10**9
"""Bytes that every daemon may use: any of them could hold the model."""
LEAST_TOKENS = 10
"""The shortest text that has a middle, in which a machine is killed."""
LEADER = "leader"
"""What to kill for the machine that schedules the steps and takes the requests."""


async def demo_survive(daemons: int, prompt: str, tokens: int, seed: int, kill: str, quiet: bool) -> dict[str, Any]:
    """Have so many daemons write a text twice, and kill one in the middle of the second time.

    Args:
        kill: the name of a machine, or `LEADER`.

    Raises:
        CliError: there is nobody left to go on, the text has no middle, or no machine has the name.
    """
    names = node_names(daemons)
    if daemons < 2 or tokens < LEAST_TOKENS:
        raise CliError(f"--survive wants at least 2 --ranks, as one is killed, and {LEAST_TOKENS} --tokens")
    victim = names[0] if kill == LEADER else kill or names[-1]
    if victim not in names:
        raise CliError(f"--kill {victim}: there is no such machine; there are {', '.join(names)}, and {LEADER}")
    logging.getLogger("motley").setLevel(logging.ERROR)  # the death is told here, and not in between
    async with mesh_of_processes([MEMORY] * daemons) as mesh:
        client = mesh.client
        console.print(f"[bold]{counted(daemons, 'daemon')}[/] joined; loading [bold]{MODEL.name}[/] in uneven shares")
        wanted = {"model": str(MODEL), "exact": True, "nodes": names, "shares": list(range(daemons, 0, -1))}
        with loading_bars() as bars:
            session = await client.wait_ready(await client.call("POST", "/api/sessions", wanted), bars.advance_to)
        body = completion(MODEL, prompt, tokens, seed)
        async with contextlib.aclosing(written(client, body, quiet=True)) as pieces:
            undisturbed = "".join([piece async for piece in pieces])
        role = "which leads the others" if victim == names[0] else "which computes with the others"
        console.print(f"halfway, [bold]{victim}[/] is killed, {role}\n")
        text, times, killed_at = await kill_halfway(mesh, victim, body, quiet)
        silence_s = max((after - before for before, after in pairwise(times[killed_at:])), default=0.0)
        session = await client.call("GET", f"/api/sessions/{session['id']}")
    console.print(session_table(session))
    console.print(f"[bold]{victim}[/] was killed; the text went on after [bold]{silence_s:.1f} s[/]")
    if session["epoch"] == 1:
        raise CliError(
            "the text was whole before the death was noticed, so nothing had to survive: ask for more --tokens"
        )
    identical = text == undisturbed
    if identical:
        console.print("[green]identical[/] to the text of an undisturbed run")
    else:
        console.print(f"[red]different[/] from the text of an undisturbed run:\n{undisturbed}")
    return {
        "ranks": daemons,
        "killed": [victim],
        "silence_s": round(silence_s, 2),
        "tokens": tokens,
        "text": text,
        "identical_to_undisturbed": identical,
    }
