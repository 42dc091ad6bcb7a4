"""`motley models ls` and `rm`: what this machine's disk has of models."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from motley.cli.errors import CliError
from motley.cli.reaching.shares import shares_folder
from motley.cli.shown.show import results, table
from motley.cli.typed.node_options import CacheHere, Models
from motley.cli.typed.options import AsJson
from motley.orchestrator.known_models.names import source_of
from motley.protocol.wording import counted, short_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from huggingface_hub import CachedRepoInfo

    from motley.daemon.lending.mirror import FoundMirror
    from motley.daemon.weights.cache import Entry, ShareCache


@dataclass
class OnDisk:
    """What the disk has of a model.

    Attributes:
        files: bytes of its own files, or of the parts of them that are here.
        where: that they are from: "hub", the folder that was given, or "" if only shares are left.
        pulled: parts of its files that `motley models pull` has fetched.
        shares: that ranks have made of it.
        used: when any of it was used last, in seconds since the epoch.
    """

    where: str = ""
    files: int = 0
    shares: list[Entry] = field(default_factory=list)
    used: float = 0.0
    fetched: CachedRepoInfo | None = None
    pulled: list[FoundMirror] = field(default_factory=list)

    @property
    def share_bytes(self) -> int:
        return sum(each.size for each in self.shares)


def ls(
    models: Models = None,
    cache: CacheHere = None,
    as_json: AsJson = False,
) -> None:
    """List the models on this machine's disk, with the shares that were made of them, used last first."""
    from motley.daemon.weights.cache import ShareCache

    kept = ShareCache(shares_folder(cache))
    found = _found(models, kept)
    ordered = sorted(found.items(), key=lambda each: -each[1].used)
    if as_json:
        print(json.dumps({"models": [_described(name, each) for name, each in ordered]}))
        return
    rows = [
        [
            name,
            each.where or "-",
            short_bytes(each.files) if each.files else "-",
            f"{short_bytes(each.share_bytes)} ({counted(len(each.shares), 'share')})" if each.shares else "-",
            f"{datetime.fromtimestamp(each.used):%Y-%m-%d}",
        ]
        for name, each in ordered
    ]
    total = sum(each.files + each.share_bytes for each in found.values())
    results.print(
        table(
            ["model", "from", "files", "shares", "last used"],
            rows,
            title=f"Models: {short_bytes(total)}, used last first; shares in {kept.folder}",
        )
    )


def rm(
    model: Annotated[str, typer.Argument(help="A model that was fetched, as `motley models ls` calls it.")],
    cache: CacheHere = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove a model that was fetched from the hub, and the shares that were made of it; never folders of your own."""
    from motley.daemon.weights.cache import ShareCache

    kept = ShareCache(shares_folder(cache))
    source = source_of(model)
    found = _found(None, kept).get(source)
    if found is None:
        raise CliError(f"{source!r} is not on this machine; `motley models ls` lists what is")
    size = short_bytes(found.files + found.share_bytes)
    if not yes and not typer.confirm(f"Remove {source} ({size})?"):
        raise CliError("nothing was removed")
    removed = [each for each in found.shares if kept.remove(each.key)]
    pulled = [each.remove() for each in found.pulled]
    if len(removed) < len(found.shares) or not all(pulled):
        done = f"{len(removed)} of {counted(len(found.shares), 'share')} removed, its files and the rest kept"
        raise CliError(f"{source} is in use by a rank ({done}); `motley stop` the session first")
    if found.fetched is not None:
        _forget(found.fetched)
    print(f"removed {source}, {size}")


def _found(models: Path | None, cache: ShareCache) -> dict[str, OnDisk]:
    """All models, by what they are asked for by."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    from motley.daemon.lending.hub_mirror import pulled_in_part

    found: dict[str, OnDisk] = {}
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:  # nothing was ever fetched
        repositories = frozenset()
    for each in repositories:
        if each.repo_type == "model":
            found[each.repo_id] = OnDisk("hub", each.size_on_disk, used=each.last_accessed, fetched=each)
    for source, part in pulled_in_part(cache.folder):
        own = found.setdefault(source, OnDisk("hub, in part"))
        own.pulled.append(part)
        own.files += part.size
        own.used = max(own.used, part.used)
    for folder in sorted(models.iterdir()) if models else ():
        if (size := _model_bytes(folder)) is not None:
            found[str(folder)] = OnDisk(str(models), size, used=folder.stat().st_mtime)
    for entry in cache.entries():
        repository = entry.label.model.partition(":")[0].partition("@")[0]
        own = found.setdefault(repository if repository in found else entry.label.model, OnDisk())
        own.shares.append(entry)
        own.used = max(own.used, entry.used)
    return found


def _model_bytes(folder: Path) -> int | None:
    """Bytes of the model that lies in a folder, or is a file; None: there is none."""
    from motley.daemon.weights.hub import ModelNotFound, files_of, find_here

    try:
        place = find_here(str(folder.absolute()))
    except ModelNotFound:
        return None
    return sum(file.stat().st_size for file in files_of(place)) if place else None


def _forget(fetched: CachedRepoInfo) -> None:
    """Remove a repository from the hub's cache."""
    from huggingface_hub import scan_cache_dir

    scan_cache_dir().delete_revisions(*(each.commit_hash for each in fetched.revisions)).execute()


def _described(name: str, each: OnDisk) -> dict[str, Any]:
    return {
        "name": name,
        "from": each.where or None,
        "bytes": each.files,
        "shares": len(each.shares),
        "share_bytes": each.share_bytes,
        "last_used": each.used,
    }
