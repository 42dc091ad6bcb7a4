"""The expert hosts that nodes can be for a session, beside its trunk: each by itself, or several as a group. Pure.

What is free on a node depends on where the trunk is; `motley.orchestrator.planning.experts.trunk` weighs the places for
it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from itertools import accumulate

from motley.orchestrator.experts.hosts import LINK_BANDWIDTH, LINK_S, ExpertHost, Member
from motley.orchestrator.experts.registry import ExpertMap, Free, row_bytes
from motley.orchestrator.mesh.nodes import Node
from motley.orchestrator.planning.experts.groups import Group, Offer, form_groups, slice_bytes, slice_count
from motley.orchestrator.planning.experts.layout import LayoutError
from motley.orchestrator.planning.experts.room import expert_count, experts_in, left_for_experts, replicas_in, room_told
from motley.orchestrator.planning.experts.trunk import Forecast, forecast
from motley.orchestrator.planning.placement.terms import Host, PlacementError
from motley.orchestrator.planning.setup import setup_of
from motley.orchestrator.session_request import SessionRequest
from motley.orchestrator.workers import Rank
from motley.protocol import MAX_RANKS
from motley.protocol.mesh_pb2 import ModelProfile


class Hosting:
    """The expert hosts that nodes can be for a new session."""

    def __init__(
        self,
        request: SessionRequest,
        profile: ModelProfile,
        nodes: Iterable[Node],
        beside: Callable[[Sequence[Rank]], Free],
    ) -> None:
        """
        Args:
            nodes: those whose engine computes single experts.
            beside: what is free beside ranks of a trunk.
        """
        self._request = request
        self._profile = profile
        self._nodes = {node.id: node for node in nodes}
        self._beside = beside

    def forecast(self, ranks: Sequence[Rank], speeds: Sequence[float]) -> Forecast:
        """What a token is forecast to take in a session with this trunk.

        Args:
            speeds: bytes per second that each of the trunk's ranks reads.
        """
        request, profile = self._request, self._profile
        hosts = [
            Host(offer.name, offer.memory, offer.speed, latency=LINK_S, bandwidth=LINK_BANDWIDTH)
            for offer in offers(profile, self._nodes.values(), self._beside(ranks))
        ]
        reads = [(rank.plan.weight_bytes, speed) for rank, speed in zip(ranks, speeds, strict=True)]
        own = {rank.node_name for rank in ranks}
        return forecast(profile, reads, own, hosts, request.replicas, row_bytes(profile, request.wire))

    def on_nodes(self, ranks: Sequence[Rank]) -> ExpertMap:
        """A host on every node that has room for an expert beside the trunk.

        Raises:
            PlacementError: no node has room.
            LayoutError: the request names more nodes than a session can have hosts.
            SetupError: a node cannot run the session's engine.
        """
        request, profile, free = self._request, self._profile, self._beside(ranks)
        for node in self._nodes.values():
            setup_of(node.name, node.capabilities, request.expert_engine, request.quantisation)
        roomy = [node for node in self._nodes.values() if experts_in(profile, free(node.id))]
        if not roomy:
            raise PlacementError("no node has room for a host of one expert")
        if len(ranks) + len(roomy) > MAX_RANKS:
            if request.nodes:
                raise LayoutError(
                    f"{len(ranks)} ranks and {len(roomy)} nodes with experts; at most {MAX_RANKS} are possible: name"
                    " fewer nodes"
                )
            roomy = roomy[: MAX_RANKS - len(ranks)]
        hosts = [expert_host(profile, [node], [1], at, len(ranks) + at, free) for at, node in enumerate(roomy)]
        return ExpertMap(profile, hosts, request.replicas, request.wire)

    def on_groups(self, trunks: Sequence[list[Rank]], because: PlacementError) -> tuple[list[Rank], ExpertMap]:
        """Groups of nodes as hosts, beside the first of these trunks that leaves room for them.

        Args:
            because: why whole experts do not fit on single nodes.

        Raises:
            PlacementError: no trunk leaves room; the message says what every node has, and what would fit.
        """
        request, profile = self._request, self._profile
        refusals = [str(because)]
        if request.exact:  # an expert in slices rounds otherwise than a whole one
            refusals.append("Experts of exact sessions are not cut over nodes")
        elif slice_count(profile) > 1:
            for ranks in trunks:
                try:
                    groups = self._form_groups(ranks, request.replicas)
                except PlacementError as error:
                    refusals.append(str(error))
                    continue
                hosts = group_hosts(profile, self._alive, groups, 0, len(ranks), self._beside(ranks))
                return ranks, ExpertMap(profile, hosts, request.replicas, request.wire)
        raise PlacementError("\n".join([*refusals[:2], self._room_told(trunks[0])])) from because

    @property
    def _alive(self) -> list[Node]:
        return [node for node in self._nodes.values() if node.alive]

    def _form_groups(self, ranks: Sequence[Rank], replicas: int) -> list[Group]:
        """Groups with room for all replicas, beside ranks of a trunk.

        Raises:
            PlacementError: there is no room for them.
        """
        return form_groups(
            offers(self._profile, self._alive, self._beside(ranks)),
            slices=slice_count(self._profile),
            slice_bytes=slice_bytes(self._profile, slice_count(self._profile)),
            experts=expert_count(self._profile),
            replicas=replicas,
            near={rank.node_name for rank in ranks},
            most=MAX_RANKS - len(ranks),
        )

    def _room_told(self, ranks: Sequence[Rank]) -> str:
        free = self._beside(ranks)
        rooms = {node.name: free(node.id) for node in self._alive}
        fitting = min(self._request.replicas - 1, replicas_in(self._profile, rooms.values()))
        if slice_count(self._profile) > 1 and not self._request.exact:
            for replicas in range(self._request.replicas - 1, fitting, -1):
                with suppress(PlacementError):
                    self._form_groups(ranks, replicas)
                    fitting = replicas
                    break
        return room_told(self._profile, rooms, {rank.node_name for rank in ranks}, fitting)


def more_groups(
    profile: ModelProfile, experts: ExpertMap, missing: int, nodes: Collection[Node], ranks: int, free: Free
) -> list[ExpertHost]:
    """More hosts for a session whose experts are cut in slices.

    They have room for all missing replicas; failing that, for one replica of every expert fewer, and so on; where nodes
    have no room even for those, there are none.

    Args:
        missing: replicas that have no place on the session's hosts.
        nodes: those that are in no host of the session.
        ranks: how many the session's trunk has.
    """
    index, count = ranks + len(experts.hosts), len(experts.keys)
    for wanted in range(missing, 0, -count):
        with suppress(PlacementError):
            groups = form_groups(
                offers(profile, nodes, free),
                slices=experts.slices,
                slice_bytes=slice_bytes(profile, experts.slices),
                experts=min(count, wanted),
                replicas=-(-wanted // count),
                most=MAX_RANKS - index,
            )
            others = MAX_RANKS + len(experts.members)
            return group_hosts(profile, nodes, groups, len(experts.hosts), index, free, others)
    return []


def offers(profile: ModelProfile, nodes: Iterable[Node], free: Free) -> list[Offer]:
    """What nodes offer to hold experts, or slices of them."""
    return [
        Offer(
            name=node.name,
            memory=left_for_experts(profile, free(node.id)),
            speed=node.capabilities.memory_bandwidth,
            zone=node.capabilities.zone,
        )
        for node in nodes
    ]


def group_hosts(
    profile: ModelProfile,
    nodes: Iterable[Node],
    groups: Iterable[Group],
    number: int,
    index: int,
    free: Free,
    others: int = MAX_RANKS,
) -> list[ExpertHost]:
    """A host of every group.

    Args:
        nodes: among them all members of the groups.
        number: the first host's place among the session's hosts.
        index: the index of the worker that leads the first host.
        others: the index of the first worker that leads no host.
    """
    by_name = {node.name: node for node in nodes}
    hosts = []
    for at, group in enumerate(groups):
        members = [by_name[name] for name in group.members]
        hosts.append(expert_host(profile, members, group.slices, number + at, index + at, free, others))
        others += len(members) - 1
    return hosts


def expert_host(
    profile: ModelProfile,
    nodes: Sequence[Node],
    slices: Sequence[int],
    number: int,
    index: int,
    free: Free,
    others: int = MAX_RANKS,
) -> ExpertHost:
    """A host on one node, or on a group of them, of which the last one leads.

    Args:
        slices: how many of every expert's slices each node has.
        number: the host's place among the session's hosts.
        index: the index of the worker that leads it.
        others: the index of its first worker that does not lead.
    """
    ends = list(accumulate(slices))
    each = slice_bytes(profile, ends[-1])
    *members, leader = nodes
    host = ExpertHost(
        index=index,
        node_id=leader.id,
        node_name=leader.name,
        memory_limit=free(leader.id),
        number=number,
        zone=leader.capabilities.zone,
        # All wait for the slowest.
        speed=min(ends[-1] / own * node.capabilities.memory_bandwidth for node, own in zip(nodes, slices, strict=True)),
        fixed_bytes=profile.host_fixed_bytes,
        expert_bytes=each * slices[-1],
        weight_bytes=profile.expert_weight_bytes,
        slices=range(ends[-1] - slices[-1], ends[-1]),
    )
    for node, own, end in zip(members, slices, ends, strict=False):
        member = Member(
            index=others + len(host.others),
            node_id=node.id,
            node_name=node.name,
            memory_limit=free(node.id),
            leader=host,
            zone=node.capabilities.zone,
            fixed_bytes=profile.host_fixed_bytes,
            expert_bytes=each * own,
            slices=range(end - own, end),
        )
        host.others.append(member)
    return host
