"""`motley cache`: the quantised shares that this machine keeps on its disk."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from motley.cli.errors import CliError
from motley.cli.options import Cache
from motley.cli.show import counted, human_size, results, table

if TYPE_CHECKING:
    from motley.daemon.weights.cache import Entry

SHOWN_KEY = 8
"""Digits of a key in the table; `motley cache rm` takes as many as tell it apart."""

MODEL = 1
"""Its column, which is narrowed where the terminal is."""

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
    damaged = kept.damaged()
    total = sum(entry.size for entry in entries) + sum(damaged.values())
    if as_json:
        sound = [_described(entry) for entry in entries]
        broken = [{"key": key, "bytes": size} for key, size in damaged.items()]
        print(json.dumps({"folder": str(kept.folder), "bytes": total, "shares": sound, "damaged": broken}))
        return
    columns = ["key", "model", "quant", "share", "size", "last used"]
    rows = [
        [
            entry.key[:SHOWN_KEY],
            entry.label.model,
            entry.label.quantisation
            + (f"/{entry.label.block}" if entry.label.quantisation not in ("fp32", "fp16") else ""),
            entry.label.expert or f"{100 * entry.label.fraction:.0f} %",
            human_size(entry.size),
            f"{datetime.fromtimestamp(entry.used):%Y-%m-%d}",
        ]
        for entry in entries
    ]
    rows += [[key[:SHOWN_KEY], "damaged", "-", "-", human_size(size), "-"] for key, size in damaged.items()]
    others = [[cell for at, cell in enumerate(row) if at != MODEL] for row in (columns, *rows)]
    room = results.width - sum(max(map(len, column)) for column in zip(*others, strict=True)) - 3 * len(columns) - 1
    for row in rows:
        row[MODEL] = end_of(row[MODEL], room)
    results.print(table(columns, rows, title=f"{kept.folder}: {human_size(total)}"))


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
    sizes = {entry.key: entry.size for entry in kept.entries()} | kept.damaged()
    wanted = sizes if everything else dict.fromkeys(_find(key, sizes) for key in keys or [])
    removed = [key for key in wanted if kept.remove(key)]
    kept.sweep()
    size = human_size(sum(sizes[key] for key in removed))
    print(f"removed {len(removed)} of {counted(len(wanted), 'share')}, {size}")
    if len(removed) < len(wanted):
        used = ", ".join(key[:SHOWN_KEY] for key in wanted if key not in removed)
        raise CliError(f"in use by a rank: {used}; `motley stop` the session first")


def _find(typed: str, keys: Iterable[str]) -> str:
    """The one key that begins like this."""
    found = [key for key in keys if key.startswith(typed.lower())]
    if len(found) != 1:
        how_many = f"{len(found)} shares have keys that begin" if found else "no share has a key that begins"
        raise CliError(f"{how_many} with {typed!r}; `motley cache ls` lists them")
    return found[0]


def end_of(path: str, room: int) -> str:
    """As much of the end of a path as there is room for, whole names if possible: ``…/models/shakespeare-2.6m``."""
    if len(path) <= room:
        return path
    end = path[len(path) - max(room - 1, 1) :]
    name = re.search(r"[/\\]", end)
    return "…" + (end[name.start() :] if name else end)


def _described(entry: Entry) -> dict[str, object]:
    return {
        "key": entry.key,
        "model": entry.label.model,
        "quantisation": entry.label.quantisation,
        "block": entry.label.block,
        "fraction": entry.label.fraction,
        "expert": entry.label.expert or None,
        "bytes": entry.size,
        "last_used": datetime.fromtimestamp(entry.used, UTC).isoformat(),
    }
