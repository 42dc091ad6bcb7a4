"""The state machine of a training on the mesh: who is told what, whoever dies, leaves or comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.orchestrator.jobs import files
from motley.orchestrator.jobs.job import (
    BROKEN_S,
    DEATHS,
    POINTS,
    START_S,
    Job,
    Member,
    Mode,
    Order,
    Papers,
    Place,
    Request,
    State,
    Step,
)
from motley.protocol import LEADER
from motley.protocol.mesh_pb2 import Credentials, JobEvent, JobProgress

REQUEST = Request("letters", "model", Mode.MERGE, "a", ("a", "b", "c"), "0" * 32, patience_s=10.0)


def issue(session: str, members: int) -> Papers:
    return Papers(session.encode(), [Credentials(key=str(index).encode()) for index in range(members)])


def begun(mode: Mode = Mode.MERGE, nodes: Sequence[str] = ("a", "b", "c")) -> Job:
    request = replace(REQUEST, mode=mode, nodes=tuple(nodes))
    places = {name: Place(1 << 30, 1.0) for name in ("a", *nodes)}
    job = Job("12345678", request, 0.0, places, issue)
    orders = job.begin(0.0)
    assert [order.order.WhichOneof("body") for order in orders] == ["start"] * len(job.members)
    return job


def event(job: Job, member: int, **body: object) -> JobEvent:
    return JobEvent(job=job.id, epoch=job.epoch, member=member, **body)  # type: ignore[arg-type]


def tell(job: Job, member: int, now: float = 1.0, **body: object) -> list[Order]:
    return job.on_event(job.members[member].node, event(job, member, **body), now)


def all_listen(job: Job) -> list[Order]:
    orders: list[Order] = []
    for number in range(len(job.members)):
        orders = tell(job, number, listening="" if number == LEADER else f"host:{number}")
    return orders


def bodies(orders: Sequence[Order]) -> list[tuple[str, int, str]]:
    return [(each.node, each.order.member, each.order.WhichOneof("body") or "") for each in orders]


def test_the_leader_hears_of_the_others_once_all_are_there_and_everything_is_forgotten_at_the_end() -> None:
    job = begun()
    assert [(each.node, each.step) for each in job.members] == [(name, Step.STARTING) for name in "aabc"]
    (told,) = all_listen(job)
    peers = told.order.peers.peers
    assert (told.node, told.order.member) == ("a", LEADER)
    assert [(each.member, each.node, each.address) for each in peers] == [
        (number, node, f"host:{number}") for number, node in ((1, "a"), (2, "b"), (3, "c"))
    ]
    orders = tell(job, LEADER, done='{"adapter": "out"}')
    assert (job.state, job.result) == (State.DONE, {"adapter": "out"})
    assert bodies(orders) == [(name, 0, "forget") for name in "abc"]
    assert tell(job, 1, died="it was killed") == [], "what comes later is ignored"


def test_only_the_leader_has_the_ticket_and_only_who_computes_takes_the_device() -> None:
    for mode, computes in ((Mode.MERGE, [False, True, True]), (Mode.CHAIN, [True, True, True])):
        job = Job("12345678", replace(REQUEST, mode=mode, nodes=("b", "c")), 0.0, {}, issue)
        starts = [order.order.start for order in job.begin(0.0)]
        assert [start.computes for start in starts] == computes
        assert [bool(start.ticket) for start in starts] == [True, False, False]
        assert [start.tls.key for start in starts] == [b"0", b"1", b"2"]


def test_a_worker_that_dies_begins_again_and_one_that_dies_too_often_is_left_out() -> None:
    job = begun()
    all_listen(job)
    for death in range(1, DEATHS):
        orders = tell(job, 2, died="it was killed by signal 9")
        assert bodies(orders)[0] == ("b", 2, "start")
        assert job.members[2].deaths == death
        (told,) = tell(job, 2, listening=f"again:{death}")
        assert told.order.peers.peers[1].address == f"again:{death}"
    orders = tell(job, 2, died="it was killed by signal 9")
    assert (job.state, job.members[2].step) == (State.RUNNING, Step.LEFT_OUT)
    assert bodies(orders) == [("b", 2, "end"), ("a", LEADER, "peers")]
    assert "died 3 times" in orders[1].order.peers.peers[1].left_out


def test_a_node_that_comes_back_goes_on_and_one_that_stays_away_is_left_out() -> None:
    job = begun()
    all_listen(job)
    job.on_node_lost("b", "is lost: its connection ended", 5.0)
    job.on_node_lost("c", "is lost: its connection ended", 5.0)
    assert job.on_time(14.0) == []
    held = [event(job, 2, listening="host:2")]
    job.on_node_back("b", held, 14.0)
    assert job.members[2].step is Step.THERE, "its worker has gone on"
    assert ("c", 3, "start") in bodies(job.on_node_back("c", [], 14.0)), "its worker was lost with it"
    job.on_node_lost("b", "is lost: its connection ended", 20.0)
    job.on_time(31.0)
    assert (job.members[2].step, "away for 10 s" in job.members[2].why) == (Step.LEFT_OUT, True)


def test_without_its_leader_or_anybody_who_trains_a_job_fails() -> None:
    job = begun()
    orders = tell(job, LEADER, failed="documents.jsonl: no line has an answer to learn")
    assert (job.state, job.why) == (State.FAILED, "a: documents.jsonl: no line has an answer to learn")
    assert bodies(orders) == [(name, 0, "forget") for name in "abc"]
    job = begun(nodes=("b", "c"))
    tell(job, 1, failed="no model 'model'")
    tell(job, 2, failed="no model 'model'")
    assert job.state is State.FAILED
    assert "b: no model 'model'; c: no model 'model'" in job.why


def test_a_device_that_somebody_else_has_is_waited_for_and_told() -> None:
    job = begun()
    why = "'game' has a lease of the processor until 12:00"
    for number in (LEADER, 1, 3):
        assert tell(job, number, listening="host") == [], "the leader begins when all are there"
    assert tell(job, 2, waits=why) == []
    assert (job.members[2].step, job.members[2].why) == (Step.WAITING, why)
    assert f"b waits: {why}" in job.log
    assert job.on_time(START_S + 2) == [], "it has longer for that than to start"
    assert bodies(tell(job, 2, listening="host")) == [("a", LEADER, "peers")]


def test_a_device_that_is_taken_is_told_to_the_leader_and_so_is_where_its_worker_is_after() -> None:
    job = begun()
    all_listen(job)
    (told,) = tell(job, 2, waits="'game' has a lease")
    assert [each.address for each in told.order.peers.peers] == ["host:1", "", "host:3"]
    assert tell(job, 2, waits="'game' has a lease for longer") == []
    (told,) = tell(job, 3, listening="again:3")
    addresses = [each.address for each in told.order.peers.peers]
    assert addresses == ["host:1", "", "again:3"], "who waits holds no news of others back"
    (told,) = tell(job, 2, listening="again:2")
    assert [each.address for each in told.order.peers.peers] == ["host:1", "again:2", "again:3"]


def test_what_a_node_holds_for_nothing_is_ended_as_it_comes_back() -> None:
    job = begun()
    all_listen(job)
    job.on_node_lost("b", "is lost", 2.0)
    job.on_time(30.0)
    assert job.members[2].step is Step.LEFT_OUT
    old = JobEvent(job=job.id, epoch=job.epoch - 1, member=3, listening="b:3")
    orders = job.on_node_back("b", [event(job, 2, listening="b:2"), old], 31.0)
    assert bodies(orders) == [("b", 2, "end"), ("b", 3, "end")]
    assert [each.order.epoch for each in orders] == [job.epoch, job.epoch - 1]


def test_what_is_no_number_is_not_told() -> None:
    member = Member("a")
    infinite = float("inf")
    member.hear(JobProgress(step=1, steps=9, loss=float("nan"), held_out=2.0, tokens_per_s=infinite))
    assert member.latest == {"step": 1, "steps": 9, "rate": 0, "tokens_per_s": 0, "peak_bytes": 0, "held_out": 2.0}
    for told in ('{"perplexity": [NaN, 1]}', '{"perplexity": 1e999}', "[" * 100_000, "[]", "{"):
        job = begun()
        all_listen(job)
        tell(job, LEADER, done=told)
        assert (job.state, job.result) == (State.DONE, {})


def test_a_chain_begins_anew_without_who_is_gone() -> None:
    job = begun(Mode.CHAIN, ("b", "c"))
    all_listen(job)
    old = job.epoch
    orders = tell(job, 2, died="it was killed")
    assert job.epoch == old + 1
    assert [each.order.WhichOneof("body") for each in orders] == ["end"] * 3 + ["start"] * 3
    assert len({each.order.start.secret for each in orders[3:]}) == 1
    all_listen(job)
    job.on_node_lost("c", "is lost: its connection ended", 2.0)
    tell(job, LEADER, 3.0, broke="rank 2 is gone")
    tell(job, 1, 3.0, broke="rank 2 is gone")
    assert job.on_time(3.0) == []
    job.on_time(3.5 + BROKEN_S)
    assert [each.node for each in job.members] == ["a", "b"], "on the nodes that are left"
    assert job.members[1].deaths == 0, "it was not its fault"


def test_others_with_data_come_first_in_a_chain_each_with_its_own_ticket() -> None:
    request = replace(REQUEST, mode=Mode.CHAIN, nodes=("b", "c"), others={"c": "1" * 32, "d": "2" * 32})
    job = Job("12345678", request, 0.0, {name: Place(1 << 30, 1.0) for name in "abcd"}, issue)
    orders = job.begin(0.0)
    tickets = {each.node: each.order.start.ticket for each in orders}
    assert list(tickets.items()) == [("a", "0" * 32), ("c", "1" * 32), ("d", "2" * 32), ("b", "")]
    assert all(each.order.start.computes for each in orders)
    assert files.read(files.pack(job), issue, 0.0).request == request
    peers = all_listen(job)[0].order.peers.peers
    assert [(each.node, each.owns) for each in peers] == [("a", False), ("c", True), ("d", True), ("b", False)]
    tell(job, 2, failed="no answers")  # d does not take part: the others begin anew
    assert [each.node for each in job.members] == ["a", "c", "b"]
    assert job.nodes == set("abcd"), "whoever may have files of it"


def test_a_chain_waits_for_the_only_other_node() -> None:
    job = begun(Mode.CHAIN, ("b",))
    all_listen(job)
    job.on_node_lost("b", "is lost: its connection ended", 2.0)
    tell(job, LEADER, 2.0, broke="rank 1 is gone")
    orders = job.on_time(3.0 + BROKEN_S)
    assert ("b", 1, "start") not in bodies(orders)
    assert job.members[1].step is Step.AWAY
    assert ("b", 1, "start") in bodies(job.on_node_back("b", [], 9.0))


def test_a_curve_is_thinned_out_and_goes_back_with_its_training() -> None:
    member = Member("a")
    for step in range(1, 3000):
        member.hear(JobProgress(step=step, steps=3000, loss=1 / step))
    assert len(member.curve) <= POINTS
    assert member.curve[0]["step"] < 20
    assert member.curve[-1]["step"] > 2900
    member.hear(JobProgress(step=2000, steps=3000, loss=0.5))
    assert all(before["step"] < after["step"] for before, after in zip(member.curve, member.curve[1:], strict=False))
    assert member.latest["step"] == 2000
    member.hear(JobProgress(step=0, steps=3000, held_out=3.0))
    assert [each["step"] for each in member.curve] == [0], "it has no checkpoint, and begins at the beginning"


def test_a_job_is_what_it_was_when_it_was_written_down() -> None:
    job = begun()
    all_listen(job)
    tell(job, 1, progress=JobProgress(step=3, steps=9, loss=2.0, peak_bytes=7))
    tell(job, 2, failed="no model")
    read = files.read(files.pack(job), issue, 100.0)
    assert read.request == job.request
    assert read.places == job.places
    assert [each.step for each in read.members] == [Step.AWAY, Step.AWAY, Step.LEFT_OUT, Step.AWAY]
    assert read.members[1].curve == job.members[1].curve
    held = [event(job, 0, listening=""), event(job, 1, listening="host:1")]
    read.on_node_back("a", held, 101.0)
    assert (read.epoch, read.members[1].step) == (job.epoch, Step.THERE), "workers that go on are taken up"
    orders = read.on_node_back("c", [], 101.0)
    assert read.epoch == job.epoch + 1, "nobody has papers for one that begins again, so all begin anew"
    assert ("c", 3, "start") in bodies(orders)
    stopped = begun()
    stopped.stop(1.0)
    assert files.read(files.pack(stopped), issue, 2.0).state is State.STOPPED
    for damaged in (b"", b"{}", b'{"format": 7}', files.pack(job).replace(b'"members"', b'"people"')):
        with pytest.raises(files.JobFileError):
            files.read(damaged, issue, 0.0)


@given(st.data())
def test_whatever_happens_a_job_ends_or_can_be_ended(data: st.DataObject) -> None:
    job = begun(data.draw(st.sampled_from(Mode)))
    now = 0.0
    for _ in range(data.draw(st.integers(0, 30))):
        now += data.draw(st.floats(0, 8))
        node = data.draw(st.sampled_from("abc"))
        match data.draw(st.sampled_from(["event", "lost", "back", "time"])):
            case "event":
                number = data.draw(st.integers(0, len(job.members) - 1))
                kind = data.draw(st.sampled_from(["listening", "died", "failed", "broke", "waits", "done", "says"]))
                orders = tell(job, number, now, **{kind: "{}"})
            case "lost":
                orders = job.on_node_lost(node, "is lost", now)
            case "back":
                orders = job.on_node_back(node, [], now)
            case _:
                orders = job.on_time(now)
        assert all(each.node in job.nodes for each in orders)
        assert all(each.order.epoch in (0, job.epoch, job.epoch - 1) for each in orders)
        files.read(files.pack(job), issue, now)
    if job.runs:
        assert bodies(job.stop(now)) == [(name, 0, "forget") for name in "abc"]
    assert not job.runs
