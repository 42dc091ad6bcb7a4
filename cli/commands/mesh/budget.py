"""`motley budget`: what ranks may have of a node's memory, and of its GPU's, also while they run."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer

from motley.cli.errors import CliError
from motley.cli.interrupt import run
from motley.cli.reaching.client import ApiKey, Client, Url
from motley.cli.shown.show import console
from motley.cli.typed.options import ALL, size
from motley.protocol.wording import human_bytes


def register(app: typer.Typer) -> None:
    app.command(epilog="Examples: motley budget gaming-pc 8GB   motley budget gaming-pc all --gpu 6GB")(budget)


def budget(
    node: Annotated[str, typer.Argument(help="A node, as `motley status` calls it.")],
    memory: Annotated[
        str, typer.Argument(help=f"Memory that ranks may use there, such as 8GB, or {ALL}: what is available.")
    ] = "",
    gpu: Annotated[str, typer.Option(help=f"Memory of its first GPU, such as 6GB, or {ALL}: what is free there.")] = "",
    url: Url = "",
    api_key: ApiKey = "",
) -> None:
    """Show what ranks may have of a node's memory, or change it: sessions that have more are planned anew."""
    wanted = {"memory_bytes": _bytes("MEMORY", memory), "gpu_bytes": _bytes("--gpu", gpu)}
    print(_words(run(_budget(node, wanted, url, api_key))))
    if any(value is not None for value in wanted.values()):
        console.print(
            "[dim]That is so until Motley is started again there: what its owner types for `motley join --memory and"
            " --gpu-memory` is remembered[/]",
            soft_wrap=True,
        )


def _bytes(option: str, typed: str) -> int | None:
    """The bytes that were typed; 0: what is available; None: nothing was.

    Raises:
        CliError: it is no size.
    """
    if not typed:
        return None
    return 0 if typed == ALL else size(option, typed)


async def _budget(node: str, wanted: dict[str, int | None], url: str, api_key: str) -> dict[str, Any]:
    """A node as the API tells it, with the budget that is wanted, or the one that it has if none is."""
    async with Client(url, api_key) as client:
        if any(value is not None for value in wanted.values()):
            return await client.call("PUT", f"/api/nodes/{quote(node, safe='')}/budget", wanted)
        nodes = (await client.call("GET", "/api/nodes"))["nodes"]
    for each in nodes:
        if (each["name"], each["state"]) == (node, "alive"):
            return dict(each)
    raise CliError(f"there is no node {node!r}; `motley status` lists them")


def _words(node: dict[str, Any]) -> str:
    taken = f"of which they have {human_bytes(node['memory_reserved_bytes'])}"
    gpu = f", and {human_bytes(node['gpu_budget_bytes'])} of its GPU" if node["gpu_budget_bytes"] else ""
    return f"{node['name']}: ranks may have {human_bytes(node['memory_bytes'])}, {taken}{gpu}"
