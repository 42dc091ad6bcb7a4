"""The training workers of this node: started, heard and ended as jobs of the mesh want it.

They outlive stays in the mesh, as ranks do. A worker that computes has a lease of the processor for as long as it lives
(`motley.daemon.node.workers.leasing`). A node leads only jobs that somebody on its machine has asked for: who did has
left a *ticket*, a file with what is to be trained on, whose name nobody else knows.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import re
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from motley.daemon.lease.file import LeaseFile
from motley.daemon.lending.wire import LendingError
from motley.daemon.node.borrowing import borrowed
from motley.daemon.node.network.address import listening_host
from motley.daemon.node.settings import NodeSettings
from motley.daemon.node.workers.leasing import Leasing
from motley.daemon.node.workers.training_worker import SilentWorker, TrainingWorker
from motley.daemon.weights.hub import ModelNotFound, find_fetched, find_here
from motley.protocol import LEADER
from motley.protocol import mesh_pb2 as pb
from motley.protocol.address import join_address
from motley.protocol.devices import CPU
from motley.protocol.files import write_private
from motley.protocol.installing import how_to_install

LAST = ("failed", "died", "done", "broke")
"""What a worker ends with: fields of `JobEvent`."""
PACKAGES = ("torch", "transformers", "peft")
"""Of the extra ``train``."""
_JOB = re.compile(r"[0-9a-f]{8}")
_TICKET = re.compile(r"[0-9a-f]{32}")

logger = logging.getLogger(__name__)


def cannot_train() -> str:
    """What training lacks on this machine, and what to install; empty: nothing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    return f"it lacks {', '.join(missing)}: {how_to_install('train')}" if missing else ""


def tickets_of(lease: LeaseFile) -> Path:
    """The folder in which programs of a machine leave what they want trained: beside its lease."""
    return lease.path.parent / "tickets"


@dataclass
class _Held:
    """A worker, from its order until it has ended."""

    order: pb.JobOrder
    task: asyncio.Task[None]
    latest: pb.JobEvent
    """How it stands, for an orchestrator that has lost sight of it."""
    worker: TrainingWorker | None = None


