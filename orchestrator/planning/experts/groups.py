"""Which nodes are an expert host together, where too few have room for whole experts.

An expert is cut in *slices* of equal width. A *group* is some nodes, its *members*: each has its own slices of every
expert that the group holds. A node with room for all slices of an expert is a group of its own. Results of slices are
added by a tree that depends on their number alone, so all groups of a session compute the same bits, however unequal.

A group of members that have room for c_1, c_2, ... slices can hold t experts if sum_m floor(c_m / t) reaches the number
of slices. As many groups are formed as have room together for all replicas, which makes them as small as possible:

1.  The groups are dealt out to the zones by the room that these have, so that members are close to each other, and
    replicas in different groups fail apart. In a zone, nodes go to the group with the least room, the largest first.
2.  Of each group those members stay that are needed for the experts it can hold; the slices go where they are done
    soonest, within everyone's room.
3.  If that is too little, the same is tried across zones, then with fewer groups.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from motley.orchestrator.planning.placement.terms import PlacementError
from motley.protocol import MAX_RANKS
from motley.protocol.mesh_pb2 import ModelProfile
from motley.protocol.wording import counted, human_bytes

SLICES = 8
"""How many slices an expert is cut in, at most: each is a product of its own, and a cached file."""


@dataclass(frozen=True)
class Offer:
    """A node's offer to hold slices of experts."""

    name: str
    memory: int
    """Bytes left for experts."""
    speed: float
    """Bytes of weights that the node reads per second."""
    zone: str = ""
    """What fails together with the node; empty: not known, which is taken for one place."""


@dataclass(frozen=True)
class Group:
    """Some nodes that are one expert host together."""

    members: tuple[str, ...]
    """Their names. The last one leads the group."""
    slices: tuple[int, ...]
    """How many slices of every expert each member has, at least one; together they make up the expert."""
    experts: int
    """How many experts the group has room for."""


def slice_count(profile: ModelProfile) -> int:
    """How many slices a model's experts are cut in: `SLICES`, or fewer where it has fewer MLP units."""
    return min(SLICES, profile.mlp_units)


