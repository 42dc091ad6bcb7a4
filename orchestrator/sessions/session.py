"""A session is a model served by a set of ranks, as a state machine. Pure.

Events come in (what ranks say, a lost node, time), commands for ranks come out; `motley.orchestrator.serving`
carries them. The states are told of in `motley.orchestrator.sessions.facts`.

From every state a failure leads to *failed* and a deletion to *closing*; both release all ranks that are not gone. But
where an engine fails that was chosen for a node's GPU, the session gets another plan, in which the node has another;
and where a node is lost while ranks load, one without it.

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

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from motley.orchestrator.experts.checksums import HostedError
from motley.orchestrator.experts.hosts import ExpertHost, Holder, Member
from motley.orchestrator.experts.messages import to_message
from motley.orchestrator.experts.questions import Answer, Question
from motley.orchestrator.experts.registry import UNREACHABLE_S, ExpertMap
from motley.orchestrator.mesh.nodes import LEFT, REVOKED, what_became
from motley.orchestrator.planning.caches import Caches
from motley.orchestrator.planning.placement.terms import PlacementError
from motley.orchestrator.sessions import blame
from motley.orchestrator.sessions.assignments import Assignments
from motley.orchestrator.sessions.cut_off import cut_off, overdue, taken_up
from motley.orchestrator.sessions.facts import Interruption, Pause, SessionFacts, State
from motley.orchestrator.sessions.losses import PROVEN_S
from motley.orchestrator.workers import CacheHolder, Rank, Worker
from motley.protocol import MAX_RANKS
from motley.protocol.mesh_pb2 import (
    AdapterOrder,
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


Command = tuple[str, RankCommand]
"""The id of a node, and what to tell one of the workers there."""


@dataclass
class Session(SessionFacts):
    """One session. Its methods are told what has happened, and return what its workers are to be told."""

    _assignments: Assignments | None = field(default=None, repr=False)
    """What its workers are started with; None: it is not planned yet."""

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
        self.state, self.heard = State.STARTING, now
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
                self.heard = now
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
        if self.recovers_from_loss and blames_itself and self.losses.blames(worker):
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
        missed = any(map(self.has_ended_for_missing, lost))
        for worker in lost:
            worker.gone = True
        if not lost or not (self.alive or missed):
            return []
        failure = blame.node_gone(lost, reason)
        if missed:  # what others said of the loss came first: the session stands as it did before, to lose a rank now
            self.state, self.failure = State.LOADING, None
        if self.recovers_from_loss and any(map(self.losses.blames, lost)):
            self.losses.explain(failure)  # others have missed its rank before
        return self._lose_rank(failure, now, ". Start its daemon again, or start a session without it")

    def on_time(self, now: float) -> list[Command]:
        """Let deadlines pass."""
        waited = now - self.heard
        if self.state is State.STARTING and waited > LISTEN_S:
            silent = [worker for worker in self.workers if not worker.address]
            return self._lose_rank(blame.stuck(silent, "did not start", waited), now)
        if self.state in (State.CONNECTING, State.LOADING) and waited > PROGRESS_S:
            unready = [worker for worker in self.workers if worker.ready is None]
            unread = [w for w in unready if w.loading.done_bytes < w.loading.total_bytes]
            what = "gave no sign of life in connecting and loading"
            return self._lose_rank(blame.stuck(unread or unready, what, waited), now)
        if self.state is State.READY and now - self.ready_since > PROVEN_S:
            self.losses.prove()
        if self.state is State.READY and (late := overdue(self.workers, self.ranks, now)) is not None:
            worker, away = late
            return self._on_node_gone(worker.node_id, away.why, now)
        if not self.alive and now - self.stopped > EXPLAIN_S:
            self.explained_late = True
        if not self.alive and now - self.stopped > RELEASE_S:
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
        if engine_failed := self.failed_by_chosen_engine(blamed, failure.code):
            assert isinstance(blamed, Rank)
            self.failed_engines.append((blamed.node_id, blamed.setup.engine, failure.message))
        if self.replanned:
            return []
        node_lost = failure.code == blame.NODE_LOST
        goes_on = self.request.recover if self.serves or node_lost else engine_failed
        if not goes_on:
            failure.message += advice
            return self.fail(failure, now)
        self.losses.add(failure, blamed, self.epoch, now)
        if self.losses.too_many:
            times = self.losses.in_a_row
            failure.message = f"ranks were lost {times} times in a row, the last time: {failure.message}"
            return self.fail(failure, now)
        return self._interrupt(Interruption(now, failure, lost=self.serves or node_lost), now)

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
            return self._stop(lost) + self._lose_caches(lost, why)
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
            released += self._stop(own for own in host.group if not own.ended)
        return released + self._go_on(now)

    def _go_on(self, now: float) -> list[Command]:
        """Carry out the moves of experts that are possible now."""
        if self.experts is None or self.state is not State.READY:
            return []
        ordered, placement = self.experts.advance(now)
        orders = [
            self._command(worker, RankCommand(host=to_message(host.ordered)))
            for host in ordered
            for worker in host.group
        ]
        return orders + (self._tell_trunk(placement) if placement else [])

    def _tell_trunk(self, placement: Placement) -> list[Command]:
        return [self._command(rank, RankCommand(placement=placement)) for rank in self.ranks]

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
        return self._stop(others) if first else []

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
        self.heard = now
        if self.state is State.STARTING and all(worker.address for worker in self.workers):
            self.state = State.CONNECTING
            if self.experts:
                self.experts.connected()
            return self._introduce(self.workers)
        if self.state is State.READY and self.experts and isinstance(worker, Holder):
            host = worker.host
            host.heard = now
            if host.up:
                self.experts.arrived()
                return self._go_on(now)
            if worker.ready or not all(each.address for each in host.group):
                return []
            return self._introduce(host.group)
        if all(worker.ready is not None for worker in self.workers):
            if self.serves and self.interruption is not None and self.interruption.lost:
                self.recoveries += 1
            self.state, self.serves, self.ready_since = State.READY, True, now
            return self._pin_adapters() + self._go_on(now)
        return []

    def _pin_adapters(self) -> list[Command]:
        """Have the leader load those that stay loaded: that of the plan before had."""
        pinned = [each.message for each in self.adapters.values() if each.pinned]
        orders = [AdapterOrder(adapter=each, pin=True) for each in pinned]
        return [self._command(self.leader, RankCommand(adapter=order)) for order in orders]

    def _introduce(self, workers: Sequence[Worker]) -> list[Command]:
        """Tell workers whom they need to know."""
        return [self._command(worker, RankCommand(peers=self._peers(worker))) for worker in workers]

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
        self.stopped = now
        for worker in self.workers:
            worker.gone = worker.gone or worker.away is not None  # it hears of it when it is back
        return self._stop(worker for worker in self.workers if not worker.gone)

    def _stop(self, workers: Iterable[Worker]) -> list[Command]:
        return [self._command(worker, RankCommand(release=Release())) for worker in workers]

    def _assign(self, worker: Worker) -> Command:
        assert self._assignments is not None
        return self._command(worker, RankCommand(assign=self._assignments.of(worker)))

    def _command(self, worker: Worker, body: RankCommand) -> Command:
        body.session, body.epoch, body.rank = self.id, self.epoch, worker.index
        return worker.node_id, body
