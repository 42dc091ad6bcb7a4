"""A training as a job of the mesh, for commands: begun, followed and shown."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from motley.cli.errors import CliError
from motley.cli.reaching.client import Client
from motley.cli.shown.show import console, results
from motley.cli.shown.timeline import sparkline
from motley.protocol.wording import counted, short_bytes

if TYPE_CHECKING:
    from motley.training.mesh.ticket import Ticket

POLL_S = 0.5
TAKEN_S = 300.0
"""So long after an offer was taken its worker may take to begin."""
CURVE = 24
"""Characters of a curve."""


class Mode(StrEnum):
    """How several nodes train together."""

    MERGE = "merge"
    CHAIN = "chain"


@dataclass(frozen=True)
class MeshTraining:
    """What is asked of the mesh.

    Attributes:
        nodes: that train, by name.
        serve: the adapter's name in the running session of the model; empty: it is not served.
        owner: the node of this machine; empty: the one that runs here.
        others: who else has data, by node what its offer is called.
    """

    mode: Mode
    model: str
    nodes: tuple[str, ...]
    serve: str
    owner: str
    others: Mapping[str, str]
    url: str
    api_key: str


async def train_on_mesh(asked: MeshTraining, ticket: Ticket, *, follow: bool, as_json: bool) -> None:
    """Begin a job, and follow it to its end.

    Raises:
        CliError: it cannot begin, or has failed.
    """
    from motley.daemon.lease.file import LeaseFile
    from motley.daemon.node.workers.training import tickets_of

    if not asked.nodes:
        raise CliError("--mode: say with --nodes who trains, such as --nodes desktop,laptop; DATA goes there")
    lease = LeaseFile()
    async with Client(asked.url, asked.api_key) as client:
        here = [told.node for told in await asyncio.to_thread(lease.told)]
        owner = asked.owner or await _node_of(client, here)
        folder = tickets_of(lease)
        name = await asyncio.to_thread(ticket.leave, folder)
        body = {
            "name": re.sub("[^A-Za-z0-9]", "-", ticket.out.name)[:64] or "training",
            "model": asked.model,
            "mode": asked.mode,
            "owner": owner,
            "nodes": list(asked.nodes),
            "ticket": name,
            "serve": asked.serve,
            "patience_s": ticket.patience_s,
        }
        if asked.others:  # which orchestrators before this version do not know
            body["others"] = dict(asked.others)
        try:
            job = await client.call("POST", "/api/jobs", body)
        except CliError:
            with contextlib.suppress(OSError):
                (folder / f"{name}.json").unlink()
            raise
        console.print(f"job {job['id']}; `motley jobs show {job['id']}` tells of it, `motley jobs stop` ends it")
        if follow:
            job = await follow_job(client, job["id"])
        if as_json:
            print(json.dumps(job))
        elif follow:
            for line in described(job):
                results.print(line, soft_wrap=True, markup=False)


async def offer_data(ticket: Ticket, *, as_json: bool) -> None:
    """Offer data for a training that somebody at another machine begins: say how it is taken, and wait until that
    training is over. Cancelled before it has begun, the offer ends.

    Raises:
        CliError: no node of a mesh runs here, or no adapter came of it.
        motley.training.errors.TrainingError: the folder for the adapter is not free.
    """
    from motley.daemon.lease.file import LeaseFile
    from motley.daemon.node.workers.training import tickets_of
    from motley.training.mesh.claim import ADAPTER, check_free, last_claimed_by, unclaim

    lease = LeaseFile()
    here = [told.node for told in lease.told()]
    if not here:
        raise CliError("--offer: no node of a mesh runs here: run `motley join` first")
    if not ticket.data.is_file():
        raise CliError(f"{ticket.data}: there is no such file")
    check_free(ticket.out)
    unclaim(ticket.out)
    folder = tickets_of(lease)
    name = ticket.leave(folder)
    left = folder / f"{name}.json"
    try:
        offers = [f"{node}:{name}" for node in here]
        if as_json:
            print(json.dumps({"offers": offers}), flush=True)
        else:
            which = " or ".join(f"--with {offer}" for offer in offers)
            results.print(f"offered, for one training: `motley train --mode chain {which}` takes it", soft_wrap=True)
            console.print("Ctrl-C ends the offer; so does the end of the training")
        await _until(lambda: not left.exists(), inf)  # somebody may begin it next week
    finally:
        with contextlib.suppress(OSError):
            left.unlink()
    console.print("it is taken; the training goes on without this command, too")
    await _until(lambda: last_claimed_by(ticket.out) is not None, TAKEN_S)
    job = last_claimed_by(ticket.out)
    await _until(lambda: job is None or not job.is_dir(), inf)
    adapter = ticket.out / ADAPTER
    if not adapter.exists():
        which = f"show {job.name}" if job else "ls"
        raise CliError(f"no adapter came of it: `motley jobs {which}` says why")
    if as_json:
        print(json.dumps({"adapter": str(adapter)}))
    else:
        results.print(f"the adapter is {escape(str(adapter))}", soft_wrap=True)


async def _until(true: Callable[[], bool], seconds: float) -> None:
    """Wait until something is true, or so long."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return
        await asyncio.sleep(POLL_S)


