"""`motley doctor`: what is wrong with this machine and its mesh, in words, and what to do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import typer
from rich.markup import escape

from motley.cli.diagnosis import Finding, Level, absent, addresses, clock, disk, home, links, ports, unsteady, versions
from motley.cli.errors import CliError
from motley.cli.interrupt import run
from motley.cli.reaching.client import ApiKey, Client, Unreachable, Url
from motley.cli.shown.show import console, results
from motley.cli.typed.node_options import Cache, DataPorts, parse_ports
from motley.cli.typed.options import AsJson

DIAL_S = 3.0
"""The port where nodes join answers within this."""
ASK_S = 5.0
"""A system's own program has so long to answer."""
_COLOURS = {Level.GOOD: "green", Level.NOTE: "yellow", Level.BAD: "red"}


def register(app: typer.Typer) -> None:
    app.command(epilog="Examples: motley doctor   motley doctor --data-ports 7340-7359")(doctor)


def doctor(
    data_ports: DataPorts = "",
    cache: Cache = None,
    url: Url = "",
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Look for what keeps this machine, or its mesh, from working, and say what to do. Status 1: something does."""
    wanted = parse_ports(data_ports) if data_ports else (0, 0)
    with console.status("looking at this machine, and asking the mesh"):
        found = [*run(_machine(wanted, cache)), *_home(), *run(_mesh(url, api_key))]
    if as_json:
        print(json.dumps([asdict(each) for each in found]))
    else:
        for each in found:
            results.print(
                f"[{_COLOURS[each.level]}]{each.level:<4}[/] {each.about}: {escape(each.what)}", soft_wrap=True
            )
            if each.remedy and each.level is not Level.GOOD:
                results.print(f"     -> {escape(each.remedy)}", soft_wrap=True)
    if any(each.level is Level.BAD for each in found):
        raise typer.Exit(1)


async def _machine(wanted: tuple[int, int], cache: Path | None) -> list[Finding]:
    """What this machine itself tells."""
    from motley.cli.typed.devices import cannot_run
    from motley.daemon.node.survey.capabilities import measure
    from motley.daemon.node.survey.engines import installed_engines
    from motley.orchestrator.mesh.addresses import own_addresses

    taken = [port for port in range(wanted[0], wanted[1] + 1) if port and not _can_listen(port)]
    firewall = await asyncio.to_thread(_firewall)
    machine = await asyncio.to_thread(measure, await installed_engines())
    gpus = ", ".join(f"{gpu.name} (driver {gpu.driver or 'unknown'})" for gpu in machine.gpus)
    there = (
        Finding(Level.GOOD, "drivers", gpus) if gpus else Finding(Level.NOTE, "drivers", f"no GPU: {machine.no_gpu}")
    )
    return [
        addresses(own_addresses()),
        ports(wanted, taken, firewall, sys.platform),
        *await asyncio.to_thread(_disks, cache),
        there,
        *(
            Finding(Level.NOTE, "engines", line)
            for line in cannot_run(machine)
            if machine.gpus  # else that is why
        ),
    ]


def _disks(cache: Path | None) -> list[Finding]:
    """About the folder for shares that was named, or those of the nodes that run on this machine, or the usual one."""
    from motley.cli.reaching.shares import folders_of_nodes
    from motley.daemon.weights.cache import CacheError, ShareCache

    nodes = folders_of_nodes() if cache is None else {}
    found = []
    for folder, names in nodes.items() or [(cache, [])]:
        shares, trouble, kept = ShareCache(folder), "", 0
        try:
            shares.prepare()
            kept = sum(entry.size for entry in shares.entries())
        except CacheError as error:
            trouble = str(error)
        free = 0.0 if trouble else float(shutil.disk_usage(shares.folder).free)
        found.append(disk(str(shares.folder), free, trouble, names, kept))
    return found


def _home() -> list[Finding]:
    """About the folder that says which meshes this machine belongs to, where it cannot be read."""
    from motley.cli.reaching.home import home as folder
    from motley.cli.reaching.home import unreadable

    trouble = unreadable()
    return [home(str(folder()), trouble)] if trouble else []


async def _mesh(url: str, api_key: str) -> list[Finding]:
    """What the mesh tells, if there is one."""
    from motley.cli.reaching.home import meshes
    from motley.daemon.node.joining.membership import all_kept
    from motley.protocol.release import release

    belongs = bool(url or all_kept(meshes()))  # else there need be none yet
    try:
        async with Client(url, api_key) as client:
            told = await client.call("GET", "/version")
            now = time.time()
            nodes = (await client.call("GET", "/api/nodes"))["nodes"]
    except Unreachable as error:
        return [
            Finding(Level.BAD if belongs else Level.NOTE, "mesh", str(error)),
            *await _joined(),
        ]
    except CliError as error:
        return [Finding(Level.BAD, "mesh", str(error)), *await _joined()]
    alive = sum(node["state"] == "alive" for node in nodes)
    return [
        Finding(Level.GOOD, "mesh", f"the orchestrator at {client.url} answers; nodes: {alive}"),
        *await _joined(),
        versions(release(), told["version"], nodes),
        clock(now - told["time"]),
        *absent(nodes),
        *unsteady(nodes),
        *links(nodes),
    ]


async def _joined() -> list[Finding]:
    """Whether the orchestrators of the meshes that this machine belongs to can be dialled, and are the same as ever."""
    from motley.cli.reaching.home import meshes
    from motley.daemon.node.joining.membership import all_kept
    from motley.daemon.node.joining.trust import TrustError, fetch_certificate, fingerprint_of
    from motley.protocol.address import parse_address

    found: list[Finding] = []
    for kept in (each for each in all_kept(meshes()) if each.name):
        level = Level.NOTE if found else Level.BAD  # this machine may have left those that it was in before
        where = f"the orchestrator at {kept.orchestrator}, which this machine has joined as {kept.name}"
        try:
            host, port = parse_address(kept.orchestrator)
            async with asyncio.timeout(DIAL_S):
                certificate = await fetch_certificate(host, port)
        except (TrustError, TimeoutError, ValueError) as error:
            told = f"{where}, cannot be reached from here: {error or f'no answer within {DIAL_S:.0f} s'}"
            remedy = f"there: `motley up`, and let port {kept.orchestrator.rpartition(':')[2]} in through its firewall"
            found.append(Finding(level, "orchestrator", told, remedy))
            continue
        if fingerprint_of(certificate) == kept.fingerprint:
            found.append(Finding(Level.GOOD, "orchestrator", f"{where}, can be reached from here"))
        else:
            remedy = "if you have set it up anew: `motley join` again, with a new code or token"
            found.append(Finding(Level.BAD, "orchestrator", f"{where}, now has another certificate", remedy))
    return found


def _can_listen(port: int) -> bool:
    from motley.transport import Listener, UsageError

    try:
        Listener("0.0.0.0", port).close()
    except UsageError:
        return False
    return True


def _firewall() -> str:
    """What lets only some ports in on this machine; "": nothing that is noticed without being an administrator."""
    if sys.platform == "win32":
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            asked = ["netsh", "advfirewall", "show", "currentprofile", "state"]
            said = subprocess.run(asked, capture_output=True, timeout=ASK_S).stdout
            return "Windows' firewall" if b"ON" in said.upper().split() else ""
    else:
        with contextlib.suppress(OSError):
            if "ENABLED=yes" in Path("/etc/ufw/ufw.conf").read_text("utf-8"):
                return "ufw"
        if Path("/run/firewalld").exists():
            return "firewalld"
    return ""
