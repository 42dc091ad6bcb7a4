"""`motley up`: an orchestrator, and this machine as its first node."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from motley.cli.interrupt import run
from motley.cli.options import (
    Advertise,
    Cache,
    CacheLimit,
    Log,
    LogFormat,
    Memory,
    Models,
    Name,
    Threads,
    Zone,
    daemon_config,
)
from motley.cli.show import console, results

if TYPE_CHECKING:
    from motley.daemon.node.app import DaemonConfig
    from motley.orchestrator.app import OrchestratorConfig


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: motley up --memory 6GB")(up)


def up(
    host: Annotated[str, typer.Option(help="Address where nodes join.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port where nodes join. 0: any free one.")] = 7337,
    http_host: Annotated[
        str, typer.Option(help="Address of the API. Anything but loopback makes an API key necessary.")
    ] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the API. 0: any free one.")] = 8000,
    api_key: Annotated[str, typer.Option(envvar="MOTLEY_API_KEY", help="Key that clients must show.")] = "",
    state: Annotated[Path | None, typer.Option(help="Folder for the mesh's identity.", file_okay=False)] = None,
    node: Annotated[bool, typer.Option(help="Whether this machine is a node too.")] = True,
    name: Name = None,
    memory: Memory = "",
    threads: Threads = 0,
    models: Models = None,
    cache: Cache = None,
    cache_limit: CacheLimit = "50GB",
    advertise: Advertise = "",
    zone: Zone = "",
    log: Log = LogFormat.TEXT,
    end_with_stdin: Annotated[bool, typer.Option("--end-with-stdin", hidden=True)] = False,
) -> None:
    """Start an orchestrator, with this machine as its first node, until Ctrl-C."""
    import platformdirs

    from motley.orchestrator.app import OrchestratorConfig

    orchestrator = OrchestratorConfig(
        host=host,
        grpc_port=port,
        http_host=http_host,
        http_port=http_port,
        state_dir=state or Path(platformdirs.user_data_dir("motley", appauthor=False)),
        api_key=api_key or None,
        advertise=advertise,
    )
    local = daemon_config(
        name=name,
        memory=memory,
        threads=threads,
        models=models,
        cache=cache,
        cache_limit=cache_limit,
        advertise=advertise,
        zone=zone,
    )
    run(_serve(orchestrator, local if node else None, log), end_with_stdin=end_with_stdin)


async def _serve(config: OrchestratorConfig, local: DaemonConfig | None, log: LogFormat) -> None:
    from motley.cli.narrator import narrator, start_log
    from motley.daemon.machine.files import raise_file_limit
    from motley.daemon.node.app import run_daemon
    from motley.orchestrator.app import Orchestrator
    from motley.orchestrator.traces import export_traces

    raise_file_limit()
    orchestrator = Orchestrator(config)
    export_traces()
    start_log(log, local.node_name if local else None)
    say = results if log is LogFormat.JSON else console  # how to join, with the token, is nothing to be collected
    await orchestrator.start()
    try:
        say.print(f"[bold]Motley is up.[/] API: {orchestrator.http_url}/v1, page: {orchestrator.http_url}/")
        if orchestrator.network_url is not None:
            url = orchestrator.network_url
            say.print(f"On other machines: API {url}/v1, page {url}/", soft_wrap=True)
        if orchestrator.api_key is not None:
            say.print(f"Clients need this API key: {orchestrator.api_key}", soft_wrap=True)
        for line in how_to_join(orchestrator.join_targets, orchestrator.local_target, orchestrator.join_token):
            say.print(line, soft_wrap=True, highlight=False)
        if local is None:
            await asyncio.Event().wait()
            return
        node = replace(local, orchestrator=orchestrator.local_target, token=orchestrator.join_token)
        with closing(narrator(log)) as observer:
            daemon = asyncio.create_task(run_daemon(node, observer))
            try:
                await asyncio.shield(daemon)
                await asyncio.Event().wait()  # the node has left the mesh, not the orchestrator
            finally:
                observer.leaving = True
                await orchestrator.stop()  # before the node goes, so that requests end for the right reason
                daemon.cancel()
                await asyncio.gather(daemon, return_exceptions=True)
    finally:  # without a node, or if it could not be started; a second stop does nothing
        await orchestrator.stop()


def how_to_join(targets: Sequence[str], local: str, token: str) -> list[str]:
    """What a person is told who wants more nodes.

    Args:
        targets: ``host:port`` for other machines to dial, the likeliest first; empty if there is none.
        local: ``host:port`` for this machine to dial.
    """
    if not targets:
        return ["Nodes on this machine, and no others, join with:", f"  motley join {local} --token {token}"]
    lines = ["Other machines join with:", f"  motley join {targets[0]} --token {token}"]
    if others := targets[1:]:
        lines.append(f"Where that address cannot be reached, one of these may be: {', '.join(others)}")
    return lines
