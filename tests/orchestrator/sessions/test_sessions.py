"""The life of a session, event by event, without a socket and with a clock of our own."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from motley.orchestrator.mesh.nodes import CONNECTION_ENDED, LEFT
from motley.orchestrator.planning.caches import Caches
from motley.orchestrator.planning.cutting.shares import Candidate, plan_shares
from motley.orchestrator.planning.setup import Setup
from motley.orchestrator.session_request import SessionRequest
from motley.orchestrator.sessions.assignments import model_spec
from motley.orchestrator.sessions.cut_off import AWAY_S, CUT_S, RETURN_S
from motley.orchestrator.sessions.facts import State
from motley.orchestrator.sessions.session import LISTEN_S, PROGRESS_S, RELEASE_S, Command, Session
from motley.orchestrator.sessions.table import NameInUseError, SessionTable
from motley.orchestrator.workers import CacheHolder, Rank
from motley.protocol.mesh_pb2 import Activity, Empty, Failure, Loading, ModelProfile, RankEvent, Ready, Timing

NODES = ["pc", "laptop", "box"]
SETUP = Setup("onnxruntime", "int4", on_gpu=False)


def event(rank: int, epoch: int = 1, **body: Any) -> RankEvent:
    return RankEvent(session="s", epoch=epoch, rank=rank, **body)


def kinds(commands: list[Command]) -> list[tuple[str, int, str | None]]:
    return [(node, command.rank, command.WhichOneof("body")) for node, command in commands]


@pytest.fixture
def session(profile: ModelProfile) -> Session:
    """In state starting, since time 0: rank r is on node `NODES[r]`, whose id is its name."""
    plans = plan_shares([profile] * 3, [Candidate(name, 1.0, 10**9) for name in NODES], 100)
    session = Session("s", SessionRequest("bard", recover=False), "bard", created=0)
    ranks = [Rank(i, name, name, 10**9, plan, SETUP) for i, (name, plan) in enumerate(zip(NODES, plans, strict=True))]
    commands = session.assign(model_spec(session.request, "int4"), profile, ranks, Caches(100, 130), now=0)
    assert kinds(commands) == [(name, rank, "assign") for rank, name in enumerate(NODES)]
    return session


def listen(session: Session, now: float = 1) -> list[Command]:
    commands: list[Command] = []
    for rank, name in enumerate(NODES):
        commands += session.on_event(name, event(rank, listening=f"{name}:1"), now)
    return commands


def make_ready(session: Session, now: float = 2) -> None:
    listen(session)
    for rank, name in enumerate(NODES):
        session.on_event(name, event(rank, ready=Ready(share_bytes=1)), now)


def test_every_rank_gets_the_same_assignment(profile: ModelProfile) -> None:
    plans = plan_shares([profile] * 2, [Candidate("pc", 1.0, 10**9)] * 2, 100)
    session = Session("s", SessionRequest("bard", threads=3, quantisation="int4"), "bard", created=0)
    ranks = [Rank(i, "pc", "pc", 77, plan, SETUP) for i, plan in enumerate(plans)]
    commands = session.assign(model_spec(session.request, "int4"), profile, ranks, Caches(100, 130), now=0)
    first, second = (command.assign for _, command in commands)
    assert first.tls.authority == second.tls.authority
    assert first.tls.certificate != second.tls.certificate
    for own in (first, second):
        own.ClearField("tls")
    assert first == second
    assert len(first.secret) == 32
    assert (first.size, len(first.shares), first.context, first.threads) == (2, 2, 100, 3)
    assert (first.cache_blocks, first.cache_block_tokens) == (5, 32)
    assert (first.fingerprint, first.model.quantisation) == (profile.fingerprint, "int4")
    assert first.shares[0].mlp.stop == first.shares[1].mlp.start
    assert [(share.quantisation, own.engine) for share, own in zip(first.shares, (first, second), strict=True)] == [
        ("int4", "onnxruntime")
    ] * 2


def test_the_way_up(session: Session) -> None:
    assert session.state is State.STARTING
    for rank, name in enumerate(NODES[:2]):
        assert session.on_event(name, event(rank, listening=f"{name}:1"), 1) == []
    commands = session.on_event("box", event(2, listening="box:1"), 1)
    assert kinds(commands) == [(name, rank, "peers") for rank, name in enumerate(NODES)]
    assert list(commands[0][1].peers.addresses) == ["pc:1", "laptop:1", "box:1"]
    assert session.state is State.CONNECTING
    session.on_event("pc", event(0, loading=Loading(done_bytes=1, total_bytes=9)), 2)
    assert session.state is State.LOADING
    for rank, name in enumerate(NODES):
        assert session.state is State.LOADING
        session.on_event(name, event(rank, ready=Ready()), 3)
    assert session.state is State.READY
    session.on_event("pc", event(0, timing=Timing(tokens=5)), 4)
    assert session.leader.timing is not None
    session.on_event("pc", event(0, activity=Activity(active=2)), 4)
    session.on_event("laptop", event(1, activity=Activity(active=7)), 4)
    assert session.activity == Activity(active=2), "only the leader's counts"
    assert session.on_time(1e9) == []
    assert session.state is State.READY


@pytest.fixture
def held(profile: ModelProfile) -> Session:
    """Ready: one rank on each of `NODES` but the last, on which are the holders of their caches."""
    plans = plan_shares([profile] * 2, [Candidate(name, 1.0, 10**9) for name in NODES[:2]], 100)
    session = Session("s", SessionRequest("bard", recover=False), "bard", created=0)
    ranks = [Rank(i, name, name, 10**9, plan, SETUP) for i, (name, plan) in enumerate(zip(NODES, plans, strict=False))]
    holders = [CacheHolder(2 + rank, "box", "box", 10**9, rank=rank, blocks_bytes=70, fixed_bytes=7) for rank in (0, 1)]
    spec, caches = model_spec(session.request, "int4"), Caches(300, 130, node_tokens=300)
    orders = [command.assign for _, command in session.assign(spec, profile, ranks, caches, 0, holders=holders)]
    assert [(order.cache_holders, order.far_blocks, order.holder_bytes) for order in orders] == [
        (2, 3, 0),
        (2, 3, 0),
        (2, 3, 70),
        (2, 3, 70),
    ]
    commands: list[Command] = []
    for worker in session.workers:
        commands += session.on_event(worker.node_id, event(worker.index, listening=f"{worker.index}:1"), 1)
    assert [*commands[0][1].peers.addresses] == ["0:1", "1:1", "2:1", "3:1"]
    for worker in session.workers:
        assert session.state is not State.READY, "the holders are waited for"
        session.on_event(worker.node_id, event(worker.index, ready=Ready()), 2)
    assert session.state is State.READY
    return session


def test_it_does_without_caches_on_a_machine_that_is_taken_back(held: Session) -> None:
    assert kinds(held.do_without("box", "it was taken back", 5)) == [("box", 2, "release"), ("box", 3, "release")]
    assert (held.state, {holder.lost for holder in held.holders}) == (State.READY, {"it was taken back"})


def test_memory_of_caches_elsewhere_is_promised_until_they_are_lost(held: Session) -> None:
    table = SessionTable()
    table.add(held)
    assert table.reserved("box") == 2 * 77
    assert table.promised("box") == 0, "they have written to all of it"
    held.on_node_lost("box", LEFT, 5)
    assert table.reserved("box") == 0


def test_a_lost_cache_holder_does_not_end_the_session_and_the_others_are_released(held: Session) -> None:
    failed = Failure(code="internal_error", message="the worker has ended with status -9")
    assert kinds(held.on_event("box", event(2, failed=failed), 5)) == [("box", 3, "release")]
    assert (held.state, [own.lost for own in held.holders]) == (
        State.READY,
        [
            "node 'box' (caches of rank 0): the worker has ended with status -9",
            "node 'box' (caches of rank 0) is lost",
        ],
    )
    assert held.on_event("box", event(3, released=Empty()), 6) == []
    assert all(own.gone for own in held.holders)
    assert held.state is State.READY
    assert kinds(held.close(7)) == [("pc", 0, "release"), ("laptop", 1, "release")]


def test_a_node_with_cache_holders_alone_does_not_end_the_session_when_it_is_lost(held: Session) -> None:
    assert held.on_node_lost("box", LEFT, 5) == []
    assert held.state is State.READY
    assert all(own.gone and "node 'box'" in own.lost for own in held.holders)
    assert held.on_node_lost("laptop", LEFT, 6) != []
    assert held.state is State.FAILED


def test_a_node_with_cache_holders_alone_is_waited_for_only_so_long(held: Session) -> None:
    assert held.on_node_lost("box", CONNECTION_ENDED, 5) == []
    assert held.on_time(5 + RETURN_S) == []
    assert not any(own.gone for own in held.holders)
    held.on_time(5.1 + RETURN_S)
    assert held.state is State.READY
    assert all(own.gone and "node 'box'" in own.lost for own in held.holders)


def test_a_failed_rank_ends_the_session_and_releases_the_others(session: Session) -> None:
    make_ready(session)
    failed = Failure(code="peer_lost", message="rank 2 said nothing", lost_rank=3)
    commands = session.on_event("laptop", event(1, failed=failed), 5)
    assert kinds(commands) == [("pc", 0, "release"), ("box", 2, "release")]
    assert session.state is State.FAILED
    assert session.failure is not None
    assert session.failure.code == "peer_lost"
    assert session.failure.message == ("node 'box' (rank 2), as node 'laptop' (rank 1) has found: rank 2 said nothing")
    assert not session.over
    session.on_event("pc", event(0, failed=Failure(code="other")), 6)
    session.on_event("box", event(2, released=Empty()), 6)
    assert session.over
    assert session.failure.code == "peer_lost"


def test_whoever_is_to_blame_may_still_say_why(session: Session) -> None:
    make_ready(session)
    session.on_event("laptop", event(1, failed=Failure(code="peer_lost", message="rank 2 is lost", lost_rank=3)), 5)
    assert not session.explained
    session.on_event("pc", event(0, failed=Failure(code="peer_lost", message="rank 2 is lost, too", lost_rank=3)), 6)
    assert not session.explained
    session.on_event("box", event(2, failed=Failure(code="wrong_results", message="this rank computes wrongly")), 7)
    assert session.explained
    assert session.failure is not None
    assert (session.failure.code, session.failure.lost_rank) == ("wrong_results", 3)
    assert session.failure.message == "node 'box' (rank 2): this rank computes wrongly"


def test_a_pair_that_cannot_reach_each_other_is_named_whoever_tells_of_it(session: Session) -> None:
    make_ready(session)
    failed = Failure(code="peer_lost", message="rank 2 is lost", lost_rank=3, found_by=2)
    session.on_event("pc", event(0, failed=failed), 5)
    assert session.failure is not None
    assert session.failure.message == ("node 'box' (rank 2), as node 'laptop' (rank 1) has found: rank 2 is lost")


def test_whoever_is_to_blame_is_not_waited_for_long(session: Session) -> None:
    """Clients wait meanwhile: a worker that was stopped cannot even be told to end."""
    make_ready(session)
    session.on_event("laptop", event(1, failed=Failure(code="peer_lost", message="rank 2 is lost", lost_rank=3)), 5)
    session.on_time(6.9)
    assert not session.explained
    session.on_time(7.1)
    assert session.explained


def test_a_lost_node_fails_the_session_by_name(session: Session) -> None:
    make_ready(session)
    commands = session.on_node_lost("laptop", LEFT, 9)
    assert kinds(commands) == [("pc", 0, "release"), ("box", 2, "release")]
    assert session.failure is not None
    assert (session.failure.code, session.failure.lost_rank) == ("node_lost", 2)
    assert f"node 'laptop' (rank 1) has left: {LEFT}" in session.failure.message
    assert session.on_node_lost("stranger", "gone", 9) == []


def test_a_node_that_is_cut_off_is_waited_for(session: Session) -> None:
    """As long as the other ranks do not miss its rank; it comes back under another id."""
    make_ready(session)
    assert session.on_node_lost("laptop", CONNECTION_ENDED, 9) == []
    assert [worker.state for worker in session.workers] == ["ready", "cut off", "ready"]
    assert session.answers, "its leader is there"
    assert session.on_time(AWAY_S) == []
    assert session.on_node_back("new", "laptop", {(1, 1)}, {}, 3000) == []
    assert (session.state, session.workers[1].node_id, session.workers[1].away) == (State.READY, "new", None)
    assert session.on_time(2 * AWAY_S) == []
    failed = Failure(code="peer_lost", message="rank 2 said nothing", lost_rank=3)
    assert session.on_event("new", event(1, failed=failed), 3001) != []


def test_who_is_missed_by_the_others_while_it_is_cut_off_is_lost(session: Session) -> None:
    make_ready(session)
    session.on_node_lost("laptop", CONNECTION_ENDED, 9)
    failed = Failure(code="peer_lost", message="rank 1 has gone", lost_rank=2)
    assert kinds(session.on_event("box", event(2, failed=failed), 10)) == [("pc", 0, "release")]
    assert session.failure is not None
    assert (session.failure.code, session.failure.lost_rank) == ("node_lost", 2)
    assert "node 'laptop' (rank 1) is lost: its connection ended" in session.failure.message


@pytest.mark.parametrize(("why", "patience"), [(CONNECTION_ENDED, RETURN_S), ("no heartbeat for 8 s", CUT_S)])
def test_a_leader_that_is_cut_off_is_waited_for_only_so_long(session: Session, why: str, patience: float) -> None:
    """As requests wait for it: less long where its daemon may have been killed."""
    make_ready(session)
    session.on_node_lost("pc", why, 9)
    assert not session.answers
    assert session.on_time(9 + patience) == []
    assert kinds(session.on_time(9.1 + patience)) == [("laptop", 1, "release"), ("box", 2, "release")]
    assert session.failure is not None
    assert f"node 'pc' (rank 0) is lost: {why}" in session.failure.message


def test_a_node_that_comes_back_without_its_rank_has_lost_it(session: Session) -> None:
    make_ready(session)
    session.on_node_lost("laptop", CONNECTION_ENDED, 9)
    commands = session.on_node_back("new", "laptop", {(1, 0), (2, 1)}, {}, 10)
    assert kinds(commands) == [("pc", 0, "release"), ("box", 2, "release")]
    assert session.failure is not None
    assert session.failure.code == "worker_died"
    assert session.on_node_back("newer", "stranger", set(), {}, 11) == []


def test_a_node_that_comes_back_without_its_rank_says_who_is_to_blame(session: Session) -> None:
    """The orchestrator and the first node were killed together; the second one, which has missed it, is back first."""
    make_ready(session)
    for node in ("pc", "laptop", "box"):
        session.on_node_lost(node, CONNECTION_ENDED, 9)
    missed = Failure(code="peer_lost", message="rank 0 has gone", lost_rank=1)
    assert session.on_node_back("new", "laptop", set(), {(1, 1): missed}, 10) == []
    assert session.failure is not None
    assert (session.failure.code, session.failure.lost_rank) == ("node_lost", 1)
    assert "node 'pc' (rank 0) is lost: its connection ended" in session.failure.message
    assert not session.workers[1].died
    died = Failure(code="worker_died", message="its worker process was killed by signal 9")
    session.on_node_back("newer", "pc", set(), {(1, 0): died}, 11)
    assert session.failure.message == "node 'pc' (rank 0): its worker process was killed by signal 9", (
        "as it knows better"
    )
    assert session.workers[0].died


def test_who_is_cut_off_is_not_waited_for_when_a_session_is_closed(session: Session) -> None:
    make_ready(session)
    session.on_node_lost("laptop", CONNECTION_ENDED, 9)
    assert kinds(session.close(10)) == [("pc", 0, "release"), ("box", 2, "release")]
    for node, rank in (("pc", 0), ("box", 2)):
        session.on_event(node, event(rank, released=Empty()), 11)
    assert session.over


def test_a_node_that_is_lost_while_ranks_load_is_done_without(session: Session) -> None:
    """Unless whoever asked wants none of that."""
    listen(session)
    unwilling = deepcopy(session)
    session.request = replace(session.request, recover=True)
    assert kinds(session.on_node_lost("laptop", CONNECTION_ENDED, 9)) == [("pc", 0, "release"), ("box", 2, "release")]
    assert (session.state, session.suspects, session.failure) == (State.RECOVERING, {"laptop"}, None)
    assert session.interruption is not None
    assert session.interruption.lost
    unwilling.on_node_lost("laptop", CONNECTION_ENDED, 9)
    assert unwilling.failure is not None
    assert unwilling.failure.message.endswith("Start its daemon again, or start a session without it")


@pytest.mark.parametrize("explained", [False, True])
def test_a_node_may_turn_out_to_be_lost_when_others_have_missed_its_rank(session: Session, explained: bool) -> None:
    """But a rank that others miss because it has failed ends the session that loads."""
    listen(session)
    session.request = replace(session.request, recover=True)
    missed = Failure(code="peer_lost", message="rank 1 has gone", lost_rank=2)
    session.on_event("box", event(2, failed=missed), 8)
    assert session.state is State.FAILED
    if explained:
        session.on_event("laptop", event(1, failed=Failure(code="wrong_results", message="wrong")), 8)
    session.on_node_lost("laptop", CONNECTION_ENDED, 9)
    assert session.state is (State.FAILED if explained else State.RECOVERING)
    if not explained:
        assert session.failure is None
        assert session.losses.last[-1].why.code == "node_lost"


def test_ranks_that_do_not_listen_are_named(session: Session) -> None:
    session.on_event("pc", event(0, listening="pc:1"), 0)
    assert session.on_time(LISTEN_S) == []
    assert len(session.on_time(LISTEN_S + 1)) == 3
    assert session.failure is not None
    assert "node 'laptop' (rank 1), node 'box' (rank 2) did not start" in session.failure.message


def test_slow_loading_is_fine_and_silence_is_not(session: Session) -> None:
    listen(session, now=0)
    session.on_event("pc", event(0, loading=Loading(done_bytes=9, total_bytes=9)), 0)
    now = 0.0
    for done in (1, 9, 9, 9, 2, 4):  # bytes are counted, something else is done, and they are counted anew
        now += PROGRESS_S
        session.on_event("box", event(2, loading=Loading(done_bytes=done, total_bytes=9)), now)
        assert session.on_time(now + PROGRESS_S) == []
    session.on_event("laptop", event(1, ready=Ready()), now)
    session.on_time(now + PROGRESS_S + 1)
    assert session.state is State.FAILED
    assert session.failure is not None
    assert (session.failure.code, session.failure.lost_rank) == ("timed_out", 3)
    assert session.failure.message.startswith("node 'box' (rank 2) gave no sign of life")


def test_a_rank_that_ends_unasked_fails_the_session(session: Session) -> None:
    session.on_event("box", event(2, released=Empty()), 1)
    assert session.state is State.FAILED
    assert session.failure is not None
    assert session.failure.code == "rank_ended"


def test_what_is_not_from_the_ranks_node_and_epoch_is_ignored(session: Session) -> None:
    session.on_event("box", event(0, failed=Failure(code="x")), 1)
    session.on_event("pc", event(0, epoch=session.epoch + 1, failed=Failure(code="x")), 1)
    session.on_event("pc", event(3, failed=Failure(code="x")), 1)
    session.on_event("pc", RankEvent(session="s", epoch=session.epoch), 1)
    assert session.state is State.STARTING


def test_a_session_s_epoch_is_its_own(session: Session) -> None:
    listen(session)
    session.epoch = 2
    session.on_event("pc", event(0, epoch=1, failed=Failure(code="x")), 1)
    assert session.state is State.CONNECTING, "that was said of the plan before"
    assert {command.epoch for _, command in session.fail(Failure(code="x"), 2)} == {2}


def test_closing_waits_for_the_ranks_but_not_for_ever(session: Session) -> None:
    make_ready(session)
    assert len(session.close(10)) == 3
    assert session.close(11) == []
    session.on_event("pc", event(0, released=Empty()), 11)
    session.on_time(10 + RELEASE_S)
    assert not session.over
    session.on_time(10 + RELEASE_S + 1)
    assert session.over


def test_names_are_unique_among_the_living() -> None:
    table = SessionTable()
    first = table.open(SessionRequest("bard", name="bard"), 0)
    with pytest.raises(NameInUseError, match=first.id):
        table.open(SessionRequest("other", name="bard"), 0)
    other = table.open(SessionRequest("other"), 0)
    with pytest.raises(NameInUseError):
        table.rename(other, "bard")
    first.fail(Failure(code="x"), 1)
    assert table.named("bard") is first
    table.rename(other, "bard")
    assert table.named("bard") is other
    assert first.state is State.CLOSING


def test_memory_is_reserved_until_ranks_are_gone(session: Session) -> None:
    table = SessionTable()
    table.add(session)
    planned = session.ranks[0].plan.memory_bytes
    assert table.reserved("pc") == planned
    session.fail(Failure(code="x"), 1)
    assert table.reserved("pc") == planned
    session.on_event("pc", event(0, released=Empty()), 2)
    assert table.reserved("pc") == 0


def test_the_holder_that_was_lost_is_blamed_where_caches_are_placed_anew(held: Session) -> None:
    """Not one that was let go for it; and nobody, if only its rank knows of the loss."""
    held.request = replace(held.request, recover=True)
    failed = Failure(code="internal_error", message="the worker has ended with status -9")
    held.on_event("box", event(3, failed=failed), 5)
    assert {kind for _, _, kind in kinds(held.replace_holders("a disk failed", 6))} == {"release"}
    assert held.state is State.RECOVERING
    why = held.losses.last[-1].why
    assert (why.code, why.lost_rank) == ("caches_lost", 4)
    assert why.message == "node 'box' (caches of rank 1): the worker has ended with status -9"
    assert held.replace_holders("a disk failed", 7) == [], "once is enough"


def test_a_node_is_unblamed_if_none_of_its_workers_is_to_blame(held: Session) -> None:
    """On box are the holders of both ranks."""
    held.request = replace(held.request, recover=True)
    died = Failure(code="worker_died", message="killed", lost_rank=4)
    held.on_event("box", event(3, failed=died), 5)
    held.replace_holders("a holder is lost", 6)
    assert held.losses.last[-1].why.lost_rank == 4
    assert held.unblamed == {"pc", "laptop"}


def test_nobody_is_blamed_for_caches_that_a_rank_alone_misses(held: Session) -> None:
    held.request = replace(held.request, recover=True)
    assert {command[0] for command in held.replace_holders("a disk failed", 6)} == {"pc", "laptop", "box"}
    why = held.losses.last[-1].why
    assert (why.lost_rank, why.message.endswith(": a disk failed")) == (0, True)
    assert held.suspects == set()
