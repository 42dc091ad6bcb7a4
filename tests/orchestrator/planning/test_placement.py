"""Placement of experts: everybody has a host, nobody's memory overflows, the cost is near the least there is, and the
way from one placement to the next is short and safe."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from motley.orchestrator.planning.placement.balance import DEALT, STEPS
from motley.orchestrator.planning.placement.board import Board
from motley.orchestrator.planning.placement.place import place_experts
from motley.orchestrator.planning.placement.replicas import SPARE_COST
from motley.orchestrator.planning.placement.terms import (
    Expert,
    ExpertKey,
    Host,
    Placement,
    PlacementError,
    PlacementInputError,
)

GB = 10**9
ROW = 100


def layers_of(layers: int, per_layer: int, size: int = 100, load: float = 1.0) -> list[Expert]:
    return [Expert(layer, index, size, load) for layer in range(layers) for index in range(per_layer)]


def answer(expert: Expert, host: Host, row_bytes: int = ROW) -> float:
    """Seconds until a row is back, by definition."""
    return host.latency + row_bytes / host.bandwidth + expert.bytes / host.speed


def seconds_of(experts: Sequence[Expert], hosts: Sequence[Host], placed: Mapping[ExpertKey, Sequence[str]]) -> Counter:
    """How long every host is occupied per token, by definition."""
    named = {host.name: host for host in hosts}
    seconds: Counter[str] = Counter({host.name: 0.0 for host in hosts})
    for expert in experts:
        own = placed[expert.key]
        together = sum(1 / answer(expert, named[name]) for name in own)
        for name in own:
            seconds[name] += expert.load / together
    return seconds


def least_cost(experts: Sequence[Expert], hosts: Sequence[Host], replicas: int, per_zone: int) -> float:
    """The cost of the best of all placements, at most `per_zone` replicas of an expert in one zone; inf: none."""
    choices = [
        chosen
        for chosen in combinations(range(len(hosts)), replicas)
        if max(Counter(hosts[host].zone for host in chosen).values()) <= per_zone
    ]
    best = math.inf
    free = [host.memory for host in hosts]
    seconds = [0.0] * len(hosts)

    def descend(number: int) -> None:
        nonlocal best
        if max(seconds) >= best:
            return
        if number == len(experts):
            best = max(seconds)
            return
        expert = experts[number]
        for chosen in choices:
            if all(free[host] >= expert.bytes for host in chosen):
                before = [seconds[host] for host in chosen]
                share = expert.load / sum(1 / answer(expert, hosts[host]) for host in chosen)
                for host in chosen:
                    free[host] -= expert.bytes
                    seconds[host] += share
                descend(number + 1)
                for host, old in zip(chosen, before, strict=True):
                    free[host] += expert.bytes
                    seconds[host] = old

    descend(0)
    return best


def assert_sound(
    placement: Placement, experts: Sequence[Expert], hosts: Sequence[Host], replicas: int, most: int
) -> None:
    """Everything that holds for every placement."""
    named = {host.name: host for host in hosts}
    assert set(placement.hosts) == {expert.key for expert in experts}
    held: Counter[str] = Counter(dict.fromkeys(named, 0))
    for expert in experts:
        own = placement.hosts[expert.key]
        assert replicas <= len(own) <= most
        assert len(set(own)) == len(own)
        answers = [answer(expert, named[name]) for name in own]
        assert all(soon <= late * (1 + 1e-9) for soon, late in pairwise(answers))
        held.update(dict.fromkeys(own, expert.bytes))
    assert placement.bytes == held
    assert all(placement.bytes[host.name] <= host.memory for host in hosts)
    assert math.fsum(placement.load.values()) == pytest.approx(math.fsum(expert.load for expert in experts))
    expected = seconds_of(experts, hosts, placement.hosts)
    assert placement.seconds == pytest.approx(dict(expected), abs=1e-9)
    assert placement.seconds_per_token == max(placement.seconds.values())


def assert_safe(
    placement: Placement,
    experts: Sequence[Expert],
    hosts: Sequence[Host],
    previous: Mapping[str, Collection[ExpertKey]],
) -> None:
    """The moves lead from the previous placement to this one; nobody overflows or is left without a host meanwhile."""
    memory = {host.name: host.memory for host in hosts}
    size = {expert.key: expert.bytes for expert in experts}
    held = {name: set(previous.get(name, ())) for name in memory}
    serving = size.keys() & set().union(*held.values())
    for move in placement.moves:
        if move.action == "fetch":
            assert move.expert not in held[move.host]
            held[move.host].add(move.expert)
            assert sum(size.get(key, 0) for key in held[move.host]) <= memory[move.host]
        else:
            held[move.host].remove(move.expert)
        assert serving <= set().union(*held.values())
    assert held == {name: set(keys) for name, keys in placement.held.items()}


def fetches(placement: Placement) -> int:
    return sum(move.action == "fetch" for move in placement.moves)


loads = st.sampled_from([0.0, 0.5, 1.0, 2.0]) | st.floats(0, 4)
speeds = st.sampled_from([100.0, 200.0, 1000.0]) | st.floats(50, 2000)


@st.composite
def models(draw: st.DrawFn, most: int = 12, same_size: bool = False) -> list[Expert]:
    """1 to 3 layers, of 1 to `most` experts in all."""
    layers = draw(st.integers(1, 3))
    per_layer = draw(st.integers(1, most // layers))
    sizes = st.just(100) if same_size else st.sampled_from([60, 100, 140])
    return [replace(expert, bytes=draw(sizes), load=draw(loads)) for expert in layers_of(layers, per_layer)]


@st.composite
def meshes(draw: st.DrawFn, experts: Sequence[Expert], most: int = 6, least: float = 0.0) -> list[Host]:
    """1 to `most` hosts in up to three zones; each has `least` to 1.2 times the memory of all experts."""
    whole = sum(expert.bytes for expert in experts)
    return [
        Host(
            f"node{number}",
            memory=math.ceil(whole * draw(st.floats(least, 1.2))),
            speed=draw(speeds),
            zone=draw(st.sampled_from("abc")),
            latency=draw(st.sampled_from([0.0, 0.001, 0.1])),
            bandwidth=draw(st.sampled_from([math.inf, 1e4])),
        )
        for number in range(draw(st.integers(1, most)))
    ]


@given(st.data())
def test_any_placement_is_sound(data: st.DataObject) -> None:
    experts = data.draw(models())
    hosts = data.draw(meshes(experts))
    replicas = data.draw(st.integers(1, 3))
    most = data.draw(st.integers(replicas, 5))
    try:
        placement = place_experts(experts, hosts, replicas=replicas, most=most, row_bytes=ROW)
    except PlacementError:
        event("does not fit")
        return
    assert_sound(placement, experts, hosts, replicas, most)
    assert_safe(placement, experts, hosts, {})


@given(st.data())
def test_with_experts_of_one_size_a_placement_is_found_whenever_there_is_one(data: st.DataObject) -> None:
    """Gale and Ryser: whole experts fit if every host takes its slots, but no more than one of each."""
    experts = data.draw(models(same_size=True))
    hosts = data.draw(meshes(experts))
    replicas = data.draw(st.integers(1, 4))
    slots = sum(min(host.memory // 100, len(experts)) for host in hosts)
    possible = len(hosts) >= replicas and slots >= replicas * len(experts)
    try:
        place_experts(experts, hosts, replicas=replicas)
    except PlacementError:
        assert not possible
    else:
        assert possible


@given(st.data())
def test_the_cost_is_within_5_percent_of_an_exhaustive_search(data: st.DataObject) -> None:
    experts = data.draw(models(most=6))
    hosts = data.draw(meshes(experts, most=4))
    replicas = data.draw(st.integers(1, 2))
    zones = len({host.zone for host in hosts if host.memory >= min(expert.bytes for expert in experts)})
    per_zone = math.ceil(replicas / max(1, zones))
    least = least_cost(experts, hosts, replicas, per_zone) if len(hosts) >= replicas else math.inf
    try:
        placement = place_experts(experts, hosts, replicas=replicas, row_bytes=ROW)
    except PlacementError:
        assert least == math.inf or len({expert.bytes for expert in experts}) > 1
        return
    if least < math.inf and spread(placement, hosts, per_zone):
        assert placement.seconds_per_token <= 1.05 * least + 1e-12


def spread(placement: Placement, hosts: Sequence[Host], per_zone: int) -> bool:
    zone = {host.name: host.zone for host in hosts}
    return all(max(Counter(zone[name] for name in own).values()) <= per_zone for own in placement.hosts.values())


@given(st.data())
def test_replicas_are_in_different_zones_whenever_all_can_be(data: st.DataObject) -> None:
    """Zones are to an expert what hosts are, if it has no more replicas than there are zones: Gale and Ryser again."""
    experts = data.draw(models(same_size=True))
    hosts = data.draw(meshes(experts, most=8))
    replicas = data.draw(st.integers(2, 3))
    slots: Counter[str] = Counter()
    for host in hosts:
        slots[host.zone] += host.memory // 100
    usable = sum(min(count, len(experts)) for count in slots.values())
    if sum(count > 0 for count in slots.values()) < replicas or usable < replicas * len(experts):
        event("cannot be spread")
        return
    placement = place_experts(experts, hosts, replicas=replicas, most=data.draw(st.integers(replicas, 4)))
    zone = {host.name: host.zone for host in hosts}
    assert all(len({zone[name] for name in own}) >= replicas for own in placement.hosts.values())


@given(st.data())
def test_the_order_of_the_input_does_not_matter(data: st.DataObject) -> None:
    experts = data.draw(models())
    hosts = data.draw(meshes(experts, least=1.0))
    previous = place_experts(experts, hosts, most=2).held
    arguments = {"most": 3, "row_bytes": ROW}
    again = {
        "previous": {name: tuple(reversed(previous[name])) for name in data.draw(st.permutations(list(previous)))},
        **arguments,
    }
    shuffled = data.draw(st.permutations(experts)), data.draw(st.permutations(hosts))
    assert place_experts(experts, hosts, **arguments) == place_experts(*shuffled, **arguments)
    assert place_experts(experts, hosts, previous=previous, **arguments) == place_experts(*shuffled, **again)


@given(st.data())
def test_the_way_from_any_placement_to_the_next_is_safe(data: st.DataObject) -> None:
    """Nodes come, go, and lose memory; loads, the model and the replicas asked for change."""
    experts = data.draw(models())
    hosts = data.draw(meshes(experts, least=0.3))
    try:
        previous = place_experts(experts, hosts, most=data.draw(st.integers(1, 4))).held
    except PlacementError:
        return
    kept = [replace(host, memory=int(host.memory * data.draw(st.sampled_from([1, 1, 0.6])))) for host in hosts]
    kept = kept[data.draw(st.integers(0, 1)) :]
    joined = [Host(f"new{number}", 400, 500.0, "d") for number in range(data.draw(st.integers(0, 2)))]
    now = [replace(expert, load=data.draw(loads)) for expert in experts[: data.draw(st.integers(1, len(experts)))]]
    replicas, moves = data.draw(st.integers(1, 2)), data.draw(st.none() | st.integers(0, 30))
    most = data.draw(st.integers(replicas, 4))
    try:
        placement = place_experts(
            now, kept + joined, replicas=replicas, most=most, row_bytes=ROW, previous=previous, moves=moves
        )
    except PlacementError:
        event("does not fit any more")
        return
    assert_sound(placement, now, kept + joined, replicas, most)
    assert_safe(placement, now, kept + joined, previous)


@given(st.data())
def test_when_a_node_leaves_only_what_it_held_is_fetched_and_nothing_else_moves(data: st.DataObject) -> None:
    experts = data.draw(models())
    hosts = data.draw(meshes(experts, least=1.0))
    replicas = data.draw(st.integers(1, 3))
    most = data.draw(st.integers(replicas, 4))
    if len(hosts) <= replicas:
        return
    before = place_experts(experts, hosts, replicas=replicas, most=most, row_bytes=ROW)
    gone = data.draw(st.sampled_from(hosts)).name
    left = [host for host in hosts if host.name != gone]
    after = place_experts(experts, left, replicas=replicas, most=most, row_bytes=ROW, previous=before.held)
    held = sum(gone in own for own in before.hosts.values())
    assert fetches(after) <= held
    if most == replicas:
        assert all(set(own) - {gone} <= set(after.hosts[key]) for key, own in before.hosts.items())


@given(st.data())
def test_when_a_node_joins_no_more_than_its_fair_share_moves_and_the_cost_does_not_rise(data: st.DataObject) -> None:
    experts = data.draw(models())
    hosts = [replace(host, latency=0.0, bandwidth=math.inf) for host in data.draw(meshes(experts, least=1.0))]
    replicas = data.draw(st.integers(1, min(2, len(hosts))))
    before = place_experts(experts, hosts, replicas=replicas)
    joined = Host("new", 10_000, data.draw(speeds), data.draw(st.sampled_from("abcd")))
    after = place_experts(experts, [*hosts, joined], replicas=replicas, previous=before.held)
    share = joined.speed / (joined.speed + sum(host.speed for host in hosts))
    assert fetches(after) <= replicas * len(experts) * share + 1
    assert after.seconds_per_token <= before.seconds_per_token * (1 + 1e-9)


@given(st.data())
def test_nothing_moves_if_nothing_changed(data: st.DataObject) -> None:
    experts = data.draw(models())
    hosts = data.draw(meshes(experts, least=1.0))
    before = place_experts(experts, hosts, most=2)
    after = place_experts(experts, hosts, most=2, previous=before.held)
    assert after.hosts == before.hosts
    assert after.moves == ()


@given(st.data())
def test_spare_replicas_cost_little(data: st.DataObject) -> None:
    """Even where the memory to spare is on a slow node."""
    experts = data.draw(models())
    hosts = data.draw(meshes(experts, least=1.0))
    asked = place_experts(experts, hosts, row_bytes=ROW)
    spare = place_experts(experts, hosts, most=4, row_bytes=ROW)
    assert spare.seconds_per_token <= SPARE_COST * asked.seconds_per_token * (1 + 1e-9)


def test_a_joining_node_takes_its_part_of_the_work() -> None:
    experts = layers_of(8, 16, load=2 / 16)
    hosts = [Host(f"node{number}", 10_000, 1000.0) for number in range(4)]
    before = place_experts(experts, hosts)
    after = place_experts(experts, [*hosts, Host("new", 10_000, 1000.0)], previous=before.held)
    assert before.seconds_per_token == pytest.approx(32 * 0.0125)
    assert after.seconds_per_token == pytest.approx(26 * 0.0125)
    assert fetches(after) <= 26
    assert {move.host for move in after.moves if move.action == "fetch"} == {"new"}


def test_measured_loads_are_balanced_with_as_many_moves_as_are_allowed() -> None:
    draw = random.Random(5)
    hosts = [Host(f"node{number}", 10_000, 1000.0 * (1 + number)) for number in range(4)]
    before = place_experts(layers_of(4, 16), hosts)
    skewed = [replace(expert, load=draw.lognormvariate(0, 1)) for expert in layers_of(4, 16)]
    after = [place_experts(skewed, hosts, previous=before.held, moves=allowed) for allowed in (0, 2, 8, 1000)]
    assert all(fetches(placement) <= allowed for placement, allowed in zip(after, (0, 2, 8, 1000), strict=True))
    assert after[0].hosts == before.hosts
    assert after[0].seconds_per_token > after[1].seconds_per_token > after[2].seconds_per_token
    assert after[3].seconds_per_token <= 1.02 * place_experts(skewed, hosts).seconds_per_token


def test_load_follows_speed() -> None:
    hosts = [Host(f"node{number}", 100_000, 1000.0 * (1 + number)) for number in range(4)]
    placement = place_experts(layers_of(16, 32, load=4 / 32), hosts)
    whole = math.fsum(placement.load.values())
    assert [placement.load[host.name] / whole for host in hosts] == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.003)


@pytest.mark.parametrize("replicas", [1, 2])
def test_every_layer_is_dealt_out_evenly_even_where_memory_binds(replicas: int) -> None:
    """A token waits for the slowest host of every layer: the fast node must not be full of the first layers."""
    fast = Host("fast", 32 * 4 * 100, 10_000.0)
    hosts = [fast, *(Host(f"node{number}", 100_000, 1000.0) for number in range(4))]
    placement = place_experts(layers_of(32, 16), hosts, replicas=replicas)
    on_fast = Counter(layer for (layer, _), own in placement.hosts.items() if "fast" in own)
    assert [on_fast[layer] for layer in range(32)] == [4] * 32


def test_the_busiest_experts_are_on_the_fast_and_near_host() -> None:
    experts = [Expert(0, index, 100, 8.0 if index < 2 else 1.0) for index in range(8)]
    hosts = [
        Host("near", 200, 1000.0),
        Host("far", 800, 1000.0, latency=0.3),
        Host("slow", 800, 300.0),
    ]
    placement = place_experts(experts, hosts)
    assert placement.hosts[0, 0] == placement.hosts[0, 1] == ("near",)


def test_spare_memory_goes_to_the_experts_with_the_highest_load_per_replica() -> None:
    experts = [Expert(0, index, 100, load) for index, load in enumerate([9.0, 4.0, 1.0, 1.0])]
    hosts = [Host(f"node{number}", 200, 1000.0) for number in range(4)]
    placement = place_experts(experts, hosts, most=4)
    assert [len(placement.hosts[expert.key]) for expert in experts] == [4, 2, 1, 1]
    assert [len(own) for own in place_experts(experts, hosts, most=2).hosts.values()] == [2, 2, 2, 2]


def test_a_slow_node_with_much_memory_is_not_made_the_bottleneck() -> None:
    hosts = [Host("one", 400, 1000.0), Host("two", 400, 1000.0), Host("store", 10**6, 50.0)]
    placement = place_experts(layers_of(1, 8), hosts, most=3)
    assert placement.seconds_per_token <= SPARE_COST * 0.4


def test_room_is_made_by_moving_others_out_of_the_way() -> None:
    """The lost expert may only come to a host that is full, and an expert there to the one that has room."""
    previous = {"a": [(0, 0)], "b": [(0, 1), (0, 2)], "c": [(0, 1), (0, 2)], "gone": [(0, 0)]}
    hosts = [Host("a", 300, 100.0), Host("b", 200, 100.0), Host("c", 200, 100.0)]
    placement = place_experts(layers_of(1, 3), hosts, replicas=2, previous=previous)
    assert_safe(placement, layers_of(1, 3), hosts, previous)
    assert fetches(placement) == 2


def test_work_at_full_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 layers of 128 experts on 64 nodes take well under a second; here by what is done, not by the clock."""
    changes = 0
    assign = Board.assign

    def counted(board: Board, expert: int, holders: Sequence[int]) -> None:
        nonlocal changes
        changes += 1
        assign(board, expert, holders)

    monkeypatch.setattr(Board, "assign", counted)
    draw = random.Random(1)
    experts = [replace(expert, load=8 / 128 * draw.lognormvariate(0, 0.5)) for expert in layers_of(64, 128, 10_000_000)]
    hosts = [
        Host(f"node{number}", int(3 * GB * draw.uniform(0.9, 2)), draw.choice([1, 2, 4]) * 1e10, f"zone{number % 4}")
        for number in range(64)
    ]
    placement = place_experts(experts, hosts, replicas=2)
    assert_sound(placement, experts, hosts, 2, 2)
    assert spread(placement, hosts, 1)
    assert changes <= 2 * len(experts) + STEPS * DEALT
    assert placement.seconds_per_token <= 1.02 * sum(placement.seconds.values()) / len(hosts)


