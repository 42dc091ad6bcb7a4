"""A model served by a set of ranks: each session is a state machine, kept in a table. Pure.

Events come in (what ranks say, a lost node, time), commands for ranks come out; `motley.orchestrator.serving`
carries them. The life of a session:

    =============  =======================================================  ====================================
    state          entered when                                             left when
    =============  =======================================================  ====================================
    planning       it is asked for                                          the shares are decided: assignments
    starting       the assignments are sent                                 every rank listens: peers
    connecting     every rank knows its peers                               a rank reports progress in loading
    loading        weights are being read                                   every rank is ready
    ready          it can answer                                            -
    failed         a rank failed, its node is lost or a deadline passed     the session is closed
    closing        a client deletes it                                      every rank is gone: it is forgotten
    =============  =======================================================  ====================================

From every state a failure leads to *failed* and a deletion to *closing*; both release all ranks that are not gone.

A session may have *expert hosts* besides the ranks of its trunk (`motley.orchestrator.expert_hosts`). They come up as
ranks do, but once it is ready the loss of one does not end it: the trunk is told, and what the host held is placed
elsewhere. A node that registers later may become a host as well. Only when an expert has found no place for long does
the session fail. A host may be a group of workers on several nodes, which come up, and are lost, together.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from motley.orchestrator.certificates import issue_credentials
from motley.orchestrator.expert_hosts import (
    UNREACHABLE_S,
    Answer,
    ExpertHost,
    ExpertMap,
    Holder,
    HostedError,
    Member,
    Question,
    name_of,
    to_message,
)
from motley.orchestrator.nodes import what_became
from motley.orchestrator.planning.experts import PlacementError
from motley.orchestrator.workers import Rank, Worker
from motley.protocol import MAX_RANKS
from motley.protocol.mesh_pb2 import (
    Assignment,
    Credentials,
    Failure,
    Gpu,
    Group,
    HostedExperts,
    ModelProfile,
    ModelSpec,
    Peers,
    Placement,
    RankCommand,
    RankEvent,
    Release,
)

LISTEN_S = 90.0
"""Every rank worker listens this soon after its assignment (its daemon gives a worker 60 s to start)."""
PROGRESS_S = 120.0
"""While ranks connect and load, some rank says how far it is at least this often; a rank that hangs does not."""
RELEASE_S = 10.0
"""A rank that was told to stop and does not say so is taken for gone after this."""
EPOCH = 1

Command = tuple[str, RankCommand]
"""A node's id and what to tell a rank of it."""


class State(StrEnum):
    PLANNING = "planning"
    STARTING = "starting"
    CONNECTING = "connecting"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    CLOSING = "closing"


@dataclass(frozen=True)
class SessionRequest:
    """What a client asks for; see `POST /api/sessions`."""

    model: str
    name: str = ""
    quantisation: str = "stored"
    block: int = 128
    nodes: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()
    context: int = 0
    engine: str = "onnxruntime"
    quantisations: Mapping[str, str] = field(default_factory=dict)
    """Of the ranks on some nodes, by their names; of all others it is `quantisation`..."""
    engines: Mapping[str, str] = field(default_factory=dict)
    """...and `engine`."""
    engine_options: Mapping[str, str] = field(default_factory=dict)
    """Settings of `engine` by name, for ranks that have it; an engine refuses those that it does not know."""
    wire: str = "fp32"
    """How sums travel between ranks."""
    exact: bool = False
    """The same bits for every split and batch."""
    threads: int = 0
    experts: str = "auto"
    """See `motley.orchestrator.planning.layout`."""
    replicas: int = 1
    """Of every expert, where they are parallel."""
    trunk: int = 1
    """Ranks of the trunk, where they are."""

    @property
    def named(self) -> set[str]:
        """Nodes whose ranks have an engine or a quantisation of their own."""
        return {*self.quantisations, *self.engines}

    def options_on(self, node: str) -> Mapping[str, str]:
        """The settings of the engine of a rank on a node: none, where it is another than `engine`."""
        return self.engine_options if self.engines.get(node, self.engine) == self.engine else {}

    def spec(self, quantisation: str, beside: Sequence[str] = ()) -> ModelSpec:
        """The model, held in some quantisations, as engines hold them."""
        return ModelSpec(
            source=self.model, quantisation=quantisation, block=self.block, exact=self.exact, beside=beside
        )


