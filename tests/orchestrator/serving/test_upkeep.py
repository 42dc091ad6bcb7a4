"""Sessions whose experts are on hosts, while nodes come and go, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import pytest

from motley.orchestrator.experts.questions import Answer, Question
from motley.orchestrator.experts.registry import ExpertMap
from motley.orchestrator.planning.experts.groups import slice_bytes
from motley.orchestrator.serving.plans.memory import Memory
from motley.orchestrator.serving.upkeep import Upkeep
from motley.protocol.mesh_pb2 import (
    Described,
    ExpertLoad,
    Failure,
    Heartbeat,
    ModelProfile,
    RankCommand,
)

from ..conftest import DEADLINE_S, join_able, of_kind, report

NODES = ["pc", "laptop", "box"]


async def test_a_lost_nodes_experts_are_placed_anew(mesh: Any, nodes: list[Any]) -> None:
    session = await mesh.serve()
    await nodes[2].leave()
    path = f"/api/sessions/{session['id']}"
    body = await mesh.poll(path, lambda body: body["hosts"][2]["state"] == "gone" and not body["waiting_for"])
    assert body["state"] == "ready"
    assert [host["experts"] for host in body["hosts"]][2] == 0
    assert sum(host["experts"] for host in body["hosts"]) == 32
    assert "node 'box' is lost" in body["hosts"][2]["lost"]
    trunk = nodes[0]

    def told() -> list[int]:
        """How many experts the trunk may ask each host for, as it was told last."""
        hosts = [command.placement.hosts for command in of_kind(trunk, "placement")] or [[]]
        return [sum(len(own.indices) for own in host.sets) for host in hosts[-1]]

    # The first is of the loss; more follow as the other hosts take over.
    await trunk.until(lambda: told()[2:] == [0] and sum(told()) == 32)
    versions = [command.placement.version for command in of_kind(trunk, "placement")]
    assert len(versions) >= 2
    assert versions == sorted(set(versions))


async def test_while_an_expert_has_no_host_the_status_says_so(mesh: Any, nodes: list[Any]) -> None:
    session = await mesh.serve()

    async def slow(command: RankCommand) -> None:
        if command.WhichOneof("body") != "host":
            await nodes[0].obey(command)

    nodes[0].on_rank = slow
    await nodes[2].leave()
    path = f"/api/sessions/{session['id']}"
    body = await mesh.poll(path, lambda body: body["waiting_for"] and len(body["waiting_for"]) < 10)
    _, experts = await mesh.call("GET", f"{path}/experts")
    assert experts["waiting_for"] == body["waiting_for"]
    assert experts["replicas"] == {"asked": 1, "least": 0}
    states = {host["state"] for group in experts["groups"] for expert in group["experts"] for host in expert["hosts"]}
    assert states == {"serving", "fetching", "dead"}
    assert experts["moves"] == len(body["waiting_for"])


async def test_nothing_moves_in_a_session_that_has_failed(mesh: Any, nodes: list[Any]) -> None:
    session = await mesh.serve(recover=False)

    async def hanging(_: RankCommand) -> None:
        """Neither fetches experts nor says that it was released."""

    nodes[1].on_rank = hanging
    path = f"/api/sessions/{session['id']}/experts"
    await nodes[2].leave()
    await mesh.poll(path, lambda body: body["hosts"][1]["fetching"])
    await nodes[0].leave()
    await mesh.session(session["id"], "failed")
    _, experts = await mesh.call("GET", path)
    assert (experts["hosts"][1]["fetching"] > 0, experts["moves"]) == (True, 0)


async def test_a_host_that_dies_is_started_again(mesh: Any, nodes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motley.orchestrator.experts.recovery.RESTART_S", 0.0)
    session = await mesh.serve()
    (host,) = of_kind(nodes[1], "assign")
    await nodes[1].event(host, failed=Failure(code="worker_died", message="killed by signal 9"))
    await nodes[1].until(lambda: len(of_kind(nodes[1], "assign")) == 2)
    body = await mesh.poll(
        f"/api/sessions/{session['id']}/experts",
        lambda body: body["hosts"][1]["state"] == "ready" and not body["moves"],
    )
    assert (body["hosts"][1]["restarts"], body["hosts"][1]["lost"], body["waiting_for"]) == (1, None, [])


async def test_a_host_is_started_again_where_what_it_was_assigned_fits(
    mesh: Any, nodes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motley.orchestrator.experts.recovery.RESTART_S", 0.0)
    session = await mesh.serve()
    await nodes[2].leave()  # the others take over what it held
    body = await mesh.poll(
        f"/api/sessions/{session['id']}",
        lambda body: body["hosts"][2]["state"] == "gone" and not body["waiting_for"],
    )
    assigned, grown = (of["hosts"][1]["memory"]["planned_bytes"] for of in (session, body))
    assert assigned < grown
    (host,) = of_kind(nodes[1], "assign")
    nodes[1].heartbeats = False
    await nodes[1].send(heartbeat=Heartbeat(memory_available_bytes=assigned))
    await nodes[1].event(host, failed=Failure(code="worker_died", message="killed by signal 9"))
    await nodes[1].until(lambda: len(of_kind(nodes[1], "assign")) == 2)


async def test_a_node_that_comes_back_hosts_experts_again(
    mesh: Any, nodes: list[Any], new_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motley.orchestrator.experts.recovery.RESTART_S", 0.0)
    session = await mesh.serve()
    path = f"/api/sessions/{session['id']}"
    await nodes[2].leave()
    await mesh.poll(path, lambda body: body["hosts"][2]["state"] == "gone" and not body["waiting_for"])
    again = await mesh.join(new_node("box"))
    body = await mesh.poll(path, lambda body: body["hosts"][2]["state"] == "ready")
    assert (body["state"], body["waiting_for"]) == ("ready", [])
    (command,) = of_kind(again, "assign")
    assert command.assign == of_kind(nodes[2], "assign")[0].assign
    trunk = nodes[0]
    await trunk.until(lambda: any(told.placement.alive[2] for told in of_kind(trunk, "placement")[-1:]))


async def test_a_node_that_joins_hosts_experts(
    mesh: Any, nodes: list[Any], new_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motley.orchestrator.experts.moves.RETIRE_S", 0.0)
    session = await mesh.serve()
    tower = await mesh.join(new_node("tower", bandwidth=9e9))
    body = await mesh.poll(
        f"/api/sessions/{session['id']}/experts",
        lambda body: len(body["hosts"]) == 4 and body["hosts"][3]["serving"] and not body["moves"],
    )
    assert (body["hosts"][3]["node"], body["hosts"][3]["rank"], body["waiting_for"]) == ("tower", 4, [])
    assert sum(host["serving"] for host in body["hosts"]) == 32
    (assigned,) = of_kind(tower, "assign")
    (first, *_) = of_kind(nodes[1], "assign")
    assert assigned.assign.tls.authority == first.assign.tls.authority
    assert assigned.assign.tls.certificate != first.assign.tls.certificate
    trunk = nodes[0]

    def told() -> list[int]:
        """How many experts the trunk may ask the last host for, as each placement says."""
        return [sum(len(own.indices) for own in t.placement.hosts[-1].sets) for t in of_kind(trunk, "placement")]

    await trunk.until(
        lambda: told()[-1:] == [body["hosts"][3]["serving"]]
    )  # it hears of it later than who asks the API
    last = of_kind(trunk, "placement")[-1].placement
    assert (list(last.alive), last.addresses[3]) == ([True] * 4, "127.0.0.1:5004")


async def test_only_nodes_that_may_join_a_session_and_can(
    mesh: Any, nodes: list[Any], new_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motley.orchestrator.experts.recovery.RESTART_S", 0.0)
    named = await mesh.serve(nodes=["pc", "box"], name="named")
    free = await mesh.serve(name="free")
    unable = new_node("unable")
    unable.capabilities.expert_engines[:] = ["reference"]
    await mesh.join(unable)
    await mesh.join(new_node("tiny", memory=8_000))
    await mesh.join(new_node("tower"))
    path = "/api/sessions/{}"
    body = await mesh.poll(path.format(free["id"]), lambda body: body["hosts"][-1]["node"] == "tower")
    assert [host["node"] for host in body["hosts"]] == ["pc", "laptop", "box", "tower"]
    await nodes[2].leave()
    again = await mesh.join(new_node("box"))
    await again.until(lambda: len(of_kind(again, "assign")) == 2)  # it may come back to both
    _, body = await mesh.call("GET", path.format(named["id"]))
    assert [host["node"] for host in body["hosts"]] == ["pc", "box"]


async def test_nodes_whose_engine_computes_no_experts_host_none(mesh: Any, nodes: list[Any], new_node: Any) -> None:
    unable = new_node("unable", bandwidth=99e9)
    unable.capabilities.expert_engines[:] = []
    unable.on_describe = nodes[0].on_describe
    await mesh.join(unable)
    session = await mesh.serve()
    assert [rank["node"] for rank in session["ranks"]] == ["pc"]
    assert [host["node"] for host in session["hosts"]] == NODES
    request = {"model": "mix", "name": "x", "experts": "parallel", "nodes": ["unable"]}
    status, body = await mesh.call("POST", "/api/sessions", request)
    assert (status, body["error"]["code"]) == (400, "invalid_request")
    assert "engine 'onnxruntime' cannot have experts elsewhere on unable" in body["error"]["message"]


async def homeless(mesh: Any, new_node: Any, moe: ModelProfile) -> dict[str, Any]:
    """A session that has lost a host whose experts find no place."""
    moe.cache_bytes_per_token = 2
    for name in ("pc", "laptop"):
        node = await mesh.join(new_node(name, memory=60_000 if name == "pc" else 30_000))
        node.on_describe = lambda _: Described(profile=moe)
    session: dict[str, Any] = await mesh.serve(context=1)
    await mesh.nodes[1].leave()
    return session


async def test_experts_that_find_no_place_end_the_session(
    mesh: Any, new_node: Any, moe: ModelProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motley.orchestrator.experts.registry.HOMELESS_S", 0.5)
    session = await homeless(mesh, new_node, moe)
    failed = await mesh.session(session["id"], "failed")
    assert failed["failure"]["code"] == "insufficient_memory"
    assert "node 'laptop' is lost" in failed["failure"]["message"]


@pytest.mark.parametrize("where", ["Question.answer", "ExpertMap.question", "ExpertMap.adopt"])
async def test_a_planner_that_fails_is_not_asked_the_same_again(
    mesh: Any, nodes: list[Any], new_node: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    session = await mesh.serve()
    owner, method = {"Question": Question, "ExpertMap": ExpertMap}[where.partition(".")[0]], where.partition(".")[2]
    asked = 0

    def fail(*_: object) -> Answer:
        nonlocal asked
        asked += 1
        raise ValueError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, fail)
        await nodes[2].leave()
        path = f"/api/sessions/{session['id']}/experts"
        body = await mesh.poll(path, lambda body: body["short"])
        assert body["short"].startswith("the planner failed (ValueError: a bug)")
        looks, look_after = 0, Upkeep.look_after

        def look(self: Upkeep, session: Any) -> None:
            nonlocal looks
            looks += 1
            look_after(self, session)

        patch.setattr(Upkeep, "look_after", look)
        await mesh.poll(path, lambda _: looks == 3)
        assert asked == 1
    await mesh.join(new_node("tower"))  # with another host there is another question
    body = await mesh.poll(path, lambda body: not body["waiting_for"])
    assert not body["short"]


async def test_a_planner_that_fails_at_rebalancing_is_told(
    mesh: Any, nodes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await mesh.serve()

    def fail(*_: object) -> Answer:
        raise ValueError("a bug")

    monkeypatch.setattr(Question, "answer", fail)
    status, body = await mesh.call("POST", f"/api/sessions/{session['id']}/experts/rebalance")
    assert (status, body["error"]["code"]) == (500, "internal_error")
    assert "ValueError: a bug" in body["error"]["message"]


@pytest.mark.parametrize("name", ["tower", "laptop"])
async def test_experts_that_find_no_place_wait_for_a_node(
    mesh: Any, new_node: Any, moe: ModelProfile, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("motley.orchestrator.experts.recovery.RESTART_S", 0.0)
    session = await homeless(mesh, new_node, moe)
    path = f"/api/sessions/{session['id']}"
    body = await mesh.poll(f"{path}/experts", lambda body: body["short"])
    assert "are missing" in body["short"]
    assert body["waiting_for"]
    await mesh.join(new_node(name, memory=30_000))
    body = await mesh.poll(path, lambda body: not body["waiting_for"])
    assert (body["state"], body["hosts"][-1]["node"]) == ("ready", name)


async def test_experts_that_find_no_place_have_it_when_another_session_ends(
    mesh: Any, nodes: list[Any], moe: ModelProfile
) -> None:
    moe.expert_bytes = 25_000_000  # 800 MB in all, on nodes of 1 GB
    session = await mesh.serve(name="this", nodes=["pc", "laptop"])
    other = await mesh.serve(name="other", nodes=["box", "pc"])
    await nodes[1].leave()
    path = f"/api/sessions/{session['id']}"
    await mesh.poll(f"{path}/experts", lambda body: body["short"])
    await mesh.call("DELETE", f"/api/sessions/{other['id']}")
    await mesh.poll(path, lambda body: not body["waiting_for"])


async def test_nobody_waits_while_the_planner_thinks_about_others(
    mesh: Any, nodes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a session that is created nor one that is balanced holds up one that has lost a host."""
    slow, quick = await mesh.serve(name="slow", nodes=["pc", "laptop"]), await mesh.serve(name="quick")
    plan, thinking, go_on = Question.answer, threading.Semaphore(0), threading.Event()

    def answer(question: Question) -> Answer:
        if (len(question.hosts) == 2 and question.worth) or question.previous is None:
            thinking.release()
            go_on.wait(DEADLINE_S)
        return plan(question)

    monkeypatch.setattr(Question, "answer", answer)
    balancing = asyncio.create_task(mesh.call("POST", f"/api/sessions/{slow['id']}/experts/rebalance"))
    creating = asyncio.create_task(mesh.call("POST", "/api/sessions", {"model": "mix", "name": "third"}))
    for _ in range(2):
        await asyncio.to_thread(thinking.acquire, timeout=DEADLINE_S)
    await nodes[2].leave()
    body = await mesh.poll(
        f"/api/sessions/{quick['id']}",
        lambda body: body["hosts"][2]["state"] == "gone" and not body["waiting_for"],
    )
    assert body["state"] == "ready"
    assert not balancing.done()
    assert not creating.done()
    go_on.set()
    assert (await balancing)[0] == 200
    assert (await creating)[0] == 503  # one of the nodes that it was planned with is lost


