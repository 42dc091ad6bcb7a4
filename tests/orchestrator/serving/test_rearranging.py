"""Nodes that are asked to leave, and sessions that get a better plan, while answers go on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from motley.orchestrator.serving.replanning import recovery

from ..conftest import DEADLINE_S, of_kind
from .conftest import text_of, two_words_at_a_time


@pytest.mark.parametrize("goes", ["pc", "box"])
async def test_an_answer_goes_on_without_the_node_that_leaves(goes: str, mesh: Any, trio: list[Any]) -> None:
    """Which ends when it is told to, and not before; that is no loss."""
    session = await mesh.serve()
    task = await text_of(mesh)
    assert await mesh.call("POST", f"/api/nodes/{goes}/leave") == (200, {"node": goes, "moved": ["bard"]})
    assert await task == "Once upon a time"
    leaver = next(node for node in trio if node.name == goes)
    await leaver.until(lambda: leaver.asked_to_leave)
    assert [command.WhichOneof("body") for command in leaver.commands][-1] == "release"
    body = await mesh.session(session["id"], "ready")
    assert (body["epoch"], body["losses"]) == (2, [])
    assert {rank["node"] for rank in body["ranks"]} == {"pc", "laptop", "box"} - {goes}


async def test_a_node_that_does_nothing_leaves_at_once(mesh: Any, trio: list[Any]) -> None:
    await mesh.serve(nodes=["pc"])
    assert await mesh.call("POST", "/api/nodes/box/leave") == (200, {"node": "box", "moved": []})
    assert len(of_kind(trio[0], "assign")) == 1
    status, body = await mesh.call("POST", "/api/nodes/stranger/leave")
    assert (status, body["error"]["code"]) == (400, "unknown_node")


async def test_a_node_that_is_needed_stays_and_its_session_goes_on(
    mesh: Any, new_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one is too small."""
    monkeypatch.setattr(recovery, "PATIENCE_S", 5.0)
    pc, _ = await mesh.join(new_node("pc")), await mesh.join(new_node("tiny", memory=500))
    pc.answer = two_words_at_a_time
    session = await mesh.serve()
    task = await text_of(mesh)
    status, body = await mesh.call("POST", "/api/nodes/pc/leave")
    assert (status, body["error"]["code"]) == (409, "cannot_move")
    assert "needs this node: nothing fits without it" in body["error"]["message"]
    assert await task == "Once upon a time"
    assert not pc.asked_to_leave
    assert (await mesh.session(session["id"], "ready"))["epoch"] == 2


async def test_a_session_without_recovery_is_not_moved(mesh: Any, trio: list[Any]) -> None:
    session = await mesh.serve(recover=False)
    for path in ("/api/nodes/pc/leave", f"/api/sessions/{session['id']}/rebalance?force=true"):
        status, body = await mesh.call("POST", path)
        assert (status, body["error"]["code"]) == (409, "cannot_move")
        assert "was started without recovery" in body["error"]["message"]
    assert (await mesh.session(session["id"], "ready"))["epoch"] == 1


async def test_a_session_gets_the_node_that_makes_it_quicker(mesh: Any, new_node: Any) -> None:
    """And is left alone where nothing does; answers go on."""
    slow = await mesh.join(new_node("slow", bandwidth=1e9))
    slow.answer = two_words_at_a_time
    session = await mesh.serve()
    path = f"/api/sessions/{session['id']}/rebalance"
    status, told = await mesh.call("POST", path)
    assert (status, told["changed"], told["session"]["epoch"]) == (200, False, 1)
    fast = new_node("fast", bandwidth=50e9)
    fast.answer = two_words_at_a_time
    await mesh.join(fast)
    task = await text_of(mesh)
    status, told = await mesh.call("POST", f"{path}?force=true")
    assert (status, told["changed"], told["session"]["epoch"]) == (200, True, 2)
    assert "fast" in {rank["node"] for rank in told["session"]["ranks"]}
    assert await task == "Once upon a time"
    assert (await mesh.call("POST", f"{path}?force=yes"))[0] == 400


async def test_two_at_once_do_not_harm_each_other(mesh: Any, trio: list[Any]) -> None:
    await mesh.serve()
    task = await text_of(mesh)
    async with asyncio.timeout(DEADLINE_S):
        answers = await asyncio.gather(*(mesh.call("POST", f"/api/nodes/{name}/leave") for name in ("pc", "box")))
    assert sorted(status for status, _ in answers) in ([200, 200], [200, 409])
    assert await task == "Once upon a time"


async def test_the_commands_say_what_became_of_it(mesh: Any, trio: list[Any], motley: Any) -> None:
    session = await mesh.serve(nodes=["pc", "box"])
    status, out, _ = await motley("leave", "box")
    assert (status, out) == (0, "box leaves; without it go on: bard\n")
    status, out, _ = await motley("rebalance", session["name"], "--force")
    assert status == 0
    assert out.startswith("planned anew, forecast ")
    status, _, err = await motley("leave", "nobody")
    assert status == 1
    assert "no live node is named 'nobody'" in err
    status, _, err = await motley("rebalance", "nothing")
    assert (status, "there is no session 'nothing'" in err) == (1, True)
