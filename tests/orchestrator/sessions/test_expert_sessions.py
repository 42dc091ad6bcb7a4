"""The life of a session whose experts are on hosts, event by event, with a clock of our own."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from motley.orchestrator.experts.hosts import ExpertHost
from motley.orchestrator.experts.messages import from_message, to_message
from motley.orchestrator.experts.moves import RETIRE_S
from motley.orchestrator.experts.recovery import RESTART_S, may_restart
from motley.orchestrator.experts.registry import HOMELESS_S, UNREACHABLE_S, ExpertMap
from motley.orchestrator.planning.caches import Caches
from motley.orchestrator.planning.cutting.shares import Candidate, plan_shares, trunk_profile
from motley.orchestrator.planning.placement.terms import PlacementError, expert_name
from motley.orchestrator.planning.setup import Setup
from motley.orchestrator.session_request import SessionRequest
from motley.orchestrator.sessions.assignments import model_spec
from motley.orchestrator.sessions.facts import State
from motley.orchestrator.sessions.losses import PROVEN_S
from motley.orchestrator.sessions.session import PROGRESS_S, Command, Session
from motley.orchestrator.sessions.table import SessionTable
from motley.orchestrator.workers import Rank
from motley.protocol.mesh_pb2 import (
    Empty,
    ExpertReport,
    Failure,
    HostedExperts,
    HostReport,
    Loading,
    ModelProfile,
    RankEvent,
    Ready,
    Starved,
)
from motley.transport.certificates import Authority, Papers

TRUNK = "trunk"
SETUP = Setup("onnxruntime", "stored", on_gpu=False)
HOSTS = ["pc", "laptop", "box"]
WORKERS = [TRUNK, *HOSTS]
"""Of every worker, its node, whose id is its name."""


def event(index: int, **body: Any) -> RankEvent:
    return RankEvent(session="s", epoch=1, rank=index, **body)


def kinds(commands: list[Command]) -> list[tuple[str, int, str | None]]:
    return [(node, command.rank, command.WhichOneof("body")) for node, command in commands]


def hosted(wanted: HostedExperts) -> HostedExperts:
    keys = from_message(wanted)
    return HostedExperts(sets=wanted.sets, digests=[hashlib.sha256(repr(key).encode()).digest() for key in keys])


def room_for(experts: int) -> Any:
    """Every node has room for so many experts in all, of those in the session."""
    return lambda session: (
        lambda node: 1000 * (experts - sum(len(host.ordered) for host in session.experts.hosts if host.node_id == node))
    )


@pytest.fixture
def issued(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ranks for which a certificate was issued."""
    ranks: list[int] = []
    issue = Authority.issue_rank

    def noted(self: Authority, rank: int, session: str) -> Papers:
        ranks.append(rank)
        return issue(self, rank, session)

    monkeypatch.setattr(Authority, "issue_rank", noted)
    return ranks


@pytest.fixture
def session(moe: ModelProfile) -> Session:
    """In state starting: a trunk of one rank, and 32 experts on three hosts, each of which has room for 32."""
    plans = plan_shares([trunk_profile(moe)], [Candidate(TRUNK, 1.0, 10**9)], 100)
    hosts = [
        ExpertHost(1 + number, name, name, 10**6, "", 8_000, 1_000, number, 1e6) for number, name in enumerate(HOSTS)
    ]
    experts = ExpertMap(moe, hosts, 1, "fp32")
    experts.begin(experts.first_question(lambda _: 32_000).answer().placement)
    session = Session("s", SessionRequest("mix", experts="parallel", recover=False), "mix", created=0)
    ranks = [Rank(0, TRUNK, TRUNK, 10**9, plans[0], SETUP)]
    commands = session.assign(model_spec(session.request, "stored"), moe, ranks, Caches(100, 100), 0, experts)
    assert kinds(commands) == [(name, index, "assign") for index, name in enumerate(WORKERS)]
    for index, (_, command) in enumerate(commands):
        assert (command.assign.size, len(command.assign.shares), len(command.assign.hosts)) == (1, 1, 3)
        assert command.assign.tls.certificate != commands[index - 1][1].assign.tls.certificate
    return session


def experts_of(session: Session) -> ExpertMap:
    assert session.experts is not None
    return session.experts


def listen(session: Session) -> list[Command]:
    commands: list[Command] = []
    for index, name in enumerate(WORKERS):
        commands += session.on_event(name, event(index, listening=f"{name}:1"), 1)
    return commands


