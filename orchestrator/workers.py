"""The worker processes of a session as the orchestrator knows them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from motley.orchestrator.planning.cutting.shares import RankPlan
from motley.orchestrator.planning.draft import Draft
from motley.orchestrator.planning.setup import Setup
from motley.protocol.mesh_pb2 import Gpu, Loading, Loan, Ready, Steps, Timing

LATEST_STEPS = 400
"""Decode steps of which a rank's times are kept one by one."""


@dataclass(frozen=True)
class Away:
    """A node's stream to the orchestrator is no more, while its workers may well compute on.

    Attributes:
        since: when that was.
        patience_s: how long it is waited for if the session's requests wait for it.
        why: what became of the stream.
    """

    since: float
    patience_s: float
    why: str


@dataclass
class Worker:
    """A worker process of a session, and what it has said of itself."""

    index: int
    """Its number in the session: ranks, which compute in step, come first, then expert hosts."""
    node_id: str
    node_name: str
    memory_limit: int
    """Bytes that it may use of the memory in which it computes: its node's, or its GPU's."""
    address: str = field(default="", kw_only=True)
    """Where its data plane listens; empty until it does."""
    loading: Loading = field(default_factory=Loading, kw_only=True)
    ready: Ready | None = field(default=None, kw_only=True)
    gone: bool = field(default=False, kw_only=True)
    """Its process has ended, its node is lost, or it was given up."""
    away: Away | None = field(default=None, kw_only=True)
    """Its node is cut off from the orchestrator; None: it is there, or lost."""
    died: bool = field(default=False, kw_only=True)
    """Its process has ended by itself: it was killed, or it crashed."""
    loan: Loan | None = field(default=None, repr=False, kw_only=True)
    """Where it reads the model, of which its node has no files."""

    @property
    def memory_bytes(self) -> int:
        """Bytes that the plan gives to it, in the memory in which it computes."""
        raise NotImplementedError

    @property
    def role(self) -> str:
        """What it is to its session, for people: ``rank 2``."""
        raise NotImplementedError

    @property
    def host_bytes(self) -> int:
        """Bytes that the plan gives to it of its node's own memory."""
        return self.memory_bytes

    @property
    def host_bytes_taken(self) -> int:
        """Bytes of its node's own memory that it has surely taken, so that the node does not count them as free any
        more: 0 until it is ready."""
        raise NotImplementedError

    @property
    def host_bytes_to_come(self) -> int:
        """Bytes of `host_bytes` that it may yet take."""
        return 0 if self.gone else max(0, self.host_bytes - self.host_bytes_taken)

    @property
    def rss_bytes(self) -> int:
        """Bytes of its node's own memory that its process has held, as far as it has told; 0: it is gone, or loads."""
        return self.ready.rss_bytes if self.ready and not self.gone else 0

    @property
    def state(self) -> str:
        """For people: ``starting``, ``loading``, ``ready``, ``cut off`` or ``gone``."""
        if self.gone or self.away:
            return "gone" if self.gone else "cut off"
        return "ready" if self.ready else "loading" if self.address else "starting"

    def __str__(self) -> str:
        return f"node {self.node_name!r} ({self.role})"


@dataclass
class CacheHolder(Worker):
    """A worker that keeps cache blocks for a rank that is on another node, or on the same."""

    rank: int
    """Whose blocks they are."""
    blocks_bytes: int
    """Bytes of all of them."""
    fixed_bytes: int
    """What it takes on its node beside them."""
    lost: str = ""
    """Why it is gone, if the session goes on without it."""
    needless: bool = False
    """It was let go as another one was lost."""

    @property
    def memory_bytes(self) -> int:
        return self.fixed_bytes + self.blocks_bytes

    @property
    def role(self) -> str:
        return f"caches of rank {self.rank}"

    @property
    def host_bytes_taken(self) -> int:
        return self.memory_bytes if self.ready else 0  # it has written to all of its pages by then


def decode_steps(timing: Timing) -> int:
    """How many decode steps a rank has told of; one that is older than their number tells of tokens alone, as many
    where one request is answered at a time."""
    return timing.steps or timing.tokens


@dataclass
class LatestSteps:
    """Where the time of a rank's latest decode steps went, one by one.

    Attributes:
        first: the number of the oldest one that is here; all ranks of an epoch number a step alike.
        compute_ms, wire_ms, wait_ms: of each of them.
    """

    first: int = 0
    compute_ms: list[float] = field(default_factory=list)
    wire_ms: list[float] = field(default_factory=list)
    wait_ms: list[float] = field(default_factory=list)

    def add(self, steps: Steps) -> None:
        """Learn of further steps; beyond `LATEST_STEPS` the oldest are forgotten, as are those before a gap."""
        follow = steps.first == self.first + len(self.compute_ms)
        self.first = self.first if follow else steps.first
        for own, fresh in (
            (self.compute_ms, steps.compute_ms),
            (self.wire_ms, steps.wire_ms),
            (self.wait_ms, steps.wait_ms),
        ):
            own[:] = [*(own if follow else ()), *fresh]
        spare = max(0, len(self.compute_ms) - LATEST_STEPS)
        self.first += spare
        for own in (self.compute_ms, self.wire_ms, self.wait_ms):
            del own[:spare]


@dataclass
class Rank(Worker):
    """A worker that computes in step with the other ranks, on its share of the model."""

    plan: RankPlan
    setup: Setup
    timing: Timing | None = None
    steps: LatestSteps = field(default_factory=LatestSteps, repr=False)
    draft: Draft | None = None
    """A model that guesses tokens beside it."""

    @property
    def memory_bytes(self) -> int:
        return self.plan.memory_bytes

    @property
    def role(self) -> str:
        return f"rank {self.index}"

    @property
    def host_bytes(self) -> int:
        own = self.plan.memory_bytes if self.setup.on_host_memory else self.plan.fixed_bytes
        return own + (self.draft.host_bytes if self.draft else 0)

    @property
    def gpu_bytes(self) -> int:
        """Bytes that the plan gives to it of its node's GPU."""
        own = self.plan.memory_bytes if self.setup.on_gpu else 0
        return own + (self.draft.gpu_bytes if self.draft else 0)

    @property
    def rss_bytes(self) -> int:
        told = super().rss_bytes
        return max(told, self.timing.peak_rss_bytes) if told and self.timing else told

    @property
    def host_bytes_taken(self) -> int:
        return self.ready.rss_bytes if self.ready else 0  # pages of its caches come when they are first written to

    def gpu_to_come(self, gpu: Gpu) -> int:
        """Bytes that it may yet take of its GPU, as that is now: what is planned, less what the driver says it has.

        Where the driver does not tell (on Windows, and in containers, where processes have other numbers), that is its
        weights and its caches, once it is ready.
        """
        if self.gone:
            return 0
        if self.ready is None or not self.gpu_bytes:
            return self.gpu_bytes
        told = next((user.bytes for user in gpu.users if user.pid == self.ready.pid), 0)
        return max(0, self.gpu_bytes - told) if told else self.plan.fixed_bytes
