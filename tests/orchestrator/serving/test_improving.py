"""Sessions get better plans by themselves while nobody asks them anything; nodes that come and go are set aside."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from motley.orchestrator.mesh import flapping
from motley.orchestrator.serving.replanning import improving
from motley.protocol.mesh_pb2 import Described, Empty, Failure, FormatSpeed, Probed

from ..conftest import of_kind, small_profile
from ..planning.seven import layered
from .conftest import text_of, two_words_at_a_time


@pytest.fixture
async def slow(mesh: Any, new_node: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(improving, "SETTLE_S", 0.3)
    return await mesh.join(measured(new_node("slow"), 1e9))


def measured(node: Any, speed: float) -> Any:
    """A node that has found out how fast it and its links are."""
    node.capabilities.memory_bandwidth = speed
    node.capabilities.speeds.append(FormatSpeed(format="int8", bytes_per_s=speed, row_bytes_per_s=10 * speed))
    node.ways = {name: Probed(latency_s=1e-3, bandwidth=1e9) for name in ("slow", "fast")}
    return node


@pytest.mark.parametrize("mesh", [0.2], indirect=True)
async def test_an_idle_session_moves_to_the_node_that_is_much_quicker(mesh: Any, slow: Any, new_node: Any) -> None:
    slow.answer = two_words_at_a_time
    session = await mesh.serve()
    task = await text_of(mesh)
    await mesh.join(measured(new_node("fast"), 100e9))
    await mesh.poll("/api/nodes", lambda body: all(node["links"] for node in body["nodes"]))
    await asyncio.sleep(4 * improving.SETTLE_S)
    assert (await mesh.session(session["id"], "ready"))["epoch"] == 1, "somebody waits for an answer"
    task.cancel()
    path = f"/api/sessions/{session['id']}"
    body = await mesh.poll(path, lambda body: (body["epoch"], body["state"]) == (2, "ready"))
    assert [rank["node"] for rank in body["ranks"]] == ["fast"]
    await asyncio.sleep(4 * improving.SETTLE_S)
    assert (await mesh.session(session["id"], "ready"))["epoch"] == 2


async def test_zero_leaves_sessions_as_they_are(mesh: Any, slow: Any, new_node: Any) -> None:
    session = await mesh.serve()
    await mesh.join(measured(new_node("fast"), 100e9))
    await mesh.poll("/api/nodes", lambda body: all(node["links"] for node in body["nodes"]))
    await asyncio.sleep(4 * improving.SETTLE_S)
    assert (await mesh.session(session["id"], "ready"))["epoch"] == 1


async def test_a_node_that_comes_and_goes_is_set_aside_unless_it_is_needed(
    mesh: Any, new_node: Any, motley: Any
) -> None:
    for _ in range(flapping.TIMES):
        node = await mesh.join(new_node("box"))
        await node.leave()
        await mesh.poll("/api/nodes", lambda body: body["nodes"][0]["state"] == "lost")
    await mesh.join(new_node("box"))
    alone = await mesh.serve(name="alone")
    assert [rank["node"] for rank in alone["ranks"]] == ["box"]
    assert "comes and goes" not in (await motley("status"))[1], "who is alone is in every plan"
    await mesh.join(new_node("pc"))
    beside = await mesh.serve(name="beside")
    assert [rank["node"] for rank in beside["ranks"]] == ["pc"]
    named = await mesh.serve(name="named", nodes=["box"])
    assert [rank["node"] for rank in named["ranks"]] == ["box"]
    aside = "box comes and goes: plans leave it out for 10 min more, unless `motley run --nodes` names it"
    _, out, _ = await motley("status")
    assert aside in out
    _, out, _ = await motley("plan", "bard")
    assert aside in out
    _, out, _ = await motley("plan", "bard", "--nodes", "box")
    assert aside not in out
    _, out, _ = await motley("doctor")
    assert aside in out


async def test_a_node_that_came_and_went_is_kept_when_a_process_dies_elsewhere(mesh: Any, new_node: Any) -> None:
    """It is the other one that has failed."""
    pc = await mesh.join(new_node("pc"))
    for _ in range(flapping.TIMES):
        laptop = await mesh.join(new_node("laptop"))
        await laptop.leave()
        await mesh.poll("/api/nodes", lambda body: body["nodes"][1]["state"] == "lost")
    await mesh.join(new_node("laptop"))
    session = await mesh.serve(nodes=["pc", "laptop"])
    died = Failure(code="worker_died", message="its worker process was killed by signal 9")
    await pc.event(of_kind(pc, "assign")[-1], failed=died)
    path = f"/api/sessions/{session['id']}"
    body = await mesh.poll(path, lambda body: (body["epoch"], body["state"]) == (2, "ready"))
    assert [rank["node"] for rank in body["ranks"]] == ["pc", "laptop"]


@pytest.mark.parametrize("mesh", [0.2], indirect=True)
async def test_a_session_goes_back_to_the_nodes_that_it_was_asked_for_on(mesh: Any, slow: Any, new_node: Any) -> None:
    """Though it is no quicker there, and its shares are given by hand; not before all of them are there."""
    box = await mesh.join(measured(new_node("box"), 1e9))
    session = await mesh.serve(nodes=["slow", "box"], shares=[1, 1])
    path = f"/api/sessions/{session['id']}"
    await box.send(leaving=Empty())
    body = await mesh.poll(path, lambda body: (body["epoch"], body["state"]) == (2, "ready"))
    assert ([rank["node"] for rank in body["ranks"]], body["missed_nodes"]) == (["slow"], ["box"])
    await asyncio.sleep(4 * improving.SETTLE_S)
    assert (await mesh.session(session["id"], "ready"))["epoch"] == 2
    await mesh.join(measured(new_node("box"), 1e9))
    body = await mesh.poll(path, lambda body: (body["epoch"], body["state"]) == (3, "ready"))
    assert ([rank["node"] for rank in body["ranks"]], body["missed_nodes"]) == (["slow", "box"], [])


async def test_the_same_command_again_brings_it_back(mesh: Any, trio: list[Any], motley: Any, new_node: Any) -> None:
    """Also one in stages, of which one node has none."""
    for node in trio:
        node.on_describe = lambda _: Described(profile=layered(small_profile()))
    session = await mesh.serve(nodes=["pc", "box"], stages=2)
    path, again = f"/api/sessions/{session['id']}", ("run", "bard", "--nodes", "pc,box", "--stages", "2")
    await trio[2].send(leaving=Empty())
    await mesh.poll(path, lambda body: (body["epoch"], body["state"]) == (2, "ready"))
    _, out, _ = await motley("status")
    assert "it was asked for on pc, box, and goes on without box" in out
    status, _, err = await motley(*again)
    assert status == 0
    assert "box cannot be reached now: bard goes on without, on pc" in err
    box = new_node("box")
    box.on_describe = trio[0].on_describe
    await mesh.join(box)
    status, _, err = await motley(*again)
    assert status == 0
    assert "box can take part again: bard is planned anew" in err
    assert [rank["node"] for rank in (await mesh.session(session["id"], "ready"))["ranks"]] == ["pc", "box"]


async def test_nodes_that_nobody_knows_are_refused_though_the_model_is_loaded(
    mesh: Any, trio: list[Any], motley: Any
) -> None:
    await mesh.serve()
    status, _, err = await motley("run", "bard", "--nodes", "pc,nowhere")
    assert status == 1
    assert "--nodes: no live node is named 'nowhere'; live nodes: box, laptop, pc" in err
