"""Caches on nodes that are no ranks, and on disks beside these: a context that the ranks' memory has no room for, and
the loss of such a node."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from motley.cli.errors import CliError
from motley.cli.reaching.client import Client
from tests.e2e.processes import BUNDLED, START_S, Mesh, in_thread, mesh

PROMPT = "ROMEO:\nBut soft, what light through yonder window breaks?\n" * 8
LONG = {"model": BUNDLED.name, "prompt": PROMPT, "temperature": 0, "ignore_eos": True, "logprobs": 2}
NEAR = 128
"""A quarter of the context."""


async def answer_of(client: Client, **changes: object) -> dict[str, Any]:
    """The answer with the log-probabilities of all its tokens, and what it has cost."""
    answer: dict[str, Any] = await client.call("POST", "/v1/completions", {**LONG, **changes})
    return answer


async def streamed(client: Client, body: dict[str, Any], at: int, do: Callable[[], None]) -> dict[str, Any]:
    """The choice of a streamed answer, put together; something is done after so many tokens."""
    whole: dict[str, Any] = {}
    async for event in client.stream("/v1/completions", body):
        for choice in event["choices"]:
            for name, more in {"text": choice["text"], **(choice["logprobs"] or {})}.items():
                before, told = len(whole.get("tokens", ())), whole.get(name)
                whole[name] = more if told is None else told + more
                if name == "tokens" and before < at <= len(whole[name]):
                    do()
            whole["finish_reason"] = choice["finish_reason"]
    return whole


async def until(client: Client, path: str, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Ask again and again until what is told is wanted."""
    async with asyncio.timeout(START_S):
        while True:
            told: dict[str, Any] = await client.call("GET", path)
            if wanted(told):
                return told
            await asyncio.sleep(0.02)


def all_are_used(told: dict[str, Any]) -> bool:
    """Whether there are blocks in all places that a session has for far ones."""
    activity = told["activity"]
    return activity is not None and all(tier["blocks_used"] for tier in activity["far_tiers"])


@pytest.mark.parametrize(
    ("exact", "cache_format", "on_disk"),
    [
        (False, "int8", NEAR),
        pytest.param(False, "fp32", 0, marks=pytest.mark.soak),
        pytest.param(True, "fp32", NEAR, marks=pytest.mark.soak),
    ],
)
async def test_a_context_four_times_what_ranks_have_room_for_is_answered_to_the_bit(
    exact: bool, cache_format: str, on_disk: int, there: Mesh
) -> None:
    same = {
        "nodes": ["a", "b"],
        "quantisation": "int8",
        "exact": exact,
        "cache_format": cache_format,
        "context": 4 * NEAR,
        "shares": [3, 2],
    }
    found = []
    far = {"cache_tokens": NEAR, "cache_disk_tokens": on_disk, "cache_node_tokens": 3 * NEAR - on_disk}
    async with Client(there.url) as client:
        for caches in ({}, far):
            session = await there.session(**same, **caches)
            whole = (await answer_of(client, max_tokens=1))["usage"]["prompt_tokens"]
            assert NEAR < whole < 3 * NEAR
            found.append((await answer_of(client, max_tokens=4 * NEAR - whole))["choices"])
            if caches:
                holders = session["cache_holders"]
                assert [(own["node"], own["of_rank"], own["state"]) for own in holders] == [
                    ("c", 0, "ready"),
                    ("c", 1, "ready"),
                ]
                assert sum(own["bytes"] for own in holders) >= far["cache_node_tokens"] * 4 * 64
                told = (await client.call("GET", f"/api/sessions/{session['id']}"))["activity"]
                assert told["far_blocks_used"] == told["far_blocks"] == 3
                _, out, _ = await in_thread("status", "--url", there.url)
                assert "c (caches of rank 1)" in out
                tiers = {tier["place"]: tier for tier in told["far_tiers"]}
                costs = [tier["block_ms"] for tier in told["far_tiers"]]
                if on_disk:
                    assert (tiers["disk"]["blocks"], tiers["nodes"]["blocks"]) == (1, 2)
                    assert 0 < costs[0] <= costs[1], "what costs a step less is filled first"
                    assert re.search(
                        r"far blocks in use: \d of \d on [^;]* ms of a step for each\), then \d of \d on", out
                    )
                else:
                    assert (costs, tiers["nodes"]["blocks"]) == ([0], 3)
            await client.call("DELETE", f"/api/sessions/{session['id']}")
    assert found[0] == found[1]