async def test_sessions_that_lose_a_host_at_a_time_are_not_promised_the_same_memory(
    mesh: Any, nodes: list[Any], new_node: Any, moe: ModelProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the one loses finds place, then the other waits for room."""
    moe.expert_bytes = 20_000_000  # 640 MB in all, on nodes of 1 GB
    first, second = [await mesh.serve(name=name, nodes=["pc", name]) for name in ("laptop", "box")]
    plan, together = Question.answer, threading.Barrier(2)

    def answer(question: Question) -> Answer:
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(1.0)  # both have seen the same free memory
        return plan(question)

    monkeypatch.setattr(Question, "answer", answer)
    await asyncio.gather(nodes[1].leave(), nodes[2].leave())

    async def waiting(session: dict[str, Any]) -> list[str]:
        path = f"/api/sessions/{session['id']}/experts"
        settled = lambda body: body["hosts"][1]["state"] == "gone" and (body["short"] or not body["waiting_for"])  # noqa: E731
        return list((await mesh.poll(path, settled))["waiting_for"])

    assert [bool(missing) for missing in sorted([await waiting(first), await waiting(second)])] == [False, True]
    _, body = await mesh.call("GET", "/api/nodes")
    assert all(node["memory_reserved_bytes"] <= node["memory_bytes"] for node in body["nodes"])


async def grouped(mesh: Any, new_node: Any, moe: ModelProfile, names: str, replicas: int = 1) -> tuple[str, int]:
    """A session of two experts with a third of both on every node, none of which has room for a whole one: the path to
    its experts, and the bytes of a node."""
    del moe.expert_layers[1:]
    moe.expert_count, moe.expert_bytes, moe.expert_weight_bytes = 2, 1_000_008, 1_000_000
    part = moe.host_fixed_bytes + 6 * slice_bytes(moe, 8) + 5
    for name, memory in [("pc", 10**5), *((name, part) for name in names)]:
        node = await mesh.join(new_node(name, memory=memory))
        node.on_describe = lambda _: Described(profile=moe)
    session = await mesh.serve(experts="parallel", context=1, replicas=replicas)
    return f"/api/sessions/{session['id']}/experts", part


async def test_a_group_that_loses_a_node_for_good_is_formed_anew_with_one_that_joins(
    mesh: Any, new_node: Any, moe: ModelProfile
) -> None:
    path, part = await grouped(mesh, new_node, moe, "bcd")
    await mesh.nodes[3].leave()
    await mesh.poll(path, lambda body: body["short"])
    small = await mesh.join(new_node("small", memory=moe.host_fixed_bytes + slice_bytes(moe, 8)))
    await mesh.join(new_node("e", memory=part))
    body = await mesh.poll(path, lambda body: not body["waiting_for"])
    assert [(host["node"], host["state"], host["serving"]) for host in body["hosts"]] == [
        ("b+c+d", "gone", 0),
        ("b+c+e", "ready", 2),
    ]
    assert small.commands == []
    (first, again) = [command.assign for command in of_kind(mesh.nodes[1], "assign")]
    assert (again.expert_slices, again.group.host, sum(again.group.slices)) == (8, 1, 8)
    assert set(again.group.ranks).isdisjoint(first.group.ranks)
    assert again.group.secret != first.group.secret
    await mesh.join(new_node("d", memory=part))  # the old group is not started again: its nodes have no room
    await mesh.nodes[-2].leave()
    await mesh.poll(path, lambda body: body["hosts"][1]["state"] == "gone" and not body["waiting_for"])


async def test_a_node_whose_group_goes_on_without_it_is_a_host_again(
    mesh: Any, new_node: Any, moe: ModelProfile
) -> None:
    path, part = await grouped(mesh, new_node, moe, "bcd")
    await mesh.nodes[3].leave()
    await mesh.join(new_node("e", memory=part))
    await mesh.poll(path, lambda body: len(body["hosts"]) == 2 and not body["waiting_for"])
    await mesh.join(new_node("d", memory=part + 2 * slice_bytes(moe, 8)))  # that has room for a whole expert
    body = await mesh.poll(path, lambda body: len(body["hosts"]) == 3 and body["hosts"][2]["state"] == "ready")
    assert [(host["node"], host["state"]) for host in body["hosts"]] == [
        ("b+c+d", "gone"),
        ("b+c+e", "ready"),
        ("d", "ready"),
    ]


async def test_a_replica_that_is_lost_with_a_group_is_restored_by_a_node_that_joins(
    mesh: Any, new_node: Any, moe: ModelProfile
) -> None:
    path, part = await grouped(mesh, new_node, moe, "bcdefg", replicas=2)
    await mesh.nodes[3].leave()
    body = await mesh.poll(path, lambda body: body["short"])
    assert (body["replicas"], body["waiting_for"]) == ({"asked": 2, "least": 1}, [])
    await mesh.join(new_node("h", memory=part))
    body = await mesh.poll(path, lambda body: body["replicas"]["least"] == 2 and not body["short"])
    assert [host["state"] for host in body["hosts"]].count("gone") == 1
    assert "h" in body["hosts"][2]["node"]


async def test_a_session_whose_answers_always_come_too_late_asks_no_more(
    mesh: Any, nodes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others have been promised the memory each time."""
    session = await mesh.serve()
    path = f"/api/sessions/{session['id']}/experts"
    monkeypatch.setattr(Memory, "has", lambda *_: False)
    status, body = await mesh.call("POST", f"{path}/rebalance")
    assert (status, body["error"]["code"]) == (422, "insufficient_memory")
    _, body = await mesh.call("GET", path)
    assert body["short"] is None, "a better balance is not missed"
    await nodes[2].leave()
    body = await mesh.poll(path, lambda body: body["short"])
    assert "promised" in body["short"]
    assert body["waiting_for"]


async def test_that_no_more_hosts_are_possible_is_logged(
    mesh: Any, nodes: list[Any], new_node: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("motley.orchestrator.serving.upkeep.MAX_RANKS", 5)
    session = await mesh.serve()
    assert "no other host can join" not in caplog.text
    await mesh.join(new_node("tower"))
    await mesh.poll(f"/api/sessions/{session['id']}", lambda body: len(body["hosts"]) == 4)
    assert f"session {session['id']} (mix) has had 5 ranks and expert hosts" in caplog.text


async def test_a_skewed_load_moves_experts_by_itself(mesh: Any, nodes: list[Any], moe: ModelProfile) -> None:
    moe.expert_bytes = 10_000_000
    session = await mesh.serve()
    _, experts = await mesh.call("GET", f"/api/sessions/{session['id']}/experts?layers=each")
    loads = [
        ExpertLoad(layer=layer, rows=[10**4 * (e["hosts"][0]["host"] == 1) for e in group["experts"]])
        for layer, group in enumerate(experts["groups"])
    ]
    await report(nodes[0], loads=loads)
    await nodes[0].until(lambda: of_kind(nodes[0], "placement"))
    body = await mesh.session(session["id"], "ready")
    assert body["waiting_for"] == []


async def test_a_node_whose_engine_cannot_run_does_not_join_a_session(mesh: Any, new_node: Any) -> None:
    await join_able(mesh, new_node, a=10**9, b=10**9)
    session = await mesh.serve(experts="parallel", context=10)
    lame = new_node("lame", memory=10**9)
    del lame.capabilities.engines[:]
    lame.capabilities.engines.add(name="onnxruntime", lacking="no DLL")
    await mesh.join(lame)
    await mesh.join(new_node("able", memory=10**9))
    path = f"/api/sessions/{session['id']}"
    body = await mesh.poll(path, lambda body: len(body["hosts"]) > 2)
    assert [host["node"] for host in body["hosts"]][2:] == ["able"]
    assert lame.commands == []
