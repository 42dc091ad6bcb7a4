"""`motley lease`: a machine's owner, or another program there, takes a device back from the mesh for a while."""

from __future__ import annotations

import asyncio
import getpass
import json
import math
import time
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from motley.cli.errors import CliError
from motley.cli.interrupt import run
from motley.cli.reaching.client import ApiKey, Client, Url
from motley.cli.shown.show import console
from motley.cli.typed.command_group import CommandGroup
from motley.cli.typed.options import AsJson, duration

if TYPE_CHECKING:
    from motley.daemon.lease.file import LeaseFile, Told
    from motley.daemon.lease.lease import Lease

POLL_S = 0.2
WAIT_S = 90.0
"""A device is free this soon after it was taken, or never: its daemon ends what still computes there."""

group = CommandGroup(
    "Take a device of this machine back from the mesh for a while, and give it again.",
    "Examples: motley lease take --for 2h --reason game --gpu 0   motley lease give   motley lease show",
)

Node = Annotated[
    str, typer.Option(help="A node of the mesh, as `motley status` calls it, instead of this machine.", metavar="NODE")
]


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="lease")


@group.command(epilog="Examples: motley lease take --for 2h --reason game --gpu 0   motley lease take --pid 4711")
def take(
    how_long: Annotated[str, typer.Option("--for", metavar="DURATION", help="It ends by itself after this.")] = "2h",
    reason: Annotated[str, typer.Option(help="What for, for others to read.")] = "",
    gpu: Annotated[int | None, typer.Option(min=0, max=99, help="This GPU. Default: the whole machine.")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="The processor. Default: the whole machine.")] = False,
    holder: Annotated[str, typer.Option(help="Who takes it. Default: the user's name.")] = "",
    pid: Annotated[int | None, typer.Option(min=1, help="A process here with whose end the lease ends too.")] = None,
    node: Node = "",
    url: Url = "",
    api_key: ApiKey = "",
) -> None:
    """Take a device back, and wait until nothing of the mesh computes on it."""
    from motley.protocol.devices import ALL, CPU, GPU

    lasting = duration("--for", how_long)
    if lasting <= 0:
        raise CliError("--for: a lease of no time is none; write 90s, 30m or 1.5h")
    if cpu and gpu is not None:
        raise CliError("--cpu and --gpu are two devices: a lease is of one, or of the whole machine without either")
    if node and pid is not None:
        raise CliError("--pid is of a process of this machine; leave it out, or --node")
    device = CPU if cpu else ALL if gpu is None else f"{GPU}{gpu}"
    name = holder or getpass.getuser()
    if node:
        order = {"device": device, "holder": name, "reason": reason, "seconds": lasting}
        run(_take_there(node, order, url, api_key))
    else:
        run(_take_here(device, name, reason, lasting, pid))


@group.command(epilog="Examples: motley lease give   motley lease give --node gaming-pc")
def give(node: Node = "", url: Url = "", api_key: ApiKey = "") -> None:
    """End the lease, whoever has it: the mesh may compute on the device again."""
    if node:
        run(_call(node, "DELETE", None, url, api_key))
        print(f"{node}: given back")
        return
    file = _file()
    lease = file.give()
    print(f"given back: {_words(lease)}" if lease else "there was no lease")


