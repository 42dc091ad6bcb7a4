"""Groups of nodes for experts that are too large for one."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from motley.orchestrator.planning.experts.groups import Group, Offer, form_groups, slice_bytes, slice_count, zones_apart
from motley.orchestrator.planning.placement.place import place_experts
from motley.orchestrator.planning.placement.terms import Expert, Host, PlacementError
from motley.protocol.mesh_pb2 import ModelProfile

SLICES, SIZE = 8, 100


def offers(*rooms: int, zones: Sequence[str] = (), speeds: Sequence[float] = ()) -> list[Offer]:
    """Nodes a, b, c ... with room for so many slices."""
    return [
        Offer(chr(97 + at), room * SIZE + 7, speeds[at] if speeds else 1.0, zones[at] if zones else "")
        for at, room in enumerate(rooms)
    ]


def formed(nodes: Sequence[Offer], experts: int = 1, replicas: int = 1, near: Sequence[str] = ()) -> list[Group]:
    return form_groups(nodes, slices=SLICES, slice_bytes=SIZE, experts=experts, replicas=replicas, near=near)


def names(groups: Sequence[Group]) -> list[str]:
    return sorted("".join(sorted(group.members)) for group in groups)


def test_groups_are_as_small_as_they_may_be_and_every_replica_has_nodes_of_its_own() -> None:
    groups = formed(offers(5, 4, 3, 5), replicas=2)
    assert names(groups) == ["ab", "cd"]
    assert [(sum(group.slices), group.experts) for group in groups] == [(8, 1), (8, 1)]


def test_a_node_that_is_not_needed_is_in_no_group() -> None:
    (group,) = formed(offers(5, 4, 1))
    assert sorted(group.members) == ["a", "b"]


def test_larger_groups_hold_what_smaller_ones_cannot() -> None:
    """Two of three nodes have room for one expert, all of them for two."""
    (group,) = formed(offers(6, 6, 6), experts=2)
    assert (len(group.members), group.experts) == (3, 2)
    assert max(group.slices) <= 3


def test_a_node_with_room_for_a_whole_expert_is_a_group_of_its_own() -> None:
    assert names(formed(offers(9, 4, 5), replicas=2)) == ["a", "bc"]


def test_slices_follow_speed_within_the_members_room_and_the_trunks_node_leads() -> None:
    (group,) = formed(offers(7, 7, speeds=[1.0, 3.0]))
    assert dict(zip(group.members, group.slices, strict=True)) == {"a": 2, "b": 6}
    assert group.members[-1] == "b", "the faster one leads"
    (group,) = formed(offers(7, 7, speeds=[1.0, 30.0]), near=["a"])
    assert dict(zip(group.members, group.slices, strict=True)) == {"a": 1, "b": 7}
    assert group.members[-1] == "a"


def test_members_are_of_one_zone_where_that_is_possible() -> None:
    zones = ["attic", "cellar", "attic", "cellar"]
    assert names(formed(offers(5, 5, 5, 5, zones=zones), replicas=2)) == ["ac", "bd"]
    assert names(formed(offers(5, 2, 2, 5, zones=zones))) == ["ad"], "neither zone has room for an expert"


def test_what_is_missing_is_told() -> None:
    with pytest.raises(PlacementError, match=r"on groups of 2 nodes: 100 bytes are missing \(800 bytes needed"):
        formed(offers(4, 3))
    with pytest.raises(PlacementError, match=r"the total would do, but not in groups"):
        formed(offers(9, 3, 2, 2), replicas=2)
    with pytest.raises(PlacementError, match="2 replicas of 3 experts of 800 bytes, cut in 8 slices"):
        formed([], experts=3, replicas=2)


def test_zones_that_a_host_spans_count_as_one() -> None:
    assert zones_apart([["a"], ["b"], ["c"]]) == ["a", "b", "c"]
    assert zones_apart([["a", "b"], ["c"], ["b"]]) == ["a", "c", "a"]
    assert zones_apart([["c", "d"], ["a"], ["b", "c"], ["b", "a"]]) == ["a"] * 4


def test_what_a_slice_takes() -> None:
    profile = ModelProfile(mlp_units=20, expert_weight_bytes=2000, expert_bytes=2050)
    assert (slice_count(profile), slice_bytes(profile, 8)) == (8, 350)
    assert slice_bytes(profile, 1) == profile.expert_bytes
    profile.mlp_units = 5
    assert (slice_count(profile), slice_bytes(profile, 5)) == (5, 450)


@st.composite
def meshes(draw: st.DrawFn) -> list[Offer]:
    rooms = draw(st.lists(st.integers(0, 20), min_size=1, max_size=9))
    zones = draw(st.lists(st.sampled_from(["", "attic", "cellar"]), min_size=len(rooms), max_size=len(rooms)))
    speeds = draw(st.lists(st.sampled_from([1.0, 2.0, 10.0]), min_size=len(rooms), max_size=len(rooms)))
    return offers(*rooms, zones=zones, speeds=speeds)


@given(meshes(), st.integers(1, 6), st.integers(1, 3), st.randoms(use_true_random=False))
def test_groups_have_room_and_no_node_in_common(
    nodes: list[Offer], experts: int, replicas: int, shuffler: random.Random
) -> None:
    memory = {node.name: node.memory for node in nodes}
    try:
        groups = formed(nodes, experts, replicas)
    except PlacementError:
        event("refused")
        alone = [min(experts, node.memory // SIZE // SLICES) for node in nodes]
        assert sum(alone) < replicas * experts, "no groups were needed"
        together = max(held for held in range(experts + 1) if held == 0 or fits([*memory.values()], held))
        assert together < experts or replicas > 1, "one group of all would do"
        return
    event(f"{max(len(group.members) for group in groups)} members")
    members = [name for group in groups for name in group.members]
    assert len(set(members)) == len(members)
    for group in groups:
        assert len(group.slices) == len(group.members)
        assert min(group.slices) >= 1
        assert sum(group.slices) == SLICES
        assert all(
            count * SIZE * group.experts <= memory[name]
            for name, count in zip(group.members, group.slices, strict=True)
        )
    # The planner finds a place for every replica on them.
    hosts = [Host(str(at), group.experts * SLICES * SIZE, 1.0) for at, group in enumerate(groups)]
    placed = place_experts([Expert(0, at, SLICES * SIZE, 0.5) for at in range(experts)], hosts, replicas=replicas)
    assert {len(holders) for holders in placed.hosts.values()} == {replicas}
    again = nodes.copy()
    shuffler.shuffle(again)
    assert formed(again, experts, replicas) == groups


def fits(memories: Sequence[int], experts: int) -> bool:
    return sum(memory // SIZE // experts for memory in memories) >= SLICES
