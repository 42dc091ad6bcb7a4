"""Checks a node's threads and address against the machine that it is on, before anything starts."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.markup import escape

from motley.cli.errors import CliError
from motley.cli.shown.show import console
from motley.protocol.wording import counted

if TYPE_CHECKING:
    from motley.daemon.node.app import DaemonConfig


def fit_to_machine(config: DaemonConfig) -> DaemonConfig:
    """The configuration with as many threads as this machine can run; says what it changes or doubts.

    Raises:
        CliError: `advertise` is no address.
    """
    from motley.daemon.machine.processor import usable_cores

    if config.advertise:
        _check_address(config.advertise)
    cores = usable_cores()
    if config.threads <= cores:
        return config
    console.print(f"[yellow]--threads {config.threads}[/] is cut to the {counted(cores, 'core')} that can be used here")
    return replace(config, threads=cores)


def _check_address(advertised: str) -> None:
    """Refuse what is no address, and say so where it is not one of this machine's: it may be forwarded to it."""
    try:
        found = socket.getaddrinfo(advertised, 0, type=socket.SOCK_STREAM)
        addresses = {ipaddress.ip_address(str(where[0]).partition("%")[0]) for *_, where in found}
    except (OSError, UnicodeError):
        raise CliError(
            f"--advertise: {advertised!r} is no address and no name that is known here; write one of this machine's, "
            "without a port, or leave it out"
        ) from None
    if all(address.is_unspecified or address.is_multicast for address in addresses):
        raise CliError(f"--advertise: {advertised} is the address of no machine; write one of this machine's")
    if not any(_is_own(str(address)) for address in addresses):
        console.print(
            f"[yellow]--advertise {escape(advertised)}[/] is no address of this machine: unless it is forwarded here, "
            "other nodes will not reach this one, and no session with it and others will start"
        )


def _is_own(address: str) -> bool:
    """Whether this machine has an address: only then can a socket be bound to it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True