def test_too_few_nodes_are_named() -> None:
    with pytest.raises(PlacementError, match=r"3 different nodes; with room for experts there are 2 \(a, b\), 1 m"):
        place_experts(layers_of(1, 2), [Host("a", GB, 1.0), Host("b", GB, 1.0)], replicas=3)
    with pytest.raises(PlacementError, match="1 different node; with room for experts there is none, 1 missing"):
        place_experts(layers_of(1, 2), [])


def test_too_little_memory_is_named() -> None:
    hosts = [Host("a", 5 * GB, 1.0), Host("b", 100 * GB, 1.0)]
    with pytest.raises(PlacementError) as caught:
        place_experts(layers_of(2, 4, GB), hosts, replicas=2)
    message = str(caught.value)
    assert "2 replicas of 8 experts do not fit on 2 nodes: 3.00 GB are missing (16.00 GB needed, 13.00 GB" in message
    assert "Without all replicas: layer " in message


def test_an_expert_that_no_node_can_hold_is_named() -> None:
    experts = [Expert(0, 0, 1 * GB, 1.0), Expert(0, 1, 3 * GB, 1.0)]
    hosts = [Host("a", 2 * GB, 1.0), Host("b", 2 * GB, 1.0)]
    with pytest.raises(PlacementError) as caught:
        place_experts(experts, hosts)
    assert "layer 0 expert 1 (3.00 GB) fits on 0 of 2 nodes (the largest has 2.00 GB): 1 node missing" in str(
        caught.value
    )