def serve(session: Session) -> Session:
    """Come up."""
    listen(session)
    for host in experts_of(session).hosts:
        session.on_event(host.node_id, event(host.index, hosted=hosted(to_message(host.ordered))), 2)
    for index, name in enumerate(WORKERS):
        assert session.on_event(name, event(index, ready=Ready()), 2) == []
    assert session.state is State.READY
    assert session.waiting_for == []
    return session


def ask(session: Session, now: float, room: int = 32) -> list[Command]:
    """Ask the planner, and hear what it says."""
    question = experts_of(session).question(room_for(room)(session))
    try:
        return session.on_answer(question, question.answer(), now)
    except PlacementError as error:
        return session.on_answer(question, error, now)


def obey(session: Session, commands: list[Command], now: float) -> list[Command]:
    """Every host that got orders says that it has done as it was told."""
    said: list[Command] = []
    for node, command in commands:
        if command.WhichOneof("body") == "host":
            said += session.on_event(node, event(command.rank, hosted=hosted(command.host)), now)
    return said


def test_hosts_come_up_with_the_ranks(session: Session) -> None:
    commands = listen(session)
    assert kinds(commands) == [(name, index, "peers") for index, name in enumerate(WORKERS)]
    assert list(commands[0][1].peers.addresses) == [f"{name}:1" for name in WORKERS]
    session.on_event("box", event(3, loading=Loading(done_bytes=1, total_bytes=2)), 2)
    assert session.state is State.LOADING
    session.on_event(TRUNK, event(0, ready=Ready()), 2)
    assert session.state is State.LOADING


@pytest.mark.parametrize(
    "loss",
    [
        lambda session: session.on_node_lost("laptop", "unplugged", 3),
        lambda session: session.on_event("laptop", event(2, failed=Failure(code="gate", message="wrong")), 3),
        lambda session: session.on_event("laptop", event(2, released=Empty()), 3),
    ],
)
def test_before_it_is_ready_the_loss_of_a_host_fails_the_session(session: Session, loss: Any) -> None:
    listen(session)
    assert kinds(loss(session)) == [(TRUNK, 0, "release"), ("pc", 1, "release"), ("box", 3, "release")]
    assert session.state is State.FAILED


def test_a_lost_hosts_experts_go_elsewhere_while_the_session_serves(session: Session) -> None:
    serve(session)
    lost = experts_of(session).hosts[1]
    had = set(lost.ordered)
    commands = session.on_node_lost("laptop", "unplugged", 10)
    assert kinds(commands) == [(TRUNK, 0, "placement")]
    assert list(commands[0][1].placement.alive) == [True, False, True]
    assert session.state is State.READY
    assert session.waiting_for == [f"layer {layer} expert {index}" for layer, index in sorted(had)]
    assert lost.lost == "node 'laptop' is lost: unplugged"
    commands = ask(session, 10)
    assert kinds(commands) == [("pc", 1, "host"), ("box", 3, "host")]
    first = session.on_event("pc", event(1, hosted=hosted(commands[0][1].host)), 11)
    assert kinds(first) == [(TRUNK, 0, "placement")]
    assert 0 < len(session.waiting_for) < len(had)
    second = session.on_event("box", event(3, hosted=hosted(commands[1][1].host)), 12)
    assert second[0][1].placement.version > first[0][1].placement.version
    assert session.waiting_for == []
    assert session.on_event("laptop", event(2, released=Empty()), 13) == []


def test_the_loss_of_the_trunk_fails_the_session(session: Session) -> None:
    serve(session)
    commands = session.on_node_lost(TRUNK, "unplugged", 10)
    assert kinds(commands) == [(name, index, "release") for index, name in enumerate(WORKERS) if index]
    assert session.state is State.FAILED
    for host in experts_of(session).hosts:
        session.on_event(host.node_id, event(host.index, released=Empty()), 11)
    assert session.over


def test_without_room_the_session_ends_with_the_reason_if_nobody_joins(session: Session) -> None:
    serve(session)
    session.on_node_lost("laptop", "unplugged", 10)
    assert ask(session, 11, room=11) == []
    assert session.on_time(11 + HOMELESS_S) == []
    assert session.state is State.READY
    assert session.waiting_for
    commands = session.on_time(11.1 + HOMELESS_S)
    assert kinds(commands) == [(TRUNK, 0, "release"), ("pc", 1, "release"), ("box", 3, "release")]
    assert session.failure is not None
    assert session.failure.code == "insufficient_memory"
    assert "node 'laptop' (experts): node 'laptop' is lost: unplugged" in session.failure.message
    assert "are missing" in session.failure.message


