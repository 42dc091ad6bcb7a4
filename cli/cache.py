"""`motley cache`: the quantised shares that this machine keeps on its disk."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from motley.cli.errors import CliError
from motley.cli.options import Cache
from motley.cli.show import human_size, table

if TYPE_CHECKING:
    from motley.daemon.weights.cache import Entry

SHOWN_KEY = 12
"""Digits of a key in the table; `motley cache rm` takes as many as tell it apart."""

shares = typer.Typer(help="The quantised shares on this machine's disk.", no_args_is_help=True, rich_markup_mode="rich")


def register(app: typer.Typer) -> None:
    app.add_typer(shares, name="cache")


@shares.command(epilog="Example: motley cache ls --json")
def ls(
    cache: Cache = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON.")] = False,
) -> None:
    """List the shares, used last first."""
    from motley.daemon.weights.cache import ShareCache

    kept = ShareCache(cache)
    entries = kept.entries()[::-1]
    total = sum(entry.size for entry in entries)
    if as_json:
        print(json.dumps({"folder": str(kept.folder), "bytes": total, "shares": [_described(e) for e in entries]}))
        return
    columns = ["key", "model", "quantisation", "share", "size", "last used"]
    rows = [
        [
            entry.key[:SHOWN_KEY],
            entry.label.model,
            entry.label.quantisation + (f"/{entry.label.block}" if entry.label.quantisation != "fp32" else ""),
            f"{100 * entry.label.fraction:.0f} %",
            human_size(entry.size),
            f"{datetime.fromtimestamp(entry.used):%Y-%m-%d %H:%M}",
        ]
        for entry in entries
    ]
    Console().print(table(columns, rows, title=f"{kept.folder}: {human_size(total)}"))


@shares.command(epilog="Example: motley cache rm 3f9a04c1")
def rm(
    keys: Annotated[list[str] | None, typer.Argument(metavar="KEY", help="As `motley cache ls` shows them.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all that are not in use.")] = False,
    cache: Cache = None,
) -> None:
    """Remove shares; they are made anew when they are wanted."""
    from motley.daemon.weights.cache import ShareCache

    if bool(keys) == everything:
        raise CliError("name the shares to remove, as `motley cache ls` shows them, or say --all")
    kept = ShareCache(cache)
    kept.sweep()
    entries = kept.entries()
    wanted = entries if everything else [_find(key, entries) for key in dict.fromkeys(keys or [])]
    removed = [entry for entry in wanted if kept.remove(entry.key)]
    print(f"removed {len(removed)} of {len(wanted)} shares, {human_size(sum(entry.size for entry in removed))}")
    if len(removed) < len(wanted):
        used = ", ".join(entry.key[:SHOWN_KEY] for entry in wanted if entry not in removed)
        raise CliError(f"in use by a rank: {used}; `motley stop` the session first")


def _find(key: str, entries: list[Entry]) -> Entry:
    """The one entry whose key begins like this."""
    found = [entry for entry in entries if entry.key.startswith(key.lower())]
    if len(found) != 1:
        how_many = f"{len(found)} shares have keys that begin" if found else "no share has a key that begins"
        raise CliError(f"{how_many} with {key!r}; `motley cache ls` lists them")
    return found[0]


def _described(entry: Entry) -> dict[str, object]:
    return {
        "key": entry.key,
        "model": entry.label.model,
        "quantisation": entry.label.quantisation,
        "block": entry.label.block,
        "fraction": entry.label.fraction,
        "bytes": entry.size,
        "last_used": datetime.fromtimestamp(entry.used, UTC).isoformat(),
    }
