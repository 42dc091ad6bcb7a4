"""The workers that hold experts: hosts of one worker, and hosts that are a group of workers on several nodes. Pure.

A worker of a group (`motley.orchestrator.planning.experts.groups`) has some slices of every expert that the host holds.
So a host is up when all its workers are, holds what all of them hold, and is lost with any of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from motley.orchestrator.planning.placement.terms import ExpertKey, Move
from motley.orchestrator.workers import Worker
from motley.protocol.mesh_pb2 import HostReport, Loading

LINK_S = 0.5e-3
"""Taken for the round trip to every host until it is measured."""
LINK_BANDWIDTH = 110e6
"""Taken for the bytes per second to every host: Gigabit Ethernet."""


@dataclass
class Holder(Worker):
    """A worker that holds experts, or some slices of each: a host, or one worker of the group that is a host."""

    zone: str
    """What fails together with its node, as the node told; empty: nothing is known to."""
    fixed_bytes: int
    """What it takes on its node before it holds any expert."""
    expert_bytes: int
    """What its slices of one expert take on its node."""
    slices: range = field(default=range(1), kw_only=True)
    """The numbers of the slices of every expert that it has itself. The last worker of a group has the last slices, so
    its `stop` is the number of all slices, which is 1 where experts are whole."""
    held: dict[ExpertKey, tuple[bytes, ...]] = field(default_factory=dict, kw_only=True)
    """What it says it holds, with the digest of each of its slices."""
    ended: bool = field(default=False, kw_only=True)
    """Its process is over: it may be started again, with the others of its group."""
    node_lost: bool = field(default=False, kw_only=True)
    """Its node is gone too."""

    @property
    def host(self) -> ExpertHost:
        """The host that this worker is, or belongs to."""
        raise NotImplementedError

    @property
    def role(self) -> str:
        return "experts"  # a node has one host of a session

    @property
    def memory_bytes(self) -> int:
        return self.bytes_of(self.host.most(self.host.to_come))

    @property
    def host_bytes_taken(self) -> int:
        return self.bytes_of(len(self.held)) if self.ready else 0

    @property
    def least_bytes(self) -> int:
        """What it needs to hold one expert."""
        return self.bytes_of(1)

    @property
    def first_bytes(self) -> int:
        """What it needs to be started again with what it was first assigned."""
        return self.bytes_of(len(self.host.first))

    def bytes_of(self, experts: int) -> int:
        """What it needs to hold its slices of so many experts."""
        return self.fixed_bytes + self.expert_bytes * experts


@dataclass
class Member(Holder):
    """A worker of a host's group that does not lead it."""

    leader: ExpertHost = field(repr=False)

    @property
    def host(self) -> ExpertHost:
        return self.leader

    def __str__(self) -> str:
        return f"node {self.node_name!r} of {self.host}"


