"""`motley bench chaos`: daemons, and the orchestrator, are killed, stopped and started again while they answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import psutil
import typer

from motley.cli.bundled import FIRST, FOLDER
from motley.cli.commands.bench.options import AsJson
from motley.cli.commands.demo.mesh import DemoMesh, family, kill_daemon, mesh_of_processes, node_names
from motley.cli.errors import CliError
from motley.cli.interrupt import run
from motley.cli.shown.show import console, loading_bars

if TYPE_CHECKING:
    from motley.bench.measurements.serving.chaos import Do

CHAOS_EXAMPLE = "Example: motley bench chaos --minutes 5 --seed 3 --json"

MODEL = FOLDER / FIRST
MEMORY = 10**9
"""Bytes that every daemon may use: any of them could hold the model."""
AWAY_S = (0.0, 5.0)
"""Seconds for which a machine is gone, at least and at most."""
STOPPED_S = (0.5, 9.0)
"""Seconds for which one stands still: shorter and longer than its peers wait."""
DOWN_S = (0.0, 5.0)
"""Seconds for which the orchestrator is gone."""
CUTS_S = (1.0, 3.0, 10.0)
"""Seconds for which the control plane is cut: shorter and longer than nodes wait."""
CUT_S = 10.0
"""A connection is broken so soon."""
LEAVE_S = 5.0
"""A daemon that was asked to leave, and does, has ended so soon."""
JOIN_S = 60.0
CAN_CUT = hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("ss") is not None
"""Whether connections of other processes can be broken here: by root, on Linux."""
ORCHESTRATOR = "the orchestrator"
WORKER = "motley.daemon.worker.process"


def chaos(
    minutes: Annotated[float, typer.Option(min=0.1, help="How long.")] = 2.0,
    events: Annotated[int, typer.Option(min=1, help="Or until so many things have been done.")] = 200,
    machines: Annotated[int, typer.Option(min=2, max=8, help="Daemons to start.")] = 4,
    clients: Annotated[int, typer.Option(min=1, max=32, help="Answers under way at a time.")] = 3,
    tokens: Annotated[int, typer.Option(min=10, max=900, help="Of each answer.")] = 300,
    seed: Annotated[int, typer.Option(help="Of what is done when to whom.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Kill, stop, end, restart and cut off machines while they answer; compare each answer with an undisturbed one."""
    report = run(_chaos(minutes, events, machines, clients, tokens, seed))
    if as_json:
        print(json.dumps(report))
    if report["leaked_processes"]:
        raise CliError(f"{report['leaked_processes']} worker processes were left over")
    if report["equal"] < report["answers"]:
        raise CliError(f"{report['answers'] - report['equal']} of {report['answers']} answers were not as undisturbed")


async def _chaos(minutes: float, events: int, machines: int, clients: int, tokens: int, seed: int) -> dict[str, Any]:
    from motley.bench.measurements.serving.chaos import measure_chaos

    logging.getLogger("motley").setLevel(logging.ERROR)  # what is done to machines is told here
    names = node_names(machines)
    async with mesh_of_processes([MEMORY] * machines, apart=True) as mesh:
        wanted = {"model": str(MODEL), "exact": True, "nodes": names}
        with loading_bars() as bars:
            await mesh.client.wait_ready(await mesh.client.call("POST", "/api/sessions", wanted), bars.advance_to)
        before = _memory_of(mesh)
        report = await measure_chaos(
            mesh.url,
            MODEL.name,
            _Deeds(mesh, random.Random(seed)).by_machine(names),
            seconds=60 * minutes,
            events=events,
            clients=clients,
            tokens=tokens,
            seed=seed,
            told=console.print,
        )
        (session,) = await mesh.client.sessions()
        if session["state"] != "ready":
            raise CliError(
                f"the session is {session['state']} in the end: {session['failure'] or session['interrupted_by']}"
            )
        ranks = {rank["node"] for rank in session["ranks"] if rank["state"] == "ready"}
        leaked = sum(max(0, len(_workers(daemon.pid)) - (name in ranks)) for name, daemon in mesh.daemons.items())
        grown = _memory_of(mesh) - before
    console.print(
        f"{report.events} events, {report.answers} answers: {report.equal} as undisturbed, {report.lost} lost; epoch"
        f" {session['epoch']}; the orchestrator has grown by {grown / 1e6:.1f} MB"
    )
    return {**asdict(report), "epochs": session["epoch"], "leaked_processes": leaked, "grown_bytes": grown}


