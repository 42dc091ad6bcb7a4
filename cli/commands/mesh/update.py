"""`motley update`: which machines of the mesh have an older Motley, and how to update them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from motley.cli.interrupt import run
from motley.cli.reaching.client import ApiKey, Client, Url
from motley.cli.shown.show import results, table
from motley.cli.typed.options import AsJson
from motley.protocol.installing import PACKAGE, source
from motley.protocol.release import release

_NUMBERS = re.compile(r"\d+(\.\d+)*")
_DIGITS = re.compile(r"\d+")
ELSEWHERE = f"pipx upgrade {PACKAGE}"
"""How other machines are updated, where nobody knows how Motley was installed."""


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: motley update")(update)


def update(
    url: Url = "",
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Compare the versions of Motley on all machines of the mesh, and say which are to be updated, and how.

    Nothing is fetched or changed: what is newest is what one of them has.
    """
    versions = run(_versions(url, api_key))
    newest = max(versions.values(), key=order)
    older = [name for name, version in versions.items() if order(version) < order(newest)]
    command = how_to_update(sys.prefix, sys.executable, *source())
    if as_json:
        print(json.dumps({"versions": versions, "newest": newest, "older": older, "command_here": command}))
        return
    rows = [[name, version, "to be updated" if name in older else "newest"] for name, version in versions.items()]
    results.print(table(["machine", "Motley", ""], rows))
    if not older:
        results.print(f"All machines have Motley {newest}.")
        return
    for name in older:
        how = command if name == HERE else f"there: `motley update` says how; usually {ELSEWHERE}"
        results.print(f"{escape(name)}: {escape(how)}", soft_wrap=True)
    results.print("Then start `motley up` or `motley join` there again.")


HERE, ORCHESTRATOR = "this machine", "the orchestrator"


async def _versions(url: str, api_key: str) -> dict[str, str]:
    """By machine: this one, the orchestrator's, every node that is there."""
    async with Client(url, api_key) as client:
        there: dict[str, Any] = await client.call("GET", "/version")
        nodes = (await client.call("GET", "/api/nodes"))["nodes"]
    alive = {node["name"]: node["version"] for node in nodes if node["state"] == "alive"}
    return {HERE: release(), ORCHESTRATOR: there["version"], **alive}


def order(version: str) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    """What versions are sorted by: their numbers, without zeros at the end; previews (``0.2.0.dev3``, ``0.2.0rc1``)
    come before what they are of, what is mended in it (``0.2.0.post1``) after; what follows a ``+`` counts for nothing.
    """
    public = version.partition("+")[0]
    release = _NUMBERS.match(public)
    numbers = [int(each) for each in release[0].split(".")] if release else []
    while numbers and not numbers[-1]:
        numbers.pop()
    rest = public[release.end() :] if release else public
    stage = {"": 0, ".dev": -2, ".post": 1}.get(_DIGITS.split(rest)[0], -1)
    return tuple(numbers), stage, tuple(int(each) for each in _DIGITS.findall(rest))


def how_to_update(prefix: str, python: str, folder: str, editable: bool) -> str:
    """The command that updates Motley where it is installed.

    Args:
        prefix: of the environment that it is installed in.
        python: the interpreter there.
        folder, editable: as `motley.protocol.installing.source` tells them.
    """
    if folder:
        again = "make .venv/installed" if editable else f"{python} -m pip install ."
        return f"cd {folder} && git pull && {again}"
    parts = Path(prefix).parts
    if "pipx" in parts:
        return f"pipx upgrade {PACKAGE}"
    if "uv" in parts and "tools" in parts:
        return f"uv tool upgrade {PACKAGE}"
    return f"{python} -m pip install --upgrade {PACKAGE}"