def test_memory_that_would_do_but_not_in_whole_experts_is_explained() -> None:
    hosts = [Host(f"node{number}", 3 * GB // 2, 1.0) for number in range(2)]
    with pytest.raises(PlacementError, match=r"not in whole experts: .* free on one is 500\.00 MB: 500\.00 MB missing"):
        place_experts(layers_of(1, 3, GB), hosts)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Expert(0, 0, -1, 1.0), "has -1 bytes"),
        (lambda: Expert(0, 0, 1, -1.0), r"load -1\.0"),
        (lambda: Expert(0, 0, 1, math.nan), "load nan"),
        (lambda: Expert(-1, 0, 1, 1.0), "layer and index are 0 or more"),
        (lambda: Host("a", -1, 1.0), "a: memory -1 is negative"),
        (lambda: Host("a", 1, 0.0), r"a: speed 0\.0"),
        (lambda: Host("a", 1, math.nan), "a: speed nan"),
        (lambda: Host("a", 1, 1.0, latency=math.nan), "a: latency nan"),
        (lambda: Host("a", 1, 1.0, bandwidth=math.nan), "a: bandwidth nan"),
        (lambda: Host("", 1, 1.0), "no name"),
        (lambda: place_experts([], [Host("a", 1, 1.0)]), "no experts"),
        (lambda: place_experts(layers_of(1, 1) * 2, [Host("a", 1, 1.0)]), "layer 0 expert 0 is there twice"),
        (lambda: place_experts(layers_of(1, 1), [Host("a", 1, 1.0)] * 2), "host a is there twice"),
        (lambda: place_experts(layers_of(1, 1), [Host("a", 1, 1.0)], replicas=0), "0 replicas asked for"),
        (lambda: place_experts(layers_of(1, 1), [Host("a", 1, 1.0)], replicas=2, most=1), "at most 1 replicas"),
        (lambda: place_experts(layers_of(1, 1), [Host("a", 1, 1.0)], row_bytes=-1), "row_bytes -1"),
        (lambda: place_experts(layers_of(1, 1), [Host("a", 1, 1.0)], previous={}, moves=-1), "moves -1"),
        (lambda: place_experts(layers_of(1, 1), [Host("a", 1, 1.0)], moves=1), "from a previous placement"),
    ],
)
def test_what_cannot_be_is_refused(make: object, message: str) -> None:
    with pytest.raises(PlacementInputError, match=message):
        make()  # type: ignore[operator]
