"""`motley join`: give this machine to a mesh."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from socket import gethostname
from typing import Annotated

import typer
from rich.markup import escape

from motley.cli.interrupt import run
from motley.cli.shown.show import console
from motley.cli.typed.node_options import (
    Advertise,
    Cache,
    CacheLimit,
    DataPorts,
    GpuMemoryAgain,
    KeepWithout,
    LeaseLimit,
    Log,
    LogFormat,
    MemoryAgain,
    Models,
    Name,
    ThreadsAgain,
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
        typer.Argument(
            metavar="[HOST[:PORT]]", help="As `motley up` printed it. Default: a mesh in the local network."
        ),
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
    memory: MemoryAgain = None,
    gpu_memory: GpuMemoryAgain = None,
    threads: ThreadsAgain = None,
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
        from motley.cli.reaching.limits import keep_limits, last_limits
        from motley.cli.shown.narrator import narrator, start_log
        from motley.daemon.machine.files import raise_file_limit
        from motley.daemon.node.app import run_daemon

    called = name if name is not None else last_name()
    before = last_limits(called or gethostname())
    limits = before.changed(memory, gpu_memory, threads)
    if log is LogFormat.TEXT and (again := before.left(memory, gpu_memory, threads).options):
        back = "to change that, say it anew: a size, --memory all, --threads 0"
        console.print(f"[dim]as the last time: {escape(again)} ({back})[/]", soft_wrap=True)
    config = daemon_config(
        name=called,
        memory=limits.memory,
        threads=limits.threads or threads,
        models=models,
        cache=cache,
        cache_limit=cache_limit,
        advertise=advertise,
        data_ports=data_ports,
        zone=zone,
        keep=keep,
        wait=wait,
        gpu_memory=limits.gpu_memory,
        lease_limit=lease_limit,
        yield_to=yield_to,
    )
    where, proof = run(find_mesh(orchestrator, token, config.node_name))
    config = replace(config, orchestrator=where, token=proof)
    raise_file_limit()
    start_log(log)
    status = console.status("measuring this machine and joining")

    def joined() -> None:
        status.stop()
        keep_limits(config.node_name, limits)

    if log is LogFormat.TEXT:
        status.start()
    try:
        with closing(narrator(log, joined)) as told:
            run(run_daemon(config, told), end_with_stdin=end_with_stdin)
    finally:
        status.stop()
