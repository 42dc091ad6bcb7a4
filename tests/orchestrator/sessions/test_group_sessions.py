"""The life of a session whose expert hosts are groups of nodes, event by event."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from motley.orchestrator.api.mesh.sessions import session_json
from motley.orchestrator.experts.hosts import ExpertHost, Member
from motley.orchestrator.experts.messages import from_message, to_message
from motley.orchestrator.experts.moves import RETIRE_S
from motley.orchestrator.experts.recovery import RESTART_S, RESTARTS, bound_nodes, gave_up, may_restart
from motley.orchestrator.experts.registry import HOMELESS_S, ExpertMap
from motley.orchestrator.planning.caches import Caches
from motley.orchestrator.planning.cutting.shares import Candidate, plan_shares, trunk_profile
from motley.orchestrator.planning.placement.terms import PlacementError
from motley.orchestrator.planning.setup import Setup
from motley.orchestrator.session_request import SessionRequest
from motley.orchestrator.sessions.assignments import model_spec
from motley.orchestrator.sessions.facts import State
from motley.orchestrator.sessions.session import Command, Session
from motley.orchestrator.sessions.table import SessionTable
from motley.orchestrator.workers import Rank, Worker
from motley.protocol import MAX_RANKS
from motley.protocol.mesh_pb2 import Empty, Failure, HostedExperts, ModelProfile, Ready
from tests.orchestrator.sessions.test_expert_sessions import TRUNK, event, experts_of, kinds

SLICE = 100
"""Bytes."""
FIXED = 8_000
EVERYONE = {0: TRUNK, 1: "laptop", 2: "box", MAX_RANKS: "pc", MAX_RANKS + 1: "nas"}
"""Of every worker, its node, whose id is its name."""


def group(number: int, member: str, leader: str, slices: int, first: int) -> ExpertHost:
    """A host of two nodes: `slices` of 8 on the one that does not lead."""
    host = ExpertHost(
        1 + number, leader, leader, 10**6, "", FIXED, SLICE * (8 - slices), number, 1e6, 700, slices=range(slices, 8)
    )
    host.others.append(Member(first, member, member, 10**6, "", FIXED, SLICE * slices, host, slices=range(slices)))
    return host


@pytest.fixture
def session(moe: ModelProfile) -> Session:
    """In state starting: 32 experts, two replicas of each, on the groups pc+laptop and nas+box."""
    return begun(moe, 2)


def begun(moe: ModelProfile, replicas: int) -> Session:
    plans = plan_shares([trunk_profile(moe)], [Candidate(TRUNK, 1.0, 10**9)], 100)
    hosts = [group(0, "pc", "laptop", 3, MAX_RANKS), group(1, "nas", "box", 5, MAX_RANKS + 1)]
    experts = ExpertMap(moe, hosts, replicas, "fp32")
    experts.begin(experts.first_question(lambda _: 40 * 5 * SLICE).answer().placement)
    session = Session("s", SessionRequest("mix", experts="parallel", replicas=replicas), "mix", created=0)
    ranks = [Rank(0, TRUNK, TRUNK, 10**9, plans[0], Setup("onnxruntime", "stored", on_gpu=False))]
    commands = session.assign(model_spec(session.request, "stored"), moe, ranks, Caches(100, 100), 0, experts)
    assert kinds(commands) == [(node, index, "assign") for index, node in EVERYONE.items()]
    for _, command in commands:
        order = command.assign
        assert (order.size, len(order.hosts), order.expert_slices) == (1, 2, 8)
        assert order.HasField("group") == (command.rank > 0)
        assert (order.WhichOneof("links") is None) == (command.rank >= MAX_RANKS), "members know the group only"
    first, second = (command.assign.group for _, command in commands[1:3])
    assert (first.host, first.member, list(first.slices), list(first.ranks)) == (0, 1, [3, 5], [MAX_RANKS, 1])
    assert (second.host, second.member, list(second.slices), list(second.ranks)) == (1, 1, [5, 3], [MAX_RANKS + 1, 2])
    assert commands[3][1].assign.group.member == 0
    assert commands[3][1].assign.group.secret == first.secret != second.secret
    assert commands[3][1].assign.group.tls.certificate != first.tls.certificate
    return session


def hosted(worker: Any, wanted: HostedExperts) -> HostedExperts:
    """What a worker says that has its slices of these."""
    digests = [
        hashlib.sha256(repr((key, number)).encode()).digest()
        for key in from_message(wanted)
        for number in worker.slices
    ]
    return HostedExperts(sets=wanted.sets, digests=digests)


def workers(session: Session) -> list[Any]:
    return [worker for worker in session.workers if not isinstance(worker, Rank)]


def listen(session: Session, who: list[Worker], now: float = 1) -> list[Command]:
    said: list[Command] = []
    for worker in who:
        said += session.on_event(worker.node_id, event(worker.index, listening=f"{worker.node_name}:1"), now)
    return said


def fill(session: Session, who: list[Any], now: float = 2) -> list[Command]:
    """They hold what their hosts were ordered, and are ready."""
    said: list[Command] = []
    for worker in who:
        ordered = worker.host.ordered
        said += session.on_event(worker.node_id, event(worker.index, hosted=hosted(worker, to_message(ordered))), now)
        said += session.on_event(worker.node_id, event(worker.index, ready=Ready()), now)
    return said


def serve(session: Session) -> Session:
    commands = listen(session, list(session.workers))
    assert kinds(commands) == [(node, index, "peers") for index, node in EVERYONE.items()]
    for _, command in commands:
        assert list(command.peers.addresses) == ["trunk:1", "laptop:1", "box:1"]
    told = {command.rank: list(command.peers.group) for _, command in commands}
    assert told[1] == told[MAX_RANKS] == ["pc:1", "laptop:1"]
    assert told[0] == []
    fill(session, workers(session))
    assert session.state is not State.READY
    session.on_event(TRUNK, event(0, ready=Ready()), 2)
    assert session.state is State.READY
    assert session.waiting_for == []
    return session


def test_a_group_is_up_when_all_are(session: Session) -> None:
    listen(session, list(session.workers))
    session.on_event(TRUNK, event(0, ready=Ready()), 2)
    *others, last = workers(session)
    fill(session, others)
    assert session.state is not State.READY
    assert [host.state for host in experts_of(session).hosts] == ["ready", "loading"]
    assert experts_of(session).hosts[1].serving == set()
    fill(session, [last])
    assert session.state is State.READY


def test_every_node_is_reserved_its_part(session: Session) -> None:
    table = SessionTable()
    table.add(session)
    assert {name: table.reserved(name) for name in ("pc", "laptop", "nas", "box")} == {
        "pc": FIXED + 32 * 3 * SLICE,
        "laptop": FIXED + 32 * 5 * SLICE,
        "nas": FIXED + 32 * 5 * SLICE,
        "box": FIXED + 32 * 3 * SLICE,
    }


@pytest.mark.parametrize("lost", ["pc", "laptop"])
def test_a_group_is_lost_with_any_of_its_nodes(session: Session, lost: str) -> None:
    serve(session)
    commands = session.on_node_lost(lost, "unplugged", 10)
    ((other, index),) = {("pc", MAX_RANKS), ("laptop", 1)} - {(lost, MAX_RANKS if lost == "pc" else 1)}
    assert kinds(commands) == [(other, index, "release"), (TRUNK, 0, "placement")]
    assert list(commands[-1][1].placement.alive) == [False, True]
    host = experts_of(session).hosts[0]
    assert host.lost == f"node {lost!r} is lost: unplugged"
    assert (host.state, session.waiting_for) == ("gone", [])
    assert not may_restart(experts_of(session).hosts, host, ["pc", "laptop"], 1000)
    assert session.on_event(other, event(index, released=Empty()), 11) == []
    assert session.state is State.READY


def test_what_a_lost_group_had_is_fetched_by_all_of_another(moe: ModelProfile) -> None:
    session = serve(begun(moe, 1))
    lost, other = experts_of(session).hosts
    had = set(lost.ordered)
    session.on_node_lost("pc", "unplugged", 10)
    assert len(session.waiting_for) == len(had) == 16
    question = experts_of(session).question(lambda _: 16 * 5 * SLICE)
    commands = session.on_answer(question, question.answer(), 11)
    assert kinds(commands) == [("nas", MAX_RANKS + 1, "host"), ("box", 2, "host")]
    assert {frozenset(from_message(command.host)) for _, command in commands} == {frozenset(other.ordered)}
    assert len(other.ordered) == 32
    assert fill(session, [other.others[0]], 12) == []
    ((_, told),) = fill(session, [other], 13)
    assert len(from_message(told.placement.hosts[1])) == 32
    assert session.waiting_for == []


def test_a_member_without_room_keeps_its_group_from_more(moe: ModelProfile) -> None:
    session = serve(begun(moe, 1))
    session.on_node_lost("pc", "unplugged", 10)
    rooms = {"nas": 15 * 5 * SLICE + SLICE, "box": 10**9}
    with pytest.raises(PlacementError, match="missing"):
        experts_of(session).question(rooms.__getitem__).answer()


def test_without_another_replica_the_reason_is_told(session: Session) -> None:
    serve(session)
    session.on_node_lost("nas", "unplugged", 10)
    session.on_node_lost("pc", "on fire", 11)
    question = experts_of(session).question(lambda _: 0)
    with pytest.raises(PlacementError, match="different nodes") as refusal:
        question.answer()
    session.on_answer(question, refusal.value, 12)
    assert session.state is State.READY, "a node may join"
    session.on_time(13 + HOMELESS_S)
    assert session.failure is not None
    assert session.failure.code == "insufficient_memory"
    assert "nodes 'pc' and 'laptop' (experts): node 'pc' is lost: on fire" in session.failure.message
    assert "nodes 'nas' and 'box' (experts): node 'nas' is lost: unplugged" in session.failure.message


def test_who_is_to_blame_in_a_group_has_its_say(session: Session) -> None:
    blamed = Failure(code="peer_lost", message="rank 0 is gone", lost_rank=MAX_RANKS + 1)
    session.on_event("laptop", event(1, failed=blamed), 10)
    told = session_json(session)
    assert (told["state"], told["explained"]) == ("failed", False)
    session.on_event("pc", event(MAX_RANKS, failed=Failure(code="load_failed", message="no such file")), 10)
    told = session_json(session)
    assert (told["explained"], told["failure"]["code"]) == (True, "load_failed")


def test_a_group_whose_worker_has_died_begins_anew_together(session: Session) -> None:
    serve(session)
    host = experts_of(session).hosts[0]
    commands = session.on_event("pc", event(MAX_RANKS, failed=Failure(code="worker_died", message="killed")), 10)
    assert kinds(commands) == [("laptop", 1, "release"), (TRUNK, 0, "placement")]
    assert "node 'pc' of nodes 'pc' and 'laptop'" in host.lost or "killed" in host.lost
    assert not may_restart(experts_of(session).hosts, host, ["pc", "laptop"], 1000), "the leader has not ended"
    blamed = Failure(code="peer_lost", message="rank 0 is gone", lost_rank=MAX_RANKS + 1)
    session.on_event("laptop", event(1, failed=blamed), 10)
    assert may_restart(experts_of(session).hosts, host, ["pc", "laptop"], 10 + RESTART_S)
    again = session.restart(host, ["pc", "laptop"], [10**6] * 2, 20)
    assert kinds(again) == [("pc", MAX_RANKS, "assign"), ("laptop", 1, "assign")]
    assert listen(session, [host.others[0]], 21) == []
    assert kinds(listen(session, [host], 21)) == [("pc", MAX_RANKS, "peers"), ("laptop", 1, "peers")]
    assert fill(session, [host.others[0]], 22) == []
    ((_, told),) = fill(session, [host], 23)
    assert list(told.placement.alive) == [True, True]
    assert len(host.serving) == 32


def test_a_node_is_in_one_host_at_a_time(session: Session) -> None:
    """One that is in a new group is not started with the old one, which thus waits for nobody."""
    serve(session)
    experts = experts_of(session)
    lost = experts.hosts[0]
    session.on_node_lost("pc", "unplugged", 10)
    assert bound_nodes(experts.hosts, {}) == session.node_names - {TRUNK} == {"pc", "laptop", "nas", "box"}
    assert bound_nodes(experts.hosts, {"laptop": "laptop"}, complete=True) == {"laptop", "nas", "box"}, (
        "that is still ending"
    )
    session.on_event("laptop", event(1, released=Empty()), 11)
    assert bound_nodes(experts.hosts, {"laptop": "laptop"}, complete=True) == {"nas", "box"}
    assert may_restart(experts.hosts, lost, ["pc anew", "laptop"], 1000)
    session.grow(group(2, "laptop", "tower", 5, MAX_RANKS + 2), 12)
    assert not may_restart(experts.hosts, lost, ["pc anew", "laptop"], 1000)
    assert "pc" not in session.node_names
    able = {name: name for name in ("laptop", "nas", "box", "tower")}
    assert bound_nodes(experts.hosts, {**able, "pc": "pc anew"}) == able.keys()
    session.on_node_lost("tower", "unplugged", 13)
    assert session.node_names == {TRUNK, "pc", "laptop", "nas", "box", "tower"}
    session.fail(Failure(code="rank_failed"), 14)
    assert session.node_names == {TRUNK, "nas", "box"}


def test_the_nodes_of_a_group_that_was_lost_too_often_may_be_in_others(session: Session) -> None:
    serve(session)
    experts = experts_of(session)
    lost = experts.hosts[0]
    session.on_event("pc", event(MAX_RANKS, failed=Failure(code="worker_died", message="killed")), 10)
    session.on_event("laptop", event(1, released=Empty()), 10)
    able = {name: name for name in ("pc", "laptop", "nas", "box")}
    assert bound_nodes(experts.hosts, able) == able.keys()
    lost.restarts = RESTARTS
    assert bound_nodes(experts.hosts, able) == {"nas", "box"}
    assert bound_nodes(experts.hosts, {**able, "pc": "pc anew"}) == able.keys(), "it is tried again there"
    assert gave_up(experts.hosts, group(2, "laptop", "pc", 5, MAX_RANKS + 2)), "the same two are not"
    assert not gave_up(experts.hosts, group(2, "laptop", "tower", 5, MAX_RANKS + 2))


def test_whom_the_leader_blames_is_named(session: Session) -> None:
    serve(session)
    blamed = Failure(code="peer_lost", message="rank 0 is gone", lost_rank=MAX_RANKS + 1)
    session.on_event("laptop", event(1, failed=blamed), 10)
    assert "node 'pc' of nodes 'pc' and 'laptop' (experts), as " in experts_of(session).hosts[0].lost


def test_unlike_slices_are_found_though_they_are_cut_otherwise(session: Session) -> None:
    listen(session, list(session.workers))
    laptop, box, pc, nas = workers(session)
    fill(session, [laptop, box, pc])
    wrong = hosted(nas, to_message(nas.host.ordered))
    wrong.digests[4] = bytes(32)  # the fifth slice: pc has three, laptop the rest
    session.on_event("nas", event(nas.index, hosted=wrong), 3)
    assert session.failure is not None
    assert (session.failure.code, session.failure.lost_rank) == ("experts_differ", nas.index + 1)
    assert "nodes 'pc' and 'laptop' (experts) with" in session.failure.message


def test_what_a_group_holds_is_what_all_hold(session: Session) -> None:
    """An expert comes to the trunk's knowledge when every member has it, and is let go by all."""
    serve(session)
    host = experts_of(session).hosts[0]
    key = min(host.ordered)
    host.ordered.discard(key)
    session.on_event("pc", event(MAX_RANKS, hosted=hosted(host.others[0], to_message(host.ordered))), 10)
    assert (key in host.has_all, host.settled) == (False, False)
    session.on_event("laptop", event(1, hosted=hosted(host, to_message(host.ordered))), 10)
    assert host.settled
    host.ordered.add(key)
    assert host.fetching == {key}
    session.on_event("laptop", event(1, hosted=hosted(host, to_message(host.ordered))), 11 + RETIRE_S)
    assert key not in host.serving
    ((_, told),) = session.on_event(
        "pc", event(MAX_RANKS, hosted=hosted(host.others[0], to_message(host.ordered))), 12 + RETIRE_S
    )
    assert key in from_message(told.placement.hosts[0])