@group.command(epilog="Examples: motley lease show   motley lease show --json")
def show(
    node: Node = "",
    url: Url = "",
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Show the lease of this machine, and whether the mesh has made way."""
    if node:
        there = run(_told_of(node, url, api_key))
        print(json.dumps(there) if as_json else _there_words(node, there))
        return
    from motley.daemon.lease.file import began
    from motley.daemon.lease.lease import LeaseError

    file = _file()
    told, trouble, lease = file.told(), "", None
    try:
        lease = file.read()
    except LeaseError as error:
        trouble = str(error)
    if as_json:
        daemons = [{"node": each.node, "state": each.state, "trouble": each.trouble or None} for each in told]
        body = lease.model_dump() if lease else None
        print(json.dumps({"file": str(file.path), "lease": body, "trouble": trouble or None, "daemons": daemons}))
        return
    over = lease.over(time.time(), math.inf, began) if lease else ""
    print(trouble or (f"no lease: {over}" if over else _words(lease) if lease else "no lease"))
    for each in told:
        print(f"node {each.node}: {each.state}")
    if not told:
        print("no daemon of this user runs on this machine")


async def _take_here(device: str, name: str, reason: str, lasting: float, pid: int | None) -> None:
    from pydantic import ValidationError

    from motley.daemon.lease.file import began
    from motley.daemon.lease.lease import LIMIT_S, Holder, Lease

    started = began(pid) if pid is not None else None
    if pid is not None and started is None:
        raise CliError(f"--pid: there is no process {pid}")
    now = time.time()
    try:
        holder = Holder(name=name, pid=pid, started_at=started)
        lease = Lease(holder=holder, granted_at=now, expires_at=now + lasting, device=device, reason=reason)
    except ValidationError as error:
        first = error.errors()[0]
        raise CliError(f"--{first['loc'][-1]}: {first['msg']}") from error
    file = _file()
    file.take(lease, max(LIMIT_S, lasting))
    with console.status("the mesh makes way"):
        told = await _until_leased(file, device)
    print(_words(lease))
    for each in told:
        cut = f", for {each.limit_s / 3600:g} h at most (--lease-limit)" if each.limit_s < lasting else ""
        print(f"node {each.node}: {each.state}{cut}")
    if not told:
        print("no daemon of this user runs on this machine: there was nothing to make way")


async def _until_leased(file: LeaseFile, device: str) -> list[Told]:
    """Wait until every daemon of this machine has made way.

    Raises:
        CliError: one has not within `WAIT_S`.
    """
    until = time.monotonic() + WAIT_S
    while True:
        told = await asyncio.to_thread(file.told)
        behind = [each for each in told if (each.state, each.device) != ("leased", device)]
        if not behind:
            return told
        if time.monotonic() > until:
            names = ", ".join(each.node for each in behind)
            raise CliError(f"the lease is taken, but after {WAIT_S:.0f} s these have not made way: {names}")
        await asyncio.sleep(POLL_S)


async def _take_there(node: str, order: dict[str, object], url: str, api_key: str) -> None:
    await _call(node, "PUT", order, url, api_key)
    until = time.monotonic() + WAIT_S
    with console.status("the mesh makes way"):
        while (told := await _told_of(node, url, api_key))["state"] != "leased":
            if time.monotonic() > until:
                raise CliError(f"the lease is taken, but after {WAIT_S:.0f} s {node} has not made way")
            await asyncio.sleep(POLL_S)
    print(_there_words(node, told))


async def _call(node: str, method: str, body: dict[str, object] | None, url: str, api_key: str) -> None:
    async with Client(url, api_key) as client:
        await client.call(method, f"/api/nodes/{quote(node, safe='')}/lease", body)


async def _told_of(node: str, url: str, api_key: str) -> dict[str, object]:
    """How a node's lease stands, as the orchestrator knows it.

    Raises:
        CliError: there is no such node.
    """
    async with Client(url, api_key) as client:
        nodes = (await client.call("GET", "/api/nodes"))["nodes"]
    found = next((each for each in nodes if each["name"] == node and each["state"] == "alive"), None)
    if found is None:
        raise CliError(f"there is no node {node!r}; `motley status` lists them")
    told: dict[str, object] = found["lease"]
    return told


def _there_words(node: str, told: dict[str, object]) -> str:
    if told["words"] is None:
        return f"{node}: {told['trouble'] or 'no lease'}"
    return f"{node} {told['words']}: {told['state']}"


def _words(lease: Lease) -> str:
    from motley.protocol.devices import device_words

    until = time.strftime("%H:%M", time.localtime(lease.expires_at))
    what_for = f" for {lease.reason}" if lease.reason else ""
    return f"{device_words(lease.device)} is lent to {lease.holder.name}{what_for} until {until}"


def _file() -> LeaseFile:
    from motley.daemon.lease.file import LeaseFile

    return LeaseFile()
