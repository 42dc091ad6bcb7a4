"""`motley cache`: the quantised shares that this machine keeps on its disk."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from motley.cli.errors import CliError
from motley.cli.reaching.shares import shares_folder
from motley.cli.shown.show import results, table
from motley.cli.typed.command_group import CommandGroup
from motley.cli.typed.node_options import CacheHere
from motley.cli.typed.options import AsJson
from motley.protocol.wording import counted, short_bytes

if TYPE_CHECKING:
    from motley.daemon.lending.mirror import FoundMirror
    from motley.daemon.rank.blocks.kept_file import FoundFile
    from motley.daemon.weights.cache import Entry

SHOWN_KEY = 8
"""Digits of a key in the table; `motley cache rm` takes as many as tell it apart."""

NAMED = 3
"""Keys that a message names at most."""

shares = CommandGroup(
    "The quantised shares on this machine's disk.",
    "Examples: motley cache ls   motley cache rm Llama-3.2-1B-Instruct",
)


def register(app: typer.Typer) -> None:
    app.add_typer(shares, name="cache")


@shares.command(epilog="Examples: motley cache ls   motley cache ls Llama-3.2-1B-Instruct --json")
def ls(
    model: Annotated[str, typer.Argument(help="List the shares of this one, each by itself.")] = "",
    cache: CacheHere = None,
    as_json: AsJson = False,
) -> None:
    """List the models that have shares there, used last first."""
    from motley.daemon.lending.mirror import found_mirrors
    from motley.daemon.rank.blocks.kept_file import FOLDER, kept_files
    from motley.daemon.weights.cache import ShareCache

    kept = ShareCache(shares_folder(cache))
    entries = kept.entries()[::-1]
    damaged = {} if model else kept.damaged()
    if model:
        entries = _of_model(model, entries)
        if not entries:
            raise CliError(f"there are no shares of a model {model!r}; `motley cache ls` lists the models")
    prefixes = [] if model else kept_files(kept.folder / FOLDER)
    borrowed = [] if model else found_mirrors(kept.folder)
    besides: dict[str, Sequence[FoundFile | FoundMirror]] = {"prefixes": prefixes, "borrowed": borrowed}
    total = sum(each.size for each in entries) + sum(damaged.values())
    total += sum(each.size for others in besides.values() for each in others)
    if as_json:
        sound = [_described(entry) for entry in entries]
        broken = [{"key": key, "bytes": size} for key, size in damaged.items()]
        told: dict[str, object] = {"folder": str(kept.folder), "bytes": total, "shares": sound, "damaged": broken}
        for name, others in besides.items():
            told[name] = [{"bytes": each.size, "last_used": _when(each.used).isoformat()} for each in others]
        print(json.dumps(told))
        return
    title = f"{kept.folder}: {short_bytes(total)}"
    if model:
        columns = ["key", "quant", "share", "size", "last used"]
        rows = [[entry.key[:SHOWN_KEY], _held(entry), _what(entry), *_size_and_day([entry])] for entry in entries]
        results.print(table(columns, rows, title=f"{entries[0].label.model} in {title}"))
        return
    columns = ["model", "quant", "shares", "size", "last used"]
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.label.model, _held(entry)), []).append(entry)
    rows = [[*group, _how_many(members), *_size_and_day(members)] for group, members in groups.items()]
    rows += [[name, "-", str(len(found)), *_size_and_day(found)] for name, found in besides.items() if found]
    rows += [[f"damaged: {key[:SHOWN_KEY]}", "-", "-", short_bytes(size), "-"] for key, size in damaged.items()]
    behind = [row[1:] for row in (columns, *rows)]
    room = results.width - sum(max(map(len, column)) for column in zip(*behind, strict=True)) - 3 * len(columns) - 1
    results.print(table(columns, [[end_of(row[0], room), *row[1:]] for row in rows], title=title))


@shares.command(epilog="Examples: motley cache rm Llama-3.2-1B-Instruct   motley cache rm 3f9a04c1")
def rm(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL|KEY", help="As `motley cache ls`, or `motley cache ls MODEL`, shows them."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all that are not in use.")] = False,
    cache: CacheHere = None,
) -> None:
    """Remove a model's shares, or single ones; they are made anew when they are wanted. --all: kept prefixes, and what
    other nodes have lent of models, too."""
    from motley.daemon.lending.mirror import found_mirrors, sweep_mirrors
    from motley.daemon.rank.blocks.kept_file import FOLDER, kept_files
    from motley.daemon.weights.cache import ShareCache

    if bool(names) == everything:
        raise CliError("name the models or shares to remove, as `motley cache ls` shows them, or say --all")
    kept = ShareCache(shares_folder(cache))
    entries = kept.entries()
    sizes = {entry.key: entry.size for entry in entries} | kept.damaged()
    wanted = sizes if everything else dict.fromkeys(key for name in names or [] for key in _find(name, entries, sizes))
    removed = [key for key in wanted if kept.remove(key)]
    kept.sweep()
    if everything:
        sweep_mirrors(kept.folder)
        besides: list[FoundFile | FoundMirror] = [*kept_files(kept.folder / FOLDER), *found_mirrors(kept.folder)]
        for other in besides:
            other.remove()
    size = short_bytes(sum(sizes[key] for key in removed))
    print(f"removed {len(removed)} of {counted(len(wanted), 'share')}, {size}")
    if len(removed) < len(wanted):
        used = [key[:SHOWN_KEY] for key in wanted if key not in removed]
        more = f" and {len(used) - NAMED} more" if len(used) > NAMED else ""
        raise CliError(f"in use by a rank: {', '.join(used[:NAMED])}{more}; `motley stop` the session first")


def _find(typed: str, entries: Sequence[Entry], keys: Iterable[str]) -> list[str]:
    """The keys of the one model that is called so, or the one key that begins so."""
    if of_model := _of_model(typed, entries):
        return [entry.key for entry in of_model]
    found = [key for key in keys if key.startswith(typed.lower())]
    if len(found) != 1:
        how_many = f"{len(found)} shares have keys that begin" if found else "no model is called so, and no key begins"
        raise CliError(f"{how_many} with {typed!r}; `motley cache ls` lists them")
    return found


def _of_model(typed: str, entries: Sequence[Entry]) -> list[Entry]:
    """Find the kept shares of the model that is called so: by its path or hub id, or an end of it in whole names."""
    if exact := [entry for entry in entries if entry.label.model == typed]:
        return exact
    end = "/" + typed.replace("\\", "/").removeprefix("./").strip("/")
    found = [entry for entry in entries if f"/{entry.label.model}".replace("\\", "/").endswith(end)]
    models = sorted({entry.label.model for entry in found})
    if len(models) > 1:
        raise CliError(f"{typed!r} can be any of {', '.join(models)}; say more of it")
    return found


def _held(entry: Entry) -> str:
    plain = entry.label.quantisation in ("fp32", "fp16")
    return entry.label.quantisation + ("" if plain else f"/{entry.label.block}")


def _what(entry: Entry) -> str:
    return entry.label.expert or f"{100 * entry.label.fraction:.0f} %"


def _how_many(entries: Sequence[Entry]) -> str:
    """``2, 64 experts``: shares of a rank, and experts by themselves."""
    experts = sum(bool(entry.label.expert) for entry in entries)
    ranks = len(entries) - experts
    return ", ".join([*([str(ranks)] if ranks else []), *([counted(experts, "expert")] if experts else [])])


def _when(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _size_and_day(entries: Sequence[Entry | FoundFile | FoundMirror]) -> list[str]:
    used = datetime.fromtimestamp(max(entry.used for entry in entries))
    return [short_bytes(sum(entry.size for entry in entries)), f"{used:%Y-%m-%d}"]


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
        "last_used": _when(entry.used).isoformat(),
    }
