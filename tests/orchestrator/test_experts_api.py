"""Sessions whose experts are on hosts, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import pytest

from motley.orchestrator.expert_hosts import Answer, Question
from motley.orchestrator.planning.experts import PlacementError
from motley.orchestrator.planning.groups import slice_bytes
from motley.orchestrator.serving import Serving
from motley.protocol.mesh_pb2 import (
    Described,
    ExpertLoad,
    ExpertReport,
    Failure,
    Heartbeat,
    HostReport,
    ModelProfile,
    RankCommand,
)

from .conftest import DEADLINE_S, expert_profile

NODES = ["pc", "laptop", "box"]


def of_kind(node: Any, body: str) -> list[RankCommand]:
    return [command for command in node.commands if command.WhichOneof("body") == body]


@pytest.fixture
async def nodes(mesh: Any, new_node: Any, moe: ModelProfile) -> list[Any]:
    """Three nodes that know a model with experts; the first is the fastest."""
    joined = []
    for number, name in enumerate(NODES):
        node = new_node(name, bandwidth=(10 - number) * 1e9, zone="attic" if name == "box" else "")
        node.on_describe = lambda _: Described(profile=moe)
        joined.append(await mesh.join(node))
    return joined


async def report(node: Any, **values: Any) -> None:
    """Say something as the trunk's only rank."""
    await node.event(of_kind(node, "assign")[0], experts=ExpertReport(**values))


async def test_experts_are_spread_over_all_nodes(mesh: Any, nodes: list[Any]) -> None:
    session = await mesh.serve(replicas=2)
    assert (session["experts"], session["replicas"], session["waiting_for"]) == ("parallel", 2, [])
    assert [rank["node"] for rank in session["ranks"]] == ["pc"]
    assert [(host["host"], host["rank"], host["node"], host["zone"]) for host in session["hosts"]] == [
        (0, 1, "pc", None),
        (1, 2, "laptop", None),
        (2, 3, "box", "attic"),
    ]
    assert sum(host["experts"] for host in session["hosts"]) == 2 * 4 * 8
    fractions = [each["fraction"] for each in session["hosts"]] + [session["ranks"][0]["share"]["fraction"]]
    assert sum(fractions) == pytest.approx(1)
    assert all(host["loading"] == {"done_bytes": 100, "total_bytes": 100} for host in session["hosts"])
    trunk, host = of_kind(nodes[0], "assign")
    assert (trunk.rank, host.rank, trunk.assign.size, len(trunk.assign.shares)) == (0, 1, 1, 1)
    assert trunk.assign.hosts == host.assign.hosts
    assert [len(peers.peers.addresses) for node in nodes for peers in of_kind(node, "peers")] == [4, 4, 4, 4]
    assert not any(peers.peers.group for node in nodes for peers in of_kind(node, "peers"))
    _, body = await mesh.call("GET", "/api/nodes")
    assert [node["zone"] for node in body["nodes"]] == [None, None, "attic"]
    assert body["nodes"][0]["ranks"] == [{"session": session["id"], "model": "mix", "rank": 0}]
    assert body["nodes"][1]["expert_hosts"] == [{"session": session["id"], "model": "mix", "host": 1}]
    assert body["nodes"][1]["memory_reserved_bytes"] == session["hosts"][1]["memory"]["planned_bytes"]
    status, closed = await mesh.call("DELETE", f"/api/sessions/{session['id']}")
    assert (status, {worker["state"] for worker in closed["ranks"] + closed["hosts"]}) == (200, {"gone"})


async def test_the_map_of_experts(mesh: Any, nodes: list[Any]) -> None:
    session = await mesh.serve()
    path = f"/api/sessions/{session['id']}/experts"
    await report(
        nodes[0],
        loads=[ExpertLoad(layer=layer, rows=[200, 200, 0, 0, 0, 0, 0, 0]) for layer in range(4)],
        hosts=[HostReport(host=1, rows=75, round_trip_s=0.002), HostReport(host=2, rows=25, stalls_s=[0.1])],
        bytes_out=1000,
        bytes_in=500,
    )
    body = await mesh.poll(path, lambda body: body["bytes_out"])
    assert (body["bytes_in"], body["replicas"], body["waiting_for"]) == (500, {"asked": 1, "least": 1}, [])
    assert [(host["rows"], host["load"]) for host in body["hosts"]] == [(0, 0), (75, 0.75), (25, 0.25)]
    assert body["hosts"][1]["round_trip_ms"] == pytest.approx(2)
    assert body["hosts"][2]["stalls_ms"] == pytest.approx([100])
    assert [group["layers"] for group in body["groups"]] == [[0], [1], [2], [3]]
    for group in body["groups"]:
        assert [expert["load"] for expert in group["experts"][:3]] == pytest.approx([2.83, 2.83, 0.39], abs=0.01)
        assert all([host["state"] for host in expert["hosts"]] == ["serving"] for expert in group["experts"])
    assert sum(host["serving"] for host in body["hosts"]) == 32
    status, each = await mesh.call("GET", f"{path}?layers=each")
    assert (status, len(each["groups"])) == (200, 4)


