"""Where new sessions whose model has experts are put, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import pytest

from motley.orchestrator.experts.questions import Answer, Question
from motley.orchestrator.planning.choosing.choice import Chooser
from motley.orchestrator.planning.experts.groups import slice_bytes
from motley.orchestrator.planning.placement.terms import PlacementError
from motley.orchestrator.serving.plans.planner import Planner
from motley.protocol.mesh_pb2 import (
    Described,
    ModelProfile,
)

from ..conftest import DEADLINE_S, join_able, of_kind


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


async def test_others_are_served_while_shares_are_planned(
    mesh: Any, new_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await mesh.join(new_node())
    asked, go_on, plan = threading.Event(), threading.Event(), Chooser.best

    def slow(*given: Any) -> Any:
        asked.set()
        assert go_on.wait(DEADLINE_S)
        return plan(*given)

    monkeypatch.setattr(Chooser, "best", slow)
    creating = asyncio.create_task(mesh.call("POST", "/api/sessions?wait=ready", {"model": "bard"}))
    await asyncio.to_thread(asked.wait, DEADLINE_S)
    assert (await mesh.call("GET", "/api/sessions"))[1]["sessions"][0]["state"] == "planning"
    go_on.set()
    assert (await creating)[0] == 201


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
    moe.cache_bytes_per_token = 2
    wanted = {"model": "mix", "experts": "parallel", "exact": exact, "context": 1}
    status, body = await mesh.call("POST", "/api/sessions", {**wanted, "replicas": 2})
    assert (status, "pc: 7." in body["error"]["message"]) == (422, True), body
    assert ("`--replicas 1`" in body["error"]["message"]) is not exact
    status, body = await mesh.call("POST", "/api/sessions", wanted)
    assert (status, [host["node"] for host in body.get("hosts", ())]) == ((422, []) if exact else (201, ["b+c"]))


async def test_a_trunk_that_does_not_fit_the_node_it_was_given_is_refused_for_that(mesh: Any, new_node: Any) -> None:
    await join_able(mesh, new_node, small=9_500, big=10**9, other=10**9)
    wanted = {"model": "mix", "experts": "parallel", "quantisation": "int8", "quantisations": {"small": "int4"}}
    status, body = await mesh.call("POST", "/api/sessions", {**wanted, "context": 10})
    assert (status, body["error"]["code"]) == (422, "insufficient_memory")
    assert "small" in body["error"]["message"]


def losing(mesh: Any, monkeypatch: pytest.MonkeyPatch, node: Any, successor: Any = None) -> None:
    """Have the planner find no room, and a node leave while it thinks; another one may come in its place."""

    def is_gone(body: Any) -> bool:
        return node.name not in [each["name"] for each in body["nodes"] if each["state"] == "alive"]

    left = asyncio.Event()

    async def answer(_: Planner, __: Question) -> Answer:
        if not left.is_set():
            left.set()
            await node.leave()
            await mesh.poll("/api/nodes", is_gone)
            if successor is not None:
                await mesh.join(successor)
        raise PlacementError("no room")

    monkeypatch.setattr(Planner, "answer", answer)


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
