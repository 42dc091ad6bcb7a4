"""Telling a person what a node does: `motley up` and `motley join`."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable

from rich.markup import escape

from motley.cli.diagnosis import Level, disk
from motley.cli.shown.show import console, loading_bars
from motley.cli.typed.node_options import LogFormat
from motley.daemon.machine.json_log import VARIABLE, JsonLog
from motley.daemon.machine.processor import usable_cores
from motley.daemon.machine.trouble_log import TroubleLog
from motley.daemon.node.app import Observer
from motley.daemon.node.settings import NodeSettings
from motley.protocol import mesh_pb2 as pb
from motley.protocol.wording import counted, short_bytes

_log = logging.getLogger(__name__)

WAITS_S = 60.0
"""How often a person is told that an orchestrator is waited for still."""
TOLD = (
    "motley.daemon.node.workers.leasing",
    "motley.orchestrator.control",
    "motley.orchestrator.serving.kept_sessions",
    "motley.orchestrator.serving.replanning.recovery",
)
"""Loggers of which people see what goes well, too."""


class Narrator(Observer):
    """Prints what a node does, with a bar for every share that loads."""

    def __init__(self, on_joined: Callable[[], None] = lambda: None) -> None:
        self._on_joined = on_joined
        self.leaving = False
        """Whether this process is ending, and the orchestrator with it: then its loss is no news."""
        self._waits_for = ""
        self._said_s = 0.0
        """When it was said last that the orchestrator is waited for."""
        self._lost: set[str] = set()
        """Why the orchestrator could not be reached since it was lost, as far as that was said; empty: it is there."""
        self._bars = loading_bars()
        self._progress = self._bars.__enter__()

    def joined(self, node_id: str, settings: NodeSettings) -> None:
        """Say that this node is in the mesh, with what it gives to it."""
        it = settings.capabilities
        self._on_joined()
        if self._lost:
            self._lost.clear()
            console.print(f"[green]joined[/] as [bold]{escape(settings.name)}[/] ({settings.address}) again")
            return
        gpus = ", ".join(gpu.name for gpu in it.gpus) or "no GPU"
        if it.gpus and it.gpu_bytes:
            gpus += f" ({short_bytes(it.gpu_bytes)} of {'it' if len(it.gpus) == 1 else 'the first'} for ranks)"
        console.print(
            f"[green]joined[/] as [bold]{escape(settings.name)}[/] ({settings.address}): {escape(it.cpu)}, "
            f"{_cores(it.cores)}, {short_bytes(it.memory_bytes)} for ranks, "
            f"{it.memory_bandwidth / 1e9:.1f} GB/s, {gpus}{_ports(settings.ports)}"
        )
        if it.gpu_bytes and not it.gpus:
            limit = f"--gpu-memory {short_bytes(it.gpu_bytes)} limits nothing here"
            console.print(f"[yellow]{limit}: no GPU was found; `motley devices` says what is missing[/]")

        with contextlib.suppress(OSError):  # whoever needs the folder says what is wrong with it
            folder = settings.cache.folder
            room = disk(str(folder), shutil.disk_usage(folder).free, nodes=[settings.name])
            if room.level is Level.BAD:
                console.print(f"[yellow]only {escape(room.what)}: {escape(room.remedy)}[/]", soft_wrap=True)

    def waits(self, why: str, retry_s: float, left_s: float) -> None:
        """Say that there is no orchestrator yet: whenever that is for another reason, and now and then."""
        now = time.monotonic()
        if why == self._waits_for and now - self._said_s < WAITS_S:
            return
        which = "waiting for the orchestrator" if why != self._waits_for else "still waiting for the orchestrator"
        self._waits_for, self._said_s = why, now
        left = f"{left_s / 60:.0f} min" if left_s >= 60 else f"{left_s:.0f} s"
        then = f"`motley up` prints its address and port. Trying for {left} more; Ctrl-C ends this"
        console.print(f"[yellow]{which}[/]: {escape(why)}{'' if why.endswith('?') else '.'} {then}", soft_wrap=True)

    def lost(self, why: str, retry_s: float) -> None:
        """Say that the orchestrator is gone, and then why it is not reached, unless this process ends with it."""
        if self.leaving or why in self._lost:
            return
        if self._lost:
            console.print(f"[dim]still without the orchestrator: {escape(why)}[/]", soft_wrap=True)
        else:
            then = "this node looks for it now and then, and joins again by itself"
            console.print(f"[yellow]lost the orchestrator[/]: {escape(why)}; {then}", soft_wrap=True)
        self._lost.add(why)

    def dismissed(self) -> None:
        """Say that somebody wanted this node to leave."""
        console.print("left the mesh, as `motley leave` asked")

    def rank(self, role: str, event: pb.RankEvent) -> None:
        """Show how a rank or an expert host of this node (`role`, in words) is: loading, ready, failed or released."""
        who = f"{role} of session {escape(event.session)}"
        match event.WhichOneof("body"):
            case "loading":
                self._progress.advance_to(role, event.loading.done_bytes, event.loading.total_bytes)
            case "ready":
                size = short_bytes(event.ready.share_bytes)
                console.print(f"[green]ready[/] {who}: {size} of weights loaded in {event.ready.load_s:.1f} s")
            case "failed" if _is_company(event):
                then = "the session goes on with the nodes that are left, where they can"
                console.print(f"[yellow]ended[/] {who}, as {escape(event.failed.message)}; {then}", soft_wrap=True)
            case "failed":
                console.print(f"[red]failed[/] {who}: {escape(event.failed.message)}", soft_wrap=True)
            case "released":
                console.print(f"released {who}")

    def close(self) -> None:
        """Take the bars off the screen."""
        self._bars.__exit__(None, None, None)


def _is_company(event: pb.RankEvent) -> bool:
    """Whether a rank has ended for the sake of another one."""
    return event.failed.lost_rank not in (0, event.rank + 1)


def _cores(used: int) -> str:
    """The cores that ranks compute with, and if that is not every one, of how many."""
    usable = usable_cores()
    return counted(used, "core") if used == usable else f"{used} of {counted(usable, 'core')}"


def _ports(ports: tuple[int, int]) -> str:
    return f"; other nodes reach its ranks on ports {ports[0]} to {ports[1]}" if ports[0] else ""


class NodeLog(Observer):
    """Logs what a node does, for programs that collect logs."""

    def __init__(self, on_joined: Callable[[], None] = lambda: None) -> None:
        self._on_joined = on_joined
        self._name = ""
        self._lost = False
        """Whether the orchestrator is away, and that was said."""
        self.leaving = False
        """As `Narrator.leaving`."""

    def joined(self, node_id: str, settings: NodeSettings) -> None:
        """This node is in the mesh."""
        self._on_joined()
        self._name, self._lost = settings.name, False
        _log.info("joined as %s (%s)", settings.name, settings.address, extra={"node": self._name})

    def lost(self, why: str, retry_s: float) -> None:
        """The orchestrator is gone; that is no news if this process ends with it."""
        if self.leaving:
            return
        level, what = (logging.INFO, "still without") if self._lost else (logging.WARNING, "lost")
        self._lost = True
        _log.log(level, "%s the orchestrator: %s; again in %.0f s", what, why, retry_s, extra={"node": self._name})

    def waits(self, why: str, retry_s: float, left_s: float) -> None:
        """There is no orchestrator yet."""
        _log.info("waiting for the orchestrator: %s; again in %.0f s", why, retry_s, extra={"node": self._name})

    def dismissed(self) -> None:
        """Somebody wanted this node to leave."""
        _log.info("left the mesh, as it was asked to", extra={"node": self._name})

    def rank(self, role: str, event: pb.RankEvent) -> None:
        """A rank or an expert host of this node is ready, has failed or was released."""
        about = {"node": self._name, "session": event.session, "rank": event.rank}
        match event.WhichOneof("body"):
            case "ready":
                size, seconds = short_bytes(event.ready.share_bytes), event.ready.load_s
                _log.info("%s is ready: %s of weights loaded in %.1f s", role, size, seconds, extra=about)
            case "failed" if _is_company(event):
                _log.warning("%s has ended with another rank: %s", role, event.failed.message, extra=about)
            case "failed":
                _log.error("%s has failed: %s", role, event.failed.message, extra=about)
            case "released":
                _log.info("%s is released", role, extra=about)

    def close(self) -> None:
        """Nothing is on a screen."""


def start_log(log: LogFormat, own: str | None = None) -> None:
    """Have this process, and those that it starts, log in a format.

    Args:
        own: the name of the node that this process is, of which `MeshLog` says nothing.
    """
    os.environ[VARIABLE] = log
    if log is LogFormat.JSON:
        JsonLog(lambda line: print(line, file=sys.stderr, flush=True)).listen()
    else:
        MeshLog(own).listen()


def narrator(log: LogFormat, on_joined: Callable[[], None] = lambda: None) -> Narrator | NodeLog:
    """What tells of the node that this process is; to be closed.

    Args:
        on_joined: called when it has joined.
    """
    return NodeLog(on_joined) if log is LogFormat.JSON else Narrator(on_joined)


class MeshLog(TroubleLog):
    """Prints what goes wrong in this process, and what the orchestrator notes of the nodes other than `own`: who
    joins, leaves, is lost or is refused; and what becomes of sessions then, and how a lease of this machine goes.
    """

    def __init__(self, own: str | None = None) -> None:
        super().__init__(_print)
        self._own = own

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record, unless it is about the node that this process is."""
        node = getattr(record, "node", None)
        if node is None or node != self._own:
            super().emit(record)

    def listen(self) -> None:
        """Begin to listen, for as long as the process lives."""
        for each in TOLD:
            logging.getLogger(each).setLevel(logging.INFO)
        super().listen()


def _print(text: str, level: int) -> None:
    console.print(escape(text), style="yellow" if level > logging.INFO else "", soft_wrap=True)
