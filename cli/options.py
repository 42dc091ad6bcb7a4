"""Options that several commands share; most are those of a node, of `motley up` and `motley join`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from motley.cli.errors import CliError
from motley.cli.show import console, human_size

if TYPE_CHECKING:
    from motley.daemon.app import DaemonConfig


class Quantisation(StrEnum):
    """How weights are held; stored: as the checkpoint has them, bit for bit, and its floats as int8."""

    STORED = "stored"
    FP32 = "fp32"
    INT8 = "int8"
    INT4 = "int4"


Exact = Annotated[bool, typer.Option("--exact", help="The same bits on any number of ranks, beside any other request.")]
Name = Annotated[str | None, typer.Option(help="This node's name in the mesh. Default: the host's name.")]
Memory = Annotated[str, typer.Option(help="Memory that ranks may use here, such as 6GB. Default: what is available.")]
Threads = Annotated[int, typer.Option(min=0, help="Compute threads per rank. 0: every usable core.")]
Models = Annotated[
    Path | None, typer.Option(help="Folder in which model names are looked up.", file_okay=False, exists=True)
]
Cache = Annotated[
    Path | None,
    typer.Option(
        help="Folder for quantised shares. Default: $MOTLEY_CACHE, or in the user's cache folder.", file_okay=False
    ),
]
CacheLimit = Annotated[str, typer.Option(help="Space for them; those used least recently make way.")]
Advertise = Annotated[str, typer.Option(help="Address under which other nodes reach this one.")]


def daemon_config(
    *,
    name: str | None,
    memory: str,
    threads: int,
    models: Path | None,
    cache: Path | None,
    cache_limit: str,
    orchestrator: str = "",
    token: str = "",
    advertise: str = "",
) -> DaemonConfig:
    """A daemon's configuration from what was typed.

    Raises:
        CliError: `name` is blank, or `memory` or `cache_limit` is no size.
    """
    from motley.daemon.app import DaemonConfig
    from motley.daemon.hardware import available_memory
    from motley.daemon.weights.cache import ShareCache

    if name is not None and not name.strip():
        raise CliError("--name is blank; leave it out to take the host's name")
    limit = _size("--memory", memory) if memory else None
    if limit is not None and limit > (available := available_memory()):
        console.print(f"[yellow]--memory {memory}[/] is cut to the {human_size(available)} that are available here")
    return DaemonConfig(
        orchestrator=orchestrator,
        token=token,
        name=name or "",
        advertise=advertise,
        memory_limit=limit,
        threads=threads,
        models=models,
        cache=ShareCache(cache, _size("--cache-limit", cache_limit)),
    )


def _size(option: str, typed: str) -> int:
    from motley.daemon.hardware import parse_size

    try:
        return parse_size(typed)
    except ValueError as error:
        raise CliError(f"{option}: {error}") from None
