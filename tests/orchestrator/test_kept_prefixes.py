"""Sessions that keep prefixes on disks: from the request or the command line to the assignments of their ranks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

Motley = Callable[..., Awaitable[tuple[int, str, str]]]


def able(node: Any) -> Any:
    """A node whose CPU engine keeps prefixes; it has another that does not."""
    node.capabilities.engines[0].keeps_prefixes = True
    node.capabilities.engines.add(name="warp")
    return node


async def test_ranks_are_told_to_keep_prefixes(mesh: Any, new_node: Any) -> None:
    node = await mesh.join(able(new_node()))
    for keeps in (False, True):
        session = await mesh.serve(name=f"keeps {keeps}", keep_prefixes=keeps, context=60)
        order = [command.assign for command in node.commands if command.WhichOneof("body") == "assign"][-1]
        assert (order.keep_prefixes, session["keep_prefixes"]) == (keeps, keeps)


async def test_an_engine_that_cannot_is_refused_by_name(mesh: Any, new_node: Any) -> None:
    node = await mesh.join(able(new_node()))
    asked = {"model": "bard", "keep_prefixes": True, "engine": "warp"}
    status, body = await mesh.call("POST", "/api/sessions", asked)
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "unusable_engine", "keep_prefixes")
    assert (
        "engine 'warp' of node 'pc' cannot keep prefixes on a disk between starts; engines there that can: onnxruntime"
        in body["error"]["message"]
    )
    assert not node.commands


async def test_the_command_line_gives_and_tells_it(mesh: Any, new_node: Any, motley: Motley) -> None:
    await mesh.join(able(new_node()))
    for _ in range(2):
        status, _, err = await motley("run", "bard", "Hi", "--context", "60", "--keep-prefixes")
        assert status == 0, err
    assert "context 60, prefixes kept on disk, ready" in (await motley("status"))[1]
    assert (await motley("run", "bard", "Hi"))[0] == 0


async def test_a_session_that_keeps_none_is_not_taken_for_one_that_does(
    mesh: Any, new_node: Any, motley: Motley
) -> None:
    await mesh.join(able(new_node()))
    assert (await motley("run", "bard", "Hi"))[0] == 0
    status, _, err = await motley("run", "bard", "Hi", "--keep-prefixes")
    assert (status, "loaded without keeping its prefixes on disks: leave out --keep-prefixes" in err) == (1, True), err