def test_a_host_that_died_alone_is_started_again_with_what_it_had(session: Session) -> None:
    serve(session)
    host = experts_of(session).hosts[1]
    had = set(host.ordered)
    assert host.first_bytes == host.memory_bytes
    session.on_event("laptop", event(2, failed=Failure(code="worker_died", message="killed")), 10)
    assert ask(session, 10, room=11) == []  # no room elsewhere, but it may come back
    assert session.state is State.READY
    assert len(session.waiting_for) == len(had)
    assert may_restart(experts_of(session).hosts, host, ["laptop"], 10 + RESTART_S)
    (again,) = session.restart(host, ["laptop"], [10**6], 16)
    assert (again[0], again[1].rank, set(from_message(again[1].assign.hosts[1]))) == ("laptop", 2, had)
    assert kinds(session.on_event("laptop", event(2, listening="laptop:2"), 17)) == [("laptop", 2, "peers")]
    session.on_event("laptop", event(2, hosted=hosted(again[1].assign.hosts[1])), 18)
    assert len(session.waiting_for) == len(had)
    ((node, back),) = session.on_event("laptop", event(2, ready=Ready()), 18)
    assert (node, list(back.placement.alive)) == (TRUNK, [True] * 3)
    assert list(back.placement.addresses) == ["pc:1", "laptop:2", "box:1"]
    assert session.waiting_for == []
    assert ask(session, 19) == []


def test_while_a_host_starts_nothing_is_without_hope_but_then_it_may_be(session: Session) -> None:
    serve(session)
    host = experts_of(session).hosts[1]
    session.on_event("laptop", event(2, failed=Failure(code="worker_died", message="killed")), 10)
    assert ask(session, 10, room=11) == []
    session.restart(host, ["laptop"], [10**6], 10 + HOMELESS_S)
    assert session.on_time(11 + HOMELESS_S) == []
    assert session.state is State.READY
    session.on_node_lost("laptop", "unplugged", 120)
    assert ask(session, 120, room=11) == []
    assert session.on_time(120 + HOMELESS_S) == []
    assert len(session.on_time(121 + HOMELESS_S)) == 3  # trunk, pc and box are released
    assert session.failure is not None
    assert "node 'laptop' (experts)" in session.failure.message


def tower(session: Session) -> ExpertHost:
    """A host on a node that has joined."""
    return ExpertHost(4, "tower", "tower", 10**6, "", 8_000, 1_000, 3, 1e6)


def come_up(session: Session, host: ExpertHost, now: float) -> list[Command]:
    """A host that has joined says that it is there: what follows from that."""
    (commands,) = session.on_event(host.node_id, event(host.index, listening=f"{host.node_id}:1"), now)
    assert kinds([commands]) == [(host.node_id, host.index, "peers")]
    assert session.on_event(host.node_id, event(host.index, hosted=HostedExperts()), now) == []
    return session.on_event(host.node_id, event(host.index, ready=Ready()), now)


def test_a_node_that_joins_takes_its_part_of_the_experts(session: Session) -> None:
    serve(session)
    experts, host = experts_of(session), tower(session)
    ((node, command),) = session.grow(host, 10)
    assert (node, command.rank, host.memory_bytes) == ("tower", 4, 8_000)
    firsts = [set(from_message(each)) for each in command.assign.hosts]
    assert firsts == [each.ordered for each in experts.hosts[:3]] + [set()]
    # Another host is lost while this one starts: the trunk does not hear of an address that is not known yet.
    ((_, told),) = session.on_node_lost("laptop", "unplugged", 11)
    assert (list(told.placement.alive), list(told.placement.addresses)) == (
        [True, False, True, False],
        ["pc:1", "laptop:1", "box:1", ""],
    )
    ((_, told),) = come_up(session, host, 12)
    assert (list(told.placement.alive), told.placement.addresses[3]) == ([True, False, True, True], "tower:1")
    commands = ask(session, 13)
    assert ("tower", 4, "host") in kinds(commands)
    assert 0 < len(host.ordered) <= 11 + 11  # what was lost, and a fair share
    served = set(session.waiting_for)
    obey(session, commands, 14)
    now = 14.0
    while experts.moves or any(not each.settled for each in experts.hosts if not each.gone):
        assert now < 100
        now += RETIRE_S
        obey(session, session.on_time(now), now)
        assert set(session.waiting_for) <= served
    assert session.waiting_for == []
    assert sum(len(each.ordered) for each in experts.hosts if not each.gone) == 32
    assert len(host.ordered) >= 8


