"""The folder in which this machine keeps shares: what was named, else that of the nodes that run here."""

from __future__ import annotations

import os
from pathlib import Path

from motley.cli.errors import CliError


def folders_of_nodes() -> dict[Path, list[str]]:
    """The folders in which the nodes that run on this machine keep shares, each with the names of its nodes."""
    from motley.daemon.lease.file import LeaseFile

    found: dict[Path, list[str]] = {}
    for told in LeaseFile().told():
        if told.shares:
            found.setdefault(Path(told.shares), []).append(told.node)
    return found


def shares_folder(named: Path | None) -> Path | None:
    """The folder that a command about shares is to look at; None: the usual one.

    Args:
        named: by an option; None: it was not given.

    Raises:
        CliError: nodes here have several, and nobody says which is meant.
    """
    if named is not None or os.environ.get("MOTLEY_CACHE") or os.environ.get("MOTLEY_HOME"):
        return named
    folders = folders_of_nodes()
    if len(folders) > 1:
        told = ", ".join(f"{folder} ({', '.join(nodes)})" for folder, nodes in sorted(folders.items()))
        raise CliError(f"the nodes on this machine keep shares in several folders; name one with --cache: {told}")
    return next(iter(folders), None)
