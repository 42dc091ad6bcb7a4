"""The experts of one session: which host is ordered to hold which, who holds what, and what to do next. Pure.

What the hosts, the trunk and the planner say comes in; orders for hosts (`motley.orchestrator.experts.moves`) and
placements for the trunk (`motley.orchestrator.experts.trunk_view`) come out. A host that is lost keeps what it was
ordered for the planner's next answer, which replaces all moves. A host that joins begins with nothing, and what finds
no place waits a while for one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from motley.orchestrator.experts import moves
from motley.orchestrator.experts.checksums import Checksums
from motley.orchestrator.experts.hosts import LINK_BANDWIDTH, LINK_S, ExpertHost, Holder, Member
from motley.orchestrator.experts.loads import ExpertLoads
from motley.orchestrator.experts.questions import Answer, Question
from motley.orchestrator.experts.trunk_view import TrunkView
from motley.orchestrator.planning.cost import WIRE_BYTES
from motley.orchestrator.planning.experts.groups import zones_apart
from motley.orchestrator.planning.placement.terms import Expert, ExpertKey, Host, Move, Placement
from motley.protocol import mesh_pb2 as pb

UNREACHABLE_S = 10.0
"""A rank of the trunk that has lost the link to a host has this long to make it again."""
HOMELESS_S = 90.0
"""Experts that find no place wait so long, after hosts last came or went, for a node that joins or comes back. (A step
of the trunk waits for 120 s.)"""
REBALANCE_S = 60.0
"""Between two looks at whether the load is skewed."""
SKEWED = 1.2
"""Experts move when the busiest host is busier than it need be by this factor."""
SKEW_ROWS = 2000
"""Rows that must have been counted since the last look."""
MOVED_AT_ONCE = 0.25
"""The part of all replicas that may be moved for the sake of balance."""
NEVER_S = 1e9
"""No time that is measured is as long: thirty years."""


Free = Callable[[str], int]
"""Bytes that may still be used on a node, by its id."""


class ExpertMap:
    """Which hosts of a session hold which experts, now and on the way to what was decided last."""

    def __init__(self, profile: pb.ModelProfile, hosts: Sequence[ExpertHost], replicas: int, wire: str) -> None:
        self.hosts = list(hosts)
        self.replicas = replicas
        """Hosts that every expert should have."""
        self.profile = profile
        self.layers = list(profile.expert_layers)
        self.keys = [(layer, index) for layer in self.layers for index in range(profile.expert_count)]
        self.loads = ExpertLoads(self.layers, profile.expert_count, profile.experts_per_token)
        self.row_bytes = row_bytes(profile, wire)
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
        self._checksums = Checksums(self.keys)
        self._view = TrunkView()
        self._left: dict[str, frozenset[ExpertKey]] = {}
        """By the name of a host that is gone: what it held when the planner was last asked."""

    @property
    def version(self) -> int:
        """The number of the placement that the trunk was told last; 0: that of its assignment."""
        return self._view.version

    @property
    def slices(self) -> int:
        """How many slices every expert is cut in; 1: experts are whole."""
        return self.hosts[0].slices.stop

    @property
    def members(self) -> list[Member]:
        """The workers of all groups that do not lead their group."""
        return [other for host in self.hosts for other in host.others]

    @property
    def waiting_for(self) -> list[ExpertKey]:
        """Experts that no host can be asked for now."""
        served = set[ExpertKey]().union(*(host.serving for host in self.hosts if not host.unreachable))
        return [key for key in self.keys if key not in served]

    # ------------------------------------------------------------ what hosts and trunk say

    def connected(self) -> None:
        """Every worker was told every address."""
        self._view.connect(self.hosts)

    def on_hosted(self, worker: Holder, hosted: pb.HostedExperts, now: float) -> None:
        """A host, or a worker of its group, says what it holds.

        Raises:
            HostedError: that is not of this model, or another one holds an expert with other weights.
        """
        worker.held = self._checksums.check(worker, hosted, self.hosts)
        worker.host.heard = now

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
        """A host is gone; see `ExpertHost.lose`."""
        host.lose(why, now, ended=ended, node_lost=node_lost)
        self._left[host.name] = frozenset(host.ordered)
        self._change()

    @property
    def is_starting(self) -> bool:
        """Some host is on its way up."""
        return any(not host.up and not host.gone for host in self.hosts)

    def is_hopeless(self, now: float) -> bool:
        """Some experts have had no place for too long, no host is being started, and the planner has nothing to add."""
        waited = self.homeless_since is not None and now - self.homeless_since > HOMELESS_S
        return waited and not self.is_starting and not self.stale and bool(self.waiting_for)

    def lacking(self, free: Free) -> int:
        """Replicas for which the hosts have no room, as the planner has found."""
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

    def join(self, host: ExpertHost, now: float) -> None:
        """Add a host, which holds nothing yet."""
        assert host.number == len(self.hosts)
        host.heard = now
        self.hosts.append(host)
        self._view.join()

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

    def question(self, free: Free, moves: int | None = None, worth: float = 0.0) -> Question:
        """What to ask the planner now.

        Args:
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

    def first_question(self, free: Free) -> Question:
        """What to ask the planner before any host has been started."""
        return self._question(self.hosts, free)

    def _question(self, hosts: Sequence[ExpertHost], free: Free) -> Question:
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

    def _memory(self, host: ExpertHost, free: Free) -> int:
        """Bytes that a host has for experts, those of experts that it has or will have included. A group has bytes for
        as many whole experts as all its workers have room for."""
        room = free(host.node_id)
        if host.others:
            room = self._size * min(free(worker.node_id) // worker.expert_bytes for worker in host.group)
        return self._size * host.most(host.to_come) + room

    def skewed(self, now: float) -> bool:
        """Whether it is time to ask if moving experts is worth it (see `SKEWED`). If so, it is not again for
        `REBALANCE_S`."""
        if self.stale or self.moves or now - self.looked_at < REBALANCE_S or self.loads.fresh < SKEW_ROWS:
            return False
        self.looked_at, self.loads.fresh = now, 0
        return True

    def rebalancing(self, free: Free, worth: float) -> Question:
        """What to ask for a better balance that costs a bounded number of moves. Where hosts have come or gone since
        the planner was asked, this is `question`: a place for every expert comes first."""
        if self.stale:
            return self.question(free)
        held = sum(len(host.ordered) for host in self.hosts if not host.gone)
        return self.question(free, max(2, int(MOVED_AT_ONCE * held)), worth)

    def begin(self, placement: Placement) -> None:
        """Order what every host is to be assigned when it is started."""
        for host in self.hosts:
            host.first = frozenset(placement.held[host.name])
            host.ordered = set(host.first)
        self._view.begin(self.hosts)

    def concerns(self, question: Question) -> bool:
        """Whether the hosts are still those that the planner was asked about."""
        return question.revision == self._revision

    def claims(self, answer: Answer) -> list[tuple[str, int]]:
        """Nodes, and the bytes that their hosts need for this answer beside what is reserved for them already."""
        own = moves.by_host(answer.placement.moves)
        return [
            (worker.node_id, worker.expert_bytes * (host.most(own[host.name]) - host.most(host.to_come)))
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
        self.moves = moves.set_moves(answer.placement.moves, self.hosts)
        self.short = answer.short
        for host in self.hosts:
            host.retiring.clear()

    def stay(self, why: str, now: float) -> None:
        """The planner found no place for some experts: wait for a host that joins or comes back."""
        self.stale, self.short, self.homeless_since = False, why, now

    # ------------------------------------------------------------ on the way

    def advance(self, now: float) -> tuple[list[ExpertHost], pb.Placement | None]:
        """Go on as far as possible: the hosts whose orders have changed, and the placement if the trunk's has."""
        self.moves, ordered = moves.go_on(self.moves, self.hosts, now)
        for host in ordered:
            host.heard = now
        return ordered, self._view.update(self.hosts)


def row_bytes(profile: pb.ModelProfile, wire: str) -> int:
    """Bytes of one row on the wire, to an expert and back."""
    return int(2 * WIRE_BYTES[wire] * profile.hidden)