class _Deeds:
    """What can be done to a daemon's machine; each ends when it is as before."""

    def __init__(self, mesh: DemoMesh, dice: random.Random) -> None:
        self._mesh = mesh
        self._dice = dice

    def by_machine(self, names: Sequence[str]) -> dict[str, dict[str, Do]]:
        """What can be done to each daemon's machine, and to the orchestrator, by name."""
        to_machine: dict[str, Do] = {
            "kill the worker of": self._kill_worker,
            "kill": self._kill,
            "stop": self._stop,
            "end": self._end,
            "ask to leave": self._ask_to_leave,
        }
        if CAN_CUT:
            to_machine["cut the links of"] = self._cut_links
        to_orchestrator: dict[str, Do] = {"restart": self._restart, "stand still": self._stand_still}
        return {**dict.fromkeys(names, to_machine), ORCHESTRATOR: to_orchestrator}

    async def _kill_worker(self, name: str) -> None:
        for process in _workers(self._mesh.daemons[name].pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    async def _cut_links(self, name: str) -> None:
        """Break all connections between a daemon's workers and those of others, though all of them are well.

        Raises:
            CliError: they do not break.
        """
        workers = _workers(self._mesh.daemons[name].pid)
        cut = _connections(workers)
        for port, peer in cut:
            filters = ("state", "established", "sport", "=", f":{port}", "dport", "=", f":{peer}")
            await asyncio.to_thread(subprocess.run, ["ss", "-K", *filters], capture_output=True, timeout=CUT_S)
        if cut & _connections(workers):
            raise CliError("connections cannot be cut here: this kernel does not let `ss -K` end them")

    async def _kill(self, name: str) -> None:
        kill_daemon(self._mesh.daemons[name].pid)
        await self._come_back(name)

    async def _end(self, name: str) -> None:
        """End a daemon as its owner would, politely."""
        self._mesh.daemons[name].terminate()
        await self._come_back(name)

    async def _stop(self, name: str) -> None:
        """Stop a daemon as a machine stops that sleeps."""
        stopped = family(self._mesh.daemons[name].pid)
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        await asyncio.sleep(self._dice.uniform(*STOPPED_S))
        for process in stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    async def _ask_to_leave(self, name: str) -> None:
        """Have a node leave while its session goes on, unless that cannot do without it now."""
        with contextlib.suppress(CliError):
            await self._mesh.client.call("POST", f"/api/nodes/{name}/leave")
        with contextlib.suppress(TimeoutError):  # it stays: it is needed, or the orchestrator was killed meanwhile
            async with asyncio.timeout(LEAVE_S):
                await self._mesh.daemons[name].wait()
            await self._come_back(name)

    async def _restart(self, _: str) -> None:
        """Kill the orchestrator, and start it again after a while."""
        orchestrator = self._mesh.orchestrator
        assert orchestrator is not None
        orchestrator.process.kill()
        await orchestrator.process.wait()
        await asyncio.sleep(self._dice.uniform(*DOWN_S))
        await orchestrator.start()

    async def _stand_still(self, _: str) -> None:
        """Stop the orchestrator, so that the control plane is cut."""
        assert self._mesh.orchestrator is not None
        process = psutil.Process(self._mesh.orchestrator.process.pid)
        process.suspend()
        await asyncio.sleep(self._dice.choice(CUTS_S))
        process.resume()

    async def _come_back(self, name: str) -> None:
        await self._mesh.daemons[name].wait()
        await asyncio.sleep(self._dice.uniform(*AWAY_S))
        await self._mesh.start(name, MEMORY)
        until = time.monotonic() + JOIN_S
        while time.monotonic() < until:
            if self._mesh.daemons[name].returncode is not None:  # the orchestrator was away when it wanted to join
                await self._mesh.start(name, MEMORY)
            with contextlib.suppress(CliError):  # the orchestrator may be away
                nodes = (await self._mesh.client.call("GET", "/api/nodes"))["nodes"]
                if any(node["name"] == name and node["state"] == "alive" for node in nodes):
                    return
            await asyncio.sleep(0.1)
        raise CliError(f"{name} was started again and did not join within {JOIN_S:.0f} s")


def _workers(daemon: int) -> list[psutil.Process]:
    """The worker processes of a daemon."""
    found = []
    for process in family(daemon):
        with contextlib.suppress(psutil.NoSuchProcess):
            if WORKER in process.cmdline():
                found.append(process)
    return found


def _connections(processes: Sequence[psutil.Process]) -> set[tuple[int, int]]:
    """The connections that processes have over TCP: the ports of this side and of the other."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            there = [each for each in process.net_connections("tcp") if each.status == psutil.CONN_ESTABLISHED]
            found |= {(each.laddr.port, each.raddr.port) for each in there if each.raddr}
    return found


def _memory_of(mesh: DemoMesh) -> int:
    """Bytes of memory of the orchestrator's process."""
    assert mesh.orchestrator is not None
    return int(psutil.Process(mesh.orchestrator.process.pid).memory_info().rss)