async def _node_of(client: Client, here: list[str]) -> str:
    """The node of this machine that is in the mesh."""
    nodes = (await client.call("GET", "/api/nodes"))["nodes"]
    alive: list[str] = [node["name"] for node in nodes if node["state"] == "alive"]
    own = [name for name in alive if name in here]
    if len(own) != 1:
        which = f"which of {', '.join(own)} is it (--owner)?" if own else "run `motley up` or `motley join` here first"
        raise CliError(f"the data is led by this machine's node: {which}")
    return own[0]


async def follow_job(client: Client, number: str) -> dict[str, Any]:
    """Show how a job goes on until it is over; the job then.

    Raises:
        CliError: it has failed, or was stopped.
    """
    said = 0
    with _bars() as show:
        while True:
            job = await client.call("GET", f"/api/jobs/{number}")
            new = min(job["said"] - said, len(job["log"]))
            for line in job["log"][len(job["log"]) - new :]:
                console.print(escape(line))
            said = job["said"]
            show(job)
            is_to_be_served = job["serve"] and job["state"] == "done" and not (job["served_as"] or job["unserved"])
            if job["ended"] and not is_to_be_served:
                break
            await asyncio.sleep(POLL_S)
    if job["state"] != "done":
        raise CliError(f"job {job['id']}: {job['why']}")
    return job


@contextmanager
def _bars() -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar for every node that trains, with its curve; nothing where stderr is no terminal."""
    if not console.is_terminal:
        yield lambda job: None
        return
    with Progress(
        TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), console=console, transient=True
    ) as progress:
        tasks: dict[str, TaskID] = {}

        def show(job: dict[str, Any]) -> None:
            for member in job["members"]:
                if (latest := member["latest"]) is None:
                    continue
                node = member["node"]
                if node not in tasks:
                    tasks[node] = progress.add_task(escape(node), total=latest["steps"])
                losses = [point["loss"] for point in member["curve"] if "loss" in point]
                loss = f" loss {losses[-1]:.3f}" if losses else ""
                words = f"{escape(node)}{loss} {sparkline(losses, CURVE)}"
                progress.update(tasks[node], completed=latest["step"], description=words)

        yield show


def described(job: dict[str, Any]) -> list[str]:
    """A job in lines: how it stands, each node, and what came of it."""
    why = f": {job['why']}" if job["why"] else ""
    lines = [f"job {job['id']} ({job['name']}): {job['mode']} of {job['model']}, {job['state']}{why}"]
    for member in job["members"]:
        latest, why = member["latest"], f": {member['why']}" if member["why"] else ""
        has_data = member["leads"] or member["node"] in job.get("others", ())
        role = "has the data" if member["leads"] else f"{'has data, ' * has_data}{member['state']}{why}"
        words = f"  {member['node']}: {role}"
        if latest:
            losses = [point["loss"] for point in member["curve"] if "loss" in point]
            words += f", step {latest['step']:.0f} of {latest['steps']:.0f}"
            if losses:
                words += f", loss {losses[0]:.3f} to {losses[-1]:.3f} {sparkline(losses, CURVE)}"
            if latest["tokens_per_s"]:  # who has some layers of a chain sees no tokens
                words += f", {latest['tokens_per_s']:.0f} tokens/s"
            words += f", {short_bytes(int(latest['peak_bytes']))} of memory"
        lines.append(words)
    result = job["result"]
    if result:
        if result.get("perplexity"):
            before, after = result["perplexity"]
            held_out = counted(result.get("held_out", 0), "held-out example")
            lines.append(f"perplexity of {held_out}: {before:.2f} to {after:.2f}")
        lines.append(f"the adapter is {result.get('adapter', 'not told')}")
    if job["served_as"]:
        lines.append(f"requests to {job['served_as']!r} are answered with it")
    return lines
