"""Nodes whose owner takes a device back, or lets ranks have less memory: sessions make way, and grow again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from motley.orchestrator.serving.plans.forecasts import Forecasts
from motley.orchestrator.serving.replanning import making_way, recovery
from motley.orchestrator.sessions.session import Session
from motley.protocol.mesh_pb2 import Budget, Engine, Gpu

from ..conftest import GB, of_kind
from .conftest import text_of, two_words_at_a_time


async def on(mesh: Any, session: dict[str, Any], epoch: int) -> set[str]:
    """The nodes of a session once it is ready by its plan of that epoch."""
    body = await mesh.poll(
        f"/api/sessions/{session['id']}", lambda body: (body["epoch"], body["state"]) == (epoch, "ready")
    )
    assert body["losses"] == [], "nothing counts as lost"
    return {rank["node"] for rank in body["ranks"]}


@pytest.mark.parametrize("named", [[], ["pc", "laptop", "box"]])
async def test_a_session_shrinks_and_grows_back_while_it_answers(named: list[str], mesh: Any, trio: list[Any]) -> None:
    session = await mesh.serve(nodes=named)
    task = await text_of(mesh)
    await trio[0].lease("all")
    assert await on(mesh, session, 2) == {"laptop", "box"}
    assert await task == "Once upon a time"
    assert [command.WhichOneof("body") for command in trio[0].commands][-1] == "release"
    await trio[0].lease("")
    assert await on(mesh, session, 3) == {"pc", "laptop", "box"}


async def test_a_session_that_cannot_do_without_is_paused_and_its_requests_wait(
    mesh: Any, bard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "PATIENCE_S", 0.0)
    bard.answer = two_words_at_a_time
    (session,) = (await mesh.call("GET", "/api/sessions"))[1]["sessions"]
    task = await text_of(mesh)
    await bard.lease("cpu")
    body = await mesh.session(session["id"], "paused")
    assert "node 'pc' has lent the processor to 'game' until " in body["interrupted_by"]
    status, body = await mesh.call("POST", "/api/sessions", {"model": "bard", "name": "another"})
    assert (status, body["error"]["code"]) == (503, "device_leased")
    assert not task.done()
    await bard.lease("")
    assert await on(mesh, session, 2) == {"pc"}
    assert await task == "Once upon a time"


async def test_requests_end_when_nobody_knows_any_more_for_how_long_they_wait(
    mesh: Any, bard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine that was lent, so that they waited, is gone."""
    monkeypatch.setattr(recovery, "PATIENCE_S", 0.0)
    monkeypatch.setattr(recovery, "PAUSED_S", 0.01)
    bard.answer = two_words_at_a_time
    (session,) = (await mesh.call("GET", "/api/sessions"))[1]["sessions"]
    task = await text_of(mesh)
    await bard.lease("cpu")
    await mesh.session(session["id"], "paused")
    await bard.leave()
    assert "no node is in the mesh" in await task
    status, body = await mesh.call("POST", "/v1/completions", {"model": "bard", "prompt": "Tell:"})
    assert (status, body["error"]["code"]) == (503, "replanned")


async def test_requests_end_where_less_memory_leaves_no_plan(
    mesh: Any, bard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "PATIENCE_S", 0.0)
    bard.answer = two_words_at_a_time
    task = await text_of(mesh)
    status, _ = await mesh.call("PUT", "/api/nodes/pc/budget", {"memory_bytes": 1000})
    assert status == 200
    assert "lets ranks have 1.00 kB of memory" in await task


