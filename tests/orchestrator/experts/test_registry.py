"""The way from one placement to another: every expert is served all the time, and no host holds too much."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from motley.orchestrator.experts.checksums import HostedError
from motley.orchestrator.experts.hosts import ExpertHost
from motley.orchestrator.experts.messages import from_message, to_message
from motley.orchestrator.experts.moves import RETIRE_S
from motley.orchestrator.experts.questions import Answer
from motley.orchestrator.experts.recovery import RESTART_S, RESTARTS, may_restart
from motley.orchestrator.experts.registry import (
    HOMELESS_S,
    REBALANCE_S,
    SKEW_ROWS,
    SKEWED,
    UNREACHABLE_S,
    ExpertMap,
)
from motley.orchestrator.planning.placement.terms import ExpertKey, Move, PlacementError
from motley.protocol.mesh_pb2 import ExpertLoad, ExpertReport, HostedExperts, HostReport, ModelProfile, Ready, Starved

SIZE = 10


def digest(key: ExpertKey) -> bytes:
    return hashlib.sha256(repr(key).encode()).digest()


def hosted(keys: Iterable[ExpertKey]) -> HostedExperts:
    """What a host says that has these."""
    message = to_message(keys)
    message.digests.extend(map(digest, from_message(message)))
    return message


def begun(
    capacities: list[int], *, layers: int = 2, experts: int = 4, replicas: int = 1, speeds: list[float] | None = None
) -> tuple[ExpertMap, dict[str, int]]:
    """A map whose hosts are being started with their first experts, and the capacity of every node, in experts."""
    profile = ModelProfile(
        name="mix",
        hidden=8,
        expert_layers=range(layers),
        expert_count=experts,
        experts_per_token=2,
        expert_bytes=SIZE,
    )
    hosts = [
        ExpertHost(1 + number, f"id{number}", f"node{number}", 0, "", 0, SIZE, number, speed)
        for number, speed in enumerate(speeds or [1e3] * len(capacities))
    ]
    room = {host.node_id: capacity for host, capacity in zip(hosts, capacities, strict=True)}
    experts_map = ExpertMap(profile, hosts, replicas, "fp32")
    experts_map.begin(experts_map.first_question(lambda node: SIZE * room[node]).answer().placement)
    return experts_map, room


def wrong(keys: Iterable[ExpertKey]) -> HostedExperts:
    """What a host says whose weights are others."""
    message = hosted(keys)
    message.digests[:] = [bytes(32)] * len(message.digests)
    return message


def made(capacities: list[int], **options: Any) -> tuple[ExpertMap, dict[str, int]]:
    """A map whose hosts are up with their first experts, and the capacity of every node, in experts."""
    experts_map, room = begun(capacities, **options)
    hosts = experts_map.hosts
    for host in hosts:
        host.address = f"{host.node_name}:1"
    experts_map.connected()
    for host in hosts:
        experts_map.on_hosted(host, hosted(host.ordered), 0)
        host.ready = Ready()
    assert experts_map.waiting_for == []
    assert experts_map.advance(0) == ([], None)
    return experts_map, room


def free(experts: ExpertMap, room: dict[str, int]) -> dict[str, int]:
    return {host.node_id: SIZE * (room[host.node_id] - len(host.ordered)) for host in experts.hosts}


def ask(experts: ExpertMap, room: dict[str, int]) -> None:
    """Ask the planner and begin with what it says."""
    experts.adopt(experts.question(free(experts, room).__getitem__).answer())


def test_messages_carry_sets() -> None:
    message = to_message([(3, 1), (0, 2), (3, 0)])
    assert [(own.layer, list(own.indices)) for own in message.sets] == [(0, [2]), (3, [0, 1])]
    assert from_message(message) == [(0, 2), (3, 0), (3, 1)]


def test_a_lost_hosts_experts_are_fetched_elsewhere_and_only_these() -> None:
    experts, room = made([8, 8, 8])
    lost = experts.hosts[1]
    had = set(lost.ordered)
    experts.lose(lost, "unplugged", 1, ended=True, node_lost=True)
    _, placement = experts.advance(1)
    assert placement is not None
    assert (placement.version, list(placement.alive)) == (1, [True, False, True])
    assert from_message(placement.hosts[1]) == []
    assert experts.waiting_for == sorted(had)
    ask(experts, room)
    ordered, placement = experts.advance(1)
    assert placement is None  # nothing has come yet
    assert set().union(*(host.fetching for host in ordered)) == had
    for host in ordered:
        experts.on_hosted(host, hosted(host.ordered), 2)
    _, placement = experts.advance(2)
    assert placement is not None
    assert placement.version == 2
    assert sorted(key for host in placement.hosts for key in from_message(host)) == experts.keys
    assert experts.waiting_for == []
    assert experts.short == ""


def test_replicas_that_find_no_room_are_missed_but_nothing_fails() -> None:
    experts, room = made([8, 8], replicas=2)
    experts.lose(experts.hosts[0], "unplugged", 1, ended=True, node_lost=True)
    experts.advance(1)
    assert experts.waiting_for == []
    ask(experts, room)
    assert not experts.stale
    assert "need 2 different nodes; with room for experts there is 1 (node1), 1 missing" in experts.short


def test_nothing_is_hopeless_while_all_experts_are_served() -> None:
    experts, _ = made([8, 8], replicas=2)
    experts.stay("others were promised the memory", 1)
    assert not experts.is_hopeless(2 + HOMELESS_S)
    for host in experts.hosts:
        experts.lose(host, "unplugged", 1, ended=True, node_lost=True)
    experts.stay("no host is left", 1)
    assert experts.is_hopeless(2 + HOMELESS_S)


def test_no_room_for_any_replica_is_an_error() -> None:
    experts, room = made([4, 4])
    experts.lose(experts.hosts[0], "unplugged", 1, ended=True, node_lost=True)
    with pytest.raises(PlacementError, match="40 bytes are missing"):
        experts.question(free(experts, room).__getitem__).answer()


def test_what_a_host_claims_is_checked() -> None:
    experts, _ = made([8, 8], replicas=2)
    one, other = experts.hosts
    message = hosted(other.ordered)
    message.digests[0] = bytes(32)
    with pytest.raises(HostedError, match=r"node 'node1' \(experts\) has layer 0 expert 0 with checksum 0{12}, node"):
        experts.on_hosted(other, message, 1)
    del message.digests[0]
    with pytest.raises(HostedError, match="8 experts with 7 digests"):
        experts.on_hosted(other, message, 1)
    with pytest.raises(HostedError, match="unknown"):
        experts.on_hosted(one, hosted([(7, 0)]), 1)


def test_what_a_refused_host_has_said_convicts_nobody() -> None:
    experts, _ = begun([8, 8, 8])
    one, other, third = experts.hosts
    first, *more = sorted(other.ordered)
    experts.on_hosted(one, hosted(one.ordered), 1)
    experts.on_hosted(other, wrong([first]), 2)
    with pytest.raises(HostedError, match=r"node 'node1' .* with checksum 0{12}, node 'node0'"):
        experts.on_hosted(other, wrong([first, *more, max(one.ordered)]), 3)
    experts.on_hosted(third, hosted(experts.keys), 4)


def test_what_others_have_confirmed_outlives_who_said_it_first() -> None:
    experts, _ = begun([8, 8, 8])
    one, other, third = experts.hosts
    experts.on_hosted(one, hosted([(0, 0), (0, 1)]), 1)
    experts.on_hosted(other, hosted([(0, 0)]), 2)
    with pytest.raises(HostedError):
        experts.on_hosted(one, wrong([(0, 1)]), 3)
    experts.lose(one, "refused", 3, ended=False)
    with pytest.raises(HostedError, match=r"node 'node2' .*, node 'node1'"):
        experts.on_hosted(third, wrong([(0, 0)]), 4)
    experts.on_hosted(third, wrong([(0, 1)]), 5)  # who had that has contradicted itself


def report(host: int, version: int, **values: object) -> ExpertReport:
    return ExpertReport(version=version, hosts=[HostReport(host=host, **values)], bytes_out=7, bytes_in=8)  # type: ignore[arg-type]


def test_a_host_that_the_trunk_gives_up_is_named_once() -> None:
    experts, _ = made([8, 8])
    assert experts.on_report(0, report(1, 0, rows=5, round_trip_s=0.003), 1) == []
    assert experts.hosts[1].round_trip_s == 0.003
    (found,) = experts.on_report(0, report(1, 0, lost="garbage", given_up=True, stalls_s=[0.2]), 2)
    assert found == (experts.hosts[1], "rank 0 has given it up: garbage")
    experts.lose(*found, 2, ended=False)
    assert experts.on_report(0, report(1, 0, lost="garbage", given_up=True), 3) == []
    assert experts.on_report(0, report(9, 0, lost="who?", given_up=True), 3) == []
    assert list(experts.hosts[1].stalls_s) == [0.2]
    assert experts.traffic == {0: (7, 8)}


@pytest.mark.parametrize(
    "times",
    [
        {"round_trip_s": math.nan},
        {"round_trip_s": math.inf},
        {"round_trip_s": -5.0},
        {"stalls_s": [0.1, math.nan]},
        {"computed_s": -math.inf},
        {"busy_s": 1e300},
        {"wait_s": -1e-9},
    ],
)
def test_times_that_cannot_be_are_left_out(times: dict[str, object]) -> None:
    experts, room = made([8, 8])
    experts.on_report(0, report(1, 0, round_trip_s=0.003), 1)
    assert experts.on_report(0, report(1, 0, **times), 2) == []
    assert experts.hosts[1].round_trip_s == 0.003
    assert not experts.hosts[1].stalls_s
    assert experts.rebalancing(free(experts, room).__getitem__, 1.0).answer().cost_now > 0


def test_a_host_that_comes_back_is_not_blamed_for_its_predecessor() -> None:
    experts, _ = made([8, 8])
    host = experts.hosts[1]
    first = set(host.ordered)
    host.ordered = {min(first)}  # it was told to drop the others since
    experts.lose(host, "killed", 1, ended=True)
    _, gone = experts.advance(1)
    assert gone is not None
    assert not may_restart(experts.hosts, host, ["id1"], 1 + RESTART_S - 0.1)
    assert may_restart(experts.hosts, host, ["id1"], 1 + RESTART_S)
    needed = host.first_bytes
    host.restart(["id1"], [needed], 7)
    assert (host.ordered, host.memory_bytes) == (first, needed)
    host.address, host.ready = "node1:2", Ready()
    experts.on_hosted(host, hosted(first), 8)
    experts.arrived()
    _, back = experts.advance(8)
    assert back is not None
    assert (list(back.alive), list(back.addresses)) == ([True, True], ["node0:1", "node1:2"])
    assert experts.stale  # the planner should know
    assert experts.on_report(0, report(1, gone.version, lost="garbage", given_up=True), 9) == []
    assert len(experts.on_report(0, report(1, back.version, lost="garbage", given_up=True), 9)) == 1


def test_a_link_may_be_made_again_for_a_while() -> None:
    experts, _ = made([8, 8])
    host = experts.hosts[1]
    for now in (10, 12):
        assert experts.on_report(0, report(1, 0, lost="reset"), now) == []
    assert experts.waiting_for == sorted(host.ordered)
    assert experts.advance(12) == ([], None)  # the trunk shall try again
    assert experts.cut_off(10 + UNREACHABLE_S) == []
    assert experts.cut_off(10.1 + UNREACHABLE_S) == [host]
    experts.on_report(0, report(1, 0), 13)
    assert (experts.waiting_for, experts.cut_off(100)) == ([], [])


def test_a_starved_trunk_reaches_none_of_the_hosts_unless_it_knows_them_not_yet() -> None:
    experts, room = made([8, 8])
    host = experts.hosts[1]
    layer, index = min(host.ordered)
    starved = Starved(layer=layer, index=index, version=0)
    experts.on_starved(0, Starved(layer=layer, index=index, version=7), 1)
    assert experts.cut_off(100) == []
    experts.on_starved(0, starved, 1)
    assert experts.waiting_for == sorted(host.ordered)
    assert experts.cut_off(100) == [host]
    experts.lose(host, "unreachable", 100, ended=False)
    assert experts.cut_off(100) == []
    ask(experts, room)
    experts.advance(100)
    experts.on_hosted(experts.hosts[0], hosted(experts.keys), 101)
    assert experts.advance(101)[1] is not None
    experts.on_starved(0, starved, 102)  # it was said before the placement came
    assert experts.cut_off(1000) == []


def test_a_host_is_not_started_again_for_ever() -> None:
    experts, _ = made([8, 8])
    host, now = experts.hosts[1], 0.0
    for _ in range(RESTARTS):
        now += 1000
        experts.lose(host, "killed", now, ended=True)
        assert may_restart(experts.hosts, host, ["id1"], now + 1000)
        host.restart(["id1"], [1000], now)
    experts.lose(host, "killed", now, ended=True)
    assert not may_restart(experts.hosts, host, ["id1"], now + 1e6)
    assert may_restart(experts.hosts, host, ["id1 anew"], now + 1e6)


def test_a_host_that_does_nothing_about_its_orders_hangs() -> None:
    experts, room = made([8, 8, 8])
    experts.lose(experts.hosts[1], "unplugged", 1, ended=True, node_lost=True)
    ask(experts, room)
    experts.advance(5)
    one, _, other = experts.hosts
    assert experts.hung(5 + 100, 100) == []
    assert experts.hung(5 + 101, 100) == [one, other]
    experts.on_hosted(one, hosted(one.ordered), 50)
    assert experts.hung(5 + 101, 100) == [other]


def skew(experts: ExpertMap, rows: int = 10 * SKEW_ROWS) -> None:
    """All rows go to what host 0 has."""
    loads = [
        ExpertLoad(layer=layer, rows=[rows * ((layer, index) in experts.hosts[0].ordered) for index in range(4)])
        for layer in experts.layers
    ]
    experts.on_report(0, ExpertReport(loads=loads), 0)


def test_a_skewed_load_moves_experts_at_most_once_a_minute() -> None:
    experts, room = made([8, 8])
    room_left = free(experts, room).__getitem__
    assert not experts.skewed(REBALANCE_S)  # nothing was counted
    skew(experts)
    assert not experts.skewed(REBALANCE_S - 1)
    assert experts.skewed(REBALANCE_S)
    skew(experts, 20 * SKEW_ROWS)
    assert not experts.skewed(2 * REBALANCE_S - 1)
    answer = experts.rebalancing(room_left, SKEWED).answer()
    assert answer.worthwhile
    assert answer.cost_now > 1.2 * answer.placement.seconds_per_token
    assert 0 < answer.fetches <= 2
    experts.adopt(answer)
    assert len(experts.moves) > 0
    assert not experts.skewed(10 * REBALANCE_S)  # these moves come first


def test_an_even_load_moves_nothing() -> None:
    experts, room = made([8, 8])
    experts.on_report(0, ExpertReport(loads=[ExpertLoad(layer=layer, rows=[SKEW_ROWS] * 4) for layer in (0, 1)]), 0)
    assert experts.skewed(REBALANCE_S)
    answer = experts.rebalancing(free(experts, room).__getitem__, SKEWED).answer()
    assert not answer.worthwhile
    experts.adopt(answer)
    assert experts.moves == []


def test_after_a_loss_balance_can_wait() -> None:
    experts, room = made([8, 8])
    experts.lose(experts.hosts[1], "unplugged", 1, ended=True)
    room_left = free(experts, room).__getitem__
    assert experts.rebalancing(room_left, SKEWED) == experts.question(room_left)


def test_an_answer_about_other_hosts_does_not_concern_us() -> None:
    experts, room = made([8, 8, 8])
    question = experts.question(free(experts, room).__getitem__)
    assert experts.concerns(question)
    experts.lose(experts.hosts[2], "unplugged", 1, ended=True, node_lost=True)
    assert not experts.concerns(question)


def test_what_a_host_will_be_told_to_fetch_is_reserved_before_it_is() -> None:
    """A fetch that waits for a drop on the same host, which waits for a fetch elsewhere."""
    experts, room = made([6, 8], layers=1, experts=8)
    one, other = experts.hosts
    out, (here, there) = min(one.ordered), sorted(other.ordered)[:2]
    more = max(other.ordered)
    moves = [
        Move("fetch", out, "node1"),
        Move("drop", out, "node0"),
        *(Move("fetch", key, "node0") for key in (here, there, more)),
    ]
    question = experts.question(free(experts, room).__getitem__)
    placement = dataclasses.replace(question.answer().placement, moves=tuple(moves))
    answer = Answer(question, placement, 0.0, "")
    assert experts.claims(answer) == [("id0", 2 * SIZE), ("id1", SIZE)]
    experts.adopt(answer)
    assert experts.claims(answer) == [("id0", 0), ("id1", 0)]
    experts.advance(0)
    assert (one.ordered, one.memory_bytes) == (set(one.held), 6 * SIZE)
    experts.on_hosted(other, hosted(other.ordered), 1)
    experts.advance(1)
    experts.advance(1 + RETIRE_S)
    assert (len(one.ordered), one.memory_bytes) == (3, 6 * SIZE)  # it was told to let one go
    experts.on_hosted(one, hosted(one.ordered), 9)
    experts.advance(9)
    assert (len(one.ordered), one.memory_bytes) == (6, 6 * SIZE)


def test_what_is_reserved_for_moves_may_be_planned_with_again() -> None:
    experts, room = made([6, 8], layers=1, experts=8)
    before = experts.question(free(experts, room).__getitem__)
    moves = [Move("fetch", key, "node0") for key in sorted(experts.hosts[1].ordered)[:2]]
    experts.adopt(Answer(before, dataclasses.replace(before.answer().placement, moves=tuple(moves)), 0.0, ""))
    left = {host.node_id: SIZE * room[host.node_id] - host.memory_bytes for host in experts.hosts}
    again = experts.question(left.__getitem__)
    assert [host.memory for host in again.hosts] == [host.memory for host in before.hosts]


@st.composite
def upheavals(draw: st.DrawFn) -> tuple[ExpertMap, dict[str, int], st.DataObject]:
    """A mesh with little room to spare, a skewed load, and maybe a host that is lost."""
    count = draw(st.integers(2, 5))
    layers, replicas = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    fair = -(-layers * 4 * replicas // count)
    capacities = [fair + draw(st.integers(0, 6)) for _ in range(count)]
    speeds = [draw(st.sampled_from([1e3, 2e3, 5e3])) for _ in range(count)]
    try:
        experts, room = made(capacities, layers=layers, replicas=replicas, speeds=speeds)
    except PlacementError:
        experts, room = made([layers * 4] * count, layers=layers, replicas=replicas, speeds=speeds)
    rows = st.lists(st.sampled_from([0, 10**4, 10**6]), min_size=4, max_size=4)
    loads = [ExpertLoad(layer=layer, rows=draw(rows)) for layer in range(layers)]
    experts.on_report(0, ExpertReport(loads=loads), 0)
    return experts, room, draw(st.data())


@given(upheavals())
def test_on_the_way_every_expert_is_served_and_no_host_overflows(
    case: tuple[ExpertMap, dict[str, int], st.DataObject],
) -> None:
    experts, room, data = case
    if len(experts.hosts) > 2 and data.draw(st.booleans()):
        experts.lose(data.draw(st.sampled_from(experts.hosts)), "unplugged", 0, ended=True, node_lost=True)
    if data.draw(st.booleans()):
        number = len(experts.hosts)
        joined = ExpertHost(1 + number, f"id{number}", f"node{number}", 0, "", 0, SIZE, number, 2e3)
        experts.join(joined, 0)
        joined.address, joined.ready = f"node{number}:1", Ready()
        experts.arrived()
        room[joined.node_id] = data.draw(st.integers(1, 12))
    unserved = set(experts.waiting_for)
    try:
        answer = experts.question(free(experts, room).__getitem__, moves=data.draw(st.integers(2, 20))).answer()
    except PlacementError:
        return
    experts.adopt(answer)
    event(f"{min(5, len(experts.moves))} moves or more")
    living = [host for host in experts.hosts if not host.gone]
    reserved = {host.number: host.memory_bytes for host in living}
    assert all(reserved[host.number] <= SIZE * room[host.node_id] for host in living)
    now = 0.0
    while experts.moves or any(not host.settled for host in living):
        assert now < 1000 * RETIRE_S, f"stuck with {experts.moves}"
        experts.advance(now)
        for host in living:
            assert SIZE * len(host.ordered | host.held.keys()) <= host.memory_bytes <= reserved[host.number]
            if data.draw(st.booleans()):  # it has done what it was told, or needs longer
                experts.on_hosted(host, hosted(host.ordered), now)
        assert set(experts.waiting_for) <= unserved
        now += RETIRE_S / 2
    experts.advance(now)
    assert experts.waiting_for == []
    for host in living:
        assert host.ordered == host.serving == set(answer.placement.held[host.node_name])