async def test_what_cannot_be_kept_elsewhere_is_refused_by_name(there: Mesh) -> None:
    caches = {"cache_tokens": NEAR, "cache_node_tokens": 3 * NEAR, "context": 4 * NEAR}
    for asked, why in (
        ({"engine": "reference"}, "engine 'reference' of node 'a' cannot keep KV caches on another node.*onnxruntime"),
        ({"cache_disk_tokens": 10, "cache_node_tokens": 10}, "of 128 tokens and 10 on disk and 10 on other nodes were"),
        ({"cache_node_tokens": 2**30}, "no other node has room for the far cache blocks of rank 0"),
        ({"cache_node_tokens": 10}, "caches of 128 tokens and 10 on other nodes were asked for"),
    ):
        with pytest.raises(CliError, match=f"(?s){why}"):
            await there.session(**{"nodes": ["a"], **caches, **asked})


@pytest.mark.parametrize("on_disk", [pytest.param(0, marks=pytest.mark.soak), 2 * NEAR])
async def test_the_node_that_keeps_caches_is_killed_and_no_text_changes(on_disk: int, tmp_path: Path) -> None:
    """Those who had tokens there compute them again, as far as the others have room; the session goes on, with the disk
    if there is one."""
    asked = [{"prompt": f"{name}:\n{PROMPT}"[:500], "max_tokens": 100} for name in ("ROMEO", "KING", "DUKE", "NURSE")]
    async with mesh(tmp_path, "a", "b", "far") as there, Client(there.url) as client:
        near = {"nodes": ["a", "b"], "shares": [3, 2], "context": 3 * NEAR, "cache_tokens": 3 * NEAR}
        session = await there.session(**near)
        alone = [(await answer_of(client, **each))["choices"] for each in asked]
        await client.call("DELETE", f"/api/sessions/{session['id']}")
        session = await there.session(**near, cache_disk_tokens=on_disk, cache_node_tokens=6 * NEAR)
        where = f"/api/sessions/{session['id']}"
        answers = [asyncio.create_task(answer_of(client, **each)) for each in asked]
        await until(client, where, all_are_used)
        assert not all(answer.done() for answer in answers)
        for process in there.nodes["far"].family():
            process.send_signal(signal.SIGKILL)
        assert [(await answer)["choices"] for answer in answers] == alone
        assert (await answer_of(client, **asked[0]))["choices"] == alone[0]
        told = await until(client, where, lambda told: all(own["lost"] for own in told["cache_holders"]))
        assert told["state"] == "ready"
        assert told["activity"]["far_blocks"] == on_disk // 128
        assert [tier["place"] for tier in told["activity"]["far_tiers"]] == ["disk"] * bool(on_disk)
        assert "far cache blocks are lost" in told["activity"]["trouble"]


@pytest.mark.parametrize("on_disk", [0, pytest.param(NEAR, marks=pytest.mark.soak)])
async def test_an_answer_that_needs_caches_that_are_lost_has_them_computed_again_elsewhere(
    on_disk: int, tmp_path: Path
) -> None:
    """While it is streamed: it has more tokens than the rank has room for, and goes on. Without recovery it is told."""
    async with mesh(tmp_path, "a", "far", "farther") as there, Client(there.url) as client:
        plan = {"nodes": ["a"], "quantisation": "int8", "context": 4 * NEAR}
        session = await there.session(**plan)
        body = {**LONG, "max_tokens": 100}
        assert (await answer_of(client, **body))["usage"]["prompt_tokens"] > NEAR
        whole = await streamed(client, body, 0, lambda: None)
        assert len(whole["tokens"]) == 100
        await client.call("DELETE", f"/api/sessions/{session['id']}")
        for recover in (True, False):
            caches = {"cache_tokens": NEAR, "cache_disk_tokens": on_disk, "cache_node_tokens": 3 * NEAR - on_disk}
            session = await there.session(**plan, **caches, recover=recover)
            where = f"/api/sessions/{session['id']}"
            keeper = session["cache_holders"][0]["node"]

            def lose(keeper: str = keeper) -> None:
                for process in there.nodes[keeper].family():
                    process.send_signal(signal.SIGKILL)

            if recover:
                assert await streamed(client, body, 20, lose) == whole
                told = await client.call("GET", where)
                assert (told["state"], told["epoch"]) == ("ready", 2)
                assert {own["node"] for own in told["cache_holders"]} == {"far", "farther"} - {keeper}
                await client.call("DELETE", where)
            else:
                with pytest.raises(CliError, match="have no room without caches that are lost"):
                    await streamed(client, body, 20, lose)
