"""The shell around jobs: it hears nodes and the clock, tells daemons what jobs decide, and writes jobs down."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from motley.orchestrator.jobs.deliveries import Deliveries
from motley.orchestrator.jobs.files import JobFileError, pack, read
from motley.orchestrator.jobs.job import Job, Mode, Order, Papers, Place, Request
from motley.orchestrator.mesh.nodes import Node, NodeTable, what_became
from motley.orchestrator.serving.adapters import Adapters
from motley.orchestrator.serving.errors import ServingError, refusal, unknown_node
from motley.orchestrator.sessions.session import Session
from motley.orchestrator.sessions.table import SessionTable
from motley.orchestrator.trust.certificates import issue_credentials
from motley.protocol import MAX_RANKS
from motley.protocol.files import write_private
from motley.protocol.mesh_pb2 import Empty, HeldRank, JobOrder, NodeMessage
from motley.protocol.versions import trains

TICK_S = 0.5
KEEP_S = 5.0
"""Progress is written down so often."""
KEPT = 20
"""So many jobs that are over are remembered, the latest ones."""
MOST = 16
"""So many jobs may run at a time."""
SERVE_S = 180.0
"""A session that has made way for a job is waited for so long, to serve the adapter."""
ANY_SPEED = "fp32"
"""The format by whose products nodes' speeds are compared."""

_log = logging.getLogger(__name__)


