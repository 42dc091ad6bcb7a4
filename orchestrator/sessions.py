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
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from motley.orchestrator.certificates import issue_credentials
from motley.orchestrator.planning.shares import RankPlan
from motley.protocol.mesh_pb2 import (
    Assignment,
    Failure,
    Loading,
    ModelProfile,
    ModelSpec,
    Peers,
    RankCommand,
    RankEvent,
    Ready,
    Release,
    Timing,
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
    wire: str = "fp32"
    """How sums travel between ranks."""
    exact: bool = False
    """The same bits for every split and batch."""
    threads: int = 0

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(source=self.model, quantisation=self.quantisation, block=self.block, exact=self.exact)


@dataclass
class Rank:
    index: int
    node_id: str
    node_name: str
    plan: RankPlan
    memory_limit: int
    """Bytes its node offers it."""
    address: str = ""
    """Where its data plane listens; empty until it does."""
    loading: Loading = field(default_factory=Loading)
    ready: Ready | None = None
    timing: Timing | None = None
    gone: bool = False
    """Its worker has ended, or its node is lost."""

    def __str__(self) -> str:
        return f"rank {self.index} on node {self.node_name!r}"


@dataclass
class Session:
    id: str
    request: SessionRequest
    name: str
    """What clients call the model; the profile's name unless the request has one."""
    created: float
    """Unix time."""
    state: State = State.PLANNING
    profile: ModelProfile = field(default_factory=ModelProfile)
    context: int = 0
    ranks: list[Rank] = field(default_factory=list)
    failure: Failure | None = None
    deadline_from: float = 0.0
    """The time of the last sign of life while it starts, or of the release."""

    @property
    def leader(self) -> Rank:
        return self.ranks[0]

    @property
    def alive(self) -> bool:
        return self.state not in (State.FAILED, State.CLOSING)

    @property
    def over(self) -> bool:
        """No rank is left of it."""
        return not self.alive and all(rank.gone for rank in self.ranks)

    def assign(self, profile: ModelProfile, ranks: Sequence[Rank], context: int, now: float) -> list[Command]:
        """The shares are decided: start the workers."""
        assert self.state is State.PLANNING
        self.profile, self.ranks, self.context = profile, list(ranks), context
        self.state, self.deadline_from = State.STARTING, now
        secret = secrets.token_bytes(32)
        shares = [rank.plan.to_share() for rank in ranks]
        return [
            self._command(
                rank,
                assign=Assignment(
                    model=self.request.spec,
                    fingerprint=profile.fingerprint,
                    size=len(ranks),
                    shares=shares,
                    context=context,
                    engine=self.request.engine,
                    wire=self.request.wire,
                    threads=self.request.threads,
                    secret=secret,
                    tls=credentials,
                ),
            )
            for rank, credentials in zip(ranks, issue_credentials(self.id, len(ranks)), strict=True)
        ]

    def on_event(self, node_id: str, event: RankEvent, now: float) -> list[Command]:
        """A rank said something; what is not from the node that has the rank is ignored."""
        if event.epoch != EPOCH or event.rank >= len(self.ranks):
            return []
        rank = self.ranks[event.rank]
        if rank.node_id != node_id or rank.gone:
            return []
        match event.WhichOneof("body"):
            case "released":
                rank.gone = True
                if self.alive:
                    return self.fail(Failure(code="rank_ended", message=f"{rank} has ended unasked"), now)
            case "failed":
                rank.gone = True
                if self.alive:
                    return self.fail(self._blame(rank, event.failed), now)
            case "timing":
                rank.timing = event.timing
            case "listening" if self.alive:
                rank.address = event.listening
                return self._on_progress(now)
            case "loading" if self.alive:
                self.deadline_from = now
                rank.loading = event.loading
                if self.state is State.CONNECTING:
                    self.state = State.LOADING
            case "ready" if self.alive:
                rank.ready = event.ready
                return self._on_progress(now)
        return []

    def on_node_lost(self, node_id: str, reason: str, now: float) -> list[Command]:
        lost = [rank for rank in self.ranks if rank.node_id == node_id and not rank.gone]
        for rank in lost:
            rank.gone = True
        if not lost or not self.alive:
            return []
        ranks = " and ".join(str(rank.index) for rank in lost)
        message = (
            f"node {lost[0].node_name!r} with rank {ranks} is lost: {reason}. Start its daemon again, or start a"
            " session without it"
        )
        return self.fail(Failure(code="node_lost", message=message, lost_rank=lost[0].index + 1), now)

    def on_time(self, now: float) -> list[Command]:
        """Let deadlines pass."""
        waited = now - self.deadline_from
        if self.state is State.STARTING and waited > LISTEN_S:
            return self._stuck([rank for rank in self.ranks if not rank.address], "did not start", waited, now)
        if self.state in (State.CONNECTING, State.LOADING) and waited > PROGRESS_S:
            unready = [rank for rank in self.ranks if rank.ready is None]
            unread = [r for r in unready if r.loading.done_bytes < r.loading.total_bytes]
            return self._stuck(unread or unready, "gave no sign of life in connecting and loading", waited, now)
        if not self.alive and waited > RELEASE_S:
            for rank in self.ranks:
                rank.gone = True
        return []

    def fail(self, failure: Failure, now: float) -> list[Command]:
        self.state, self.failure = State.FAILED, failure
        return self._release(now)

    def close(self, now: float) -> list[Command]:
        already_released = not self.alive
        self.state = State.CLOSING
        return [] if already_released else self._release(now)

    def _on_progress(self, now: float) -> list[Command]:
        """A rank listens or is ready: go on when it was the last one."""
        self.deadline_from = now
        if self.state is State.STARTING and all(rank.address for rank in self.ranks):
            self.state = State.CONNECTING
            peers = Peers(addresses=[rank.address for rank in self.ranks])
            return [self._command(rank, peers=peers) for rank in self.ranks]
        if all(rank.ready is not None for rank in self.ranks):
            self.state = State.READY
        return []

    def _stuck(self, ranks: list[Rank], what: str, waited: float, now: float) -> list[Command]:
        names = ", ".join(map(str, ranks))
        message = f"{names} {what} for {waited:.0f} s; look at the log of the daemon there"
        failure = Failure(code="timed_out", message=message, lost_rank=ranks[0].index + 1)
        return self.fail(failure, now)

    def _blame(self, rank: Rank, failure: Failure) -> Failure:
        """What a rank reported, with the nodes named."""
        message = f"{rank}: {failure.message}"
        if 0 < failure.lost_rank <= len(self.ranks) and failure.lost_rank != rank.index + 1:
            message += f" (to blame: {self.ranks[failure.lost_rank - 1]})"
        return Failure(
            code=failure.code or "rank_failed",
            message=message,
            lost_rank=failure.lost_rank or rank.index + 1,
        )

    def _release(self, now: float) -> list[Command]:
        self.deadline_from = now
        return [self._command(rank, release=Release()) for rank in self.ranks if not rank.gone]

    def _command(
        self,
        rank: Rank,
        *,
        assign: Assignment | None = None,
        peers: Peers | None = None,
        release: Release | None = None,
    ) -> Command:
        command = RankCommand(
            session=self.id, epoch=EPOCH, rank=rank.index, assign=assign, peers=peers, release=release
        )
        return rank.node_id, command


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
        """Bytes that the plans of running ranks give to them on a node."""
        return sum(
            rank.plan.memory_bytes
            for session in self
            for rank in session.ranks
            if rank.node_id == node_id and not rank.gone
        )