@dataclass
class Session:
    id: str
    request: SessionRequest
    name: str
    """What clients call the model; the profile's name unless the request has one."""
    created: float
    """Unix time."""
    planned: float = 0.0
    """When its nodes were chosen: those that register later are new to it."""
    state: State = State.PLANNING
    profile: ModelProfile = field(default_factory=ModelProfile)
    context: int = 0
    ranks: list[Rank] = field(default_factory=list)
    experts: ExpertMap | None = None
    """Where its experts are; None: in the ranks' shares, or there are none."""
    failure: Failure | None = None
    deadline_from: float = 0.0
    """The time of the last sign of life while it starts, or of the release."""
    _assignment: Assignment = field(default_factory=Assignment, repr=False)
    """What those of all workers have in common."""
    _credentials: list[Credentials] = field(default_factory=list, repr=False)
    """By rank and host, and of as many hosts as may still join."""
    _groups: dict[int, Group] = field(default_factory=dict, repr=False)
    """By index, of the workers of groups: their places there."""

    @property
    def workers(self) -> Sequence[Worker]:
        """The ranks, then the expert hosts, by index, then the other workers of their groups."""
        return [*self.ranks, *(self.experts.hosts + self.experts.members if self.experts else ())]

    def worker(self, index: int) -> Worker | None:
        return next((worker for worker in self.workers if worker.index == index), None)

    @property
    def node_names(self) -> set[str]:
        """Of the nodes that it has workers on, or lost hosts that may begin anew."""
        names = {worker.node_name for worker in self.workers if not worker.gone}
        return names | (self.experts.bound({}) if self.experts and self.alive else set())

    @property
    def leader(self) -> Rank:
        return self.ranks[0]

    @property
    def alive(self) -> bool:
        return self.state not in (State.FAILED, State.CLOSING)

    @property
    def over(self) -> bool:
        """No rank is left of it."""
        return not self.alive and all(worker.gone for worker in self.workers)

    @property
    def explained(self) -> bool:
        """It has ended, and whoever is to blame has said why, or is gone without a word."""
        blamed = self.worker(self.failure.lost_rank - 1) if self.failure else None
        return not self.alive and (blamed is None or blamed.gone)

    @property
    def waiting_for(self) -> list[str]:
        """Experts that no host can be asked for now, by name: requests that need one wait."""
        return [name_of(key) for key in self.experts.waiting_for] if self.experts and self.state is State.READY else []

    def assign(
        self,
        spec: ModelSpec,
        profile: ModelProfile,
        ranks: Sequence[Rank],
        context: int,
        now: float,
        experts: ExpertMap | None = None,
    ) -> list[Command]:
        """The shares, and the experts' first hosts, are decided: start the workers.

        Args:
            spec: the model with every quantisation that units must suit.
            profile: in the first of these.
        """
        assert self.state is State.PLANNING
        self.profile, self.ranks, self.context, self.experts = profile, list(ranks), context, experts
        self.state, self.deadline_from = State.STARTING, now
        self._assignment = Assignment(
            model=spec,
            fingerprint=profile.fingerprint,
            size=len(ranks),
            shares=[rank.plan.to_share(rank.setup.quantisation) for rank in ranks],
            context=context,
            wire=self.request.wire,
            threads=self.request.threads,
            secret=secrets.token_bytes(32),
            expert_slices=experts.slices if experts else 0,
        )
        self._credentials = issue_credentials(self.id, MAX_RANKS if experts else len(ranks))
        for host in experts.hosts if experts else ():
            if host.others:
                self._form_group(host)
        return [self._assign(worker) for worker in self.workers]

    def _form_group(self, host: ExpertHost) -> None:
        """Give every worker of a host's group its place there; only the leader is one of the session's peers."""
        secret = secrets.token_bytes(32)
        issued = issue_credentials(f"{self.id}.h{host.number}", len(host.group))
        for member, worker in enumerate(host.group):
            self._groups[worker.index] = Group(
                host=host.number,
                member=member,
                slices=[len(each.slices) for each in host.group],
                ranks=[each.index for each in host.group],
                secret=secret,
                tls=issued[member],
            )

    def on_event(self, node_id: str, event: RankEvent, now: float) -> list[Command]:
        """A rank said something; what is not from the node that has the rank is ignored."""
        worker = self.worker(event.rank)
        if event.epoch != EPOCH or worker is None or worker.node_id != node_id:
            return []
        body = event.WhichOneof("body")
        if worker.gone:
            if isinstance(worker, Holder) and body in ("released", "failed"):
                worker.ended = True
            return []
        match body:
            case "released":
                failure = Failure(code="rank_ended", message=f"{worker} has ended unasked")
                return self._on_end(worker, failure, now)
            case "failed":
                failure = self._blame(worker, event.failed)
                if self.failure and failure.lost_rank == self.failure.lost_rank == worker.index + 1:
                    self.failure = failure  # others have missed it before it could say why itself
                return self._on_end(worker, failure, now)
            case "timing" if isinstance(worker, Rank):
                worker.timing = event.timing
            case "listening" if self.alive:
                worker.address = event.listening
                return self._on_progress(worker, now)
            case "loading" if self.alive:
                self.deadline_from = now
                worker.loading = event.loading
                if isinstance(worker, Holder):
                    worker.host.heard = now
                if self.state is State.CONNECTING:
                    self.state = State.LOADING
            case "ready" if self.alive:
                worker.ready = event.ready
                return self._on_progress(worker, now)
            case "hosted" if self.alive and isinstance(worker, Holder):
                return self._on_hosted(worker, event.hosted, now)
            case "experts" if self.experts and self.state is State.READY and isinstance(worker, Rank):
                given_up = self.experts.on_report(worker.index, event.experts, now)
                return [command for host, why in given_up for command in self._lose([host], why, now)]
            case "starved" if self.experts and isinstance(worker, Rank):
                self.experts.on_starved(worker.index, event.starved, now)
        return []

    def on_node_lost(self, node_id: str, reason: str, now: float) -> list[Command]:
        if self.experts:
            self.experts.on_node_lost(node_id)
        lost = [worker for worker in self.workers if worker.node_id == node_id and not worker.gone]
        if self.state is State.READY and lost and not any(isinstance(worker, Rank) for worker in lost):
            return self._lose(
                lost, f"node {lost[0].node_name!r} {what_became(reason)}", now, ended=True, node_lost=True
            )
        for worker in lost:
            worker.gone = True
        if not lost or not self.alive:
            return []
        roles = " and ".join(worker.role for worker in lost)
        message = (
            f"node {lost[0].node_name!r} ({roles}) {what_became(reason)}. Start its daemon again, or start a session"
            " without it"
        )
        return self.fail(Failure(code="node_lost", message=message, lost_rank=lost[0].index + 1), now)

    def on_time(self, now: float) -> list[Command]:
        """Let deadlines pass."""
        waited = now - self.deadline_from
        if self.state is State.STARTING and waited > LISTEN_S:
            return self._stuck([worker for worker in self.workers if not worker.address], "did not start", waited, now)
        if self.state in (State.CONNECTING, State.LOADING) and waited > PROGRESS_S:
            unready = [worker for worker in self.workers if worker.ready is None]
            unread = [w for w in unready if w.loading.done_bytes < w.loading.total_bytes]
            return self._stuck(unread or unready, "gave no sign of life in connecting and loading", waited, now)
        if not self.alive and waited > RELEASE_S:
            for worker in self.workers:
                worker.gone = True
        if self.state is State.READY and self.experts:
            if hung := self.experts.hung(now, PROGRESS_S):
                return self._lose(hung, f"it gave no sign of life in loading experts for {PROGRESS_S:.0f} s", now)
            if cut_off := self.experts.cut_off(now):
                return self._lose(cut_off, f"the trunk has not reached it for {UNREACHABLE_S:.0f} s", now)
            if self.experts.is_hopeless(now):
                return self._give_up(self.experts, now)
            return self._go_on(now)
        return []

    def fail(self, failure: Failure, now: float) -> list[Command]:
        self.state, self.failure = State.FAILED, failure
        return self._release(now)

    def close(self, now: float) -> list[Command]:
        already_released = not self.alive
        self.state = State.CLOSING
        return [] if already_released else self._release(now)

    # ------------------------------------------------------------ expert hosts

    def claims(self, answer: Answer) -> list[tuple[str, int]]:
        """Nodes, and the bytes that the planner's answer takes there beside what is reserved already; none if it comes
        too late."""
        return self.experts.claims(answer) if self.experts and self._concerns(answer.question) else []

    def _concerns(self, question: Question) -> bool:
        return self.experts is not None and self.state is State.READY and self.experts.concerns(question)

    def on_answer(self, question: Question, answer: Answer | PlacementError, now: float) -> list[Command]:
        """The planner has said where experts should be; an error: some find no place on the hosts that are left."""
        if self.experts is None or not self._concerns(question):
            return []
        if isinstance(answer, Answer):
            self.experts.adopt(answer)
            return self._go_on(now)
        if not question.worth:  # else it was about the balance, and all have a place
            self.experts.stay(str(answer), now)
        return []

    def _give_up(self, experts: ExpertMap, now: float) -> list[Command]:
        lost = "; ".join(f"{host}: {host.lost}" for host in experts.hosts if host.gone)
        together = ", or several that have it together" if experts.slices > 1 else ""
        apart = [host for host in experts.hosts if host.gone and host.others]
        back = f", or bring {' or '.join(str(host) for host in apart)} back" if apart else ""
        message = (
            f"no room is left for the experts of lost hosts ({lost}). {experts.short}. Free memory or add a node with"
            f" room for a whole expert{together}{back}"
        )
        return self.fail(Failure(code="insufficient_memory", message=message), now)

    def restart(self, host: ExpertHost, node_ids: Sequence[str], rooms: Sequence[int], now: float) -> list[Command]:
        """Start a lost host again, on the nodes that have the names of its own now and so many bytes free."""
        assert self.experts is not None
        self.experts.restart(host, node_ids, rooms, now)
        return [self._assign(worker) for worker in host.group]

    def grow(self, host: ExpertHost, now: float) -> list[Command]:
        """Start another host, on a node that has joined or on several as a group. It has nothing yet: once it is ready,
        the planner knows of it."""
        assert self.experts is not None
        assert host.index == len(self.ranks) + len(self.experts.hosts) < MAX_RANKS
        self.experts.join(host, now)
        if host.others:
            self._form_group(host)
        return [self._assign(worker) for worker in host.group]

    def _on_hosted(self, worker: Holder, hosted: HostedExperts, now: float) -> list[Command]:
        assert self.experts is not None
        try:
            self.experts.on_hosted(worker, hosted, now)
        except HostedError as error:
            if self.state is State.READY:
                return self._lose([worker], str(error), now)
            return self.fail(Failure(code="experts_differ", message=str(error), lost_rank=worker.index + 1), now)
        return self._go_on(now)

    def _lose(
        self, workers: Sequence[Worker], why: str, now: float, *, ended: bool = False, node_lost: bool = False
    ) -> list[Command]:
        """Give up the hosts that some workers are, or are a part of; those that may live on are released."""
        assert self.experts is not None
        released = []
        for worker in workers:
            assert isinstance(worker, Holder)
            host = worker.host
            self.experts.lose(host, why, now, ended=ended and worker is host, node_lost=node_lost and worker is host)
            worker.ended, worker.node_lost = ended, node_lost
            released += [self._command(own, release=Release()) for own in host.group if not own.ended]
        return released + self._go_on(now)

    def _go_on(self, now: float) -> list[Command]:
        """Carry out what the placement needs next."""
        if self.experts is None or self.state is not State.READY:
            return []
        ordered, placement = self.experts.advance(now)
        orders = [self._command(worker, host=to_message(host.ordered)) for host in ordered for worker in host.group]
        return orders + (self._tell_trunk(placement) if placement else [])

    def _tell_trunk(self, placement: Placement) -> list[Command]:
        return [self._command(rank, placement=placement) for rank in self.ranks]

    # ------------------------------------------------------------ up and down

    def _on_progress(self, worker: Worker, now: float) -> list[Command]:
        """A worker listens or is ready: go on when it was the last one, or if it is a host that came (back)."""
        self.deadline_from = now
        if self.state is State.STARTING and all(worker.address for worker in self.workers):
            self.state = State.CONNECTING
            if self.experts:
                self.experts.connected()
            return [self._command(each, peers=self._peers(each)) for each in self.workers]
        if self.state is State.READY and self.experts and isinstance(worker, Holder):
            host = worker.host
            host.heard = now
            if host.up:
                self.experts.arrived()
                return self._go_on(now)
            if worker.ready or not all(each.address for each in host.group):
                return []
            return [self._command(each, peers=self._peers(each)) for each in host.group]
        if all(worker.ready is not None for worker in self.workers):
            self.state = State.READY
            return self._go_on(now)
        return []

    def _peers(self, worker: Worker) -> Peers:
        """All whom the trunk has to do with and, for a worker of a group, the others of that."""
        named = [each for each in self.workers if not isinstance(each, Member)]
        host = worker.host if isinstance(worker, Holder) else None
        group = host.group if host and host.others else ()
        return Peers(addresses=[each.address for each in named], group=[each.address for each in group])

    def _on_end(self, worker: Worker, failure: Failure, now: float) -> list[Command]:
        """A worker's process is over, asked or unasked."""
        if self.state is State.READY and isinstance(worker, Holder):
            return self._lose([worker], failure.message, now, ended=True)
        worker.gone = True
        return self.fail(failure, now) if self.alive else []

    def _stuck(self, workers: list[Worker], what: str, waited: float, now: float) -> list[Command]:
        names = ", ".join(map(str, workers))
        message = f"{names} {what} for {waited:.0f} s; look at the log of the daemon there"
        failure = Failure(code="timed_out", message=message, lost_rank=workers[0].index + 1)
        return self.fail(failure, now)

    def _blame(self, worker: Worker, failure: Failure) -> Failure:
        """What a worker reported, with the nodes named."""
        message = f"{worker}: {failure.message}"
        blamed = self.worker(failure.lost_rank - 1)
        if blamed is not None and blamed is not worker:
            message += f" (to blame: {blamed})"
        return Failure(
            code=failure.code or "rank_failed",
            message=message,
            lost_rank=failure.lost_rank or worker.index + 1,
        )

    def _release(self, now: float) -> list[Command]:
        self.deadline_from = now
        return [self._command(worker, release=Release()) for worker in self.workers if not worker.gone]

    def _assign(self, worker: Worker) -> Command:
        """What a worker is started with; of a group's, only the leader is known to the trunk."""
        assignment = Assignment(group=self._groups.get(worker.index))
        assignment.MergeFrom(self._assignment)
        assignment.engine = worker.setup.engine if isinstance(worker, Rank) else self.request.engine
        if isinstance(worker, Rank):
            assignment.engine_options.update(self.request.options_on(worker.node_name))
        if isinstance(worker, Member):
            assignment.ClearField("secret")
        else:
            assignment.tls.CopyFrom(self._credentials[worker.index])
        if self.experts:
            assignment.hosts.extend(to_message(host.first) for host in self.experts.hosts)
        return self._command(worker, assign=assignment)

    def _command(
        self,
        worker: Worker,
        *,
        assign: Assignment | None = None,
        peers: Peers | None = None,
        release: Release | None = None,
        placement: Placement | None = None,
        host: HostedExperts | None = None,
    ) -> Command:
        command = RankCommand(
            session=self.id,
            epoch=EPOCH,
            rank=worker.index,
            assign=assign,
            peers=peers,
            release=release,
            placement=placement,
            host=host,
        )
        return worker.node_id, command