def test_a_session_has_been_ready_for_as_long_whoever_joins(session: Session) -> None:
    serve(session)
    session.losses.in_a_row = 3
    host = tower(session)
    session.grow(host, PROVEN_S - 1)
    session.on_event("tower", event(host.index, loading=Loading(done_bytes=1, total_bytes=2)), PROVEN_S)
    assert session.losses.in_a_row == 3
    session.on_time(PROVEN_S + 3)
    assert session.losses.in_a_row == 0, "it has proven itself"


def test_its_part_is_bounded(session: Session) -> None:
    serve(session)
    host = tower(session)
    session.grow(host, 10)
    come_up(session, host, 11)
    commands = ask(session, 12)
    assert kinds(commands)[0] == ("tower", 4, "host")
    assert 0 < len(host.ordered) <= 8


def test_every_host_that_joins_has_a_certificate_of_its_own_from_the_same_authority(session: Session) -> None:
    serve(session)
    lost = experts_of(session).hosts[1]
    session.on_event("laptop", event(2, failed=Failure(code="worker_died", message="killed")), 10)
    ((_, again),) = session.restart(lost, ["laptop"], [10**6], 16)
    ((_, joined),) = session.grow(tower(session), 17)
    assert again.assign.tls.authority == joined.assign.tls.authority
    assert again.assign.tls.certificate != joined.assign.tls.certificate
    assert again.assign.secret == joined.assign.secret


def test_certificates_are_issued_for_those_that_are_there(issued: list[int], session: Session) -> None:
    serve(session)
    assert issued == [0, 1, 2, 3]
    session.grow(tower(session), 10)
    assert issued == [0, 1, 2, 3, 4]


def test_what_found_no_place_goes_to_who_joins(session: Session) -> None:
    serve(session)
    session.on_node_lost("laptop", "unplugged", 10)
    assert ask(session, 11, room=11) == []
    missing = set(session.waiting_for)
    host = tower(session)
    session.grow(host, 50)
    assert session.on_time(12 + HOMELESS_S) == []  # it is being started
    come_up(session, host, 110)
    assert session.on_time(110) == []  # the planner will know what to do
    commands = ask(session, 110, room=11)
    assert ("tower", 4, "host") in kinds(commands)
    (*_, (node, told)) = obey(session, commands, 120)
    assert node == TRUNK
    assert missing & set(map(expert_name, from_message(told.placement.hosts[3])))
    assert session.waiting_for == []
    assert session.on_time(10_000) == []


def test_a_host_that_joins_and_hangs_is_given_up(session: Session) -> None:
    serve(session)
    host = tower(session)
    session.grow(host, 10)
    assert session.on_time(10 + PROGRESS_S) == []
    assert kinds(session.on_time(11 + PROGRESS_S)) == [("tower", 4, "release")]
    assert host.gone


def test_a_node_that_comes_back_smaller_begins_with_nothing(session: Session) -> None:
    serve(session)
    host = experts_of(session).hosts[1]
    session.on_node_lost("laptop", "unplugged", 10)
    assert may_restart(experts_of(session).hosts, host, ["laptop anew"], 16)
    ((node, again),) = session.restart(host, ["laptop anew"], [host.first_bytes - 1], 16)
    assert (node, from_message(again.assign.hosts[1])) == ("laptop anew", [])
    ((_, told),) = come_up(session, host, 17)
    assert list(told.placement.alive) == [True] * 3
    assert session.waiting_for
    obey(session, ask(session, 18, room=12), 19)
    assert session.waiting_for == []
    assert host.ordered


def test_a_host_that_the_trunk_gives_up_is_released_and_may_begin_anew_when_it_has_ended(session: Session) -> None:
    serve(session)
    host = experts_of(session).hosts[2]
    gone = ExpertReport(hosts=[HostReport(host=2, lost="silent for 5 s", given_up=True)])
    commands = session.on_event(TRUNK, event(0, experts=gone), 10)
    assert kinds(commands) == [("box", 3, "release"), (TRUNK, 0, "placement")]
    assert session.on_event(TRUNK, event(0, experts=gone), 11) == []
    assert not may_restart(experts_of(session).hosts, host, ["box"], 1000)
    session.on_event("box", event(3, released=Empty()), 12)
    assert may_restart(experts_of(session).hosts, host, ["box"], 1000)


