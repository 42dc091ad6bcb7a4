"""A session is a model served by a set of ranks, as a state machine. Pure.

Events come in (what ranks say, a lost node, time), commands for ranks come out; `motley.orchestrator.serving`
carries them. The life of a session:

    =============  =======================================================  ====================================
    state          entered when                                             left when
    =============  =======================================================  ====================================
    planning       it is asked for                                          the shares are decided: assignments
    starting       the assignments are sent                                 every rank listens: peers
    connecting     every rank knows its peers                               a rank reports progress in loading
    loading        weights are being read                                   every rank is ready
    ready          it can answer                                            a rank is lost: recovering
    recovering     a rank is lost, after it was ready once, or a GPU fails  there is a new plan: starting again
    paused         no plan has fitted for a while, after it was ready once  there is a new plan: starting again
    failed         a rank failed, its node is lost or a deadline passed     the session is closed
    closing        a client deletes it                                      every rank is gone: it is forgotten
    =============  =======================================================  ====================================

From every state a failure leads to *failed* and a deletion to *closing*; both release all ranks that are not gone. But
where an engine fails that was chosen for a node's GPU, the session gets another plan, in which the node has another.

Once a session has been ready, it outlives its ranks. When one is lost, whatever has become of it, the others are
released, and when they are gone the session gets a new plan, of nodes that are left, and with it a new *epoch*
(`motley.orchestrator.serving.replanning.recovery`). Its requests go on from the tokens that they have. When no plan
fits, it is paused until one does, as a node comes back, say; what was asked ends, but waits while a device is only
taken back for a while. It fails when ranks are lost again and again.

A session may have *expert hosts* besides the ranks of its trunk (`motley.orchestrator.experts`). They come up as
ranks do, but once it is ready the loss of one does not end it: the trunk is told, and what the host held is placed
elsewhere. A node that registers later may become a host as well. Only when an expert has found no place for long does
the session fail. A host may be a group of workers on several nodes, which come up, and are lost, together.

A session may have *cache holders*, one for each rank. They come up as ranks do, too. When one is lost once the session
is ready, its rank sees that for itself, and the leader does without all of them: the others are released.

All of this is one state machine in one file, though a long one: who reads what an event does has to see all states.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from motley.orchestrator.adapters import NamedAdapter
from motley.orchestrator.experts.checksums import HostedError
from motley.orchestrator.experts.hosts import ExpertHost, Holder, Member
from motley.orchestrator.experts.loads import KeptLoads
from motley.orchestrator.experts.messages import to_message
from motley.orchestrator.experts.questions import Answer, Question
from motley.orchestrator.experts.recovery import bound_nodes
from motley.orchestrator.experts.registry import UNREACHABLE_S, ExpertMap
from motley.orchestrator.mesh.nodes import LEFT, REVOKED, what_became
from motley.orchestrator.planning.caches import Caches
from motley.orchestrator.planning.cost import Forecast
from motley.orchestrator.planning.placement.terms import PlacementError, expert_name
from motley.orchestrator.session_request import SessionRequest
from motley.orchestrator.sessions import blame
from motley.orchestrator.sessions.assignments import Assignments
from motley.orchestrator.sessions.cut_off import cut_off, overdue, taken_up
from motley.orchestrator.sessions.losses import PROVEN_S, Losses
from motley.orchestrator.workers import CacheHolder, Rank, Worker
from motley.protocol import MAX_RANKS
from motley.protocol.mesh_pb2 import (
    Activity,
    AdapterOrder,
    Assignment,
    Described,
    Failure,
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
"""While ranks connect and load, at least one of them says this often how far it is; else they are taken to hang."""
EXPLAIN_S = 2.0
"""Whoever is to blame for the end of a session has so long to say why, while its clients wait."""
RELEASE_S = 10.0
"""A rank that was told to stop, and does not say that it has, is taken for gone after this."""
CLEAR_S = 1.0
"""When a rank is lost, the others have so long to end before there is a new plan; where one takes longer, its memory is
not free, so the plan does without its node if it can."""

ENGINE_FAILURES = (
    *("engine_error", "device_lost", "wrong_results", "insufficient_memory", "out_of_memory"),
    *("internal_error", "worker_died", "timed_out"),
)
"""What ranks fail with where another engine may do better."""

Command = tuple[str, RankCommand]
"""The id of a node, and what to tell one of the workers there."""


class State(StrEnum):
    """See the table above."""

    PLANNING = "planning"
    STARTING = "starting"
    CONNECTING = "connecting"
    LOADING = "loading"
    READY = "ready"
    RECOVERING = "recovering"
    PAUSED = "paused"
    FAILED = "failed"
    CLOSING = "closing"


@dataclass(frozen=True)
class ModelKnown:
    """What was found out of a session's model when it was first planned.

    Attributes:
        spec: the model with every quantisation that units must suit.
        profiles: what it costs, by quantisation.
        copies: by the name of a node that was asked, what it has of the model.
    """

    spec: ModelSpec
    profiles: Mapping[str, ModelProfile]
    copies: Mapping[str, Described]


@dataclass(frozen=True)
class Interruption:
    """Why a session is planned anew.

    Attributes:
        at: since when it serves nobody.
        why: and, if no plan fits, why it ends.
        lost: whether ranks were lost; else somebody wants another plan.
        avoid: ids of nodes that the new plan should do without.
    """

    at: float
    why: Failure
    lost: bool = True
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Pause:
    """Why a session is paused.

    Attributes:
        why: what no plan fits for, and what its requests end with, if they do.
        brief: a machine that is there has only taken a device back for a while, so requests wait for it.
    """

    why: Failure
    brief: bool = False


@dataclass
class Session:
    """One session. Its methods are told what has happened, and return what its workers are to be told."""

    id: str
    request: SessionRequest
    name: str
    """What clients call the model; the profile's name unless the request has one."""
    created: float
    """Unix time."""
    planned: float = 0.0
    """When its nodes were chosen: a node that registers later is new to the session."""
    state: State = State.PLANNING
    profile: ModelProfile = field(default_factory=ModelProfile)
    caches: Caches = field(default_factory=lambda: Caches(context=0, tokens=0))
    """How many tokens prompt and answer have together, and how many all requests have in the caches; 0: not planned."""
    epoch: int = 1
    """The number of the plan that its workers follow. What a worker of another plan says is ignored."""
    known: ModelKnown | None = field(default=None, repr=False)
    """What was found out of its model, for further plans; None: not all of that yet."""
    serves: bool = False
    """It has been ready, so it takes requests, which wait while it recovers."""
    losses: Losses = field(default_factory=Losses)
    """Of ranks."""
    recoveries: int = 0
    """How often it has been ready again after ranks were lost."""
    failed_engines: list[tuple[str, str, str]] = field(default_factory=list)
    """Engines that were chosen for GPUs and have failed, for whoever chooses: ids of nodes, the engines, and why."""
    interruption: Interruption | None = None
    """Why it was planned anew the last time, or is to be; None: it never was."""
    pause: Pause | None = None
    """Why it is paused, or was the last time."""
    without: set[str] = field(default_factory=set)
    """Names of nodes that it does without, as something there was taken back: it grows again when it is given."""
    ranks: list[Rank] = field(default_factory=list)
    holders: list[CacheHolder] = field(default_factory=list)
    """Where its ranks have far cache blocks, one for each rank; none: they have them themselves, or have none."""
    experts: ExpertMap | None = None
    """Where its experts are; None: in the ranks' shares, or there are none."""
    earlier_loads: KeptLoads = field(default_factory=dict, repr=False)
    """How often its experts were chosen before the orchestrator was started again: they are placed by that at first."""
    adapters: dict[str, NamedAdapter] = field(default_factory=dict)
    """Those that its requests may name, by that."""
    forecast: Forecast | None = None
    """What its token was forecast to take when it was planned; None: not forecast."""
    activity: Activity | None = None
    """What its leader has told last of the requests under way; None: there has been none."""
    failure: Failure | None = None
    deadline_from: float = 0.0
    """While it starts: when a worker last showed life. Once it is ready: since when. Once it has ended, or recovers:
    when its workers were told to stop."""
    _explained_late: bool = False
    """The worker to blame for its end has had `EXPLAIN_S` to say why."""
    _assignments: Assignments | None = field(default=None, repr=False)
    """What its workers are started with; None: it is not planned yet."""

    @property
    def workers(self) -> Sequence[Worker]:
        """All its workers: the ranks, cache holders and expert hosts by index, then the workers of groups that do not
        lead one."""
        return [*self.ranks, *self.holders, *(self.experts.hosts + self.experts.members if self.experts else ())]

    def worker(self, index: int) -> Worker | None:
        """The worker with this index, if there is one."""
        return next((worker for worker in self.workers if worker.index == index), None)

    @property
    def node_names(self) -> set[str]:
        """Names of the nodes where it has workers, or where a lost host of it may begin anew."""
        names = {worker.node_name for worker in self.workers if not worker.gone}
        return names | (bound_nodes(self.experts.hosts, {}) if self.experts and self.alive else set())

    @property
    def leader(self) -> Rank:
        """The rank that takes the requests."""
        return self.ranks[0]

    @property
    def alive(self) -> bool:
        """Whether the session serves, or is on its way up."""
        return self.state not in (State.FAILED, State.CLOSING)

    @property
    def takes_requests(self) -> bool:
        """Whether requests can be given to the session: it is ready or, and then they wait, it recovers, or a device
        that it needs was taken back for a while."""
        return self.serves and self.alive and self.paused_for_long is None

    @property
    def replanned(self) -> bool:
        """Whether the session waits for another plan than it had."""
        return self.state in (State.RECOVERING, State.PAUSED)

    @property
    def paused_for_long(self) -> Failure | None:
        """Why the session is paused, if nobody knows for how long: requests end, and others are refused."""
        return self.pause.why if self.state is State.PAUSED and self.pause and not self.pause.brief else None

    @property
    def answers(self) -> bool:
        """Whether its leader can be asked: it is ready, and can be reached."""
        return self.state is State.READY and self.leader.away is None

    @property
    def unplanned(self) -> bool:
        """Whether the session waits for a plan: its first, or another."""
        return self.state is State.PLANNING or self.replanned

    def cleared(self, now: float) -> bool:
        """Whether the session recovers and waits for none of its old workers any more."""
        waited = now - self.deadline_from
        return self.state is State.RECOVERING and (waited > CLEAR_S or all(worker.gone for worker in self.workers))

    @property
    def suspects(self) -> set[str]:
        """While it recovers: ids of nodes that the new plan should do without, see `Losses.suspects`."""
        if not (self.interruption and self.interruption.lost):
            return set()
        code = self.losses.last[-1].why.code
        others = [worker for worker in self.workers if not self._by_chosen_engine(worker, code)]
        return self.losses.suspects(others)  # a node whose engine has failed gets another

    @property
    def unblamed(self) -> set[str]:
        """While it recovers: ids of the nodes none of whose workers is to blame for that."""
        lost = self.interruption is not None and self.interruption.lost
        blamed = {worker.node_id for worker in self.workers if lost and self.losses.blames(worker)}
        return {worker.node_id for worker in self.workers} - blamed

    @property
    def unreleased(self) -> set[str]:
        """While it recovers: ids of nodes where a worker of a plan before has not ended yet."""
        return self.losses.occupied | {worker.node_id for worker in self.workers if not worker.gone}

    @property
    def over(self) -> bool:
        """Whether the session has ended and no worker is left of it."""
        return not self.alive and all(worker.gone for worker in self.workers)

    @property
    def explained(self) -> bool:
        """Whether it has ended for a final reason: the worker to blame has said why, is gone, or has had its time."""
        blamed = self.worker(self.failure.lost_rank - 1) if self.failure else None
        return not self.alive and (blamed is None or blamed.gone or self._explained_late)

    @property
    def waiting_for(self) -> list[str]:
        """Experts that no host can be asked for now, by name: requests that need one wait."""
        if self.experts is None or self.state is not State.READY:
            return []
        return [expert_name(key) for key in self.experts.waiting_for]

    def assign(
        self,
        spec: ModelSpec,
        profile: ModelProfile,
        ranks: Sequence[Rank],
        caches: Caches,
        now: float,
        experts: ExpertMap | None = None,
        holders: Sequence[CacheHolder] = (),
    ) -> list[Command]:
        """The shares, and the experts' first hosts, are decided: start the workers, after a loss of the next epoch.

        Args:
            spec: the model with every quantisation that units must suit.
            profile: what the model costs in the first of these.
        """
        assert self.unplanned
        if self.replanned:
            self.losses.linger(self.epoch, self.workers)
            self.epoch += 1
            self.activity = None
        self.profile, self.ranks, self.caches, self.experts = profile, list(ranks), caches, experts
        self.holders = list(holders)
        self.without -= {worker.node_name for worker in self.workers}
        self.state, self.deadline_from = State.STARTING, now
        self._assignments = Assignments(self.id, self.request, spec, profile, ranks, caches, experts, holders)
        return [self._assign(worker) for worker in self.workers]

    def on_event(self, node_id: str, event: RankEvent, now: float) -> list[Command]:
        """A worker said something. Ignored unless it comes from the worker's node, and from the plan of now."""
        if event.WhichOneof("body") in ("released", "failed"):
            self.losses.ended(event.epoch, event.rank)
        worker = self.worker(event.rank)
        if event.epoch != self.epoch or worker is None or worker.node_id != node_id:
            return []
        body = event.WhichOneof("body")
        if body == "failed" and event.failed.code == "worker_died":
            worker.died = True
        if worker.gone:
            if isinstance(worker, Holder) and body in ("released", "failed"):
                worker.ended = True
            return []
        match body:
            case "released":
                return self._on_end(worker, blame.ended_unasked(worker), now)
            case "failed":
                return self._on_end(worker, self._explained(worker, event.failed), now)
            case "timing" if isinstance(worker, Rank):
                worker.timing = event.timing
            case "steps" if isinstance(worker, Rank):
                worker.steps.add(event.steps)
            case "activity" if worker is self.leader:
                self.activity = event.activity
                if event.activity.generated_tokens:
                    self.losses.prove()
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
        """A node's stream has ended, whether it is one of this session's or not.

        While a session is ready, that need not be the end of the node's ranks: unless it has said that it leaves, or
        may not come back, it is waited for, see `on_time`. Those that compute with its ranks tell sooner if these are
        gone.
        """
        lost = [worker for worker in self.workers if worker.node_id == node_id and not worker.gone]
        for_good = reason == LEFT or reason.startswith(REVOKED)
        if self.state is not State.READY or self.experts or for_good or not lost:
            return self._on_node_gone(node_id, reason, now)
        self.losses.node_lost(node_id)
        cut_off(lost, reason, now)
        return []

    def on_node_back(
        self,
        node_id: str,
        name: str,
        held: Collection[tuple[int, int]],
        failed: Mapping[tuple[int, int], Failure],
        now: float,
    ) -> list[Command]:
        """A node has joined that was cut off before, under the same name.

        Args:
            held: what it has kept of this session's workers, by epoch and index.
            failed: why workers there have ended, likewise: another one may be to blame.
        """
        commands: list[Command] = []
        back = taken_up(self.workers, node_id, name)
        for worker in [each for each in self.workers if each.node_name == name]:
            key = self.epoch, worker.index
            failure, ended = failed.get(key), worker in back and key not in held
            if failure is not None or ended:  # of one that is gone already, others may have said less than it knows
                worker.died = failure is None or failure.code == "worker_died"
                why = blame.ended_cut_off(worker) if failure is None else self._explained(worker, failure)
                if ended:
                    commands += self._on_end(worker, why, now)
        return commands

    def _explained(self, worker: Worker, failure: Failure) -> Failure:
        """What a worker has reported, with names. What others have said of it before it could say why itself is
        replaced by that."""
        failure = blame.reported(worker, failure, self.worker)
        blames_itself = failure.lost_rank == worker.index + 1
        if self._recovers_from_loss and blames_itself and self.losses.blames(worker):
            self.losses.explain(failure)
        if self.failure and failure.lost_rank == self.failure.lost_rank == worker.index + 1:
            self.failure = failure
        return failure

    def _on_node_gone(self, node_id: str, reason: str, now: float) -> list[Command]:
        """A node is lost, or not waited for any more.

        A session that is ready goes on if only expert hosts or cache holders were on the node; else see `_lose_rank`.
        """
        if self.experts:
            self.experts.on_node_lost(node_id)
        self.losses.node_lost(node_id)
        lost = [worker for worker in self.workers if worker.node_id == node_id and not worker.gone]
        if self.state is State.READY and lost and all(isinstance(worker, CacheHolder) for worker in lost):
            return self._lose_caches(lost, f"node {lost[0].node_name!r} {what_became(reason)}")
        if self.state is State.READY and lost and not any(isinstance(worker, Rank) for worker in lost):
            return self._lose(
                lost, f"node {lost[0].node_name!r} {what_became(reason)}", now, ended=True, node_lost=True
            )
        for worker in lost:
            worker.gone = True
        if not lost or not self.alive:
            return []
        failure = blame.node_gone(lost, reason)
        if self._recovers_from_loss and any(map(self.losses.blames, lost)):
            self.losses.explain(failure)  # others have missed its rank before
        return self._lose_rank(failure, now, ". Start its daemon again, or start a session without it")

    def on_time(self, now: float) -> list[Command]:
        """Let deadlines pass."""
        waited = now - self.deadline_from
        if self.state is State.STARTING and waited > LISTEN_S:
            silent = [worker for worker in self.workers if not worker.address]
            return self._lose_rank(blame.stuck(silent, "did not start", waited), now)
        if self.state in (State.CONNECTING, State.LOADING) and waited > PROGRESS_S:
            unready = [worker for worker in self.workers if worker.ready is None]
            unread = [w for w in unready if w.loading.done_bytes < w.loading.total_bytes]
            what = "gave no sign of life in connecting and loading"
            return self._lose_rank(blame.stuck(unread or unready, what, waited), now)
        if self.state is State.READY and waited > PROVEN_S:
            self.losses.prove()
        if self.state is State.READY and (late := overdue(self.workers, self.ranks, now)) is not None:
            worker, away = late
            return self._on_node_gone(worker.node_id, away.why, now)
        if not self.alive and waited > EXPLAIN_S:
            self._explained_late = True
        if not self.alive and waited > RELEASE_S:
            for worker in self.workers:
                worker.gone = True
        if self.state is State.READY and self.experts:
            if hung := self.experts.hung(now, PROGRESS_S):
                return self._lose(hung, f"it gave no sign of life in loading experts for {PROGRESS_S:.0f} s", now)
            if cut_off := self.experts.cut_off(now):
                return self._lose(cut_off, f"the trunk has not reached it for {UNREACHABLE_S:.0f} s", now)
            if self.experts.is_hopeless(now):
                return self.fail(blame.no_room(self.experts), now)
            return self._go_on(now)
        return []

    def _lose_rank(self, failure: Failure, now: float, advice: str = "") -> list[Command]:
        """Stop all workers, as the session cannot serve as it is planned, to plan anew once they are gone, or for good.

        Args:
            advice: what to do if it is for good, to follow the message.
        """
        blamed = self.worker(failure.lost_rank - 1)
        if engine_failed := self._by_chosen_engine(blamed, failure.code):
            assert isinstance(blamed, Rank)
            self.failed_engines.append((blamed.node_id, blamed.setup.engine, failure.message))
        if self.replanned:
            return []
        goes_on = self.request.recover if self.serves else engine_failed
        if not goes_on:
            failure.message += advice
            return self.fail(failure, now)
        self.losses.add(failure, blamed, self.epoch, now)
        if self.losses.too_many:
            times = self.losses.in_a_row
            failure.message = f"ranks were lost {times} times in a row, the last time: {failure.message}"
            return self.fail(failure, now)
        return self._interrupt(Interruption(now, failure, lost=self.serves), now)

    def _by_chosen_engine(self, worker: Worker | None, code: str) -> bool:
        """Whether a worker has failed by its engine, which was chosen for a GPU, so that a further plan should have
        another. One that has served may have died of anything."""
        chosen = isinstance(worker, Rank) and worker.setup.on_gpu and bool(worker.setup.chosen)
        return chosen and code in ENGINE_FAILURES and not (self.serves and code == "worker_died")

    def replan(self, why: str, avoid: Collection[str], now: float) -> list[Command]:
        """Stop all workers to plan the session anew, though nothing is lost. It must have a plan.

        Args:
            why: for people.
            avoid: ids of nodes that the new plan should do without.
        """
        assert self.has_plan
        failure = Failure(code="replanned", message=why)
        return self._interrupt(Interruption(now, failure, lost=False, avoid=frozenset(avoid)), now)

    def _interrupt(self, interruption: Interruption, now: float) -> list[Command]:
        self.interruption, self.state = interruption, State.RECOVERING
        return self._release(now)

    @property
    def has_plan(self) -> bool:
        """Whether there are workers by a plan that holds."""
        return self.alive and not self.unplanned

    @property
    def _recovers_from_loss(self) -> bool:
        return self.replanned and self.interruption is not None and self.interruption.lost

    def wait_for_plan(self, pause: Pause) -> None:
        """No plan has fitted for a while: pause until one does. The session must recover, or be paused already."""
        assert self.replanned
        self.state, self.pause = State.PAUSED, pause

    def do_without(self, node_id: str, why: str, now: float) -> list[Command]:
        """Do without the expert hosts, or the cache holders, on a node where there are no ranks. It must be ready."""
        lost = [worker for worker in self.workers if worker.node_id == node_id and not worker.gone]
        assert self.state is State.READY
        assert not any(isinstance(worker, Rank) for worker in lost)
        if all(isinstance(worker, CacheHolder) for worker in lost):
            return [self._command(each, release=Release()) for each in lost] + self._lose_caches(lost, why)
        return self._lose(lost, why, now)

    def fail(self, failure: Failure, now: float) -> list[Command]:
        """End the session because it cannot serve any more: stop its workers."""
        self.state, self.failure = State.FAILED, failure
        return self._release(now)

    def close(self, now: float) -> list[Command]:
        """Nobody wants it any more: stop its workers, unless they were told to stop before."""
        already_released = not self.alive
        self.state = State.CLOSING
        return [] if already_released else self._release(now)

    # ------------------------------------------------------------ expert hosts

    def claims(self, answer: Answer) -> list[tuple[str, int]]:
        """The planner's answer takes memory beyond what is reserved: nodes, and how many bytes more there. An answer
        that comes too late takes none."""
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

    def restart(self, host: ExpertHost, node_ids: Sequence[str], rooms: Sequence[int], now: float) -> list[Command]:
        """Start a lost host again.

        Args:
            node_ids: the nodes that have the names of its own now.
            rooms: bytes free on each of these.
        """
        host.restart(node_ids, rooms, now)
        return [self._assign(worker) for worker in host.group]

    def grow(self, host: ExpertHost, now: float) -> list[Command]:
        """Start another host, on a node that has joined or on several as a group. It holds nothing yet: once it is
        ready, the planner gives it experts."""
        assert self.experts is not None
        assert host.index == len(self.ranks) + len(self.experts.hosts) < MAX_RANKS
        self.experts.join(host, now)
        assert self._assignments is not None
        self._assignments.form_group(host)
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
        """Give up the hosts that these workers are, or belong to, and stop what is still running of them."""
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
        """Carry out the moves of experts that are possible now."""
        if self.experts is None or self.state is not State.READY:
            return []
        ordered, placement = self.experts.advance(now)
        orders = [self._command(worker, host=to_message(host.ordered)) for host in ordered for worker in host.group]
        return orders + (self._tell_trunk(placement) if placement else [])

    def _tell_trunk(self, placement: Placement) -> list[Command]:
        return [self._command(rank, placement=placement) for rank in self.ranks]

    # ------------------------------------------------------------ cache holders

    def _lose_caches(self, lost: Sequence[Worker], why: str) -> list[Command]:
        """Go on without cache holders, of which some are gone: all that the others keep is of no use any more."""
        first = not any(holder.lost for holder in self.holders)
        for holder in self.holders:
            if holder in lost:
                holder.gone, holder.lost = True, why
        others = [holder for holder in self.holders if not holder.gone]
        for holder in others:
            if not holder.lost:
                holder.lost, holder.needless = f"{lost[0]} is lost", True
        return [self._command(holder, release=Release()) for holder in others if first]

    @property
    def lost_holder(self) -> CacheHolder | None:
        """The cache holder that was lost, for which all others were let go; None: none is known to be."""
        return next((holder for holder in self.holders if holder.lost and not holder.needless), None)

    def replace_holders(self, why: str, now: float) -> list[Command]:
        """Stop all workers to plan the session anew with other cache holders, unless that is under way. It must have
        some.

        Args:
            why: what its leader tells of the caches that are lost: a holder's, or those of a disk.
        """
        if self.state is not State.READY:
            return []
        return self._lose_rank(blame.caches_lost(self.leader, self.lost_holder, why), now)

    # ------------------------------------------------------------ up and down

    def _on_progress(self, worker: Worker, now: float) -> list[Command]:
        """A worker listens or is ready. Go on if all are, or if it is a host that joins or comes back."""
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
            if self.serves and self.interruption is not None and self.interruption.lost:
                self.recoveries += 1
            self.state, self.serves, self.deadline_from = State.READY, True, now
            return self._pin_adapters() + self._go_on(now)
        return []

    def _pin_adapters(self) -> list[Command]:
        """Have the leader load those that stay loaded: that of the plan before had."""
        pinned = [each.message for each in self.adapters.values() if each.pinned]
        return [self._command(self.leader, adapter=AdapterOrder(adapter=each, pin=True)) for each in pinned]

    def _peers(self, worker: Worker) -> Peers:
        """The addresses that a worker needs: of all ranks and hosts and, if it belongs to a group, of that group."""
        named = [each for each in self.workers if not isinstance(each, Member)]
        host = worker.host if isinstance(worker, Holder) else None
        group = host.group if host and host.others else ()
        return Peers(addresses=[each.address for each in named], group=[each.address for each in group])

    def _on_end(self, worker: Worker, failure: Failure, now: float) -> list[Command]:
        """Note that a worker's process is over, asked or unasked."""
        if self.state is State.READY and isinstance(worker, Holder):
            return self._lose([worker], failure.message, now, ended=True)
        if self.state is State.READY and isinstance(worker, CacheHolder):
            return self._lose_caches([worker], worker.lost or failure.message)
        worker.gone = True
        return self._lose_rank(failure, now) if self.alive else []

    def _release(self, now: float) -> list[Command]:
        self.deadline_from = now
        for worker in self.workers:
            worker.gone = worker.gone or worker.away is not None  # it hears of it when it is back
        return [self._command(worker, release=Release()) for worker in self.workers if not worker.gone]

    def _assign(self, worker: Worker) -> Command:
        assert self._assignments is not None
        return self._command(worker, assign=self._assignments.of(worker))

    def _command(
        self,
        worker: Worker,
        *,
        assign: Assignment | None = None,
        peers: Peers | None = None,
        release: Release | None = None,
        placement: Placement | None = None,
        host: HostedExperts | None = None,
        adapter: AdapterOrder | None = None,
    ) -> Command:
        command = RankCommand(
            session=self.id,
            epoch=self.epoch,
            rank=worker.index,
            assign=assign,
            peers=peers,
            release=release,
            placement=placement,
            host=host,
            adapter=adapter,
        )
        return worker.node_id, command
