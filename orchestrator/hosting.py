"""The expert hosts that nodes can be for a session, beside its trunk: each by itself, or several as a group. Pure.

What is free on a node depends on where the trunk is; `motley.orchestrator.planning.trunk` weighs the places for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from itertools import accumulate

from motley.orchestrator.expert_hosts import LINK_BANDWIDTH, LINK_S, ExpertHost, ExpertMap, Member, row_bytes
from motley.orchestrator.nodes import Node
from motley.orchestrator.planning.experts import Host, PlacementError
from motley.orchestrator.planning.groups import Group, Offer, form_groups, slice_bytes, slice_count
from motley.orchestrator.planning.layout import LayoutError
from motley.orchestrator.planning.room import expert_count, experts_in, left_for_experts, replicas_in, room_told
from motley.orchestrator.planning.setup import setup_of
from motley.orchestrator.planning.trunk import Forecast, forecast
from motley.orchestrator.sessions import SessionRequest
from motley.orchestrator.workers import Rank
from motley.protocol import MAX_RANKS
from motley.protocol.mesh_pb2 import ModelProfile

Free = Callable[[str], int]
"""Bytes free on a node, by its id."""


class Hosting:
    """What nodes offer to a new session."""

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
        """Of a session with this trunk, whose ranks read so many bytes per second."""
        request, profile = self._request, self._profile
        hosts = [
            Host(offer.name, offer.memory, offer.speed, latency=LINK_S, bandwidth=LINK_BANDWIDTH)
            for offer in offers(profile, self._nodes.values(), self._beside(ranks))
        ]
        reads = [(rank.plan.weight_bytes, speed) for rank, speed in zip(ranks, speeds, strict=True)]
        own = {rank.node_name for rank in ranks}
        return forecast(profile, reads, own, hosts, request.replicas, row_bytes(profile, request.wire))

    def on_nodes(self, ranks: Sequence[Rank]) -> ExpertMap:
        """A host on every node that has room for one beside the trunk.

        Raises:
            PlacementError: none has.
            LayoutError, SetupError: more have than can be, and are named; or one cannot.
        """
        request, profile, free = self._request, self._profile, self._beside(ranks)
        for node in self._nodes.values():
            setup_of(node.name, node.capabilities, request.engine, request.quantisation)
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
        """Groups of nodes as hosts, `because` whole experts do not fit, beside the first trunk where these do.

        Raises:
            PlacementError: beside none; the message says what every node has, and what would fit.
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
        """
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
    """More hosts for a session whose experts are cut, with room for so many `missing` replicas, or for all experts once
    less, and so on; none, if nodes have not.

    Args:
        nodes: in no host of it.
        ranks: of its trunk.
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
    """To hold experts, or slices of them."""
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
    """The hosts that groups of some nodes are.

    Args:
        number: of the first one among the session's hosts.
        index: of the worker that leads it.
        others: index of the first worker that leads none.
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
        slices: of an expert, on every node.
        others: index of the first worker that does not lead.
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
