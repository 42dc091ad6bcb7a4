"""The experts of a session that has them on hosts: who holds which, and the way to another placement. Pure.

`motley.orchestrator.planning.experts` says which host should hold what, as a list of *moves*; here they are carried out
while the session serves. A host is *ordered* to hold a set and says what it *holds*; the trunk asks it for what is in
both. A fetch is ordered at once unless a drop that comes before it must first make room. A drop waits until every
fetch of its expert has come; then the trunk is told not to ask there, and the host, `RETIRE_S` later, to let it go. So
in every moment each expert has a host, if it had one, and no host holds more than it has room for.

A host that is lost keeps what it was ordered for the planner's next answer, which replaces all moves. A host that joins
begins with nothing, and what finds no place waits a while for one.

A host may be a group of workers (`motley.orchestrator.planning.groups`), each with some slices of every expert: it is
up when all are, holds what all hold, and is lost with any of them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from motley.orchestrator.expert_loads import ExpertLoads
from motley.orchestrator.planning.experts import (
    Expert,
    ExpertKey,
    Host,
    Move,
    Placement,
    PlacementError,
    place_experts,
)
from motley.orchestrator.planning.groups import zones_apart
from motley.orchestrator.workers import Worker
from motley.protocol import mesh_pb2 as pb

RETIRE_S = 5.0
"""A replica that is not asked for any more is kept for so long: a step under way may still ask."""
UNREACHABLE_S = 10.0
"""A rank of the trunk that has lost the link to a host has this long to make it again."""
RESTART_S = 5.0
"""A lost host is started again after this long, twice that the second time, and so on."""
RESTARTS = 3
"""So often; a host that is lost again is left alone until its node registers anew."""
HOMELESS_S = 90.0
"""Experts that find no place wait so long, after hosts last came or went, for a node that joins or comes back. (A step
of the trunk waits for 120 s.)"""
REBALANCE_S = 60.0
"""Between two looks at whether the load is skewed."""
SKEWED = 1.2
"""Experts move when the busiest host is busier than it need be by this factor."""
SKEW_ROWS = 2000
"""As many rows must have been counted since the last look."""
MOVED_AT_ONCE = 0.25
"""Of all replicas, for the sake of balance."""
LINK_S = 0.5e-3
"""Taken for the round trip to every host until it is measured."""
LINK_BANDWIDTH = 110e6
"""Bytes per second to every host: Gigabit Ethernet."""
NEVER_S = 1e9
"""No time that is measured is as long: thirty years."""
WIRE_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0625}
"""Of one element on the wire."""


class HostedError(Exception):
    """What a host says it holds cannot be right; the message says why."""


@dataclass
class Holder(Worker):
    """A worker that has experts, or some slices of each: a host, or one of the group that is a host together."""

    zone: str
    """What fails together with its node, as that was told; empty: nothing is known to."""
    fixed_bytes: int
    expert_bytes: int
    """What its slices of an expert take on its node."""
    slices: range = field(default=range(1), kw_only=True)
    """Of every expert, that it has itself. The stop of the last one's is the number of all, 1 where experts are
    whole."""
    held: dict[ExpertKey, tuple[bytes, ...]] = field(default_factory=dict, kw_only=True)
    """What it says it holds, with the digest of each of its slices."""
    ended: bool = field(default=False, kw_only=True)
    """Its process is over: it may be started again, with those of its group."""
    node_lost: bool = field(default=False, kw_only=True)
    """Its node is gone too."""

    @property
    def host(self) -> ExpertHost:
        """That it is, or is a part of."""
        raise NotImplementedError

    @property
    def role(self) -> str:
        return "experts"  # a node has one host of a session

    @property
    def memory_bytes(self) -> int:
        return self.bytes_of(self.host.most(self.host.to_come))

    @property
    def least_bytes(self) -> int:
        """What it needs to hold anything."""
        return self.bytes_of(1)

    @property
    def first_bytes(self) -> int:
        """What it needs to be started again."""
        return self.bytes_of(len(self.host.first))

    def bytes_of(self, experts: int) -> int:
        """What it needs to have its slices of so many."""
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
    """A worker that holds experts and computes them for the trunk, or the one that leads a group of such."""

    number: int
    """Among the hosts, from 0."""
    speed: float
    """Bytes of weights per second."""
    weight_bytes: int = 0
    """Of a whole expert, without what an engine takes for it."""
    others: list[Member] = field(default_factory=list)
    """The rest of its group, whose slices come before its own."""
    ordered: set[ExpertKey] = field(default_factory=set)
    """What it was told to hold, last."""
    to_come: list[Move] = field(default_factory=list)
    """What it will be told next, in order."""
    first: frozenset[ExpertKey] = frozenset()
    """What it was assigned, which its node has in its cache: it is started again with that."""
    retiring: dict[ExpertKey, float] = field(default_factory=dict)
    """What the trunk does not ask it for any more, and since when."""
    heard: float = 0.0
    """When it last did something about what it was ordered."""
    lost: str = ""
    """Why it is gone, if it is."""
    lost_at: float = 0.0
    restarts: int = 0
    since: int = 0
    """Version of the placement that it came back with: what was reported of it before was of another process."""
    links: dict[int, pb.HostReport] = field(default_factory=dict)
    """By rank of the trunk: what that has measured."""
    unreachable: dict[int, float] = field(default_factory=dict)
    """By rank of the trunk: since when that has had no link to it."""
    stalls_s: deque[float] = field(default_factory=lambda: deque(maxlen=1000))
    """What failing over from it has cost, newest last."""

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
        """All its workers, in the order of their slices; it leads, and is the last."""
        return [*self.others, self]

    @property
    def node_names(self) -> set[str]:
        """All that it is on."""
        return {worker.node_name for worker in self.group}

    @property
    def node_ids(self) -> set[str]:
        return {worker.node_id for worker in self.group}

    @property
    def name(self) -> str:
        """Of its node, or of all that it is on: ``pc-b+pc-c``."""
        return "+".join(worker.node_name for worker in self.group)

    @property
    def zones(self) -> str:
        """Of its nodes, as they were told: ``attic+cellar``."""
        return "+".join(sorted({worker.zone for worker in self.group if worker.zone}))

    @property
    def state(self) -> str:
        """See `Worker`: what all of its workers are."""
        if self.gone or self.up:
            return "gone" if self.gone else "ready"
        return "listening" if all(worker.address for worker in self.group) else "starting"

    @property
    def up(self) -> bool:
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
        return set() if self.gone else self.ordered - self.has_all

    @property
    def settled(self) -> bool:
        return all(self.ordered == worker.held.keys() for worker in self.group)

    @property
    def round_trip_s(self) -> float:
        """Of the slowest link to it, as far as known."""
        measured = max((link.round_trip_s for link in self.links.values()), default=0.0)
        return measured or LINK_S

    def __str__(self) -> str:
        nodes = " and ".join(repr(worker.node_name) for worker in self.group)
        return f"node{'s' * bool(self.others)} {nodes} ({self.role})"


@dataclass(frozen=True)
class Question:
    """What the planner is asked, apart from the state, which goes on changing meanwhile."""

    revision: int
    experts: tuple[Expert, ...]
    hosts: tuple[Host, ...]
    replicas: int
    least: int
    """Replicas that will do where there is no room for all."""
    row_bytes: int
    previous: Mapping[str, frozenset[ExpertKey]] | None = None
    moves: int | None = None
    """For both see `place_experts`."""
    worth: float = 0.0
    """The answer is taken if the cost now exceeds its cost by this factor; 0: in any case."""

    def answer(self) -> Answer:
        """Ask the planner. Takes a second for thousands of experts.

        Raises:
            PlacementError: there is no room for the least that will do.
        """
        now = self._place(1, 0).seconds_per_token if self.worth else 0.0
        short = ""
        for replicas in range(self.replicas, self.least - 1, -1):
            try:
                return Answer(self, self._place(replicas, self.moves), now, short)
            except PlacementError as error:
                short = short or str(error)
        raise PlacementError(short)

    def _place(self, replicas: int, moves: int | None) -> Placement:
        return place_experts(
            self.experts,
            self.hosts,
            replicas=replicas,
            most=self.replicas,
            row_bytes=self.row_bytes,
            previous=self.previous,
            moves=moves,
        )


@dataclass(frozen=True)
class Answer:
    question: Question
    placement: Placement
    cost_now: float
    """Seconds per token as experts are placed now; 0: not asked."""
    short: str
    """What is missing for all replicas; empty: nothing."""

    @property
    def fetches(self) -> int:
        return sum(move.action == "fetch" for move in self.placement.moves)

    @property
    def worthwhile(self) -> bool:
        worth = self.question.worth
        return not worth or self.cost_now > worth * self.placement.seconds_per_token


class ExpertMap:
    """Which hosts of a session hold which experts, now and on the way to what was decided last."""

    def __init__(self, profile: pb.ModelProfile, hosts: Sequence[ExpertHost], replicas: int, wire: str) -> None:
        self.hosts = list(hosts)
        self.replicas = replicas
        """Of every expert, asked for."""
        self.layers = list(profile.expert_layers)
        self.keys = [(layer, index) for layer in self.layers for index in range(profile.expert_count)]
        self.loads = ExpertLoads(self.layers, profile.expert_count, profile.experts_per_token)
        self.row_bytes = row_bytes(profile, wire)
        self.version = 0
        """Of the placement that the trunk was told last; 0: the assignment's."""
        self.moves: list[Move] = []
        """Not finished yet, in order."""
        self.short = ""
        """Why there are fewer replicas than asked for."""
        self.stale = False
        """Hosts have come or gone, or memory for experts without a place, since the planner was asked."""
        self.homeless_since: float | None = None
        """When the planner last found no place for some experts, unless it has since."""
        self.looked_at = 0.0
        """When the load's balance was last looked at."""
        self.traffic: dict[int, tuple[int, int]] = {}
        """By rank of the trunk: bytes sent and received."""
        self._revision = 0
        self._digests: dict[tuple[ExpertKey, int], tuple[bytes, Holder]] = {}
        """Of every slice of an expert that was held: what it must be, and who says so."""
        self._left: dict[str, frozenset[ExpertKey]] = {}
        """By name: what hosts that are gone held when the planner was last asked."""
        self._told: list[tuple[frozenset[ExpertKey], str, bool]] = []
        """What the trunk knows: what it may ask every host for, its address, and whether it is alive."""

    @property
    def slices(self) -> int:
        """That every expert is cut in; 1: they are whole."""
        return self.hosts[0].slices.stop

    @property
    def members(self) -> list[Member]:
        """The workers of groups that do not lead them."""
        return [other for host in self.hosts for other in host.others]

    @property
    def waiting_for(self) -> list[ExpertKey]:
        """Experts that no host can be asked for now."""
        served = set[ExpertKey]().union(*(host.serving for host in self.hosts if not host.unreachable))
        return [key for key in self.keys if key not in served]

    # ------------------------------------------------------------ what hosts and trunk say

    def connected(self) -> None:
        """Every worker was told every address."""
        self._told = [
            (keys, host.address, alive) for (keys, _, alive), host in zip(self._told, self.hosts, strict=True)
        ]

    def on_hosted(self, worker: Holder, hosted: pb.HostedExperts, now: float) -> None:
        """A host, or a worker of its group, says what it holds.

        Raises:
            HostedError: that is not of this model, or another one holds an expert with other weights.
        """
        keys, host = from_message(hosted), worker.host
        each = len(worker.slices)
        if len(hosted.digests) != len(keys) * each or not set(keys) <= set(self.keys):
            raise HostedError(f"{worker} names {len(keys)} experts with {len(hosted.digests)} digests, or unknown ones")
        held = {key: tuple(hosted.digests[each * at : each * (at + 1)]) for at, key in enumerate(keys)}
        for (key, number), digest in _numbered(worker, held):
            known, other = self._digests.get((key, number), (digest, worker))
            if digest != known:
                self._forget(host)
                raise HostedError(
                    f"{worker} has {name_of(key)} with checksum {digest.hex()[:12]}, {other} with {known.hex()[:12]}:"
                    " their files or caches differ; give both the same model, and clear the cache of the wrong one"
                    " (`motley cache rm --all`)"
                )
        for slice_, digest in _numbered(worker, held):
            self._digests.setdefault(slice_, (digest, worker))
        worker.held = held
        host.heard = now

    def _forget(self, refused: ExpertHost) -> None:
        """Nobody is measured by what this host alone has said."""
        self._digests = {key: own for key, own in self._digests.items() if own[1].host is not refused}
        for host in self.hosts:
            if host is not refused and not host.gone:
                for worker in host.group:
                    for slice_, digest in _numbered(worker, worker.held):
                        self._digests.setdefault(slice_, (digest, worker))

    def on_report(self, rank: int, report: pb.ExpertReport, now: float) -> list[tuple[ExpertHost, str]]:
        """A rank of the trunk says what it has sent where; the hosts that it has given up, and why.

        What it says of a host in times that cannot be is left out.
        """
        self.loads.count(rank, report, now)
        self.traffic[rank] = (report.bytes_out, report.bytes_in)
        given_up = []
        for told in report.hosts:
            times = (told.busy_s, told.wait_s, told.round_trip_s, told.computed_s, *told.stalls_s)
            if told.host >= len(self.hosts) or not all(0 <= seconds < NEVER_S for seconds in times):
                continue
            host = self.hosts[told.host]
            host.stalls_s.extend(told.stalls_s)
            if host.gone or not host.up or report.version < host.since:
                continue
            host.links[rank] = told
            if told.given_up:
                given_up.append((host, f"rank {rank} has given it up: {told.lost}"))
            elif told.lost:
                host.unreachable.setdefault(rank, now)
            else:
                host.unreachable.pop(rank, None)
        return given_up

    def on_starved(self, rank: int, starved: pb.Starved, now: float) -> None:
        """A rank of the trunk reaches none of an expert's hosts, unless it has not heard yet where they are now."""
        if starved.version == self.version:
            for host in self.hosts:
                if (starved.layer, starved.index) in host.serving:
                    host.unreachable.setdefault(rank, now)

    def cut_off(self, now: float) -> list[ExpertHost]:
        """Hosts that a rank of the trunk has not reached for too long."""
        return [host for host in self.hosts if any(now - since > UNREACHABLE_S for since in host.unreachable.values())]

    def lose(self, host: ExpertHost, why: str, now: float, *, ended: bool, node_lost: bool = False) -> None:
        """A host is gone, with all of its group; its node may be asked for another if its process has `ended`."""
        host.gone, host.lost, host.lost_at, host.ended, host.node_lost = True, why, now, ended, node_lost
        for other in host.others:
            other.gone = True
        host.unreachable.clear()
        self._left[host.name] = frozenset(host.ordered)
        self._change()

    def may_restart(self, host: ExpertHost, node_ids: Sequence[str], now: float) -> bool:
        """Whether a lost host may begin anew on the nodes that have the names of its own now."""
        patience_s = RESTART_S * 2 ** min(host.restarts, RESTARTS)
        ended = all(worker.ended for worker in host.group)
        return ended and now >= host.lost_at + patience_s and self._may_return(host, node_ids)

    def _may_return(self, host: ExpertHost, node_ids: Sequence[str]) -> bool:
        """Whether a lost host may begin anew on these nodes at some time: not where it was lost too often, nor where
        one of them is in another host."""
        others = [worker.node_id for worker in host.group] != list(node_ids)
        return (host.restarts < RESTARTS or others) and host.node_names.isdisjoint(self._busy)

    @property
    def _busy(self) -> set[str]:
        """Names of the nodes that are in a host now."""
        return set[str]().union(*(host.node_names for host in self.hosts if not host.gone))

    def bound(self, node_ids: Mapping[str, str], *, complete: bool = False) -> set[str]:
        """Names of nodes that cannot be in a new host: they are in one, or in a lost one that is still ending or may
        begin anew.

        Args:
            node_ids: of the nodes that may have hosts now, by name.
            complete: lost hosts that lack a node of theirs now do not count.
        """
        bound = self._busy
        for host in [host for host in self.hosts if host.gone]:
            own = [node_ids.get(worker.node_name, "") for worker in host.group]
            if (all(own) or not complete) and self._may_return(host, own):
                bound |= host.node_names
            bound |= {worker.node_name for worker in host.group if not worker.ended}
        return bound

    def gave_up(self, host: ExpertHost) -> bool:
        """Whether a host on just the nodes of this one is lost."""
        return any(old.gone and old.node_ids == host.node_ids for old in self.hosts)

    @property
    def is_starting(self) -> bool:
        """Some host is on its way up."""
        return any(not host.up and not host.gone for host in self.hosts)

    def is_hopeless(self, now: float) -> bool:
        """Some experts have had no place for too long, no host is being started, and the planner has nothing to add."""
        waited = self.homeless_since is not None and now - self.homeless_since > HOMELESS_S
        return waited and not self.is_starting and not self.stale and bool(self.waiting_for)

    def lacking(self, free: Callable[[str], int]) -> int:
        """Replicas for which the hosts have no room, as the planner has found.

        Args:
            free: see `question`.
        """
        if not self.short or self.stale:
            return 0
        count, size = len(self.keys), self._size
        there = sum(min(count, self._memory(host, free) // size) for host in self._living)
        return max(0, self.replicas * count - there)

    def on_node_lost(self, node_id: str) -> None:
        """The node of hosts that were lost before is lost as well."""
        for worker in (worker for host in self.hosts for worker in host.group):
            if worker.gone and worker.node_id == node_id and not worker.node_lost:
                worker.ended = worker.node_lost = True
                self._change()

    def restart(self, host: ExpertHost, node_ids: Sequence[str], rooms: Sequence[int], now: float) -> None:
        """A lost host begins anew, with what it was first assigned if there is room for that, else with nothing.

        Args:
            node_ids: the nodes that have the names of its own now.
            rooms: bytes free on each.
        """
        if any(worker.first_bytes > room for worker, room in zip(host.group, rooms, strict=True)):
            host.first = frozenset()
        for worker, node_id in zip(host.group, node_ids, strict=True):
            worker.node_id, worker.gone, worker.ended, worker.node_lost = node_id, False, False, False
            worker.address, worker.ready, worker.loading, worker.held = "", None, pb.Loading(), {}
        host.lost, host.ordered, host.retiring = "", set(host.first), {}
        host.restarts += 1
        host.heard = now
        host.links.clear()

    def join(self, host: ExpertHost, now: float) -> None:
        """Another host begins, with nothing."""
        assert host.number == len(self.hosts)
        host.heard = now
        self.hosts.append(host)
        self._told.append((frozenset(), "", False))

    def retry(self) -> None:
        """There may be room now for experts that had found none."""
        if self.homeless_since is not None:
            self._change()

    def arrived(self) -> None:
        """A host that has joined, or was started again, is ready."""
        self._change()

    def hung(self, now: float, patience_s: float) -> list[ExpertHost]:
        """Hosts that have not done what they were told, nor shown life, for so long."""
        busy = [host for host in self.hosts if not host.gone and not (host.up and host.settled)]
        return [host for host in busy if now - host.heard > patience_s]

    def _change(self) -> None:
        self._revision += 1
        self.stale = True

    # ------------------------------------------------------------ what the planner says

    def question(self, free: Callable[[str], int], moves: int | None = None, worth: float = 0.0) -> Question:
        """What to ask the planner now.

        Args:
            free: of a node by its id, the bytes that may still be used there.
            moves: fetches for the sake of balance, at most; None: what hosts that have come or gone account for.
            worth: see `Question`.
        """
        held = {**self._left, **{host.name: frozenset(host.ordered) for host in self._living}}
        new = {host.name for host in self._living if not host.ordered}
        return replace(
            self._question(self._living, free),
            least=1,
            previous={name: keys for name, keys in held.items() if name not in new},
            moves=moves,
            worth=worth,
        )

    def first_question(self, free: Callable[[str], int]) -> Question:
        """What to ask before any host has been started."""
        return self._question(self.hosts, free)

    def _question(self, hosts: Sequence[ExpertHost], free: Callable[[str], int]) -> Question:
        loads, size = self.loads.per_token().ravel().tolist(), self._size
        zones = zones_apart([{worker.zone or worker.node_id for worker in host.group} for host in hosts])
        return Question(
            revision=self._revision,
            experts=tuple(Expert(*key, size, load) for key, load in zip(self.keys, loads, strict=True)),
            hosts=tuple(
                Host(
                    name=host.name,
                    memory=self._memory(host, free),
                    speed=host.speed,
                    zone=zone,
                    latency=host.round_trip_s + LINK_S * bool(host.others),
                    bandwidth=LINK_BANDWIDTH,
                )
                for host, zone in zip(hosts, zones, strict=True)
            ),
            replicas=self.replicas,
            least=self.replicas,
            row_bytes=self.row_bytes,
        )

    @property
    def _living(self) -> list[ExpertHost]:
        return [host for host in self.hosts if not host.gone and host.up]

    @property
    def _size(self) -> int:
        """Bytes of a whole expert, on all nodes that have slices of it."""
        return sum(worker.expert_bytes for worker in self.hosts[0].group)

    def _memory(self, host: ExpertHost, free: Callable[[str], int]) -> int:
        """Bytes for experts, with what it has or will have: in a group, for as many whole ones as all have room for."""
        room = free(host.node_id)
        if host.others:
            room = self._size * min(free(worker.node_id) // worker.expert_bytes for worker in host.group)
        return self._size * host.most(host.to_come) + room

    def skewed(self, now: float) -> bool:
        """Whether the time has come to ask if moving experts is worth it, being `SKEWED`; it has not again for long."""
        if self.stale or self.moves or now - self.looked_at < REBALANCE_S or self.loads.fresh < SKEW_ROWS:
            return False
        self.looked_at, self.loads.fresh = now, 0
        return True

    def rebalancing(self, free: Callable[[str], int], worth: float) -> Question:
        """The question for a better balance that costs a bounded number of moves; where hosts have come or gone, what
        is to be asked about that."""
        if self.stale:
            return self.question(free)
        held = sum(len(host.ordered) for host in self.hosts if not host.gone)
        return self.question(free, max(2, int(MOVED_AT_ONCE * held)), worth)

    def begin(self, placement: Placement) -> None:
        """What every host will be assigned when it is started."""
        for host in self.hosts:
            host.first = frozenset(placement.held[host.name])
            host.ordered = set(host.first)
        self._told = [(frozenset(host.ordered), "", True) for host in self.hosts]

    def concerns(self, question: Question) -> bool:
        """Whether the hosts are still those that the planner was asked about."""
        return question.revision == self._revision

    def claims(self, answer: Answer) -> list[tuple[str, int]]:
        """Nodes, and the bytes that their hosts need for this answer beside what is reserved for them already."""
        moves = _by_host(answer.placement.moves)
        return [
            (worker.node_id, worker.expert_bytes * (host.most(moves[host.name]) - host.most(host.to_come)))
            for host in self.hosts
            if not host.gone
            for worker in host.group
        ]

    def adopt(self, answer: Answer) -> None:
        """Begin with what the planner said, unless it is not worth it."""
        assert self.concerns(answer.question)
        if not answer.worthwhile:
            return
        self._revision += 1
        self.stale = False
        self.homeless_since = None
        self._left.clear()
        self._plan(answer.placement.moves)
        self.short = answer.short
        for host in self.hosts:
            host.retiring.clear()

    def stay(self, why: str, now: float) -> None:
        """The planner found no place for some experts: wait for a host that joins or comes back."""
        self.stale, self.short, self.homeless_since = False, why, now

    def _plan(self, moves: Iterable[Move]) -> None:
        self.moves = list(moves)
        by_host = _by_host(self.moves)
        for host in self.hosts:
            host.to_come = [] if host.gone else by_host[host.name]

    # ------------------------------------------------------------ on the way

    def advance(self, now: float) -> tuple[list[ExpertHost], pb.Placement | None]:
        """Go on as far as possible: the hosts whose orders have changed, and the placement if the trunk's has."""
        ordered = self._start(now)
        for host in ordered:
            host.heard = now
        return ordered, self._placement()

    def _start(self, now: float) -> list[ExpertHost]:
        if not self.moves:
            return []
        by_name = {host.name: host for host in self.hosts if not host.gone}
        coming = {key for host in self.hosts for key in host.fetching}
        full: set[str] = set()
        ordered: list[ExpertHost] = []
        left: list[Move] = []
        for move in self.moves:
            host = by_name.get(move.host)
            if host is None:
                continue  # lost: the planner is asked again
            if move.action == "fetch" and move.host not in full:
                host.ordered.add(move.expert)
                coming.add(move.expert)
                ordered.append(host)
            elif move.action == "fetch":
                coming.add(move.expert)
                left.append(move)
            elif not self._dropped(move.expert, host, coming, now, ordered):
                full.add(move.host)
                left.append(move)
        self._plan(left)
        return list({host.number: host for host in ordered}.values())

    def _dropped(
        self, key: ExpertKey, host: ExpertHost, coming: set[ExpertKey], now: float, ordered: list[ExpertHost]
    ) -> bool:
        """Go on with a drop; whether it is over."""
        if key not in host.ordered:
            return not any(key in worker.held for worker in host.group)
        elsewhere = any(key in other.serving for other in self.hosts if other is not host)
        if key in coming or not elsewhere:
            host.retiring.pop(key, None)
        elif now - host.retiring.setdefault(key, now) >= RETIRE_S:
            host.ordered.discard(key)
            del host.retiring[key]
            ordered.append(host)
        return False

    def _placement(self) -> pb.Placement | None:
        """What the trunk should know, as a new version, if it does not."""
        now = [
            (frozenset(host.serving), host.address, not host.gone) if host.up or host.gone else told
            for host, told in zip(self.hosts, self._told, strict=True)
        ]
        if now == self._told:
            return None
        for host, (_, _, alive), (_, _, was_alive) in zip(self.hosts, now, self._told, strict=True):
            if alive and not was_alive:
                host.since = self.version + 1
        self._told = now
        self.version += 1
        return pb.Placement(
            version=self.version,
            hosts=[to_message(keys) for keys, _, _ in now],
            addresses=[address for _, address, _ in now],
            alive=[alive for _, _, alive in now],
        )


def _by_host(moves: Iterable[Move]) -> defaultdict[str, list[Move]]:
    by_host = defaultdict[str, list[Move]](list)
    for move in moves:
        by_host[move.host].append(move)
    return by_host


def _numbered(
    worker: Holder, held: Mapping[ExpertKey, Sequence[bytes]]
) -> Iterator[tuple[tuple[ExpertKey, int], bytes]]:
    """The digests of what a worker holds, by expert and number of the slice."""
    for key, digests in held.items():
        yield from (((key, number), digest) for number, digest in zip(worker.slices, digests, strict=True))


def row_bytes(profile: pb.ModelProfile, wire: str) -> int:
    """Of one row on the wire, there and back."""
    return int(2 * WIRE_BYTES[wire] * profile.hidden)


def name_of(key: ExpertKey) -> str:
    return f"layer {key[0]} expert {key[1]}"


def to_message(keys: Iterable[ExpertKey]) -> pb.HostedExperts:
    by_layer: dict[int, list[int]] = {}
    for layer, index in sorted(keys):
        by_layer.setdefault(layer, []).append(index)
    return pb.HostedExperts(sets=[pb.ExpertSet(layer=layer, indices=own) for layer, own in by_layer.items()])


def from_message(hosted: pb.HostedExperts) -> list[ExpertKey]:
    """In the order in which they are told, which is that of the digests."""
    return [(own.layer, index) for own in hosted.sets for index in own.indices]
