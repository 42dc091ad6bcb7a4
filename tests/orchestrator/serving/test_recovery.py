"""Sessions that lose ranks, over real sockets: new plans, and requests that go on from the tokens that they have."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from motley.orchestrator.app import Orchestrator, OrchestratorConfig
from motley.orchestrator.serving import kept_sessions
from motley.orchestrator.serving.answering.requests import FRUITLESS
from motley.orchestrator.serving.replanning import recovery
from motley.orchestrator.sessions import cut_off
from motley.orchestrator.sessions.losses import LOSSES
from motley.protocol.mesh_pb2 import Delta, Described, Empty, Failure, Generate, RankCommand

from ..conftest import DEADLINE_S, Mesh, of_kind
from .conftest import STREAM, text_of, two_words_at_a_time


@pytest.fixture(autouse=True)
def _lost_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose connection has ended is not waited for as long as it is elsewhere."""
    monkeypatch.setattr(cut_off, "RETURN_S", 0.3)


async def planned_anew(mesh: Any, session: dict[str, Any], epoch: int) -> dict[str, Any]:
    """The session once it is ready by its plan of that epoch."""

    def is_ready(body: dict[str, Any]) -> bool:
        return (body["epoch"], body["state"]) == (epoch, "ready")

    return dict(await mesh.poll(f"/api/sessions/{session['id']}", is_ready))


async def test_a_stream_goes_on_when_the_node_of_rank_0_is_lost(mesh: Any, trio: list[Any]) -> None:
    session = await mesh.serve()
    task = await text_of(mesh)
    await trio[0].leave()
    assert await task == "Once upon a time"
    (first,), (again,) = trio[0].generated, trio[1].generated
    assert list(again.written) == [0, 1]
    assert again.asked_at == first.asked_at != ""
    assert again.request_id != first.request_id
    body = await mesh.session(session["id"], "ready")
    assert (body["epoch"], [rank["node"] for rank in body["ranks"]]) == (2, ["laptop", "box"])
    (loss,) = body["losses"]
    assert (loss["epoch"], loss["node"], loss["code"]) == (1, "pc", "node_lost")
    assert not any(command.epoch == 1 for command in of_kind(trio[1], "assign")[1:])