def test_two_hosts_with_unlike_weights_of_one_expert(session: Session) -> None:
    listen(session)
    pc = experts_of(session).hosts[0]
    session.on_event("pc", event(1, hosted=hosted(to_message(pc.ordered))), 2)
    wrong = hosted(to_message(pc.ordered))
    wrong.digests[0] = bytes(32)
    session.on_event("laptop", event(2, hosted=wrong), 3)
    assert session.failure is not None
    assert (session.failure.code, session.failure.lost_rank) == ("experts_differ", 3)
    assert "node 'laptop' (experts) has layer 0 expert" in session.failure.message


def test_once_it_is_ready_the_later_of_two_unlike_is_refused(session: Session) -> None:
    serve(session)
    pc, laptop, _ = experts_of(session).hosts
    wrong = hosted(to_message(pc.ordered))
    wrong.digests[0] = bytes(32)
    commands = session.on_event("laptop", event(2, hosted=wrong), 3)
    assert kinds(commands) == [("laptop", 2, "release"), (TRUNK, 0, "placement")]
    assert session.state is State.READY
    assert "checksum" in laptop.lost


def test_a_host_that_the_trunk_cannot_reach_is_given_up_after_a_while(session: Session) -> None:
    serve(session)
    layer, index = next(iter(experts_of(session).hosts[0].ordered))
    assert session.on_event(TRUNK, event(0, starved=Starved(layer=layer, index=index)), 10) == []
    assert f"layer {layer} expert {index}" in session.waiting_for
    assert session.on_time(10 + UNREACHABLE_S) == []
    commands = session.on_time(10.1 + UNREACHABLE_S)
    assert kinds(commands) == [("pc", 1, "release"), (TRUNK, 0, "placement")]


def test_a_host_that_hangs_while_it_fetches_is_given_up(session: Session) -> None:
    serve(session)
    session.on_node_lost("laptop", "unplugged", 10)
    commands = ask(session, 10)
    obey(session, commands[:1], 11)
    assert session.on_time(10 + PROGRESS_S) == []
    session.on_event("box", event(3, loading=Loading(done_bytes=1, total_bytes=2)), 100)
    assert session.on_time(100 + PROGRESS_S) == []
    commands = session.on_time(100 + PROGRESS_S + 1)
    assert kinds(commands) == [("box", 3, "release"), (TRUNK, 0, "placement")]


def test_moved_experts_are_dropped_when_nobody_can_be_asking_any_more(session: Session) -> None:
    serve(session)
    experts = experts_of(session)
    loads = [(layer, [10_000 * ((layer, i) in experts.hosts[0].ordered) for i in range(8)]) for layer in range(4)]
    report = ExpertReport()
    for layer, rows in loads:
        report.loads.add(layer=layer, rows=rows)
    session.on_event(TRUNK, event(0, experts=report), 3)
    question = experts.rebalancing(room_for(32)(session), worth=1.0)
    answer = question.answer()
    assert answer.worthwhile
    commands = session.on_answer(question, answer, 10)
    assert {body for _, _, body in kinds(commands)} == {"host"}
    ((_, told),) = [each for each in obey(session, commands, 11) if each[1].rank == 0][-1:]
    assert session.waiting_for == []
    busy = experts.hosts[0]
    assert set(from_message(told.placement.hosts[0])) < busy.ordered
    assert session.on_time(11 + RETIRE_S - 1) == []
    commands = session.on_time(11 + RETIRE_S)
    assert ("pc", 1, "host") in kinds(commands)
    assert obey(session, commands, 20) == []
    assert session.on_time(20) == []
    assert experts.moves == []


def test_memory_for_experts_is_reserved_as_they_come_and_go(session: Session) -> None:
    table = SessionTable()
    table.add(session)
    assert table.reserved("pc") == 8_000 + 1_000 * len(experts_of(session).hosts[0].ordered)
    serve(session)
    session.on_node_lost("laptop", "unplugged", 10)
    assert table.reserved("laptop") == 0
    before = table.reserved("pc")
    ask(session, 10)
    assert table.reserved("pc") > before
