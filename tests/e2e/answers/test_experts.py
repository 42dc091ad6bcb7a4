"""Experts on several nodes: the text never shows where they are, nor which node dies."""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from motley.bench.random_models.writing import synthesise
from motley.cli.errors import CliError
from motley.cli.reaching.client import Client
from motley.daemon.node.survey.describe import describe
from motley.daemon.weights.cache import LABEL, ShareCache
from motley.daemon.weights.spec import SHARE_FILE
from motley.orchestrator.known_models.shapes import SHAPES
from motley.orchestrator.planning.cutting.shares import Candidate, plan_shares, trunk_profile
from motley.orchestrator.planning.experts.groups import slice_bytes
from motley.protocol import mesh_pb2 as pb
from tests.e2e.processes import Mesh, in_thread, last_json, mesh

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
}
EXPERTS = 24
CONTEXT = 512
GREEDY = {"model": "moe", "prompt": "To be", "max_tokens": 80, "temperature": 0, "ignore_eos": True}
SOON_S = 120.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "moe"
    synthesise(SHAPES["mixtral-quarter"] | SMALL, folder)
    return folder


async def session(there: Mesh, model: Path, **wanted: Any) -> dict[str, Any]:
    return await there.session(model=str(model), context=CONTEXT, **wanted)


async def text(there: Mesh, after: Callable[[int], Awaitable[None]] | None = None) -> str:
    """The greedy answer; `after` is awaited after each piece of it, with their number."""
    pieces: list[str] = []
    async with Client(there.url) as client:
        async for event in client.stream("/v1/completions", GREEDY):
            for choice in event["choices"]:
                pieces.append(choice["text"])
                if after is not None:
                    await after(len(pieces))
    return "".join(pieces)


async def call(there: Mesh, method: str, path: str) -> dict[str, Any]:
    async with Client(there.url) as client:
        return await client.call(method, path)


async def close(there: Mesh, session: dict[str, Any]) -> None:
    await call(there, "DELETE", f"/api/sessions/{session['id']}")


async def until(look: Callable[[], Awaitable[dict[str, Any]]], enough: Callable[[dict[str, Any]], object]) -> Any:
    """What is seen when it is enough."""
    deadline = time.monotonic() + SOON_S
    while not enough(seen := await look()):
        assert time.monotonic() < deadline, seen
        await asyncio.sleep(0.02)
    return seen


async def test_no_layout_and_no_placement_shows_in_the_text(model: Path, there: Mesh) -> None:
    layouts: list[dict[str, Any]] = [
        {"experts": "sliced", "nodes": ["a", "b"]},
        {"experts": "parallel", "nodes": ["b", "a", "c"], "trunk": 2},
        {"experts": "parallel", "nodes": ["a", "b", "c"], "replicas": 2},
    ]
    texts = []
    for layout in layouts:
        made = await session(there, model, **layout)
        assert made["experts"] == layout["experts"]
        texts.append(await text(there))
        if layout is not layouts[-1]:
            await close(there, made)
    assert texts == [texts[0]] * len(layouts)
    # Of the last one there is a map, which may be changed while it answers.
    found = await last_json("experts", "moe", "--url", there.url)
    assert found["replicas"] == {"asked": 2, "least": 2}
    assert [host["node"] for host in found["hosts"]] == ["a", "b", "c"]
    assert sum(host["rows"] for host in found["hosts"]) >= (80 + 5 - 1) * 3 * 2  # more if some were asked twice
    answer = asyncio.create_task(text(there))
    moved = await last_json("experts", "rebalance", "moe", "--url", there.url)
    assert moved["busy_ms_after"] <= moved["busy_ms"]
    assert await answer == texts[0]
    status, shown, _ = await in_thread("experts", made["id"], "--url", there.url)
    assert status == 0
    assert "2 of each expert asked for" in shown


