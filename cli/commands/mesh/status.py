"""`motley status`: who is in the mesh and who does what. `motley stop`: close a session."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.markup import escape

from motley.cli.errors import CliError
from motley.cli.interrupt import run
from motley.cli.reaching.client import ApiKey, Client, Url
from motley.cli.shown.glossary import of_nodes, of_sessions
from motley.cli.shown.show import (
    activity,
    ago,
    devices_told,
    forecast_beside,
    losses,
    results,
    session_table,
    show_set_aside,
    table,
    waiting,
    without_part,
)
from motley.cli.typed.options import AsJson
from motley.protocol.wording import short_bytes


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: motley status --json")(status)
    app.command(epilog="Example: motley stop shakespeare-2.6m")(stop)


def status(
    url: Url = "",
    api_key: ApiKey = "",
    words: Annotated[bool, typer.Option("--words", help="Say what the words mean that are shown.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the nodes of the mesh, and the sessions with their ranks; with --json more, such as processors and units."""
    nodes, sessions = run(_fetch(url, api_key))
    if as_json:
        print(json.dumps({"nodes": nodes, "sessions": sessions}))
        return
    alive = [node for node in nodes if node["state"] == "alive"]
    results.print(_node_table(alive))
    if links := _link_rows(alive):
        results.print(table(["link", "latency", "bandwidth"], links, title="Links"))
    for node in alive:
        for link in node["links"]:
            if link["failure"]:
                by = f"; they meet by {link['relay']}" if link["relay"] else ""
                why = f"{node['name']} cannot reach {link['to']}: {link['failure']}{by}"
                results.print(f"[red]{escape(why)}[/]", soft_wrap=True)
        if node["lease"]["words"]:
            results.print(f"[yellow]{escape(node['name'])} {escape(node['lease']['words'])}[/]", soft_wrap=True)
        if node["lease"]["trouble"]:
            why = f"{node['name']}: its file of leases is not followed: {node['lease']['trouble']}"
            results.print(f"[red]{escape(why)}[/]", soft_wrap=True)
    show_set_aside(alive)
    for node in nodes:
        if node["state"] == "lost":
            why = f"lost {ago(node['gone_s'])}: {node['lost']}"
            results.print(f"[red]{escape(node['name'])} was {escape(why)}[/]", soft_wrap=True)
        elif node["state"] == "left":
            results.print(f"[dim]{escape(node['name'])} left {ago(node['gone_s'])}[/]", soft_wrap=True)
    for session in sessions:
        results.print(session_table(session))
        if doing := activity(session):
            results.print(doing, soft_wrap=True)
        if told := forecast_beside(session):
            results.print(told, soft_wrap=True)
        for told in devices_told(session):
            results.print(f"[dim]{escape(told)}[/]", soft_wrap=True)
        for told in without_part(session):
            results.print(f"[yellow]{escape(told)}[/]", soft_wrap=True)
        if missing := waiting(session):
            results.print(f"[yellow]{missing}[/]", soft_wrap=True)
        if lost := losses(session):
            results.print(f"[yellow]{escape(lost)}[/]", soft_wrap=True)
        if session["failure"]:
            results.print(f"[red]{escape(session['failure']['message'])}[/]", soft_wrap=True)
    if explained := [*of_nodes(alive), *of_sessions(sessions)]:
        for line in explained if words else ["`motley status --words` says what these words mean"]:
            results.print(f"[dim]{line}[/]", soft_wrap=True)


def _node_table(alive: list[dict[str, Any]]) -> RenderableType:
    """The nodes: what each offers, and what it does; GPUs, and the memory of ranks, where there are any."""
    gpus, works = (any(node[field] for node in alive) for field in ("gpus", "memory_reserved_bytes"))
    memory = ["memory", *(["planned", "used"] if works else [])]
    sizes = ["memory_bytes", *(["memory_reserved_bytes", "memory_used_bytes"] if works else [])]
    return table(
        ["node", *memory, "bandwidth", "computes", *(["GPUs"] if gpus else []), "serves"],
        [
            [
                node["name"],
                *(short_bytes(node[size]) if node.get(size) else "-" for size in sizes),
                f"{node['memory_bandwidth'] / 1e9:.1f} GB/s",
                _speeds(node),
                *(["\n".join(map(_gpu_text, node["gpus"])) or "-"] if gpus else []),
                "\n".join(_workers(node)) or "-",
            ]
            for node in alive
        ],
        title="Nodes",
    )


def _link_rows(alive: list[dict[str, Any]]) -> list[list[str]]:
    """Every pair of nodes whose link was measured, as the first of them has found it."""
    rows, told = [], set()
    for node in alive:
        for link in node["links"]:
            pair = frozenset((node["name"], link["to"]))
            if not link["failure"] and pair not in told:
                told.add(pair)
                speed = f"{link['bandwidth'] * 8e-6:.0f} Mbit/s"
                rows.append([f"{node['name']} - {link['to']}", f"{link['latency_ms']:.2f} ms", speed])
    return rows


def _speeds(node: dict[str, Any]) -> str:
    """How fast a node computes with weights in each format: ``int4 31, int8 33, fp32 32 GB/s``."""
    told = [f"{own['format']} {own['bytes_per_s'] / 1e9:.0f}" for own in node["speeds"] if own["format"] != "fp16"]
    return f"{', '.join(told)} GB/s" if told else "-"


def _workers(node: dict[str, Any]) -> list[str]:
    """What a node does: its ranks, and the sessions whose experts it has."""
    ranks = [f"{rank['model']} (rank {rank['rank']})" for rank in node["ranks"]]
    return ranks + [f"{host['model']} (experts)" for host in node["expert_hosts"]]


def stop(
    session: Annotated[str, typer.Argument(help="A session's name or id, as `motley status` shows it.")],
    url: Url = "",
    api_key: ApiKey = "",
) -> None:
    """Close a session and free its memory on every node."""
    run(_stop(session, url, api_key))


def _gpu_text(gpu: dict[str, Any]) -> str:
    name = gpu["name"].removeprefix("NVIDIA ").removeprefix("GeForce ")
    software = ", software" if gpu["kind"] == "software" else ""
    return f"{name} ({short_bytes(gpu['free_bytes'])} of {short_bytes(gpu['memory_bytes'])} free{software})"


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
