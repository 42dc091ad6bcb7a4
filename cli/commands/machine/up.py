"""`motley up`: an orchestrator, and this machine as its first node."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from motley.cli.errors import CliError
from motley.cli.interrupt import run
from motley.cli.shown.show import console, results
from motley.cli.typed.node_options import (
    Advertise,
    Cache,
    CacheLimit,
    DataPorts,
    GpuMemory,
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
from motley.protocol.address import JOIN_PORT, parse_address
from motley.protocol.announcing import Announced, announced, is_address

if TYPE_CHECKING:
    from motley.daemon.node.app import DaemonConfig
    from motley.daemon.node.joining.membership import Membership
    from motley.orchestrator.app import Orchestrator, OrchestratorConfig
    from motley.orchestrator.trust.pairings import Pairing


NEXT = "Next, in another terminal: `motley models fit` says what fits these machines, `motley chat MODEL` runs a model"
"""What a person may do who sees Motley for the first time."""
LOCK = "up.lock"
"""In the state folder: whoever has locked it is the orchestrator; with the number of its process."""


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: motley up --memory 6GB")(up)


def up(
    host: Annotated[str, typer.Option(help="Address where nodes join.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port where nodes join. 0: any free one.")] = JOIN_PORT,
    http_host: Annotated[
        str, typer.Option(help="Address of the API. Anything but loopback makes an API key necessary.")
    ] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the API. 0: any free one.")] = 8000,
    https_port: Annotated[
        int | None,
        typer.Option(
            min=-1,
            max=65535,
            help="Port of the API for other machines, with TLS. 0: any free one; -1: none. Default: --port + 1.",
        ),
    ] = None,
    api_key: Annotated[
        str, typer.Option(envvar="MOTLEY_API_KEY", help="A key that may do everything, and is wanted here too.")
    ] = "",
    certificate: Annotated[
        Path | None, typer.Option(help="Certificate of the API, PEM. Default: the mesh makes its own.", dir_okay=False)
    ] = None,
    key: Annotated[Path | None, typer.Option(help="Its private key.", dir_okay=False)] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="With --http-host: no TLS. Everybody in the network can read along.")
    ] = False,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Web pages of this origin may use the API. May be repeated.")
    ] = None,
    database: Annotated[
        str,
        typer.Option(
            envvar="MOTLEY_DATABASE",
            help="URL of a database, such as postgresql+psycopg://user@host/motley. Default: SQLite in --state.",
        ),
    ] = "",
    state: Annotated[Path | None, typer.Option(help="Folder for the mesh's identity.", file_okay=False)] = None,
    rebalance_at: Annotated[
        float,
        typer.Option(
            min=0,
            max=0.99,
            help="Plan an idle session anew by itself when that saves this part of a token's time, or when nodes that"
            " it was asked for with are back. 0: never.",
        ),
    ] = 0.2,
    node: Annotated[bool, typer.Option(help="Whether this machine is a node too.")] = True,
    name: Name = None,
    memory: Memory = "",
    gpu_memory: GpuMemory = "",
    threads: Threads = None,
    models: Models = None,
    cache: Cache = None,
    cache_limit: CacheLimit = "50GB",
    advertise: Advertise = "",
    data_ports: DataPorts = "",
    announce: Annotated[
        bool, typer.Option(help="Whether machines in the local network can find this mesh by `motley join` (mDNS).")
    ] = True,
    zone: Zone = "",
    log: Log = LogFormat.TEXT,
    lease_limit: LeaseLimit = "2h",
    yield_to: YieldToOption = "",
    end_with_stdin: Annotated[bool, typer.Option("--end-with-stdin", hidden=True)] = False,
) -> None:
    """Start an orchestrator, with this machine as its first node, until Ctrl-C."""
    with imports_that_stay():
        from motley.cli.reaching.home import home
        from motley.orchestrator.app import OrchestratorConfig

    if (certificate is None) != (key is None):
        raise CliError("--certificate and --key belong together: give both, or none")

    orchestrator = OrchestratorConfig(
        host=host,
        grpc_port=port,
        http_host=http_host,
        http_port=http_port,
        https_port=https_port,
        certificate=(certificate, key) if certificate and key else None,
        insecure=insecure,
        cors_origins=tuple(cors_origin or ()),
        state_dir=state or home(),
        database=database,
        api_key=api_key or None,
        advertise=advertise,
        rebalance_at=rebalance_at,
    )
    local = None
    if node:
        local = daemon_config(
            name=name,
            memory=memory,
            threads=threads,
            models=models,
            cache=cache,
            cache_limit=cache_limit,
            advertise=advertise,
            data_ports=data_ports,
            zone=zone,
            gpu_memory=gpu_memory,
            lease_limit=lease_limit,
            yield_to=yield_to,
        )
    with _alone_with(orchestrator.state_dir):
        run(_serve(orchestrator, local, announce, log), end_with_stdin=end_with_stdin)


@contextmanager
def _alone_with(state: Path) -> Iterator[None]:
    """Keep other orchestrators from the same state folder while the context lasts: they would serve the same sessions.

    Raises:
        CliError: one has it.
    """
    from motley.daemon.machine.files import own_file

    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (state / LOCK).open("ab+", buffering=0)  # else closing it would write again what a full disk refused
    except OSError:  # of which the orchestrator says what to do
        yield
        return
    with lock:
        if not own_file(lock):
            lock.seek(0)
            owner = lock.read(20).decode(errors="replace")
            raise CliError(
                f"`motley up` runs already on this machine with the state folder {state} (process {owner}): end that"
                " one, or give this one a folder of its own with --state"
            )
        with suppress(OSError):  # a full disk
            lock.truncate(0)
            lock.write(str(os.getpid()).encode())
        yield


async def _serve(config: OrchestratorConfig, local: DaemonConfig | None, announce: bool, log: LogFormat) -> None:
    from motley.cli.reaching.home import meshes
    from motley.cli.shown.narrator import narrator, start_log
    from motley.daemon.machine.files import raise_file_limit
    from motley.daemon.node.joining.membership import forget
    from motley.orchestrator.app import Orchestrator
    from motley.orchestrator.traces import export_traces

    raise_file_limit()
    orchestrator = Orchestrator(config)
    export_traces()
    orchestrator.show_code = _show_code
    start_log(log, local.node_name if local else None)
    say = results if log is LogFormat.JSON else console  # how to join, with the token, is nothing to be collected
    await orchestrator.start()
    mine = _of_operator(orchestrator)
    stack = AsyncExitStack()
    try:
        mine.keep(meshes())
        if local is None:
            _tell_all(orchestrator, config, say)
        if announce:
            await stack.enter_async_context(
                _announced(orchestrator, local.node_name if local else socket.gethostname())
            )
        if local is None:
            await asyncio.Event().wait()
            return
        from motley.daemon.node.app import run_daemon  # takes a moment, which a mesh without a node here needs not

        node = replace(local, orchestrator=orchestrator.local_target, token=orchestrator.join_token)
        measuring = console.status("measuring this machine")
        stack.callback(measuring.stop)
        if log is LogFormat.TEXT:
            measuring.start()
        is_up = False

        def joined() -> None:  # again, where the stream broke
            nonlocal is_up
            if not is_up:
                is_up = True
                measuring.stop()
                _tell_all(orchestrator, config, say)

        with closing(narrator(log, joined)) as observer:
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
        await stack.aclose()
        forget(meshes(), mine)
        await orchestrator.stop()


def _tell_all(orchestrator: Orchestrator, config: OrchestratorConfig, say: Console) -> None:
    """Tell a person that the mesh can be used, and how."""
    from motley.orchestrator.api.access.certificate import AUTHORITY

    page = f"{orchestrator.http_url}/"
    say.print(f"[bold]Motley is up.[/] Page: {page}  API: {page}v1")
    tell([NEXT], say)
    tell(how_to_join(orchestrator.join_targets, orchestrator.local_target, orchestrator.join_token), say)
    authority = config.state_dir / AUTHORITY if config.certificate is None else None
    tell(for_programs(orchestrator.network_url, orchestrator.api_key, authority), say)


def _show_code(pairing: Pairing) -> None:
    from motley.orchestrator.trust.pairings import LIFE_S
    from motley.protocol.pairing import shown

    console.print(
        f"[bold]{escape(pairing.name)}[/] ({pairing.address}) wants to join. If that is your machine, type there within"
        f" {LIFE_S / 60:.0f} minutes: [bold]{shown(pairing.code)}[/]"
    )


@asynccontextmanager
async def _announced(orchestrator: Orchestrator, name: str) -> AsyncIterator[None]:
    """Let `motley join` find the mesh, where other machines can reach it; without that it goes on all the same."""
    targets = [parse_address(target) for target in orchestrator.join_targets]
    addresses = [host for host, _ in targets if is_address(host)]
    async with AsyncExitStack() as stack:
        if addresses:
            mesh = Announced(name, tuple(addresses), targets[0][1], orchestrator.fingerprint[:16])
            try:
                await stack.enter_async_context(announced(mesh))
            except Exception as error:  # whatever a network of the day does not like
                console.print(f"[yellow]`motley join` will not find this mesh by itself[/]: {escape(str(error))}")
        yield


def _of_operator(orchestrator: Orchestrator) -> Membership:
    """By what commands of whoever has started an orchestrator reach it."""
    from motley.daemon.node.joining.membership import Membership

    return Membership(
        name="",
        fingerprint=orchestrator.fingerprint,
        key=orchestrator.operator_key,
        orchestrator=orchestrator.local_target,
        api_url=orchestrator.http_url,
        api_trust=orchestrator.api_trust.decode(),
        api_name=orchestrator.api_name,
    )


def tell(lines: Sequence[str], where: Console = console) -> None:
    """Print lines as they are, whatever is in them: brackets of IPv6 addresses, say."""
    for line in lines:
        where.print(line, soft_wrap=True, markup=False)


def how_to_join(targets: Sequence[str], local: str, token: str) -> list[str]:
    """What a person is told who wants more nodes.

    Args:
        targets: ``host:port`` for other machines to dial, the likeliest first; empty if there is none.
        local: ``host:port`` for this machine to dial.
    """
    if not targets:
        return ["Nodes on this machine, and no others, join with:", f"  motley join {local} --token {token}"]
    lines = [
        "Other machines join with `motley join`, and a code that is shown here then; or, for a day, with:",
        f"  motley join {targets[0]} --token {token}",
    ]
    if others := targets[1:]:
        lines.append(f"Where that address cannot be reached, one of these may be: {', '.join(others)}")
    return lines


def for_programs(url: str | None, api_key: str | None, authority: Path | None) -> list[str]:
    """What programs and browsers need that are on machines outside the mesh.

    Args:
        url: of the API for other machines; None: there is none.
        api_key: that was made now; None: there are some already.
        authority: the certificate that signs the API's; None: its owner has brought one that is known.
    """
    lines = []
    if url is not None:
        lines += [f"From machines that have not joined: page {url}/, API {url}/v1"]
        if url.startswith("https://") and authority is not None:
            lines += [f"  certificate to trust there: {authority}"]
    if api_key is not None:
        lines += [f"  API key, shown only now (`motley keys create` makes others): {api_key}"]
    return lines
