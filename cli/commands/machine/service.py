"""`motley service`: this machine takes part in a mesh whenever it runs, without a terminal."""

from __future__ import annotations

import sys
from collections import deque
from typing import TYPE_CHECKING, Annotated

import typer

from motley.cli.errors import CliError
from motley.cli.shown.show import console
from motley.cli.typed.command_group import CommandGroup
from motley.protocol.address import parse_address, with_port

if TYPE_CHECKING:
    from motley.cli.service.manager import Manager

LINES = 100
"""Of the log that are shown."""

services = CommandGroup(
    "Take part in a mesh whenever this machine runs.",
    "Examples: motley service install --up   motley service install --join 192.168.1.10:7337/TOKEN",
)


def register(app: typer.Typer) -> None:
    app.add_typer(services, name="service")


@services.command(epilog="Example: motley service install --join 192.168.1.10:7337/TOKEN -- --memory 6GB --name den")
def install(
    up: Annotated[bool, typer.Option("--up", help="Run `motley up`: this machine's own mesh.")] = False,
    join: Annotated[
        str,
        typer.Option(
            metavar="HOST[:PORT][/TOKEN]",
            help="Run `motley join`. The token is for the first time; a machine that has joined before needs none.",
        ),
    ] = "",
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[-- OPTIONS]", help="More options of `motley up` or `motley join`.")
    ] = None,
) -> None:
    """Start the service, now and from now on. Installed once more, it runs as it is said then."""
    from motley.cli.service.settings import ServiceSettings, save

    if up == bool(join):
        raise CliError("say either --up, for a mesh of this machine's own, or --join HOST:PORT/TOKEN")
    address, _, token = join.partition("/")
    if join:
        address = with_port(address)
        try:
            parse_address(address)
        except ValueError as error:
            raise CliError(f"--join: {error}") from None
    save(ServiceSettings(["up" if up else "join", *([address] if join else []), *(options or ())], token))
    manager = _manager()
    manager.install()
    print("Motley runs as a service now; `motley service status` and `motley service logs` tell of it.")
    console.print(f"[dim]{manager.hint}[/]")


@services.command()
def uninstall() -> None:
    """End the service, and forget how it was run."""
    from motley.cli.service.settings import settings_file

    _manager().uninstall()
    settings_file().unlink(missing_ok=True)
    print("Motley is no service any more.")


@services.command()
def status() -> None:
    """Show how the service stands, as the system tells it."""
    from motley.cli.service.manager import show

    show(_manager().state)


@services.command()
def logs(lines: Annotated[int, typer.Option(min=1, help="So many of the latest.")] = LINES) -> None:
    """Show what the service has said."""
    from motley.cli.service.manager import show
    from motley.cli.service.settings import log_file

    manager = _manager(lines)
    if manager.logs is not None:
        show(manager.logs)
        return
    try:
        with log_file().open(encoding="utf-8", errors="replace") as said:
            print("".join(deque(said, lines)), end="")
    except OSError as error:
        raise CliError(f"the service has said nothing yet: {error}") from error


def _manager(lines: int = LINES) -> Manager:
    if sys.platform == "win32":
        from motley.cli.service import windows_task

        return windows_task.manager(sys.executable)
    else:
        from motley.cli.service import systemd

        if not sys.platform.startswith("linux"):
            raise CliError(
                "services are for Linux (systemd) and Windows; here, run `motley up` or `motley join` yourself"
            )
        return systemd.manager(sys.executable, lines)