async def test_many_layers_are_shown_in_groups(mesh: Any, nodes: list[Any], moe: ModelProfile) -> None:
    moe.expert_layers.extend(range(4, 19))
    session = await mesh.serve()
    _, body = await mesh.call("GET", f"/api/sessions/{session['id']}/experts")
    assert [len(group["layers"]) for group in body["groups"]] == [3, 3, 3, 2, 2, 2, 2, 2]
    assert all(
        sum(host["layers"] for host in expert["hosts"]) == len(group["layers"])
        for group in body["groups"]
        for expert in group["experts"]
    )
    _, body = await mesh.call("GET", f"/api/sessions/{session['id']}/experts?layers=each")
    assert [group["layers"] for group in body["groups"]] == [[layer] for layer in range(19)]


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
    session = await mesh.serve()

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
    monkeypatch.setattr("motley.orchestrator.expert_hosts.RESTART_S", 0.0)
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
    monkeypatch.setattr("motley.orchestrator.expert_hosts.RESTART_S", 0.0)
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
    monkeypatch.setattr("motley.orchestrator.expert_hosts.RESTART_S", 0.0)
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
    await trunk.until(lambda: of_kind(trunk, "placement")[-1].placement.alive[2])


async def test_a_node_that_joins_hosts_experts(
    mesh: Any, nodes: list[Any], new_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motley.orchestrator.expert_hosts.RETIRE_S", 0.0)
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
    told = of_kind(nodes[0], "placement")[-1].placement
    assert (list(told.alive), told.addresses[3]) == ([True] * 4, "127.0.0.1:5004")
    assert sum(len(own.indices) for own in told.hosts[3].sets) == body["hosts"][3]["serving"]


async def test_only_nodes_that_may_join_a_session_and_can(
    mesh: Any, nodes: list[Any], new_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motley.orchestrator.expert_hosts.RESTART_S", 0.0)
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
    for name in ("pc", "laptop"):
        node = await mesh.join(new_node(name, memory=60_000 if name == "pc" else 30_000))
        node.on_describe = lambda _: Described(profile=moe)
    session: dict[str, Any] = await mesh.serve(context=1)
    await mesh.nodes[1].leave()
    return session


async def test_experts_that_find_no_place_end_the_session(
    mesh: Any, new_node: Any, moe: ModelProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motley.orchestrator.expert_hosts.HOMELESS_S", 0.5)
    session = await homeless(mesh, new_node, moe)
    failed = await mesh.session(session["id"], "failed")
    assert failed["failure"]["code"] == "insufficient_memory"
    assert "node 'laptop' is lost" in failed["failure"]["message"]


@pytest.mark.parametrize("name", ["tower", "laptop"])
async def test_experts_that_find_no_place_wait_for_a_node(
    mesh: Any, new_node: Any, moe: ModelProfile, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("motley.orchestrator.expert_hosts.RESTART_S", 0.0)
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


async def test_experts_too_large_for_a_node_are_on_groups(mesh: Any, new_node: Any, moe: ModelProfile) -> None:
    """Two experts: no node has room for one, three have room for both."""
    del moe.expert_layers[1:]
    moe.expert_count, moe.expert_bytes, moe.expert_weight_bytes = 2, 1_000_008, 1_000_000
    each = slice_bytes(moe, 8)
    for name, memory in [("pc", 10**5), *((name, moe.host_fixed_bytes + 6 * each + 5) for name in ("b", "c", "d"))]:
        node = await mesh.join(new_node(name, memory=memory, zone=name if name > "c" else ""))
        node.on_describe = lambda _: Described(profile=moe)
    session = await mesh.serve(experts="parallel", nodes=["pc", "b", "c", "d"], context=1)
    (host,) = session["hosts"]
    assert (host["node"], host["zone"], host["experts"], host["state"]) == ("b+c+d", "d", 2, "ready")
    assert sum(own["slices"] for own in host["group"]) == 8
    assert host["memory"]["planned_bytes"] == 3 * moe.host_fixed_bytes + 2 * 8 * each
    assert host["loading"] == {"done_bytes": 300, "total_bytes": 300}
    _, found = await mesh.call("GET", f"/api/sessions/{session['id']}/experts")
    assert [(own["node"], own["serving"]) for own in found["hosts"]] == [("b+c+d", 2)]
    _, body = await mesh.call("GET", "/api/nodes")
    assert [len(node["expert_hosts"]) for node in body["nodes"]] == [0, 1, 1, 1]
    reserved = sum(node["memory_reserved_bytes"] for node in body["nodes"][1:])
    assert reserved == host["memory"]["planned_bytes"]
    await mesh.nodes[3].leave()
    found = await mesh.poll(f"/api/sessions/{session['id']}/experts", lambda body: body["short"])
    assert "node 'd'" in found["hosts"][0]["lost"]
    assert len(found["waiting_for"]) == 2


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
    monkeypatch.setattr(Serving, "_is_free", lambda *_: False)
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
    monkeypatch.setattr("motley.orchestrator.serving.MAX_RANKS", 5)
    session = await mesh.serve()
    assert "no other host can join" not in caplog.text
    await mesh.join(new_node("tower"))
    await mesh.poll(f"/api/sessions/{session['id']}", lambda body: len(body["hosts"]) == 4)
    assert f"session {session['id']} (mix) has had 5 ranks and expert hosts" in caplog.text


async def test_what_groups_lack_is_told(mesh: Any, new_node: Any, moe: ModelProfile) -> None:
    moe.expert_weight_bytes = 900
    for name, memory in [("pc", 10**6), ("b", moe.host_fixed_bytes + 500)]:
        node = await mesh.join(new_node(name, memory=memory))
        node.on_describe = lambda _: Described(profile=moe)
    status, body = await mesh.call(
        "POST", "/api/sessions", {"model": "mix", "experts": "parallel", "nodes": ["pc", "b"], "replicas": 2}
    )
    assert status == 422
    message = body["error"]["message"]
    assert "need 2 different nodes; with room for experts there is 1 (pc), 1 missing" in message
    assert "do not fit on groups of 2 nodes" in message
    assert "Each of 32 experts takes 1.00 kB, and a node that has any 8.00 kB for itself:\n  pc: " in message
    assert "free beside the trunk, room for 32\n  b: 8.50 kB free, 500 bytes missing for the first\n" in message
    assert "There is room for 1 of each: `--replicas 1`." in message


async def test_sessions_planned_at_a_time_are_not_promised_the_same_memory(
    mesh: Any, new_node: Any, moe: ModelProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, together = Question.answer, threading.Barrier(3)

    def answer(question: Question) -> Answer:
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(0.5)  # whoever is asked now has seen the same free memory
        return plan(question)

    monkeypatch.setattr(Question, "answer", answer)
    for name in ("pc", "laptop"):  # with room for two sessions
        node = await mesh.join(new_node(name, memory=650_000))
        node.on_describe = lambda _: Described(profile=moe)
    request = {"model": "mix", "experts": "parallel", "context": 2048}
    said = await asyncio.gather(
        *(mesh.call("POST", "/api/sessions?wait=ready", {**request, "name": f"mix {number}"}) for number in range(3))
    )
    codes = sorted(body["error"]["code"] if status != 201 else body["state"] for status, body in said)
    assert codes == ["insufficient_memory", "ready", "ready"]
    _, body = await mesh.call("GET", "/api/nodes")
    assert all(node["memory_reserved_bytes"] <= node["memory_bytes"] for node in body["nodes"])


@pytest.mark.parametrize("experts", ["auto", "parallel"])
async def test_a_session_closed_while_the_planner_fails_was_closed(
    mesh: Any, nodes: list[Any], monkeypatch: pytest.MonkeyPatch, experts: str
) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def answer(_: Question) -> Answer:
        asked.set()
        go_on.wait(DEADLINE_S)
        raise PlacementError("no room")

    monkeypatch.setattr(Question, "answer", answer)
    creating = asyncio.create_task(mesh.call("POST", "/api/sessions", {"model": "mix", "experts": experts}))
    await asyncio.to_thread(asked.wait, DEADLINE_S)
    _, body = await mesh.call("GET", "/api/sessions")
    await mesh.call("DELETE", f"/api/sessions/{body['sessions'][0]['id']}")
    go_on.set()
    status, body = await creating
    assert (status, body["error"]["code"]) == (503, "session_closed")


async def test_rebalancing(mesh: Any, nodes: list[Any], moe: ModelProfile) -> None:
    moe.expert_bytes = 10_000_000
    session = await mesh.serve()
    path = f"/api/sessions/{session['id']}/experts"
    status, body = await mesh.call("POST", f"{path}/rebalance")
    assert (status, body["moves"]) == (200, 0)
    assert body["busy_ms"] == body["busy_ms_after"] > 0
    _, experts = await mesh.call("GET", f"{path}?layers=each")
    loads = [
        ExpertLoad(layer=layer, rows=[150 * (e["hosts"][0]["host"] == 1) for e in group["experts"]])
        for layer, group in enumerate(experts["groups"])
    ]
    await report(nodes[0], loads=loads, bytes_out=1)
    await mesh.poll(path, lambda body: body["bytes_out"])
    status, body = await mesh.call("POST", f"{path}/rebalance")
    assert status == 200
    assert 0 < body["moves"] <= 8
    assert body["busy_ms_after"] < body["busy_ms"]
    status, body = await mesh.call("POST", f"{path}/rebalance")
    assert (status, body["error"]["code"]) == (409, "experts_moving")


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


async def test_where_experts_are_is_chosen_by_itself(mesh: Any, new_node: Any, moe: ModelProfile) -> None:
    node = await mesh.join(new_node())
    node.on_describe = lambda _: Described(profile=moe)
    alone = await mesh.serve(name="alone")
    assert (alone["experts"], alone["hosts"]) == ("sliced", [])
    asked = await mesh.serve(name="asked", experts="parallel")
    assert (asked["experts"], len(asked["hosts"])) == ("parallel", 1)
    await mesh.join(new_node("second"))
    assert (await mesh.serve(name="two"))["experts"] == "parallel"
    sliced = await mesh.serve(name="sliced", experts="sliced")
    assert (sliced["experts"], len(sliced["ranks"])) == ("sliced", 2)
    assert (await mesh.serve(name="weights", shares=[1, 1]))["experts"] == "sliced"
    trunk = await mesh.serve(name="trunk", trunk=2)
    assert (len(trunk["ranks"]), [host["rank"] for host in trunk["hosts"]]) == (2, [2, 3])
    status, body = await mesh.call("GET", f"/api/sessions/{sliced['id']}/experts")
    assert (status, body["error"]["code"]) == (409, "no_expert_hosts")
    status, body = await mesh.call("POST", f"/api/sessions/{sliced['id']}/experts/rebalance")
    assert (status, body["error"]["code"]) == (409, "no_expert_hosts")


async def test_experts_are_sliced_where_the_trunk_is_too_large_for_a_node(
    mesh: Any, new_node: Any, moe: ModelProfile
) -> None:
    for name in ("pc", "laptop"):
        node = await mesh.join(new_node(name, memory=60_000))
        node.on_describe = lambda _: Described(profile=moe)
    wanted = {"model": "mix", "context": 100}  # half the cache fits on each node, beside half of the model
    status, session = await mesh.call("POST", "/api/sessions?wait=ready", wanted)
    assert (status, session["experts"]) == (201, "sliced")
    status, body = await mesh.call("POST", "/api/sessions", {**wanted, "name": "x", "experts": "parallel"})
    assert (status, body["error"]["code"]) == (422, "insufficient_memory")


async def test_named_nodes_are_trunk_and_hosts(mesh: Any, nodes: list[Any]) -> None:
    """The trunk is on the faster one, unless another is meant."""
    session = await mesh.serve(nodes=["box", "laptop"])
    assert [rank["node"] for rank in session["ranks"]] == ["laptop"]
    assert [host["node"] for host in session["hosts"]] == ["box", "laptop"]
    meant = {"experts": "parallel", "engines": {"box": "onnxruntime"}}
    session = await mesh.serve(nodes=["laptop", "box"], name="meant", **meant)
    assert [rank["node"] for rank in session["ranks"]] == ["box"]


async def test_the_trunk_is_not_on_a_fast_node_that_is_too_small_for_experts(
    mesh: Any, new_node: Any, moe: ModelProfile
) -> None:
    """Each row of every layer would have to travel."""
    for name, memory, speed in (("sprinter", 47_000, 30e9), ("big", 10**9, 20e9), ("slow", 10**9, 10e9)):
        node = await mesh.join(new_node(name, memory=memory, bandwidth=speed))
        node.on_describe = lambda _: Described(profile=moe)
    session = await mesh.serve(context=1)
    assert [rank["node"] for rank in session["ranks"]] == ["big"]


async def test_the_trunk_leaves_room_for_the_replicas(mesh: Any, new_node: Any, moe: ModelProfile) -> None:
    """On the fast node it would take the place of the second ones."""
    for name, memory, speed in (("fast", 50_000, 30e9), ("slow", 90_000, 10e9)):
        node = await mesh.join(new_node(name, memory=memory, bandwidth=speed))
        node.on_describe = lambda _: Described(profile=moe)
    session = await mesh.serve(context=1, replicas=2)
    assert [rank["node"] for rank in session["ranks"]] == ["slow"]
    assert [host["experts"] for host in session["hosts"]] == [32, 32]


@pytest.mark.parametrize(
    ("fields", "status", "match"),
    [
        ({"experts": "scattered"}, 400, "experts must be one of auto, sliced, parallel"),
        ({"replicas": 0}, 400, "replicas must be an integer from 1 to 64"),
        ({"trunk": 0}, 400, "trunk must be an integer from 1 to 32"),
        ({"experts": "sliced", "replicas": 2}, 400, "replicas is for experts on nodes of their own"),
        ({"experts": "sliced", "trunk": 2}, 400, "trunk is for experts on nodes of their own"),
        ({"experts": "parallel", "shares": [1, 1, 1]}, 400, "shares are of sliced experts"),
        ({"replicas": 4}, 422, "4 different nodes; with room for experts there are 3 (box, laptop, pc), 1 missing"),
        ({"trunk": 4}, 400, "a trunk of 4 ranks needs as many nodes; 3 take part"),
    ],
)
async def test_bad_requests(mesh: Any, nodes: list[Any], fields: Any, status: int, match: str) -> None:
    told, body = await mesh.call("POST", "/api/sessions", {"model": "mix", **fields})
    assert (told, match in body["error"]["message"]) == (status, True), body
    assert status != 400 or body["error"]["param"] in fields
    assert await mesh.call("GET", "/api/sessions") == (200, {"sessions": []})


async def test_replicas_without_memory_are_refused_with_the_shortage(
    mesh: Any, nodes: list[Any], moe: ModelProfile
) -> None:
    moe.expert_bytes = 40_000_000
    status, body = await mesh.call("POST", "/api/sessions", {"model": "mix", "replicas": 3})
    assert (status, body["error"]["code"]) == (422, "insufficient_memory")
    message = body["error"]["message"]
    assert "are missing" in message
    assert [line.split(":")[0] for line in message.splitlines() if line[0] == " "] == ["  pc", "  laptop", "  box"]
    assert "laptop: 1.00 GB free, room for 24" in message
    assert "There is room for 2 of each: `--replicas 2`." in message
    assert message.endswith("narrower weights.")
    status, body = await mesh.call("POST", "/api/sessions", {"model": "mix", "replicas": 4})
    assert (status, "It does not fit" in body["error"]["message"]) == (422, False), "it is nodes that are missing"
    assert (await mesh.call("POST", "/api/sessions", {"model": "mix", "replicas": 2}))[0] == 201


@pytest.mark.parametrize("exact", [False, True])
async def test_what_would_fit_is_told_of_groups_too(mesh: Any, new_node: Any, moe: ModelProfile, exact: bool) -> None:
    """Two nodes have room for an expert together, and none for one alone."""
    moe.expert_weight_bytes = moe.expert_bytes
    moe.expert_count, moe.expert_layers[:] = 1, [0]
    for name, memory in [("pc", 30_000), ("b", moe.host_fixed_bytes + 500), ("c", moe.host_fixed_bytes + 500)]:
        node = await mesh.join(new_node(name, memory=memory, bandwidth=20e9 if name == "pc" else 10e9))
        node.on_describe = lambda _: Described(profile=moe)
    moe.attention_query_bytes, moe.attention_kv_bytes, moe.vocabulary_unit_bytes = 3_000, 200, 100
    wanted = {"model": "mix", "experts": "parallel", "exact": exact, "context": 1}
    status, body = await mesh.call("POST", "/api/sessions", {**wanted, "replicas": 2})
    assert (status, "pc: 7." in body["error"]["message"]) == (422, True), body
    assert ("`--replicas 1`" in body["error"]["message"]) is not exact
    status, body = await mesh.call("POST", "/api/sessions", wanted)
    assert (status, [host["node"] for host in body.get("hosts", ())]) == ((422, []) if exact else (201, ["b+c"]))


async def test_a_model_without_experts_has_none_to_place(mesh: Any, bard: Any) -> None:
    status, body = await mesh.call("POST", "/api/sessions", {"model": "x", "name": "x", "experts": "parallel"})
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "invalid_request", "experts")
    assert "bard (llama) has no experts" in body["error"]["message"]
    _, listed = await mesh.call("GET", "/api/sessions")
    assert listed["sessions"][0]["experts"] is None


async def test_bad_queries(mesh: Any, nodes: list[Any]) -> None:
    session = await mesh.serve()
    status, body = await mesh.call("GET", f"/api/sessions/{session['id']}/experts?layers=some")
    assert (status, body["error"]["param"]) == (400, "layers")
    for method, path in (("GET", "experts"), ("POST", "experts/rebalance")):
        assert (await mesh.call(method, f"/api/sessions/nope/{path}"))[0] == 404


# ---------------------------------------------------------------- nodes that change while a session is planned


async def join_able(mesh: Any, new_node: Any, **memory: int) -> dict[str, Any]:
    """Nodes with so much memory, which describe a model with experts alike in every quantisation."""

    def describe(order: Any) -> Described:
        return Described(profile=expert_profile(), beside=[expert_profile() for _ in order.model.beside])

    joined = {}
    for name, size in memory.items():
        joined[name] = await mesh.join(new_node(name, memory=size))
        joined[name].on_describe = describe
    return joined


async def test_a_trunk_that_does_not_fit_the_node_it_was_given_is_refused_for_that(mesh: Any, new_node: Any) -> None:
    await join_able(mesh, new_node, small=9_500, big=10**9, other=10**9)
    wanted = {"model": "mix", "experts": "parallel", "quantisation": "int8", "quantisations": {"small": "int4"}}
    status, body = await mesh.call("POST", "/api/sessions", {**wanted, "context": 10})
    assert (status, body["error"]["code"]) == (422, "insufficient_memory")
    assert "small" in body["error"]["message"]


def losing(mesh: Any, monkeypatch: pytest.MonkeyPatch, node: Any, successor: Any = None) -> None:
    """Have the planner find no room, and a node leave while it thinks; another one may come in its place."""

    def is_there(serving: Serving) -> bool:
        return node.node_id in {each.id for each in serving.nodes if each.alive}

    async def plan(serving: Serving, _: Question) -> Answer:
        if is_there(serving):
            await node.leave()
            async with asyncio.timeout(DEADLINE_S):
                await serving._until(lambda: not is_there(serving))
            if successor is not None:
                await mesh.join(successor)
        raise PlacementError("no room")

    monkeypatch.setattr(Serving, "_plan_apart", plan)


async def test_a_node_lost_while_experts_are_placed_has_no_rank_of_what_is_done_instead(
    mesh: Any, new_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = await join_able(mesh, new_node, a=10**9, b=10**9)
    losing(mesh, monkeypatch, nodes["b"])
    status, body = await mesh.call("POST", "/api/sessions", {"model": "mix", "context": 10})
    assert (status, [rank["node"] for rank in body["ranks"]]) == (201, ["a"])


async def test_a_node_that_comes_back_while_experts_are_placed_is_no_error_of_ours(
    mesh: Any, new_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = await join_able(mesh, new_node, a=60_000, b=60_000)
    losing(mesh, monkeypatch, nodes["b"], new_node("b", memory=60_000))
    wanted = {"model": "mix", "context": 10, "experts": "parallel"}
    status, body = await mesh.call("POST", "/api/sessions", wanted)
    assert status == 422, body
    assert "no room" in body["error"]["message"]


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