class Jobs:
    """All jobs of the mesh: a `motley.orchestrator.control.Listener`."""

    def __init__(
        self,
        nodes: NodeTable,
        deliveries: Deliveries,
        sessions: SessionTable,
        adapters: Adapters,
        clock: Callable[[], float],
        folder: Path,
    ) -> None:
        """
        Args:
            folder: where jobs are written down; those that are there are taken up.
        """
        self._nodes, self._deliveries, self._clock, self._folder = nodes, deliveries, clock, folder
        self._sessions, self._adapters = sessions, adapters
        self._jobs: dict[str, Job] = {}
        self._unwritten: dict[str, float] = {}
        """Jobs that have changed since they were written down, and when they are to be."""
        self._serving: set[asyncio.Task[None]] = set()
        for file in sorted(folder.glob("*.json")):
            try:
                job = read(file.read_bytes(), _papers, clock())
                self._jobs[job.id] = job
            except (OSError, JobFileError) as error:
                _log.warning("%s holds no job: %s", file, error)

    def __iter__(self) -> Iterator[Job]:
        """All jobs, the oldest first."""
        return iter(sorted(self._jobs.values(), key=lambda job: job.created))

    def find(self, job_id: str) -> Job:
        """The job of an id, or of a name, of which the latest counts.

        Raises:
            ServingError: there is none.
        """
        if job_id in self._jobs:
            return self._jobs[job_id]
        found = [job for job in self if job.request.name == job_id]
        if not found:
            raise refusal("job_not_found", f"there is no job {job_id!r}; `motley jobs ls` lists them")
        return found[-1]

    def create(self, request: Request) -> Job:
        """Begin a job.

        Raises:
            ServingError: a node is not there, or cannot train; or too many jobs run.
        """
        if sum(job.runs for job in self) >= MOST:
            raise refusal("too_many_jobs", f"{MOST} jobs run already; wait for one, or stop it (`motley jobs stop`)")
        places = {name: _place(self._able(name)) for name in (request.owner, *request.others, *request.nodes)}
        owners = {request.owner, *request.others}
        if request.mode is Mode.CHAIN and not set(request.nodes) - owners:
            raise refusal("invalid_request", "a chain wants a node beside those that have the data", "nodes")
        if request.others and (request.mode is not Mode.CHAIN or request.owner in request.others):
            raise refusal(
                "invalid_request", "only a chain has others with data, and its owner is none of them", "others"
            )
        job = Job(secrets.token_hex(4), request, time.time(), places, _papers)
        orders = job.begin(self._clock())
        if len(job.members) > MAX_RANKS:
            message = f"it would have {len(job.members)} members with its owner; {MAX_RANKS} at most are possible"
            raise refusal("invalid_request", message, "nodes")
        self._jobs[job.id] = job
        over = [each for each in self if not each.runs]
        for old in over[: max(0, len(over) - KEPT)]:
            del self._jobs[old.id]
            self._unwritten.pop(old.id, None)
            (self._folder / f"{old.id}.json").unlink(missing_ok=True)
        self._carry_out(job, orders)
        return job

    def stop(self, job: Job) -> None:
        """End a job; one that is over stays as it is."""
        if job.runs:
            self._carry_out(job, job.stop(self._clock()))

    def on_message(self, node: Node, kind: str | None, message: NodeMessage) -> None:
        if kind != "job":
            return
        event = message.job
        job = self._jobs.get(event.job)
        if job is None:
            self._forget(node, event.job)
            return
        can_wait = event.WhichOneof("body") in ("progress", "says")
        self._carry_out(job, job.on_event(node.name, event, self._clock()), soon=not can_wait)

    def on_joined(self, node: Node, held: Sequence[HeldRank]) -> None:
        """See how this node's workers stand, and have it remove what no job wants any more."""
        told = node.jobs
        for job in self:
            if node.name in job.nodes and job.runs:
                own = [event for event in told if event.job == job.id]
                self._carry_out(job, job.on_node_back(node.name, own, self._clock()))
        for number in {*node.kept_jobs, *(event.job for event in told)}:
            known = self._jobs.get(number)
            if known is None or not known.runs or node.name not in known.nodes:
                self._forget(node, number)

    def on_offer(self, node: Node) -> None:
        """Jobs do not mind: their daemons take leases themselves."""

    def on_lost(self, node: Node) -> None:
        for job in self:
            if job.runs and node.name in job.nodes:
                self._carry_out(job, job.on_node_lost(node.name, what_became(node.lost), self._clock()))

    async def watch(self) -> None:
        """Notice passed deadlines, and write down what has changed, for ever; first, take up what was to be served when
        the orchestrator before this one ended."""
        for job in self:
            self._begin_serving(job, afresh=True)
        while True:
            await asyncio.sleep(TICK_S)
            try:
                now = self._clock()
                for job in self:
                    if job.runs and (orders := job.on_time(now)):
                        self._carry_out(job, orders)
                for number, due in list(self._unwritten.items()):
                    if now >= due:
                        self._write(self._jobs[number])
            except Exception:  # a fault of ours; without deadlines jobs would hang
                _log.exception("looking after jobs failed")

    async def finish(self) -> None:
        """Write down what has changed, as the orchestrator stops: workers go on without it."""
        for number in list(self._unwritten):
            self._write(self._jobs[number])
        await self._deliveries.finish()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def _able(self, name: str) -> Node:
        """The node of a name.

        Raises:
            ServingError: it is not there, or cannot train; who has the data needs the extra, too.
        """
        node = self._nodes.named(name)
        if node is None:
            raise unknown_node(name, self._nodes, "nodes")
        if not trains(node.protocol):
            why = "its Motley is older than trainings on the mesh: `motley update` says how to update it"
            raise refusal("cannot_train", f"node {name!r} cannot train: {why}", "nodes")
        if node.capabilities.cannot_train:
            raise refusal("cannot_train", f"node {name!r} cannot train: {node.capabilities.cannot_train}", "nodes")
        return node

    def _carry_out(self, job: Job, orders: Sequence[Order], *, soon: bool = True) -> None:
        """Tell daemons what a job has decided, and have it written down: now, or with what else comes."""
        self._deliveries.send(job, orders)
        if not job.runs and not job.ended:
            job.ended = time.time()
            _log.info("job %s (%s): %s %s", job.id, job.request.name, job.state, job.why)
            self._begin_serving(job, afresh=False)
        if soon:
            self._write(job)
        else:
            self._unwritten.setdefault(job.id, self._clock() + KEEP_S)

    def _begin_serving(self, job: Job, *, afresh: bool) -> None:
        """Have the adapter served, if that was asked for and has not been tried to its end.

        Args:
            afresh: this orchestrator has just been started, so that the model's session may be still to come.
        """
        if job.is_to_be_served:
            task = asyncio.create_task(self._serve(job, afresh))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _serve(self, job: Job, afresh: bool) -> None:
        """Have the running session of the job's model know the adapter."""
        source = str(job.result.get("adapter", ""))
        session, until = self._session_of(job), self._clock() + SERVE_S
        while (session is None and afresh) or (session is not None and session.alive and not session.answers):
            if self._clock() > until:  # it has not grown back on the devices that were lent
                break
            await asyncio.sleep(TICK_S)
            session = session or self._session_of(job)
        try:
            if session is None:
                raise refusal("model_not_found", f"no session of {job.request.model!r} with room for adapters runs")
            added = await self._adapters.add(session, job.request.serve, source, False)
            job.served_as = f"{session.name}:{added.name}"
            job.say(f"served as {job.served_as}")
        except ServingError as error:
            job.unserved = error.failure.message
            job.say(f"the adapter is not served: {job.unserved}. `motley adapters add` does it later")
        self._write(job)

    def _session_of(self, job: Job) -> Session | None:
        """A session of the job's model that takes adapters."""
        served = [each for each in self._sessions if each.alive and each.request.adapters]
        return next((each for each in served if job.request.model in (each.name, each.request.model)), None)

    def _forget(self, node: Node, number: str) -> None:
        self._deliveries.tell(node, JobOrder(job=number, forget=Empty()))

    def _write(self, job: Job) -> None:
        self._unwritten.pop(job.id, None)
        try:
            write_private(self._folder / f"{job.id}.json", pack(job))
        except OSError as error:
            _log.warning("job %s cannot be written down: %s", job.id, error)


def _papers(session: str, members: int) -> Papers:
    return Papers(secrets.token_bytes(32), issue_credentials(session, members))


def _place(node: Node) -> Place:
    capabilities = node.capabilities
    speeds = [each.row_bytes_per_s for each in capabilities.speeds if each.format == ANY_SPEED]
    return Place(capabilities.memory_bytes, speeds[0] if speeds else capabilities.memory_bandwidth)