class Trainings:
    """What this node trains, of all jobs, for as long as its daemon lives."""

    def __init__(self, settings: NodeSettings, leasing: Leasing, tickets: Path) -> None:
        """
        Args:
            tickets: the folder in which programs of this machine leave theirs.
        """
        self._settings, self._leasing, self._tickets = settings, leasing, tickets
        self._say: Callable[..., None] | None = None
        self._held: dict[tuple[str, int], _Held] = {}
        self._one_by_one = asyncio.Lock()
        self._unsaid: dict[tuple[str, int], pb.JobEvent] = {}
        """What workers have ended with between two stays."""

    @property
    def told(self) -> list[pb.JobEvent]:
        """How each worker stands, or has ended while nobody could be told, for the beginning of a stay."""
        return [*(held.latest for held in self._held.values()), *self._unsaid.values()]

    @property
    def kept(self) -> list[str]:
        """The jobs of which there are files here."""
        folder = self._folder()
        return sorted(each.name for each in folder.iterdir() if _JOB.fullmatch(each.name)) if folder.is_dir() else []

    def attach(self, say: Callable[..., None], settings: NodeSettings) -> None:
        """A stay in the mesh has begun.

        Args:
            say: sends the orchestrator a message.
            settings: the node's, with the address that this orchestrator knows.
        """
        self._say, self._settings = say, settings

    def detach(self) -> None:
        """A stay has ended; workers go on."""
        self._say = None

    async def command(self, order: pb.JobOrder) -> None:
        """Do what the orchestrator wants of a worker, one thing after the other."""
        async with self._one_by_one:
            await self._command(order)

    async def _command(self, order: pb.JobOrder) -> None:
        key = order.job, order.member
        if not _JOB.fullmatch(order.job):
            logger.warning("an order about a job with no proper id: %r", order.job)
            return
        match order.WhichOneof("body"):
            case "start":
                await self._end(key)
                self._unsaid.pop(key, None)
                latest = pb.JobEvent(job=order.job, epoch=order.epoch, member=order.member, waits="it begins")
                self._held[key] = held = _Held(order, asyncio.create_task(self._hold(order)), latest)
                held.task.add_done_callback(lambda _: self._forget(key, held))
            case "peers" if (held_now := self._held.get(key)) and held_now.order.epoch == order.epoch:
                if held_now.worker is not None:
                    held_now.worker.tell_peers(order.peers.peers)
            case "end" if (held_now := self._held.get(key)) and held_now.order.epoch <= order.epoch:
                await self._end(key)
            case "forget":
                for other in [own for own in self._held if own[0] == order.job]:
                    await self._end(other)
                for other in [own for own in self._unsaid if own[0] == order.job]:
                    del self._unsaid[other]
                await asyncio.to_thread(shutil.rmtree, self._folder() / order.job, ignore_errors=True)

    async def end(self) -> None:
        """End all workers; what is on the disk stays."""
        for key in list(self._held):
            await self._end(key)

    async def _end(self, key: tuple[str, int]) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            held.task.cancel()
            await asyncio.gather(held.task, return_exceptions=True)

    def _forget(self, key: tuple[str, int], held: _Held) -> None:
        if self._held.get(key) is held:
            del self._held[key]

    def _tell(self, order: pb.JobOrder, **body: Any) -> None:
        """Tell the orchestrator something of a worker; nobody, between two stays."""
        event = pb.JobEvent(job=order.job, epoch=order.epoch, member=order.member, **body)
        held = self._held.get((order.job, order.member))
        if held is not None and event.WhichOneof("body") in ("waits", "listening"):
            held.latest = event
        if self._say is not None:
            self._say(job=event)
        elif event.WhichOneof("body") in LAST:
            self._unsaid[order.job, order.member] = event

    async def _hold(self, order: pb.JobOrder) -> None:
        """Run a worker to its end, which is told."""
        try:
            async with self._model(order) as model:
                if not order.start.computes:
                    await self._run(order, model, asyncio.Event())
                    return
                holder = f"training {order.start.name} ({order.job})"
                again = True
                while again:
                    async with self._leasing.lent_to(holder, CPU, lambda why: self._tell(order, waits=why)) as lost:
                        again = await self._run(order, model, lost)
        except LendingError as error:
            self._tell(order, failed=str(error))
        except Exception as error:
            logger.exception("a worker of job %s", order.job)
            self._tell(order, failed=f"{type(error).__name__}: {error}")

    @asynccontextmanager
    async def _model(self, order: pb.JobOrder) -> AsyncIterator[str]:
        """A job's model as its worker is told of it: borrowed, if it is not here and another node lends it.

        Raises:
            LendingError: that node is lost or refuses, or there is no room here.
        """
        source, loan = order.start.model, order.start.loan
        if not loan.id or await asyncio.to_thread(self._is_here, source):
            yield source
            return
        self._tell(order, says=f"fetches the model from {loan.node}")
        async with borrowed(loan, self._settings.cache) as place:
            yield str(place)

    def _is_here(self, source: str) -> bool:
        """Whether this machine has a model, and need not ask the hub for it."""
        try:
            return (find_here(source, self._settings.models) or find_fetched(source)) is not None
        except ModelNotFound:
            return False

    async def _run(self, order: pb.JobOrder, model: str, lost: asyncio.Event) -> bool:
        """Start a worker's process and pass on what it says, until it ends; whether it ended as its device was lost."""
        try:
            told = await asyncio.to_thread(self._order, order, model)
        except (OSError, ValueError) as error:
            self._tell(order, failed=str(error))
            return False
        worker = await TrainingWorker.start(told, self._settings.threads)
        if (held := self._held.get((order.job, order.member))) is not None:
            held.worker = worker
        passing = asyncio.create_task(self._pass_on(order, worker))
        losing = asyncio.create_task(lost.wait())
        try:
            await asyncio.wait((passing, losing), return_when=asyncio.FIRST_COMPLETED)
            if not passing.done():
                return True
            await passing
            return False
        finally:
            for task in (passing, losing):
                task.cancel()
            await worker.stop()
            await asyncio.gather(passing, losing, return_exceptions=True)

    async def _pass_on(self, order: pb.JobOrder, worker: TrainingWorker) -> None:
        last = False
        try:
            async for said in worker.lines():
                for kind, value in said.items():
                    if kind == "listening":
                        value = join_address(self._settings.address, value) if value else ""
                    elif kind == "progress":
                        value = pb.JobProgress(**value)
                    if kind != "beat":
                        self._tell(order, **{kind: value})
                    last = last or kind in LAST
        except SilentWorker as error:
            self._tell(order, died=str(error))
            return
        if not last:
            status = await worker.exit_status()
            how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            self._tell(order, died=f"its worker process {how}")

    def _order(self, order: pb.JobOrder, model: str) -> dict[str, Any]:
        """What the worker is told.

        Raises:
            OSError: the job's folder cannot be made.
            ValueError: nobody on this machine has asked for the job that it is to lead.
        """
        start, settings, leads = order.start, self._settings, order.member == LEADER
        folder = self._folder() / order.job
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        return {
            "session": f"job-{order.job}-{order.epoch}",
            "epoch": order.epoch,
            "member": order.member,
            "members": start.members,
            "mode": start.mode,
            "model": model,
            "secret": start.secret.hex(),
            "tls": [each.decode() for each in (start.tls.certificate, start.tls.key, start.tls.authority)],
            "listen": [listening_host(settings.address), *settings.ports],
            "folder": str(folder / str(order.member)),
            "models": str(settings.models) if settings.models else None,
            "ticket": self._ticket(order, folder / "ticket.json") if start.ticket or leads else None,
        }

    def _ticket(self, order: pb.JobOrder, kept: Path) -> dict[str, Any]:
        """What somebody on this machine has asked for, or offers. A ticket is good for one job, which keeps it.

        Who has been told of an offer can begin any job with its name; so what is offered is only for a chain that
        another machine leads, in which no example leaves this one.

        Raises:
            ValueError: nobody has, or not for such a job.
        """
        left = self._tickets / f"{order.start.ticket}.json"
        found = kept
        if _TICKET.fullmatch(order.start.ticket) and left.is_file():
            found = left
        try:
            content = found.read_bytes()
        except FileNotFoundError:
            raise ValueError(
                f"nobody on the machine of node {self._settings.name!r} has asked for this job: run `motley"
                " train` there"
            ) from None
        ticket: dict[str, Any] = json.loads(content)
        if bool(ticket.get("offered")) != (order.member != LEADER and order.start.mode == "chain"):
            raise ValueError(
                f"what somebody on the machine of node {self._settings.name!r} has asked for is another job: data that"
                " is offered is for a chain that another machine leads, and other data for a job that is led here"
            )
        if found is left:
            write_private(kept, content)  # it may be of another file system than the job's folder
            left.unlink()
        return ticket

    def _folder(self) -> Path:
        return self._settings.cache.folder / "training" / quote(self._settings.name, safe="")