async def test_a_session_grows_back_when_its_memory_is_told_to_be_free_only_later(
    mesh: Any, trio: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a node says of its free memory is older than that its owner has given it back."""
    monkeypatch.setattr(making_way, "AGAIN_S", 0.01)
    session = await mesh.serve()
    await trio[0].lease("all")
    assert await on(mesh, session, 2) == {"laptop", "box"}
    trio[0].capabilities.memory_bytes, whole = 1000, trio[0].capabilities.memory_bytes
    await trio[0].send(budget=Budget(memory_bytes=1000))
    await trio[0].lease("")
    looked = asyncio.Event()
    members_anew = Forecasts.members_anew

    async def look(self: Forecasts, session: Session) -> set[str]:
        looked.set()
        return await members_anew(self, session)

    monkeypatch.setattr(Forecasts, "members_anew", look)
    await looked.wait()
    await trio[0].send(budget=Budget(memory_bytes=whole))
    assert await on(mesh, session, 3) == {"pc", "laptop", "box"}


async def test_only_what_computes_on_the_device_makes_way(mesh: Any, new_node: Any) -> None:
    pc = new_node("pc")
    pc.gpus_now = [Gpu(name="RTX 9", memory_bytes=8 * GB, free_bytes=8 * GB, kind="discrete")]
    pc.capabilities.gpus.extend(pc.gpus_now)
    pc.capabilities.engines.append(Engine(name="webgpu", on_gpu=True))
    await mesh.join(pc)
    await mesh.join(new_node("box"))
    on_cpu = await mesh.serve(name="slow", nodes=["pc"])
    on_gpu = await mesh.serve(name="quick", nodes=["webgpu@pc"])
    await pc.lease("gpu:0")
    assert await on(mesh, on_gpu, 2) == {"box"}
    assert await on(mesh, on_cpu, 1) == {"pc"}
    await pc.lease("gpu:1")
    assert await on(mesh, on_gpu, 3) == {"pc"}


async def test_a_session_without_recovery_is_left_to_the_node(mesh: Any, trio: list[Any]) -> None:
    """Which ends the ranks that have had their time, and says why."""
    session = await mesh.serve(recover=False, nodes=["pc"])
    await trio[0].lease("all")
    await mesh.poll("/api/nodes", lambda body: body["nodes"][0]["lease"]["state"] == "leased")
    assert (await mesh.session(session["id"], "ready"))["epoch"] == 1


async def test_a_node_that_comes_back_leased_is_left_alone(mesh: Any, trio: list[Any], new_node: Any) -> None:
    await trio[2].leave()
    again = new_node("box")
    await again.lease("all")
    await mesh.join(again)
    session = await mesh.serve()
    assert await on(mesh, session, 1) == {"pc", "laptop"}


async def test_experts_go_elsewhere_and_come_back(mesh: Any, nodes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The trunk, and whatever is asked of it, goes on."""
    monkeypatch.setattr("motley.orchestrator.experts.recovery.RESTART_S", 0.0)
    session = await mesh.serve()
    await nodes[2].lease("all")
    path = f"/api/sessions/{session['id']}"
    body = await mesh.poll(path, lambda body: body["hosts"][2]["state"] == "gone" and not body["waiting_for"])
    assert (body["epoch"], [host["experts"] > 0 for host in body["hosts"]]) == (1, [True, True, False])
    assert "node 'box' has lent the whole machine to 'game'" in body["hosts"][2]["lost"]
    await nodes[2].lease("")
    await mesh.poll(path, lambda body: body["hosts"][2]["state"] == "ready")
    await nodes[0].lease("all")
    body = await mesh.poll(path, lambda body: (body["epoch"], body["state"]) == (2, "ready"))
    used = {each["node"] for each in body["ranks"] + body["hosts"] if each["state"] != "gone"}
    assert used == {"laptop", "box"}, "the trunk, too"


async def test_less_memory_is_respected_and_more_is_used_again(mesh: Any, trio: list[Any]) -> None:
    session = await mesh.serve(nodes=["pc", "box"])
    body = await mesh.session(session["id"], "ready")
    taken = body["ranks"][0]["memory"]["planned_bytes"]
    for other in (trio[0], trio[2]):
        assert len(of_kind(other, "assign")) == 1
    status, told = await mesh.call("PUT", "/api/nodes/pc/budget", {"memory_bytes": taken - 1000})
    assert (status, told["memory_bytes"]) == (200, taken - 1000)
    assert await on(mesh, session, 2) == {"pc", "box"}
    body = await mesh.session(session["id"], "ready")
    assert body["ranks"][0]["memory"]["planned_bytes"] < taken
    assert "memory" in str(trio[0].orders[0])
    status, told = await mesh.call("PUT", "/api/nodes/pc/budget", {"memory_bytes": GB})
    assert (status, told["memory_reserved_bytes"] < taken) == (200, True)
    status, told = await mesh.call("PUT", "/api/nodes/pc/budget", {"memory": GB})
    assert (status, told["error"]["code"]) == (400, "unknown_parameter")
    status, told = await mesh.call("PUT", "/api/nodes/nobody/budget", {"memory_bytes": GB})
    assert (status, told["error"]["code"]) == (400, "unknown_node")


async def test_the_commands_order_it_of_other_machines(mesh: Any, trio: list[Any], motley: Any) -> None:
    await mesh.serve(nodes=["pc", "box"])
    status, out, err = await motley("lease", "take", "--node", "laptop", "--for", "30m", "--gpu", "0", "--holder", "me")
    assert status == 0, err
    assert out.startswith("laptop has lent the GPU to 'game' until ")
    (order,) = trio[1].orders
    assert (order.device, order.holder, order.seconds) == ("gpu:0", "me", 1800)
    status, out, _ = await motley("status")
    assert "laptop has lent the GPU to 'game' until " in out
    assert await motley("lease", "give", "--node", "laptop") == (0, "laptop: given back\n", "")
    _, out, err = await motley("budget", "laptop", "300MB", "--gpu", "2GB")
    assert "until Motley is started again there" in err
    assert (status, out) == (
        0,
        "laptop: ranks may have 300.00 MB, of which they have 0 bytes, and 2.00 GB of its GPU\n",
    )
    assert await motley("budget", "laptop") == (status, out, "")