@pytest.mark.parametrize(
    "layouts",
    [
        [{"nodes": ["a"]}, {"nodes": ["b", "a", "c"]}, {"nodes": ["a", "b"], "shares": [1, 3]}],
        pytest.param(
            [
                {"experts": "parallel", "nodes": ["a"]},
                {"experts": "parallel", "nodes": ["b", "a", "c"], "trunk": 2},
                {"experts": "parallel", "nodes": ["a", "b", "c"], "replicas": 2},
            ],
            marks=pytest.mark.soak,
        ),
    ],
    ids=["sliced", "parallel"],
)
async def test_exact_answers_depend_on_neither_nodes_nor_company(
    layouts: list[dict[str, Any]], model: Path, there: Mesh
) -> None:
    """To the last bit of every log-probability."""
    prompts = [f"{name}:" for name in ("ROMEO", "KING", "JULIET")]
    sampled = {**GREEDY, "temperature": 0.9, "top_p": 0.9, "seed": 5, "max_tokens": 30, "logprobs": 3}
    async with Client(there.url) as client:

        async def choice_of(prompt: str) -> object:
            return (await client.call("POST", "/v1/completions", {**sampled, "prompt": prompt}))["choices"][0]

        seen = []
        for layout in layouts:
            made = await session(there, model, exact=True, **layout)
            assert made["experts"] == layout.get("experts", "sliced")
            if not seen:
                seen.append([await choice_of(prompt) for prompt in prompts])
            seen.append(await asyncio.gather(*map(choice_of, prompts)))
            await close(there, made)
        assert all(answers == seen[0] for answers in seen)


