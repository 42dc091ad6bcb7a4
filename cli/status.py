"""`motley status`: who is in the mesh and who does what. `motley stop`: close a session."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.markup import escape

from motley.cli.client import DEFAULT_URL, ApiKey, Client, Url
from motley.cli.errors import CliError
from motley.cli.interrupt import run
from motley.cli.show import human_size, results, session_table, table


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: motley status --json")(status)
    app.command(epilog="Example: motley stop shakespeare-2.6m")(stop)


def status(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON.")] = False,
) -> None:
    """Show the nodes of the mesh, and the sessions with their ranks."""
    nodes, sessions = run(_fetch(url, api_key))
    if as_json:
        print(json.dumps({"nodes": nodes, "sessions": sessions}))
        return
    results.print(
        table(
            ["node", "state", "machine", "cores", "memory", "bandwidth", "ranks"],
            [
                [
                    node["name"],
                    node["state"],
                    ", ".join([node["cpu"], *(gpu["name"] for gpu in node["gpus"])]),
                    str(node["cores"]),
                    human_size(node["memory_bytes"]),
                    f"{node['memory_bandwidth'] / 1e9:.1f} GB/s",
                    " ".join(f"{rank['model']}#{rank['rank']}" for rank in node["ranks"]) or "-",
                ]
                for node in nodes
            ],
            title="Nodes",
        )
    )
    for session in sessions:
        results.print(session_table(session))
        if session["failure"]:
            results.print(f"[red]{escape(session['failure']['message'])}[/]", soft_wrap=True)


def stop(
    session: Annotated[str, typer.Argument(help="A session's name or id, as `motley status` shows it.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
) -> None:
    """Close a session and free its memory on every node."""
    run(_stop(session, url, api_key))


async def _fetch(url: str, api_key: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    async with Client(url, api_key) as client:
        return (await client.call("GET", "/api/nodes"))["nodes"], await client.sessions()


async def _stop(wanted: str, url: str, api_key: str) -> None:
    async with Client(url, api_key) as client:
        for session in await client.sessions():
            if wanted in (session["id"], session["name"]):
                await client.call("DELETE", f"/api/sessions/{session['id']}")
                print(f"closed {session['name']}")
                return
    raise CliError(f"there is no session {wanted!r}; `motley status` lists them")