@dataclass
class ExpertHost(Holder):
    """A worker that holds experts and computes them for the trunk, or the one that leads a group of such workers."""

    number: int
    """Its place among the session's hosts, from 0."""
    speed: float
    """Bytes of weights that it reads per second."""
    weight_bytes: int = 0
    """Bytes of one whole expert's weights, without what an engine takes for it."""
    others: list[Member] = field(default_factory=list)
    """The other workers of its group, whose slices come before its own; empty: it is a host by itself."""
    ordered: set[ExpertKey] = field(default_factory=set)
    """What it was last told to hold."""
    to_come: list[Move] = field(default_factory=list)
    """What it will be told next, in order."""
    first: frozenset[ExpertKey] = frozenset()
    """What it was assigned, which its node has in its cache: it is started again with that."""
    retiring: dict[ExpertKey, float] = field(default_factory=dict)
    """Experts that the trunk does not ask it for any more, each with the time since when."""
    heard: float = 0.0
    """When it last did something about what it was ordered."""
    lost: str = ""
    """Why it is gone, if it is."""
    lost_at: float = 0.0
    restarts: int = 0
    since: int = 0
    """Version of the placement that it came back with: what was reported of it before was of another process."""
    links: dict[int, HostReport] = field(default_factory=dict)
    """By rank of the trunk: what that rank has measured of this host."""
    unreachable: dict[int, float] = field(default_factory=dict)
    """By rank of the trunk that has no link to this host: since when."""
    stalls_s: deque[float] = field(default_factory=lambda: deque(maxlen=1000))
    """What each failing over from it has cost, newest last."""

    @property
    def host(self) -> ExpertHost:
        return self

    def most(self, moves: Iterable[Move]) -> int:
        """Experts that it has at a time, at most, until it has made these moves."""
        there = set(self.ordered)
        # What it was told to drop is there until it says so.
        most = len(there.union(*(worker.held for worker in self.group)))
        for move in moves:
            if move.action == "fetch":
                there.add(move.expert)
                most = max(most, len(there))
            else:
                there.discard(move.expert)
        return most

    @property
    def group(self) -> Sequence[Holder]:
        """All its workers, in the order of their slices; it leads them, and is the last."""
        return [*self.others, self]

    @property
    def node_names(self) -> set[str]:
        """Names of all nodes that it is on."""
        return {worker.node_name for worker in self.group}

    @property
    def node_ids(self) -> set[str]:
        """Ids of all nodes that it is on."""
        return {worker.node_id for worker in self.group}

    @property
    def name(self) -> str:
        """The name of its node, or of all that it is on: ``pc-b+pc-c``."""
        return "+".join(worker.node_name for worker in self.group)

    @property
    def zones(self) -> str:
        """The zones of its nodes, as these told them: ``attic+cellar``."""
        return "+".join(sorted({worker.zone for worker in self.group if worker.zone}))

    @property
    def state(self) -> str:
        """See `Worker.state`; it is as far as the last of its workers."""
        if self.gone or self.up:
            return "gone" if self.gone else "ready"
        return "loading" if all(worker.address for worker in self.group) else "starting"

    @property
    def up(self) -> bool:
        """All its workers are ready."""
        return all(worker.ready is not None for worker in self.group)

    @property
    def has_all(self) -> set[ExpertKey]:
        """What all of its workers hold."""
        return set(self.held).intersection(*(other.held for other in self.others))

    @property
    def serving(self) -> set[ExpertKey]:
        """What the trunk may ask it for."""
        return (self.ordered & self.has_all) - self.retiring.keys() if self.up and not self.gone else set()

    @property
    def fetching(self) -> set[ExpertKey]:
        """What it was told to hold and does not have yet."""
        return set() if self.gone else self.ordered - self.has_all

    @property
    def settled(self) -> bool:
        """Whether the host holds what it was told to, and nothing else."""
        return all(self.ordered == worker.held.keys() for worker in self.group)

    @property
    def round_trip_s(self) -> float:
        """Seconds to it and back over the slowest link, as far as known."""
        measured = max((link.round_trip_s for link in self.links.values()), default=0.0)
        return measured or LINK_S

    def lose(self, why: str, now: float, *, ended: bool, node_lost: bool) -> None:
        """Note that the host is gone, with all of its group.

        Args:
            ended: its own process is over.
            node_lost: its own node is gone too.
        """
        self.gone, self.lost, self.lost_at, self.ended, self.node_lost = True, why, now, ended, node_lost
        for other in self.others:
            other.gone = True
        self.unreachable.clear()

    def restart(self, node_ids: Sequence[str], rooms: Sequence[int], now: float) -> None:
        """Begin anew after a loss, with what the host was first assigned if there is room for that, else with nothing.

        Args:
            node_ids: the nodes that have the names of its own now.
            rooms: bytes free on each of these.
        """
        if any(worker.first_bytes > room for worker, room in zip(self.group, rooms, strict=True)):
            self.first = frozenset()
        for worker, node_id in zip(self.group, node_ids, strict=True):
            worker.node_id, worker.gone, worker.ended, worker.node_lost = node_id, False, False, False
            worker.address, worker.ready, worker.loading, worker.held = "", None, Loading(), {}
        self.lost, self.ordered, self.retiring = "", set(self.first), {}
        self.restarts += 1
        self.heard = now
        self.links.clear()

    def __str__(self) -> str:
        nodes = " and ".join(repr(worker.node_name) for worker in self.group)
        return f"node{'s' * bool(self.others)} {nodes} ({self.role})"