def slice_bytes(profile: ModelProfile, slices: int) -> int:
    """Bytes of the widest slice of an expert, with what an engine takes for it.

    Args:
        slices: that the expert is cut in; 1: it is whole.
    """
    units = -(-profile.mlp_units // slices)
    engine_bytes = profile.expert_bytes - profile.expert_weight_bytes
    return -(-profile.expert_weight_bytes * units // profile.mlp_units) + engine_bytes


def form_groups(
    offers: Collection[Offer],
    *,
    slices: int,
    slice_bytes: int,
    experts: int,
    replicas: int,
    near: Collection[str] = (),
    most: int = MAX_RANKS,
) -> list[Group]:
    """Groups with room for all replicas, each of them on different nodes. The same input, in any order, gives the same.

    Args:
        slices: that every expert is cut in, each of `slice_bytes`.
        experts: how many the model has.
        replicas: of every expert.
        near: names of nodes that lead a group rather than others do: those of the trunk.
        most: how many groups there may be.

    Raises:
        PlacementError: there is no room; the message says how much is missing.
    """
    room = {offer.name: offer.memory // slice_bytes for offer in offers}
    usable = sorted((offer for offer in offers if room[offer.name]), key=lambda one: (-room[one.name], one.name))
    by_zone = defaultdict(list)
    for offer in usable:
        by_zone[offer.zone].append(offer)
    apart = [members for _, members in sorted(by_zone.items())]
    for count in range(min(len(usable), most), 0, -1):
        for pools in (apart, [usable]):
            dealt = _deal(pools, room, count)
            groups = [group for members in dealt if (group := _cut(members, room, slices, experts, near))]
            if sum(group.experts for group in groups) >= replicas * experts:
                return groups
    raise PlacementError(_explain(offers, slices, slice_bytes, experts, replicas))


def zones_apart(hosts: Sequence[Collection[str]]) -> list[str]:
    """One name of a zone for every host, so that hosts with different names have no zone in common.

    Args:
        hosts: of every host, the zones of its nodes.
    """
    names = {zone: zone for zones in hosts for zone in zones}
    for zones in hosts:  # those that a host spans count as one
        spanned = {names[zone] for zone in zones}
        names = {zone: min(spanned) if name in spanned else name for zone, name in names.items()}
    return [names[min(zones)] for zones in hosts]


def _deal(pools: Sequence[Sequence[Offer]], room: dict[str, int], count: int) -> list[list[Offer]]:
    """Deal all nodes out to groups. Every pool gets groups by its room, at most one per node; the nodes of a pool that
    gets no group go to the groups of others.

    Args:
        pools: nodes that are close to each other, those with the most room first.
        room: of every node, by name, the slices that it has room for.
        count: how many groups.
    """
    totals = [sum(room[offer.name] for offer in pool) for pool in pools]
    counts = [0] * len(pools)
    for _ in range(count):
        open_pools = [at for at, pool in enumerate(pools) if counts[at] < len(pool)]
        counts[max(open_pools, key=lambda at: totals[at] / (counts[at] + 1))] += 1
    groups: list[list[Offer]] = []
    left: list[Offer] = []
    for pool, number in zip(pools, counts, strict=True):
        own: list[list[Offer]] = [[] for _ in range(number)]
        if own:
            _spread(pool, own, room)
        else:
            left += pool
        groups += own
    _spread(left, groups, room)
    return groups


def _spread(offers: Sequence[Offer], groups: Sequence[list[Offer]], room: dict[str, int]) -> None:
    """Add every node to the group that has the least room by then."""
    for offer in offers:
        min(groups, key=lambda group: sum(room[member.name] for member in group)).append(offer)


def _cut(members: Sequence[Offer], room: dict[str, int], slices: int, most: int, near: Collection[str]) -> Group | None:
    """The slices of a group for as many experts as it can hold, at most `most`; None: it can hold none."""
    rooms = sorted((room[offer.name] for offer in members), reverse=True)
    experts = bisect_left(range(1, most + 1), True, key=lambda held: sum(own // held for own in rooms) < slices)
    if not experts:
        return None
    ordered = sorted(members, key=lambda offer: (-room[offer.name], offer.name))
    reach = accumulate(room[offer.name] // experts for offer in ordered)
    needed = ordered[: next(number for number, so_far in enumerate(reach, 1) if so_far >= slices)]
    counts = dict.fromkeys(needed, 0)
    for _ in range(slices):
        able = [offer for offer in needed if counts[offer] < room[offer.name] // experts]
        counts[min(able, key=lambda offer: ((counts[offer] + 1) / offer.speed, offer.name))] += 1
    taking = sorted(
        (offer for offer in needed if counts[offer]), key=lambda offer: (offer.name in near, offer.speed, offer.name)
    )
    return Group(tuple(offer.name for offer in taking), tuple(counts[offer] for offer in taking), experts)


def _explain(offers: Collection[Offer], slices: int, slice_bytes: int, experts: int, replicas: int) -> str:
    """What is missing so that groups could hold all replicas."""
    needed, there = replicas * experts * slices * slice_bytes, sum(offer.memory for offer in offers)
    whole = sum(offer.memory // slice_bytes for offer in offers) * slice_bytes
    size = f"{experts} experts of {human_bytes(slices * slice_bytes)}, cut in {slices} slices"
    if whole < needed:
        verdict = (
            f"{human_bytes(needed - whole)} are missing ({human_bytes(needed)} needed, {human_bytes(there)} there,"
            f" {human_bytes(whole)} of it in whole slices)"
        )
    else:
        verdict = "the total would do, but not in groups that have no node in common"
    return f"{counted(replicas, 'replica')} of {size}, do not fit on groups of {len(offers)} nodes: {verdict}"
