"""What a session's caches have on disks: from the request or the command line to the assignments of its ranks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from motley.protocol.versions import OLDEST

Motley = Callable[..., Awaitable[tuple[int, str, str]]]
FAR = {"context": 250, "cache_tokens": 60, "cache_disk_tokens": 190}


def able(node: Any) -> Any:
    """A node whose CPU engine reads blocks from a disk; it has another that does not."""
    node.capabilities.engines[0].reads_far_blocks = True
    node.capabilities.engines.add(name="warp")
    return node


async def test_ranks_have_blocks_on_disks_and_memory_is_planned_for_the_others(mesh: Any, new_node: Any) -> None:
    node = await mesh.join(able(new_node()))
    near = await mesh.serve(name="near", context=60)
    far = await mesh.serve(name="far", **FAR)
    order = [command.assign for command in node.commands if command.WhichOneof("body") == "assign"][-1]
    assert (order.cache_blocks, order.cache_block_tokens, order.far_blocks, order.context) == (2, 32, 6, 250)
    assert (far["context"], far["cache_tokens"], far["cache_disk_tokens"]) == (250, 60, 190)
    (less,), (more,) = ([rank["memory"]["planned_bytes"] for rank in each["ranks"]] for each in (near, far))
    assert less == more


@pytest.mark.parametrize(
    ("fields", "code", "param", "words"),
    [
        (
            {**FAR, "engine": "warp"},
            "unusable_engine",
            "cache_disk_tokens",
            "engine 'warp' of node 'pc' cannot keep KV caches on a disk; engines there that can: onnxruntime",
        ),
        (
            {**FAR, "cache_disk_tokens": 189},
            "invalid_request",
            "cache_tokens",
            "caches of 60 tokens and 189 on disk were asked for; one sequence may have 250 (the context)",
        ),
        ({"cache_disk_tokens": -1}, "invalid_value", "cache_disk_tokens", "cache_disk_tokens must be"),
    ],
)
async def test_what_cannot_be_is_refused_when_it_is_planned(
    fields: dict[str, Any], code: str, param: str, words: str, mesh: Any, new_node: Any
) -> None:
    node = await mesh.join(able(new_node()))
    status, body = await mesh.call("POST", "/api/sessions", {"model": "bard", **fields})
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, code, param)
    assert words in body["error"]["message"]
    assert not node.commands


async def test_a_node_of_an_older_version_is_not_asked_to_have_both(mesh: Any, new_node: Any) -> None:
    """It would take the blocks of its disk for its holder's."""
    node = able(new_node("older"))
    node.capabilities.engines[0].asks_block_holders = True
    node.protocol = OLDEST
    await mesh.join(node)
    asked = {"context": 1000, "cache_tokens": 250, "cache_disk_tokens": 300, "cache_node_tokens": 500}
    status, body = await mesh.call("POST", "/api/sessions", {"model": "bard", **asked})
    assert (status, body["error"]["param"]) == (400, "cache_node_tokens")
    assert (
        "'older' cannot keep caches on its disk and on another node at a time: its Motley" in body["error"]["message"]
    )


async def test_disks_and_other_nodes_may_have_some_both(mesh: Any, new_node: Any, motley: Motley) -> None:
    """In blocks of a stretch each; holders are asked for theirs alone, and the command line gives and tells both."""
    node, box = able(new_node()), able(new_node("box"))
    for each in (node, box):
        each.capabilities.engines[0].asks_block_holders = True
        await mesh.join(each)
    where = {"context": 1000, "cache_tokens": 250, "cache_disk_tokens": 300, "cache_node_tokens": 500}
    wanted = [f"--{name.replace('_', '-')}={tokens}" for name, tokens in where.items()]
    status, _, err = await motley("run", "bard", "Hi", "--nodes", "pc", *wanted)
    assert status == 0, err
    order, to_holder = (
        next(command.assign for command in each.commands if command.WhichOneof("body") == "assign")
        for each in (node, box)
    )
    assert (order.cache_blocks, order.cache_block_tokens, order.far_blocks, order.far_blocks_on_disk) == (2, 128, 7, 3)
    alone = await mesh.serve(name="alone", nodes=["pc"], **{**where, "cache_tokens": 1000, "cache_disk_tokens": 0})
    assert to_holder.holder_bytes == alone["cache_holders"][0]["bytes"] > 0
    assert "context 1000, 250 tokens in caches, 300 on disk, 500 on other nodes, ready" in (await motley("status"))[1]


async def test_the_command_line_gives_and_tells_it(mesh: Any, new_node: Any, motley: Motley) -> None:
    await mesh.join(able(new_node()))
    wanted = ("--context", "250", "--cache-tokens", "60", "--cache-disk-tokens", "190")
    for _ in range(2):
        status, _, err = await motley("run", "bard", "Hi", *wanted)
        assert status == 0, err
    (session,) = (await mesh.call("GET", "/api/sessions"))[1]["sessions"]
    assert (session["cache_tokens"], session["cache_disk_tokens"]) == (60, 190)
    assert "context 250, 60 tokens in caches, 190 on disk, ready" in (await motley("status"))[1]
    assert (await motley("run", "bard", "Hi"))[0] == 0
    status, _, err = await motley("run", "bard", "Hi", "--cache-disk-tokens", "200")
    assert (status, "loaded with 190 tokens on disk: leave out --cache-disk-tokens" in err) == (1, True), err
