"""`motley leave` and `motley rebalance`: other plans for sessions that go on answering."""

from __future__ import annotations

import socket
from typing import Annotated, Any
from urllib.parse import quote

import typer

from motley.cli.errors import CliError
from motley.cli.interrupt import run
from motley.cli.reaching.client import ApiKey, Client, Url
from motley.cli.shown.show import console


def register(app: typer.Typer) -> None:
    app.command(epilog="Examples: motley leave   motley leave laptop")(leave)
    app.command(epilog="Examples: motley rebalance Llama-3.2-1B-Instruct")(rebalance)


def leave(
    node: Annotated[str, typer.Argument(help="A node, as `motley status` calls it; this machine if not given.")] = "",
    url: Url = "",
    api_key: ApiKey = "",
) -> None:
    """Have a node leave the mesh: first its sessions go on without it, and nobody's answer ends."""
    run(_leave(node or socket.gethostname(), url, api_key))


def rebalance(
    session: Annotated[str, typer.Argument(help="A session's name or id, as `motley status` shows it.")],
    force: Annotated[bool, typer.Option("--force", help="Plan anew, whether or not that is quicker.")] = False,
    url: Url = "",
    api_key: ApiKey = "",
) -> None:
    """Plan a session anew with the nodes that are there now, if that makes it quicker; answers go on."""
    run(_rebalance(session, force, url, api_key))


async def _leave(node: str, url: str, api_key: str) -> None:
    async with Client(url, api_key) as client:
        with console.status(f"sessions go on without {node}"):
            told = await client.call("POST", f"/api/nodes/{quote(node, safe='')}/leave")
    moved = f"; without it go on: {', '.join(told['moved'])}" if told["moved"] else ""
    print(f"{told['node']} leaves{moved}")


async def _rebalance(wanted: str, force: bool, url: str, api_key: str) -> None:
    async with Client(url, api_key) as client:
        found = next((one for one in await client.sessions() if wanted in (one["id"], one["name"])), None)
        if found is None:
            raise CliError(f"there is no session {wanted!r}; `motley status` lists them")
        with console.status("looking for a better plan"):
            told = await client.call("POST", f"/api/sessions/{found['id']}/rebalance?force={str(force).lower()}")
    print(_sentence(told))


def _sentence(told: dict[str, Any]) -> str:
    """What became of it."""
    after = f"{told['after_ms']:.1f} ms per token"
    before = "not forecast" if told["before_ms"] is None else f"{told['before_ms']:.1f} ms"
    if not told["changed"]:
        return f"left as it is: the best plan would take {after}, this one {before}"
    ranks = ", ".join(f"{rank['node']} {rank['share']['fraction']:.0%}" for rank in told["session"]["ranks"])
    return f"planned anew, forecast {after} (before: {before}): {ranks}"
