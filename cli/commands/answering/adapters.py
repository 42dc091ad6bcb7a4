"""`motley adapters`: those that a session's requests may name, and ones that were trained apart made one."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from motley.cli.commands.answering.run import named_adapters
from motley.cli.errors import CliError
from motley.cli.interrupt import run
from motley.cli.reaching.client import ApiKey, Client, Url
from motley.cli.shown.show import console, counting_bar, results, table
from motley.cli.typed.command_group import CommandGroup
from motley.cli.typed.options import AsJson, one_of
from motley.protocol.wording import counted, short_bytes
from motley.training.settings import How

Model = Annotated[str, typer.Option(help="Of the session, as it is served; needless if only one has adapters.")]

adapters = CommandGroup("Adapters of models that are served, and merging some.")


def register(app: typer.Typer) -> None:
    app.add_typer(adapters, name="adapters")


@adapters.callback()
def _adapters() -> None:
    """Adapters of models that are served, and merging some."""


@adapters.command(epilog="Example: motley adapters add poems=./poems/adapter --model tinyllama")
def add(
    named: Annotated[
        str,
        typer.Argument(metavar="NAME=FOLDER", help="What requests call it, and its PEFT folder, GGUF file or hub id."),
    ],
    model: Model = "",
    pin: Annotated[bool, typer.Option("--pin", help="Keep it loaded.")] = False,
    url: Url = "",
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Have a session that was started with --adapters know an adapter, whose folder any of its nodes may have."""
    ((name, folder),) = named_adapters([named]).items()
    if not folder:
        raise CliError(f"say where {name!r} is: NAME=FOLDER")

    async def work(client: Client, served: str) -> dict[str, Any]:
        return await client.add_adapter(served, name, folder, pin)

    added = run(_for_model(work, model, url, api_key))
    _tell(added, as_json, f"requests to {added['served_as']!r} are answered with it: {_described(added)}")


@adapters.command(name="ls")
def list_them(url: Url = "", api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """List the adapters that requests may name."""

    async def work() -> dict[str, Any]:
        async with Client(url, api_key) as client:
            return await client.call("GET", "/api/adapters")

    told = run(work())
    if as_json:
        print(json.dumps(told))
        return
    rows = [
        [each["served_as"], str(each["rank"]), short_bytes(each["bytes"]), _state(each), each["folder"]]
        for each in told["adapters"]
    ]
    results.print(table(["model", "rank", "size", "state", "folder"], rows))


@adapters.command()
def rm(
    name: Annotated[str, typer.Argument(help="As `motley adapters ls` shows it behind the colon.")],
    model: Model = "",
    url: Url = "",
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Forget an adapter. Requests under way are answered with it to their end; new ones are refused."""

    async def work(client: Client, served: str) -> dict[str, Any]:
        return await client.call("DELETE", _path(served, name))

    removed = run(_for_model(work, model, url, api_key))
    _tell(removed, as_json, f"{removed['served_as']!r} is no more")


@adapters.command()
def pin(
    name: Annotated[str, typer.Argument(help="As `motley adapters ls` shows it behind the colon.")],
    model: Model = "",
    off: Annotated[bool, typer.Option("--off", help="Let it give way to others again.")] = False,
    url: Url = "",
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Keep an adapter loaded, whoever else is asked for."""

    async def work(client: Client, served: str) -> dict[str, Any]:
        return await client.call("POST", f"{_path(served, name)}/pin", {"pinned": not off}, patient=True)

    changed = run(_for_model(work, model, url, api_key))
    _tell(changed, as_json, f"{changed['served_as']!r}: {_state(changed)}")


async def _for_model(
    work: Callable[[Client, str], Awaitable[dict[str, Any]]], model: str, url: str, api_key: str
) -> dict[str, Any]:
    """Do something for a model that is served; without a name, for the only one that has room for adapters.

    Raises:
        CliError: it is not clear which.
    """
    async with Client(url, api_key) as client:
        if not model:
            able = [each["name"] for each in await client.sessions() if each["adapters"] and not each["failure"]]
            if len(able) != 1:
                which = f"name one with --model: {', '.join(able)}" if able else "none was started with --adapters"
                raise CliError(f"{counted(len(able), 'session')} with room for adapters; {which}")
            model = able[0]
        return await work(client, model)


def _path(model: str, name: str) -> str:
    return f"/api/adapters/{quote(model, safe='')}/{quote(name, safe='')}"


def _tell(adapter: dict[str, Any], as_json: bool, words: str) -> None:
    if as_json:
        print(json.dumps(adapter))
    else:
        results.print(words, markup=False, soft_wrap=True)


def _described(adapter: dict[str, Any]) -> str:
    return f"rank {adapter['rank']}, {short_bytes(adapter['bytes'])}"


def _state(adapter: dict[str, Any]) -> str:
    return ", ".join(word for word in ("pinned", "loaded") if adapter[word]) or "known"


@adapters.command(epilog="Example: motley adapters merge ./letters/adapter ./notes/adapter --how ties -o ./both")
def merge(
    folders: Annotated[list[Path], typer.Argument(help="PEFT folders of adapters of one model.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write; must be new.")],
    how: Annotated[
        How,
        typer.Option(
            parser=one_of(How),
            metavar="|".join(How),
            help="The exact mean; the mean weighed by 1 / perplexity; TIES; DARE.",
        ),
    ] = How.LINEAR,
    weights: Annotated[str, typer.Option(help="One for each adapter, such as 3,1.", show_default="equal")] = "",
    density: Annotated[float, typer.Option(min=0.001, max=1.0, help="Share of values TIES and DARE keep.")] = 0.2,
    seed: Annotated[int, typer.Option(min=0, help="Of what DARE drops.")] = 0,
    rank: Annotated[
        int, typer.Option(min=0, help="Of an adapter by TIES or DARE.", show_default="that of all together")
    ] = 0,
    into: Annotated[
        Path | None, typer.Option(help="A model's folder: OUT becomes a copy of it with changed weights.")
    ] = None,
) -> None:
    """Merge adapters into one, or into the weights of their model. Needs no torch."""
    from motley.training.adapters import merge as merge_all

    try:
        shares = [float(each) for each in weights.split(",") if each.strip()]
    except ValueError:
        raise CliError(f"--weights wants numbers such as 3,1, and not {weights!r}") from None
    with counting_bar("merged modules") as told:
        missed = merge_all(
            folders, how, out, weights=shares, density=density, seed=seed, rank=rank, into=into, progress=told
        )
    if missed > 0.01:
        console.print(
            f"the rank holds a module's change up to {missed:.0%}; --into a model, or a larger --rank, is exact"
        )
    console.print(f"wrote {out}")