class NameInUseError(Exception):
    """Another session serves a model under this name."""


class SessionTable:
    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}

    def __iter__(self) -> Iterator[Session]:
        """All sessions, oldest first; safe against changes while iterating."""
        return iter(list(self._sessions.values()))

    def get(self, session_id: str) -> Session | None:
        return self._sessions.get(session_id)

    def named(self, name: str) -> Session | None:
        """The session that serves `name`; a failed one if there is none alive."""
        namesakes = [session for session in self if session.name == name and session.state is not State.CLOSING]
        return max(namesakes, key=lambda session: session.alive, default=None)

    def open(self, request: SessionRequest, created: float) -> Session:
        """A new session in planning.

        Raises:
            NameInUseError: the request has a name, and it is taken.
        """
        session = Session(secrets.token_hex(4), request, "", created)
        if request.name:
            self.rename(session, request.name)
        self.add(session)
        return session

    def add(self, session: Session) -> None:
        self._sessions[session.id] = session

    def rename(self, session: Session, name: str) -> None:
        """Name a session; a failed one of that name gives way.

        Raises:
            NameInUseError: a live session has the name.
        """
        for other in self:
            if other.name != name or other is session:
                continue
            if other.alive:
                raise NameInUseError(
                    f"session {other.id} serves a model named {name!r} already; use it, delete it, or choose"
                    ' another "name"'
                )
            other.state = State.CLOSING
        session.name = name

    def remove(self, session: Session) -> None:
        self._sessions.pop(session.id, None)

    def reserved(self, node_id: str) -> int:
        """Bytes of a node's own memory that the plans of running workers give to them."""
        return sum(
            worker.host_bytes
            for session in self
            for worker in session.workers
            if worker.node_id == node_id and not worker.gone
        )

    def promised_gpu(self, node_id: str, gpu: Gpu) -> int:
        """Bytes that running ranks may yet take of a node's GPU, as that is now."""
        return sum(rank.gpu_to_come(gpu) for session in self for rank in session.ranks if rank.node_id == node_id)
