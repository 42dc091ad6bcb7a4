"""What is known of a session: its state, the workers that it has, why it waits. Nothing here changes it.

`motley.orchestrator.sessions.session` does, as things happen. The life of a session:

    =============  =======================================================  ====================================
    state          entered when                                             left when
    =============  =======================================================  ====================================
    planning       it is asked for                                          the shares are decided: assignments
    starting       the assignments are sent                                 every rank listens: peers
    connecting     every rank knows its peers                               a rank reports progress in loading
    loading        weights are being read                                   every rank is ready
    ready          it can answer                                            a rank is lost: recovering
    recovering     a rank is lost, after it was ready once, or a GPU fails  there is a new plan: starting again
                   or a node is lost while it loads
    paused         no plan has fitted for a while, after it was ready once  there is a new plan: starting again
    failed         a rank failed, or a deadline passed; or a node is lost   the session is closed, or it turns out that
                   and the session does not recover                         a node was lost: recovering
    closing        a client deletes it                                      every rank is gone: it is forgotten
    =============  =======================================================  ====================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from motley.orchestrator.adapters import NamedAdapter
from motley.orchestrator.experts.loads import KeptLoads
from motley.orchestrator.experts.recovery import bound_nodes
from motley.orchestrator.experts.registry import ExpertMap
from motley.orchestrator.planning.caches import Caches
from motley.orchestrator.planning.choosing.arrangement import NoPart
from motley.orchestrator.planning.cost import Forecast
from motley.orchestrator.planning.placement.terms import expert_name
from motley.orchestrator.session_request import SessionRequest
from motley.orchestrator.sessions.losses import Losses
from motley.orchestrator.workers import CacheHolder, Rank, Worker
from motley.protocol.mesh_pb2 import Activity, Described, Failure, ModelProfile, ModelSpec

CLEAR_S = 1.0
"""When a rank is lost, the others have so long to end before there is a new plan; where one takes longer, its memory is
not free, so the plan does without its node if it can."""
ENGINE_FAILURES = (
    *("engine_error", "device_lost", "wrong_results", "insufficient_memory", "out_of_memory"),
    *("internal_error", "worker_died", "timed_out"),
)
"""What ranks fail with where another engine may do better."""


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
class SessionFacts:
    """One session, as it is now."""

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
    no_part: Sequence[NoPart] = ()
    """Nodes that were to have ranks by its plan, and have none."""
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
    explained_late: bool = False
    """The worker to blame for its end has had its time to say why."""
    heard: float = 0.0
    """When a worker last showed life on its way up, ..."""
    ready_since: float = 0.0
    """... since when the session is ready, or was the last time, ..."""
    stopped: float = 0.0
    """... and when its workers were last told to stop, as it ended or was to be planned anew."""

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
    def explained(self) -> bool:
        """Whether it has ended for a final reason: the worker to blame has said why, is gone, or has had its time."""
        blamed = self.worker(self.failure.lost_rank - 1) if self.failure else None
        return not self.alive and (blamed is None or blamed.gone or self.explained_late)

    def has_ended_for_missing(self, worker: Worker) -> bool:
        """Whether it has just ended while it loaded, only because others missed a worker, which may yet turn out to be
        on a lost node: then it is planned anew."""
        failed = self.state is State.FAILED and not self.serves and self.request.recover and not self.explained
        return failed and self.failure is not None and self.failure.lost_rank == worker.index + 1

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
        waited = now - self.stopped
        return self.state is State.RECOVERING and (waited > CLEAR_S or all(worker.gone for worker in self.workers))

    @property
    def suspects(self) -> set[str]:
        """While it recovers: ids of nodes that the new plan should do without, see `Losses.suspects`."""
        if not (self.interruption and self.interruption.lost):
            return set()
        code = self.losses.last[-1].why.code
        others = [worker for worker in self.workers if not self.failed_by_chosen_engine(worker, code)]
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
    def waiting_for(self) -> list[str]:
        """Experts that no host can be asked for now, by name: requests that need one wait."""
        if self.experts is None or self.state is not State.READY:
            return []
        return [expert_name(key) for key in self.experts.waiting_for]

    @property
    def has_plan(self) -> bool:
        """Whether there are workers by a plan that holds."""
        return self.alive and not self.unplanned

    @property
    def recovers_from_loss(self) -> bool:
        return self.replanned and self.interruption is not None and self.interruption.lost

    @property
    def lost_holder(self) -> CacheHolder | None:
        """The cache holder that was lost, for which all others were let go; None: none is known to be."""
        return next((holder for holder in self.holders if holder.lost and not holder.needless), None)

    def failed_by_chosen_engine(self, worker: Worker | None, code: str) -> bool:
        """Whether a worker has failed by its engine, which was chosen for a GPU, so that a further plan should have
        another. One that has served may have died of anything."""
        chosen = isinstance(worker, Rank) and worker.setup.on_gpu and bool(worker.setup.chosen)
        return chosen and code in ENGINE_FAILURES and not (self.serves and code == "worker_died")
