"""`motley join`: give this machine to a mesh."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Annotated

import typer

from motley.cli.interrupt import run
from motley.cli.shown.show import console
from motley.cli.typed.node_options import (
    Advertise,
    Cache,
    CacheLimit,
    DataPorts,
    GpuMemory,
    KeepWithout,
    LeaseLimit,
    Log,
    LogFormat,
    Memory,
    Models,
    Name,
    Threads,
    YieldToOption,
    Zone,
    daemon_config,
)
from motley.daemon.machine.importing import imports_that_stay


def register(app: typer.Typer) -> None:
    app.command(epilog="Examples: motley join   motley join 192.168.1.10:7337 --token TOKEN --memory 6GB")(join)


def join(
    orchestrator: Annotated[
        str,
        typer.Argument(metavar="[HOST:PORT]", help="As `motley up` printed it. Default: a mesh in the local network."),
    ] = "",
    token: Annotated[
        str,
        typer.Option(
            envvar="MOTLEY_TOKEN",
            help="A join token. Default: a code that `motley up` shows is typed here, the first time.",
            show_default=False,
        ),
    ] = "",
    name: Name = None,
    memory: Memory = "",
    gpu_memory: GpuMemory = "",
    threads: Threads = 0,
    models: Models = None,
    cache: Cache = None,
    cache_limit: CacheLimit = "50GB",
    advertise: Advertise = "",
    data_ports: DataPorts = "",
    zone: Zone = "",
    keep: KeepWithout = "1h",
    log: Log = LogFormat.TEXT,
    wait: Annotated[
        str,
        typer.Option(metavar="DURATION", help="How long to wait for an orchestrator that is not up. 0: not at all."),
    ] = "1h",
    lease_limit: LeaseLimit = "2h",
    yield_to: YieldToOption = "",
    end_with_stdin: Annotated[bool, typer.Option("--end-with-stdin", hidden=True)] = False,
) -> None:
    """Give this machine to the mesh of an orchestrator, until Ctrl-C."""
    with imports_that_stay():
        from motley.cli.reaching.joining import find_mesh, last_name
        from motley.cli.shown.narrator import narrator, start_log
        from motley.daemon.machine.files import raise_file_limit
        from motley.daemon.node.app import run_daemon

    config = daemon_config(
        name=name if name is not None else last_name(),
        memory=memory,
        threads=threads,
        models=models,
        cache=cache,
        cache_limit=cache_limit,
        advertise=advertise,
        data_ports=data_ports,
        zone=zone,
        keep=keep,
        wait=wait,
        gpu_memory=gpu_memory,
        lease_limit=lease_limit,
        yield_to=yield_to,
    )
    where, proof = run(find_mesh(orchestrator, token, config.node_name))
    config = replace(config, orchestrator=where, token=proof)
    raise_file_limit()
    start_log(log)
    if log is LogFormat.JSON:
        run(run_daemon(config, narrator(log)), end_with_stdin=end_with_stdin)
        return
    with console.status("measuring this machine and joining") as status, closing(narrator(log, status.stop)) as told:
        run(run_daemon(config, told), end_with_stdin=end_with_stdin)
