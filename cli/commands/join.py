"""`motley join`: give this machine to a mesh."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from motley.cli.errors import CliError
from motley.cli.interrupt import run
from motley.cli.options import (
    Advertise,
    Cache,
    CacheLimit,
    KeepWithout,
    Log,
    LogFormat,
    Memory,
    Models,
    Name,
    Threads,
    Zone,
    daemon_config,
)
from motley.cli.show import console


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: motley join 192.168.1.10:7337 --token TOKEN --memory 6GB")(join)


def join(
    orchestrator: Annotated[str, typer.Argument(metavar="HOST:PORT", help="As `motley up` printed it.")],
    token: Annotated[
        str, typer.Option(envvar="MOTLEY_TOKEN", help="The join token that `motley up` printed.", show_default=False)
    ],
    name: Name = None,
    memory: Memory = "",
    threads: Threads = 0,
    models: Models = None,
    cache: Cache = None,
    cache_limit: CacheLimit = "50GB",
    advertise: Advertise = "",
    zone: Zone = "",
    keep: KeepWithout = "1h",
    log: Log = LogFormat.TEXT,
    end_with_stdin: Annotated[bool, typer.Option("--end-with-stdin", hidden=True)] = False,
) -> None:
    """Give this machine to the mesh of an orchestrator, until Ctrl-C."""
    from motley.cli.narrator import narrator, start_log
    from motley.daemon.machine.files import raise_file_limit
    from motley.daemon.node.app import run_daemon
    from motley.protocol.address import parse_address

    try:
        parse_address(orchestrator)
    except ValueError as error:
        raise CliError(str(error)) from None
    config = daemon_config(
        orchestrator=orchestrator,
        token=token,
        name=name,
        memory=memory,
        threads=threads,
        models=models,
        cache=cache,
        cache_limit=cache_limit,
        advertise=advertise,
        zone=zone,
        keep=keep,
    )
    raise_file_limit()
    start_log(log)
    if log is LogFormat.JSON:
        run(run_daemon(config, narrator(log)), end_with_stdin=end_with_stdin)
        return
    with console.status("measuring this machine and joining") as status, closing(narrator(log, status.stop)) as told:
        run(run_daemon(config, told), end_with_stdin=end_with_stdin)