@pytest.mark.parametrize("others_suffice", [True, False])
async def test_a_node_that_is_lost_while_its_rank_loads_is_done_without(
    mesh: Any, trio: list[Any], others_suffice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same session, for which its maker waits; it ends if no plan fits for long."""
    monkeypatch.setattr(recovery, "PATIENCE_S", 0.1)
    laptop = trio[1]
    loads = asyncio.Event()

    async def load(command: RankCommand) -> None:
        if command.WhichOneof("body") == "peers":
            loads.set()
        else:
            await laptop.obey(command)

    laptop.on_rank = load
    asked: dict[str, Any] = {} if others_suffice else {"nodes": ["laptop"]}
    if not others_suffice:
        for node in (trio[0], trio[2]):
            await node.leave()
            await mesh.poll("/api/nodes", lambda body, name=node.name: _states(body)[name] == "lost")
    serving = asyncio.create_task(mesh.call("POST", "/api/sessions?wait=ready", {"model": "bard", **asked}))
    async with asyncio.timeout(DEADLINE_S):
        await loads.wait()
    await laptop.leave()
    status, body = await serving
    if others_suffice:
        assert (status, body["epoch"], [rank["node"] for rank in body["ranks"]]) == (201, 2, ["pc", "box"])
        assert [loss["code"] for loss in body["losses"]] == ["node_lost"]
    else:
        assert (status, body["error"]["code"]) == (503, "node_lost")
        assert "It cannot go on with the nodes that are left" in body["error"]["message"]


def _states(body: Any) -> dict[str, str]:
    return {node["name"]: node["state"] for node in body["nodes"]}


async def test_the_log_says_what_becomes_of_a_session(
    mesh: Any, trio: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A warning for a node that is lost, and none for one whose daemon somebody has ended."""
    caplog.set_level(logging.INFO, "motley.orchestrator.serving.replanning.recovery")
    session = await mesh.serve()
    await trio[0].send(leaving=Empty())
    await trio[0].ended()
    await planned_anew(mesh, session, 2)
    await trio[1].leave()
    await planned_anew(mesh, session, 3)
    said = [(each.levelname, each.getMessage()) for each in caplog.records if each.name.endswith("recovery")]
    about, then = (
        f"session {session['id']} ({session['name']})",
        "it goes on with the nodes that are left, where they can",
    )
    assert [level for level, _ in said] == ["INFO", "INFO", "WARNING", "INFO"]
    assert said[0][1].startswith(
        f"{about} has lost a rank: node 'pc' (rank 0) has left: its daemon was ended there; {then}"
    )
    assert said[1][1] == f"{about} is loaded anew (by laptop, box), and then goes on"
    assert said[2][1].startswith(
        f"{about} has lost a rank: node 'laptop' (rank 0) is lost: its connection ended; {then}"
    )
    assert said[3][1] == f"{about} is loaded anew (by box), and then goes on"
    assert "laptop is lost: its connection ended; if Motley still runs there, it comes back by itself" in caplog.text


async def test_the_first_token_came_when_it_came_before_the_loss(mesh: Any, trio: list[Any]) -> None:
    """And not when the next leader told its first, which has the tokens before to compute again."""
    await mesh.serve()
    words = 0
    async with mesh.http.post("/v1/completions", json=STREAM) as response:
        async for line in response.content:
            words += b'"text"' in line
            if words == 2 and trio[0].generated and not trio[1].generated:
                await trio[0].leave()
            if b'"ttft_ms"' in line:
                timings = json.loads(line.removeprefix(b"data: "))["timings"]
    assert 0 < timings["ttft_ms"] < 100_000


async def test_named_nodes_that_are_left_come_first_and_others_after_them(mesh: Any, trio: list[Any]) -> None:
    session = await mesh.serve(nodes=["laptop", "pc"], shares=[3, 1])
    await trio[0].leave()
    await mesh.poll("/api/nodes", lambda body: body["nodes"][0]["state"] == "lost")
    lost = Failure(code="peer_lost", message="rank 1 has gone", lost_rank=2)
    await trio[1].event(of_kind(trio[1], "assign")[-1], failed=lost)
    body = await planned_anew(mesh, session, 2)
    assert [rank["node"] for rank in body["ranks"]] == ["laptop"]
    assert body["losses"][-1]["code"] == "node_lost"
    assert "node 'pc' (rank 1) is lost: its connection ended" in body["losses"][-1]["message"]
    await trio[1].leave()
    body = await planned_anew(mesh, session, 3)
    assert [rank["node"] for rank in body["ranks"]] == ["box"]
    assert body["nodes"] == ["laptop", "pc"], "as it was asked for"


async def test_a_process_that_dies_is_started_again_where_it_was_but_not_twice(mesh: Any, trio: list[Any]) -> None:
    session = await mesh.serve()
    for epoch, left in ((2, ["pc", "laptop", "box"]), (3, ["pc", "box"])):
        died = Failure(code="worker_died", message="its worker process was killed by signal 9")
        await trio[1].event(of_kind(trio[1], "assign")[-1], failed=died)
        body = await planned_anew(mesh, session, epoch)
        assert [rank["node"] for rank in body["ranks"]] == left


async def test_a_node_that_others_cannot_reach_is_left_out(mesh: Any, trio: list[Any]) -> None:
    session = await mesh.serve()
    lost = Failure(code="peer_lost", message="rank 2 is lost", lost_rank=3)
    await trio[0].event(of_kind(trio[0], "assign")[-1], failed=lost)
    body = await planned_anew(mesh, session, 2)
    assert [rank["node"] for rank in body["ranks"]] == ["pc", "laptop"]


async def test_a_node_that_does_not_end_its_worker_is_left_out(mesh: Any, trio: list[Any]) -> None:
    """As it still has the memory, and may hang."""
    session = await mesh.serve()

    async def hang(command: RankCommand) -> None:
        if command.WhichOneof("body") != "release":
            await trio[2].obey(command)

    trio[2].on_rank = hang
    died = Failure(code="worker_died", message="its worker process was killed by signal 9")
    await trio[0].event(of_kind(trio[0], "assign")[-1], failed=died)
    body = await planned_anew(mesh, session, 2)
    assert [rank["node"] for rank in body["ranks"]] == ["pc", "laptop"]


async def test_a_node_without_the_model_is_no_spare(
    mesh: Any, trio: list[Any], new_node: Any, motley: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "PATIENCE_S", 0.0)
    session = await mesh.serve(nodes=["pc"])
    for other in trio[1:]:
        await other.leave()
    spare = new_node("spare")
    failure = Failure(code="model_missing", message="no folder 'bard'")
    spare.on_describe = lambda _: Described(failure=failure)
    await mesh.join(spare)
    task = await text_of(mesh)
    await trio[0].leave()
    words = await task
    assert "node 'pc' (rank 0) is lost" in words
    assert "It cannot go on with the nodes that are left: node 'spare' does not have the model" in words
    body = await mesh.session(session["id"], "paused")
    assert "node 'spare' does not have the model" in body["interrupted_by"]
    status, body = await mesh.call("POST", "/v1/completions", {**STREAM, "stream": False})
    assert (status, body["error"]["code"]) == (503, "node_lost")
    assert "is paused until a plan fits" in body["error"]["message"]
    status, _, err = await motley("run", "bard", "Tell:", "--raw")
    assert status == 1
    assert "session 'bard' is paused, and goes on by itself when a plan fits" in err


async def test_a_session_that_found_no_plan_comes_back_by_itself_when_a_node_does(
    mesh: Any, new_node: Any, bard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "PATIENCE_S", 0.0)
    (session,) = (await mesh.call("GET", "/api/sessions"))[1]["sessions"]
    await bard.leave()
    body = await mesh.session(session["id"], "paused")
    assert "no node is in the mesh" in body["interrupted_by"]
    await mesh.join(new_node("pc"))
    body = await planned_anew(mesh, session, 2)
    assert (body["failure"], body["interrupted_by"]) == (None, None)
    assert (await mesh.call("POST", "/v1/completions", {**STREAM, "stream": False}))[0] == 200


async def test_a_session_of_before_a_restart_waits_for_its_nodes(
    mesh: Any, bard: Any, new_node: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if they do not come as soon as they should."""
    monkeypatch.setattr(recovery, "PATIENCE_S", 0.0)
    monkeypatch.setattr(kept_sessions, "RETURN_S", 0.1)
    (session,) = (await mesh.call("GET", "/api/sessions"))[1]["sessions"]
    shutil.copytree(tmp_path / "state", tmp_path / "again")
    again = Orchestrator(OrchestratorConfig(grpc_port=0, http_port=0, state_dir=tmp_path / "again"))
    await again.start()
    try:
        async with aiohttp.ClientSession(again.http_url) as http:
            restarted = Mesh(again, http)
            assert "no node is in the mesh" in (await restarted.session(session["id"], "paused"))["interrupted_by"]
            node = await restarted.join(new_node("pc"))
            assert (await planned_anew(restarted, session, 2))["name"] == "bard"
            assert (await restarted.call("POST", "/v1/completions", {**STREAM, "stream": False}))[0] == 200
            await node.leave()
    finally:
        await again.stop()


async def test_a_machine_that_is_lost_for_a_moment_takes_its_session_up_again(
    mesh: Any, new_node: Any, bard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut_off, "RETURN_S", 30.0)
    bard.answer = two_words_at_a_time
    task = await text_of(mesh)
    await bard.leave()
    again = new_node("pc")
    again.answer = two_words_at_a_time
    await mesh.poll("/api/nodes", lambda body: body["nodes"][0]["state"] == "lost")
    await mesh.join(again)
    assert await task == "Once upon a time"


async def test_a_new_request_waits_while_a_session_recovers(mesh: Any, new_node: Any, bard: Any) -> None:
    (session,) = (await mesh.call("GET", "/api/sessions"))[1]["sessions"]
    await bard.leave()
    await mesh.session(session["id"], "recovering")
    asking = asyncio.create_task(mesh.call("POST", "/v1/completions", {**STREAM, "stream": False}))
    models = (await mesh.call("GET", "/v1/models"))[1]["data"]
    assert [model["id"] for model in models] == ["bard"]
    await mesh.join(new_node("pc"))
    status, body = await asking
    assert (status, body["choices"][0]["text"]) == (200, "Hello, world")


async def test_who_hangs_up_meanwhile_is_not_asked_for_again(mesh: Any, new_node: Any, bard: Any) -> None:
    bard.answer = two_words_at_a_time
    (session,) = (await mesh.call("GET", "/api/sessions"))[1]["sessions"]
    task = await text_of(mesh)
    await bard.leave()
    await mesh.session(session["id"], "recovering")
    task.cancel()
    again = await mesh.join(new_node("pc"))
    await mesh.session(session["id"], "ready")
    assert (await mesh.call("POST", "/v1/completions", {**STREAM, "stream": False}))[0] == 200
    assert len(again.generated) == 1


async def test_a_session_that_recovers_can_be_closed(mesh: Any, bard: Any) -> None:
    bard.answer = two_words_at_a_time
    (session,) = (await mesh.call("GET", "/api/sessions"))[1]["sessions"]
    task = await text_of(mesh)
    await bard.leave()
    await mesh.session(session["id"], "recovering")
    assert (await mesh.call("DELETE", f"/api/sessions/{session['id']}"))[0] == 200
    assert "was closed" in await task
    assert (await mesh.call("GET", "/api/sessions"))[1]["sessions"] == []


async def test_ranks_that_are_lost_again_and_again_end_the_session(mesh: Any, bard: Any) -> None:
    (session,) = (await mesh.call("GET", "/api/sessions"))[1]["sessions"]

    async def fail(command: RankCommand) -> None:
        if command.WhichOneof("body") == "assign":
            await bard.event(command, failed=Failure(code="out_of_memory", message="it has no memory"))
        else:
            await bard.obey(command)

    bard.on_rank = fail
    await bard.event(bard.commands[0], failed=Failure(code="engine_error", message="it broke"))
    body = await mesh.session(session["id"], "failed")
    assert body["failure"]["message"] == (
        f"ranks were lost {LOSSES + 1} times in a row, the last time: node 'pc' (rank 0): it has no memory"
    )


async def test_a_request_by_which_ranks_are_lost_ends_and_the_session_goes_on(mesh: Any, bard: Any) -> None:
    async def poisoned(generate: Generate) -> AsyncIterator[Delta]:
        if generate.prompt == "poison":
            broken = Failure(code="engine_error", message="it broke")
            await bard.event(of_kind(bard, "assign")[-1], failed=broken)
            return
        yield Delta(text="fine", ids=[1], finish="stop", prompt_tokens=1, completion_tokens=1)

    bard.answer = poisoned
    status, body = await mesh.call("POST", "/v1/completions", {"model": "bard", "prompt": "poison"})
    assert status >= 500
    assert body["error"]["message"] == (
        f"{FRUITLESS} times in a row a rank was lost before there was a token: node 'pc' (rank 0): it broke"
    )
    status, body = await mesh.call("POST", "/v1/completions", {"model": "bard", "prompt": "x"})
    assert (status, body["choices"][0]["text"]) == (200, "fine")
