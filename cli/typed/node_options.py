"""Options of a node, for `motley up`, `motley join` and what else starts one, and its configuration made of them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from motley.cli.errors import CliError
from motley.cli.machine import fit_to_machine
from motley.cli.shown.show import console
from motley.cli.typed.options import ALL, duration, one_of, size
from motley.daemon.machine.importing import imports_that_stay
from motley.daemon.machine.json_log import VARIABLE
from motley.protocol.wording import short_bytes

if TYPE_CHECKING:
    from motley.daemon.node.app import DaemonConfig


class LogFormat(StrEnum):
    """How a command that lasts says what happens: for people, or a line of JSON for each thing."""

    TEXT = "text"
    JSON = "json"


Name = Annotated[str | None, typer.Option(help="This node's name in the mesh. Default: the host's name.")]
_AGAIN = "Default: as it was said the last time, or"
Memory = Annotated[
    str, typer.Option(help=f"Memory that ranks may use here, such as 6GB, or {ALL}. Default: what is available.")
]
MemoryAgain = Annotated[
    str | None,
    typer.Option(help=f"Memory that ranks may use here, such as 6GB, or {ALL}. {_AGAIN} what is available."),
]
Zone = Annotated[
    str, typer.Option(help="What fails together with this machine: a room, a fuse. Replicas are kept in several.")
]
KeepWithout = Annotated[
    str,
    typer.Option(
        "--keep-without-orchestrator",
        metavar="DURATION",
        help="How long ranks here go on when the orchestrator cannot be reached, such as 30m. 0s: not at all.",
    ),
]
GpuMemory = Annotated[
    str,
    typer.Option(help=f"Memory of its first GPU that ranks may use, such as 6GB, or {ALL}. Default: what is free."),
]
GpuMemoryAgain = Annotated[
    str | None,
    typer.Option(help=f"Memory of its first GPU that ranks may use, such as 6GB, or {ALL}. {_AGAIN} what is free."),
]
LeaseLimit = Annotated[
    str,
    typer.Option(
        metavar="DURATION", help="How long a lease of this machine lasts at most (`motley lease take`), such as 8h."
    ),
]
YieldToOption = Annotated[
    str,
    typer.Option(
        "--yield-to",
        metavar="gpu,full-screen,cpu=PERCENT",
        help="Take a lease by itself while other programs use the GPU, one has the whole screen (on Windows), or they"
        " use more than so much of the processor. Default: none of these.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(min=0, help="Compute threads per rank. 0: every usable core. Default: 0."),
]
ThreadsAgain = Annotated[
    int | None,
    typer.Option(min=0, help=f"Compute threads per rank. 0: every usable core. {_AGAIN} every usable core."),
]
DataPorts = Annotated[
    str,
    typer.Option(
        metavar="FIRST-LAST",
        help="Ports on which other nodes reach this one's ranks, such as 7340-7359, for a rule of a firewall; a session"
        " takes one for each of its ranks and hosts here, and some for moments. Default: any.",
    ),
]
Models = Annotated[
    Path | None, typer.Option(help="Folder in which model names are looked up.", file_okay=False, exists=True)
]
Cache = Annotated[
    Path | None,
    typer.Option(
        help="Folder for quantised shares. Default: $MOTLEY_CACHE, or shares in $MOTLEY_HOME, or in the user's cache"
        " folder.",
        file_okay=False,
    ),
]
CacheHere = Annotated[
    Path | None,
    typer.Option(
        "--cache",
        help="Folder with the shares. Default: $MOTLEY_CACHE, or shares in $MOTLEY_HOME, or that of the nodes that run"
        " here, or in the user's cache folder.",
        file_okay=False,
    ),
]
CacheLimit = Annotated[str, typer.Option(help="Space for them; those used least recently make way.")]
Log = Annotated[
    LogFormat,
    typer.Option(
        envvar=VARIABLE,
        help="How this command logs on stderr: for people, or (json) for programs, a line for each request too.",
        parser=one_of(LogFormat),
        metavar="|".join(LogFormat),
    ),
]
Advertise = Annotated[str, typer.Option(help="Address under which other nodes reach this one.")]


def daemon_config(
    *,
    name: str | None,
    memory: str,
    threads: int | None,
    models: Path | None,
    cache: Path | None,
    cache_limit: str,
    zone: str = "",
    advertise: str = "",
    keep: str = "1h",
    data_ports: str = "",
    wait: str = "0s",
    gpu_memory: str = "",
    lease_limit: str = "2h",
    yield_to: str = "",
) -> DaemonConfig:
    """Make a daemon's configuration from what was typed, fitted to this machine; its orchestrator and token
    are empty, as they are found later.

    Raises:
        CliError: `name` is blank, `zone` is long or not printable, `memory` or `cache_limit` is no size, `memory`
            holds nothing, `gpu_memory` is no size, `advertise` is no address, `keep`, `wait` or `lease_limit` no
            duration, `yield_to` says nothing that is known, or `data_ports` no ports.
    """
    with imports_that_stay():
        from motley.cli.reaching.home import meshes
        from motley.daemon.lease.rules import YieldTo
        from motley.daemon.machine.memory import available_memory
        from motley.daemon.machine.processor import usable_cores
        from motley.daemon.models.cutting.profile import RUNTIME_BYTES
        from motley.daemon.node.app import DaemonConfig
        from motley.daemon.weights.cache import ShareCache

    if name is not None and not name.strip():
        raise CliError("--name is blank; leave it out to take the host's name")
    if len(zone) > 64 or not zone.isprintable():
        raise CliError("--zone has up to 64 printable characters")
    limit = size("--memory", memory) if memory not in ("", ALL) else None
    if limit is not None and limit <= RUNTIME_BYTES:
        least = short_bytes(RUNTIME_BYTES)
        raise CliError(f"--memory: {memory} holds nothing: a rank takes {least} before its weights; give it more")
    if limit is not None and limit > (available := available_memory()):
        console.print(f"[yellow]--memory {memory}[/] is cut to the {short_bytes(available)} that are available here")
    if threads == 0:
        console.print(f"--threads 0: each rank computes with every core, {usable_cores()} here")
    try:
        yielding = YieldTo.parse(yield_to)
    except ValueError as error:
        raise CliError(f"--yield-to: {error}") from None
    return fit_to_machine(
        DaemonConfig(
            orchestrator="",
            token="",
            name=name or "",
            advertise=advertise,
            zone=zone,
            keep_s=duration("--keep-without-orchestrator", keep),
            wait_s=duration("--wait", wait),
            memory_limit=limit,
            gpu_limit=size("--gpu-memory", gpu_memory) if gpu_memory not in ("", ALL) else 0,
            lease_limit_s=duration("--lease-limit", lease_limit),
            yield_to=yielding,
            threads=threads or 0,
            models=models,
            ports=parse_ports(data_ports) if data_ports else (0, 0),
            meshes=meshes(),
            cache=ShareCache(cache, size("--cache-limit", cache_limit)),
        )
    )


def parse_ports(text: str) -> tuple[int, int]:
    """Read ``7340-7359``.

    Raises:
        CliError: it is no such range.
    """
    first, _, last = text.partition("-")
    if first.isdecimal() and last.isdecimal() and 1024 <= int(first) <= int(last) < 1 << 16:
        return int(first), int(last)
    raise CliError(f"--data-ports wants two ports from 1024 to 65535, like 7340-7359, not {text!r}")