@pytest.mark.parametrize(("trunk", "victims"), [pytest.param(1, "dcb", marks=pytest.mark.soak), (2, "dc")])
async def test_a_kill_every_ten_tokens_does_not_show_in_the_text(
    trunk: int, victims: str, model: Path, tmp_path: Path
) -> None:
    """Until nobody is left but the trunk, whose nodes have all experts then."""
    async with mesh(tmp_path, *"abcd") as there:
        wanted = {"trunk": trunk, "engines": dict.fromkeys("ab"[:trunk], "onnxruntime")}
        made = await session(there, model, experts="parallel", nodes=list("abcd"), replicas=2, **wanted)
        expected = await text(there)

        async def kill(pieces: int) -> None:
            if pieces % 10 == 0 and pieces // 10 <= len(victims):
                await there.nodes[victims[pieces // 10 - 1]].kill()

        assert await text(there, kill) == expected

        def look() -> Awaitable[dict[str, Any]]:
            return call(there, "GET", f"/api/sessions/{made['id']}/experts")

        found = await until(look, lambda found: found["replicas"]["least"] == trunk and not found["moves"])
        assert [host["state"] for host in found["hosts"]] == ["ready"] * trunk + ["gone"] * len(victims)
        assert all(f"node '{host['node']}' is lost" in host["lost"] for host in found["hosts"][trunk:])
        if trunk < 2:
            assert "2 replicas of every expert need 2 different nodes" in found["short"]
        assert await text(there) == expected


@pytest.mark.soak
async def test_an_expert_without_a_host_is_waited_for_while_there_is_hope(model: Path, tmp_path: Path) -> None:
    """The trunk's node has no room for experts, two others for half of them each, and a fourth for none at first."""
    profile = describe(pb.ModelSpec(source=str(model), quantisation="fp32", block=128), None).profile
    (plan,) = plan_shares([trunk_profile(profile)], [Candidate("a", 1.0, 1 << 60)], CONTEXT)
    half = profile.host_fixed_bytes + EXPERTS // 2 * profile.expert_bytes
    async with mesh(tmp_path) as there:
        await asyncio.gather(
            there.join("a", f"{plan.memory_bytes + profile.host_fixed_bytes}"),
            *(there.join(name, f"{half}") for name in "bc"),
            there.join("d", f"{profile.host_fixed_bytes}"),
        )
        wanted: dict[str, Any] = {"experts": "parallel", "nodes": list("abcd"), "engines": {"a": "onnxruntime"}}
        with pytest.raises(CliError, match=r"replicas .* missing"):
            await session(there, model, **wanted, replicas=2)
        made = await session(there, model, **wanted)
        assert [(host["node"], host["experts"]) for host in made["hosts"]] == [("b", 12), ("c", 12)]
        expected = await text(there)
        (worker,) = there.nodes["c"].workers()

        def look() -> Awaitable[dict[str, Any]]:
            return call(there, "GET", f"/api/sessions/{made['id']}")

        async def kill_worker(pieces: int) -> None:
            if pieces == 10:
                worker.kill()
                seen = await until(look, lambda seen: seen["waiting_for"])
                assert (len(seen["waiting_for"]), seen["state"]) == (12, "ready")

        assert await text(there, kill_worker) == expected  # it was started again
        assert (await look())["waiting_for"] == []

        async def replace(victim: str, successor: str, pieces: int) -> None:
            if pieces == 10:
                await there.nodes[victim].kill()
                seen = await until(look, lambda seen: seen["waiting_for"])
                assert (len(seen["waiting_for"]), seen["state"]) == (12, "ready")
                status, shown, _ = await in_thread("status", "--url", there.url)
                assert status == 0
                assert f"no host has {seen['waiting_for'][0]}" in shown
                await there.join(successor, f"{half}")

        await there.nodes["d"].kill()
        for victim, successor in ("cd", "dc"):  # one that is new to the session, then one that has been there before
            assert await text(there, partial(replace, victim, successor)) == expected
            seen = await look()
            assert seen["waiting_for"] == []
            experts = {host["node"]: host["experts"] for host in seen["hosts"]}
            assert experts == {"b": 12, "c": 0, "d": 0} | {successor: 12}


@pytest.mark.soak
async def test_a_node_that_joins_takes_experts_and_a_host_that_was_there_dies(model: Path, tmp_path: Path) -> None:
    async with mesh(tmp_path, "a", "b") as there:
        made = await session(there, model, experts="parallel")
        (trunk,) = {rank["node"] for rank in made["ranks"]}
        (other,) = {"a", "b"} - {trunk}
        expected = await text(there)
        over = asyncio.Event()

        async def talk() -> list[str]:
            texts = []
            while not over.is_set():
                texts.append(await text(there))
            return texts

        def look() -> Awaitable[dict[str, Any]]:
            return call(there, "GET", f"/api/sessions/{made['id']}/experts")

        talking = asyncio.create_task(talk())
        try:
            await there.join("c")
            found = await until(
                look, lambda found: len(found["hosts"]) == 3 and found["hosts"][2]["serving"] and not found["moves"]
            )
            assert found["hosts"][2]["node"] == "c"
            assert sum(host["serving"] for host in found["hosts"]) == EXPERTS
            rows = found["hosts"][2]["rows"]
            await there.nodes[other].kill()
            lost = lambda found: any(host["state"] == "gone" for host in found["hosts"])  # noqa: E731
            found = await until(look, lambda found: lost(found) and not found["waiting_for"] and not found["moves"])
            assert {host["node"]: host["state"] for host in found["hosts"]} == {
                trunk: "ready",
                other: "gone",
                "c": "ready",
            }
            await until(look, lambda found: found["hosts"][2]["rows"] > rows)
        finally:
            over.set()
        assert set(await talking) == {expected}
        assert await text(there) == expected


@pytest.fixture(scope="module")
def two_large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two experts, which are most of it."""
    folder = tmp_path_factory.mktemp("models") / "moe"
    large = {"intermediate_size": 8192, "num_hidden_layers": 1, "num_local_experts": 2, "num_experts_per_tok": 1}
    synthesise(SHAPES["mixtral-quarter"] | SMALL | large, folder)
    return folder


@pytest.mark.soak
async def test_an_expert_too_large_for_a_node_is_on_several(two_large: Path, tmp_path: Path) -> None:
    """Each of three nodes has room for three quarters of an expert: together for two. A fourth one, which has room for
    both by itself, computes the same bits, and so takes over in the middle of a text."""
    profile = describe(pb.ModelSpec(source=str(two_large), quantisation="fp32", block=128), None).profile
    (plan,) = plan_shares([trunk_profile(profile)], [Candidate("a", 1.0, 1 << 60)], CONTEXT)
    part = profile.host_fixed_bytes + 6 * slice_bytes(profile, 8)
    assert part < profile.host_fixed_bytes + profile.expert_bytes
    async with mesh(tmp_path) as there:
        await asyncio.gather(
            there.join("a", f"{plan.memory_bytes + profile.host_fixed_bytes}"),
            there.join("big"),
            *(there.join(name, f"{part}") for name in "bcd"),
        )
        alone = await session(there, two_large, nodes=["big"])
        expected = await text(there)
        await close(there, alone)

        on_a: dict[str, Any] = {"experts": "parallel", "engines": {"a": "onnxruntime"}}  # where the trunk is
        with pytest.raises(CliError, match=r"do not fit on groups of 3 nodes: .* are missing"):
            await session(there, two_large, **on_a, nodes=["a", "b", "c"])
        made = await session(there, two_large, **on_a, nodes=["a", "b", "c", "d"])
        assert [(sorted(host["node"]), host["experts"]) for host in made["hosts"]] == [(sorted("b+c+d"), 2)]
        (worker,) = there.nodes["c"].workers()

        async def kill_worker(pieces: int) -> None:
            if pieces == 10:
                worker.kill()

        assert await text(there, kill_worker) == expected, "the answer waits until all three have begun anew"
        found = await call(there, "GET", f"/api/sessions/{made['id']}/experts")
        assert [(host["state"], host["restarts"]) for host in found["hosts"]] == [("ready", 1)]
        group = made["hosts"][0]["node"]
        status, shown, _ = await in_thread("experts", "moe", "--url", there.url)
        assert (status, group in shown) == (0, True)
        status, shown, _ = await in_thread("status", "--url", there.url)
        assert (status, group in shown, shown.count("moe (experts)")) == (0, True, 3)
        await close(there, made)

        made = await session(there, two_large, **on_a, nodes=["a", "b", "c", "d", "big"], replicas=2)
        assert {host["node"] for host in made["hosts"]} == {group, "big"}
        assert [host["experts"] for host in made["hosts"]] == [2, 2]

        async def kill(pieces: int) -> None:
            if pieces == 10:
                await there.nodes["c"].kill()

        assert await text(there, kill) == expected
        found = await call(there, "GET", f"/api/sessions/{made['id']}/experts")
        lost = {host["node"]: host["lost"] for host in found["hosts"]}
        assert (lost["big"], "'c'" in lost[group]) == (None, True)


@pytest.mark.soak
async def test_a_group_is_formed_anew_when_a_node_has_left_for_good(two_large: Path, tmp_path: Path) -> None:
    """In the middle of a text, which waits, of two that are left and one that joins; none has room for an expert."""
    profile = describe(pb.ModelSpec(source=str(two_large), quantisation="fp32", block=128), None).profile
    (plan,) = plan_shares([trunk_profile(profile)], [Candidate("a", 1.0, 1 << 60)], CONTEXT)
    part = profile.host_fixed_bytes + 6 * slice_bytes(profile, 8)
    async with mesh(tmp_path) as there:
        await asyncio.gather(
            there.join("a", f"{plan.memory_bytes + profile.host_fixed_bytes}"),
            *(there.join(name, f"{part}") for name in "bcd"),
        )
        made = await session(there, two_large, experts="parallel", engines={"a": "onnxruntime"})
        assert [(sorted(host["node"]), host["experts"]) for host in made["hosts"]] == [(sorted("b+c+d"), 2)]
        expected = await text(there)

        async def replace(pieces: int) -> None:
            if pieces == 10:
                await there.nodes["c"].kill()
                await there.join("e", f"{part}")

        assert await text(there, replace) == expected
        found = await call(there, "GET", f"/api/sessions/{made['id']}/experts")
        assert [(sorted(host["node"]), host["state"]) for host in found["hosts"]] == [
            (sorted("b+c+d"), "gone"),
            (sorted("b+d+e"), "ready"),
        ]


@pytest.mark.soak
async def test_nodes_that_leave_or_lie_while_they_are_filled_are_named(model: Path, tmp_path: Path) -> None:
    async with mesh(tmp_path, "a") as there:
        await asyncio.gather(*(there.join(name, cache=tmp_path / name) for name in "bcd"))
        made = await session(there, model, experts="parallel", nodes=["a", "b", "c"], replicas=3)
        await close(there, made)
        spoil(tmp_path / "c")
        differ = r"layer \d expert \d with checksum .*their files or caches differ"
        with pytest.raises(CliError, match=differ) as refusal:
            await session(there, model, experts="parallel", nodes=["a", "b", "c"], replicas=3)
        assert "'c'" in str(refusal.value)
        async with Client(there.url) as client:
            body = {"model": str(model), "experts": "parallel", "replicas": 2, "nodes": ["a", "b", "d"]}
            body |= {"engines": {"a": "onnxruntime"}}
            made = await client.call("POST", "/api/sessions", body)
            await there.nodes["d"].kill()
            with pytest.raises(CliError, match=r"node 'd' \(experts\) is lost"):
                await client.wait_ready(made, lambda *_: None)


def spoil(cache: Path) -> None:
    """Change a bit of the first cached expert, so that its label does not tell."""
    entry = min(ShareCache(cache).entries(), key=lambda entry: entry.key)
    share = cache / entry.key / SHARE_FILE
    data = bytearray(share.read_bytes())
    data[len(data) // 2] ^= 1
    share.write_bytes(data)
    label = cache / entry.key / LABEL
    told = json.loads(label.read_text("utf-8"))
    told["crc32"] = zlib.crc32(data)
    label.write_text(json.dumps(told), "utf-8")
