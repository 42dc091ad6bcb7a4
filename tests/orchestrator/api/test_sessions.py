"""Sessions and nodes over real sockets."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from motley.cli.shown.show import forecast_beside
from motley.orchestrator.serving import lifecycle
from motley.orchestrator.serving.plans import fitting
from motley.protocol.mesh_pb2 import (
    Activity,
    Describe,
    Described,
    Failure,
    FarTier,
    GpuUser,
    Heartbeat,
    Loading,
    ModelProfile,
    RankCommand,
    Ready,
    Timing,
)
from motley.protocol.wording import short_bytes

from ..conftest import DEADLINE_S, of_kind

MODEL = {"model": "bard"}
GB = 10**9


async def test_a_session_over_three_nodes(mesh: Any, new_node: Any) -> None:
    slow, fast, mid = [
        await mesh.join(new_node(name, bandwidth=speed)) for name, speed in (("slow", 1e9), ("fast", 6e9), ("mid", 3e9))
    ]
    session = await mesh.serve(context=100, threads=2, quantisation="int4", block=64)
    assert [rank["node"] for rank in session["ranks"]] == ["fast", "mid", "slow"]
    assert [rank["share"]["mlp"] for rank in session["ranks"]] == [10, 5, 1]
    assert sum(rank["share"]["fraction"] for rank in session["ranks"]) == pytest.approx(1)
    assert all(rank["loading"] == {"done_bytes": 100, "total_bytes": 100} for rank in session["ranks"])
    assert session["ranks"][0]["memory"]["rss_bytes"] == 300
    assert (session["context"], session["threads"], session["family"]) == (100, 2, "llama")
    assign, peers = fast.commands
    assert (assign.session, assign.rank, assign.assign.size) == (session["id"], 0, 3)
    assert (assign.assign.model.source, assign.assign.model.quantisation, assign.assign.model.block) == (
        "bard",
        "int4",
        64,
    )
    assert list(peers.peers.addresses) == ["127.0.0.1:5000", "127.0.0.1:5001", "127.0.0.1:5002"]
    assert mid.commands[1].peers == peers.peers
    status, listed = await mesh.call("GET", "/api/sessions")
    assert (status, listed) == (200, {"sessions": [session]})
    _, body = await mesh.call("GET", "/api/nodes")
    assert body["nodes"][0]["ranks"] == [{"session": session["id"], "model": "bard", "rank": 2}]
    assert body["nodes"][0]["memory_reserved_bytes"] == session["ranks"][2]["memory"]["planned_bytes"]

    status, closed = await mesh.call("DELETE", f"/api/sessions/{session['id']}")
    assert (status, closed["state"]) == (200, "closing")
    assert {rank["state"] for rank in closed["ranks"]} == {"gone"}
    assert [node.commands[-1].WhichOneof("body") for node in (slow, fast, mid)] == ["release"] * 3
    assert await mesh.call("GET", "/api/sessions") == (200, {"sessions": []})
    assert (await mesh.call("GET", f"/api/sessions/{session['id']}"))[0] == 404
    _, body = await mesh.call("GET", "/api/nodes")
    assert body["nodes"][0]["memory_reserved_bytes"] == 0


async def test_memory_is_planned_for_the_blocks_that_ranks_allocate(mesh: Any, new_node: Any) -> None:
    node = new_node()
    node.capabilities.engines.add(name="whole", has_whole_caches=True)
    await mesh.join(node)
    planned = {}
    for name, wanted, blocks in (
        ("none", {"context": 1}, (1, 32)),
        ("one", {"context": 100}, (4, 32)),
        ("several", {"context": 100, "cache_tokens": 1001}, (32, 32)),
        ("whole", {"context": 100, "cache_tokens": 201, "engine": "whole"}, (3, 100)),
    ):
        session = await mesh.serve(name=name, **wanted)
        assert (session["context"], session["cache_tokens"]) == (
            wanted["context"],
            wanted.get("cache_tokens", wanted["context"]),
        )
        order = [command.assign for command in node.commands if command.WhichOneof("body") == "assign"][-1]
        assert (order.context, order.cache_blocks, order.cache_block_tokens) == (wanted["context"], *blocks)
        planned[name] = session["ranks"][0]["memory"]["planned_bytes"]
    a_token = 4 * 64  # four KV groups
    assert [planned[name] - planned["none"] for name in ("one", "several", "whole")] == [
        a_token * (tokens - 32) for tokens in (4 * 32, 32 * 32, 3 * 100)
    ]


async def test_layers_with_a_window_have_fewer_blocks_if_every_engine_can(
    mesh: Any, new_node: Any, profile: ModelProfile
) -> None:
    """Memory is planned for what they have."""
    profile.windowed_bytes_per_token, profile.window = 48, 40
    joined = []
    for name in ("a", "b"):
        node = new_node(name)
        node.on_describe = lambda _: Described(profile=profile)
        node.capabilities.engines[0].keeps_windows = True
        node.capabilities.engines.add(name="all")
        joined.append(await mesh.join(node))
    planned = {}
    for name, fields, windowed in (("fewer", {}, (44, 40)), ("same", {"engines": {"b": "all"}}, (0, 0))):
        session = await mesh.serve(name=name, context=2048, **fields)
        orders = [
            [command.assign for command in node.commands if command.WhichOneof("body") == "assign"][-1]
            for node in joined
        ]
        assert [(order.cache_blocks, order.windowed_blocks, order.window) for order in orders] == [(64, *windowed)] * 2
        planned[name] = sum(rank["memory"]["planned_bytes"] for rank in session["ranks"])
    a_token = 4 * 64 - 4 * (16 + 48 * 44 // 64)
    assert planned["same"] - planned["fewer"] == a_token * 2048


async def test_one_engine_with_whole_caches_decides_for_all_ranks(mesh: Any, new_node: Any) -> None:
    joined = []
    for name in ("a", "b"):
        node = new_node(name)
        node.capabilities.engines.add(name="whole", has_whole_caches=True)
        joined.append(await mesh.join(node))
    await mesh.serve(context=100, cache_tokens=150, engines={"b": "whole"})
    orders = [command.assign for node in joined for command in node.commands if command.WhichOneof("body") == "assign"]
    assert [(order.cache_blocks, order.cache_block_tokens) for order in orders] == [(2, 100)] * 2


async def test_a_node_s_gpus_are_told(mesh: Any, new_node: Any) -> None:
    node = new_node("pc")
    facts = {
        "name": "A GPU",
        "kind": "discrete",
        "memory_bytes": 12,
        "free_bytes": 11,
        "driver": "580",
        "compute_capability": "8.6",
    }
    user = {"pid": 7, "name": "game", "bytes": 1}
    node.capabilities.gpus.add(**facts, multiprocessors=28, memory_bandwidth=3e11, users=[GpuUser(**user)])
    node.capabilities.gpus.add(**facts)
    await mesh.join(node)
    _, body = await mesh.call("GET", "/api/nodes")
    assert body["nodes"][0]["gpus"] == [
        facts | {"multiprocessors": 28, "memory_bandwidth": 3e11, "users": [user]},
        facts | {"multiprocessors": None, "memory_bandwidth": None, "users": []},
    ]
    node.capabilities.gpus[0].free_bytes = 3
    await node.send(heartbeat=Heartbeat(memory_available_bytes=GB, gpus=node.capabilities.gpus))
    body = await mesh.poll("/api/nodes", lambda body: body["nodes"][0]["gpus"][0]["free_bytes"] == 3)
    assert body["nodes"][0]["gpus"][0]["users"] == [user]


async def test_explicit_nodes_and_shares_keep_their_order(mesh: Any, new_node: Any) -> None:
    for name, speed in (("slow", 1e9), ("fast", 6e9)):
        await mesh.join(new_node(name, bandwidth=speed))
    await mesh.join(new_node("other"))
    session = await mesh.serve(nodes=["slow", "fast", "slow"], shares=[2, 1, 1])
    assert [rank["node"] for rank in session["ranks"]] == ["slow", "fast", "slow"]
    assert [rank["share"]["mlp"] for rank in session["ranks"]] == [8, 4, 4]
    assert session["ranks"][0]["memory"]["limit_bytes"] == 5 * 10**8  # two ranks there
    again = await mesh.serve(name="again", shares=[0, 1, 3])
    assert [rank["node"] for rank in again["ranks"]] == ["slow", "fast", "other"]
    assert [rank["share"]["mlp"] for rank in again["ranks"]] == [0, 4, 12]


async def test_exact_is_asked_for_planned_and_assigned(mesh: Any, new_node: Any) -> None:
    node = await mesh.join(new_node())
    asked: list[bool] = []
    describe = node.on_describe
    node.on_describe = lambda order: asked.append(order.model.exact) or describe(order)
    for exact in (False, True):
        session = await mesh.serve(name=f"exact {exact}", exact=exact)
        assert session["exact"] is exact
        assert asked[-1] is exact
        assigned = [command for command in node.commands if command.WhichOneof("body") == "assign"]
        assert assigned[-1].assign.model.exact is exact


async def test_what_a_node_s_ranks_may_take_and_have_taken_is_told(mesh: Any, new_node: Any, motley: Any) -> None:
    node = await mesh.join(new_node(memory=4 * GB))
    _, out, _ = await motley("status")
    assert ("4 GB" in out, "planned" in out) == (True, False)
    session = await mesh.serve()
    planned = session["ranks"][0]["memory"]["planned_bytes"]

    async def told() -> tuple[int, int]:
        (body,) = (await mesh.call("GET", "/api/nodes"))[1]["nodes"]
        return body["memory_reserved_bytes"], body["memory_used_bytes"]

    assert await told() == (planned, 300)
    await node.event(of_kind(node, "assign")[0], timing=Timing(peak_rss_bytes=5000))
    await mesh.poll("/api/nodes", lambda body: body["nodes"][0]["memory_used_bytes"] == 5000)
    _, out, _ = await motley("status", "--words")
    (row,) = [line.split() for line in out.splitlines() if line.startswith("│ pc ") and "4 GB" in line]
    assert row[2:11] == ["│", "4", "GB", "│", *short_bytes(planned).split(), "│", "5", "kB"]
    assert "used: what their processes have taken at most" in out
    await mesh.call("DELETE", f"/api/sessions/{session['id']}")
    assert await told() == (0, 0)


async def test_timing_is_shown_after_a_request(mesh: Any, bard: Any) -> None:
    await mesh.call("POST", "/v1/completions", {"model": "bard", "prompt": "Hi"})
    _, listed = await mesh.call("GET", "/api/sessions")
    session_id = listed["sessions"][0]["id"]
    session = await mesh.poll(f"/api/sessions/{session_id}", lambda body: body["step_ms"])
    assert session["step_ms"] == [12.0, 12.0]
    timing = session["ranks"][0]["timing"]
    assert (timing["tokens"], timing["compute_ms"], timing["wire_ms"], timing["wait_ms"]) == (2, 10, 2, 0)
    assert (session["measured_ms_per_step"], session["tokens_per_step"]) == (12, 1)


async def test_what_a_step_takes_is_told_apart_from_what_a_token_does(mesh: Any, bard: Any, motley: Any) -> None:
    """Four requests are answered at a time, and every second guess is right."""
    order, (session,) = of_kind(bard, "assign")[0], (await mesh.call("GET", "/api/sessions"))[1]["sessions"]
    await bard.event(order, activity=Activity(tried_drafts=40, accepted_drafts=20))
    spent = {"compute_s": 0.08, "wire_s": 0.01, "wait_s": 0.01}
    await bard.event(order, timing=Timing(tokens=40, steps=10, step_ms=[11.0, 13.0], **spent))
    told = await mesh.poll(f"/api/sessions/{session['id']}", lambda body: body["step_ms"])
    timing = told["ranks"][0]["timing"]
    assert [timing[each] for each in ("steps", "compute_ms", "wire_ms", "wait_ms")] == [10, 8, 1, 1]
    measured = [told[each] for each in ("measured_ms_per_step", "tokens_per_step", "measured_ms_per_token")]
    assert measured == [12, 1.5, 8]
    told["forecast"] = {"ms_per_token": 9.0, "ttft_ms": 100.0, "compute_ms": 8.0, "wire_ms": 1.0, "wait_ms": 0.0}
    assert forecast_beside(told).endswith(
        "; measured: 12.0 ms a step, which gives 1.50 tokens with those that were guessed: 8.0 ms per token"
    )
    _, out, _ = await motley("status", "--words")
    assert "compute, wire, wait: milliseconds of a step" in out


async def test_what_a_session_does_is_told_once_somebody_has_asked_it(mesh: Any, new_node: Any) -> None:
    node = await mesh.join(new_node())
    session = await mesh.serve()
    assert session["activity"] is None
    ready = next(command for command in node.commands if command.WhichOneof("body") == "peers")
    told = {"active": 2, "waiting": 1, "blocks": 9, "blocks_used": 5, "blocks_kept": 3, "block_tokens": 32}
    counted = {"prompt_tokens": 70, "cached_tokens": 64, "generated_tokens": 8, "tried_drafts": 4, "accepted_drafts": 0}
    counted |= {"far_blocks": 4, "far_blocks_used": 2, "trouble": "rank 0: no disk"}
    counted |= {"windowed_blocks": 6, "windowed_blocks_used": 1, "blocks_on_disk": 7}
    tiers = [{"place": "nodes", "blocks": 4, "blocks_used": 2, "block_ms": 0.5}]
    await node.event(ready, activity=Activity(**told, **counted, far_tiers=[FarTier(**tier) for tier in tiers]))
    body = await mesh.poll(f"/api/sessions/{session['id']}", lambda body: body["activity"])
    assert body["activity"] == {**told, **counted, "far_tiers": tiers, "adapters": [], "adapter_loads": 0}


async def test_a_session_comes_up_while_the_client_polls(mesh: Any, new_node: Any) -> None:
    node = await mesh.join(new_node())
    go_on = asyncio.Event()

    async def half_way(command: RankCommand) -> None:
        if command.WhichOneof("body") == "peers":
            await node.event(command, loading=Loading(done_bytes=30, total_bytes=100))
            await go_on.wait()
        await node.obey(command)

    node.on_rank = half_way
    status, session = await mesh.call("POST", "/api/sessions", MODEL)
    assert (status, session["state"]) == (201, "starting")
    session = await mesh.session(session["id"], "loading")
    assert session["ranks"][0]["loading"] == {"done_bytes": 30, "total_bytes": 100}
    status, body = await mesh.call("POST", "/v1/completions", {"model": "bard", "prompt": "Hi"})
    assert (status, body["error"]["code"]) == (503, "session_not_ready")
    go_on.set()
    await mesh.session(session["id"], "ready")


async def test_whoever_waits_for_a_session_hears_that_it_is_not_ready_yet(
    mesh: Any, new_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await mesh.join(new_node())

    async def wait(_: RankCommand) -> None:
        pass

    node.on_rank = wait
    monkeypatch.setattr(lifecycle, "READY_S", 0.01)
    status, body = await mesh.call("POST", "/api/sessions?wait=ready", MODEL)
    assert (status, body["error"]["code"]) == (504, "timed_out")
    assert "(bard) is starting, not ready, after" in body["error"]["message"]
    (session,) = (await mesh.call("GET", "/api/sessions"))[1]["sessions"]
    assert session["state"] == "starting"  # it goes on


async def test_no_session_begins_while_the_orchestrator_stops(mesh: Any, new_node: Any) -> None:
    node = await mesh.join(new_node())
    session, go_on = await mesh.serve(), asyncio.Event()

    async def linger(command: RankCommand) -> None:
        await go_on.wait()
        await node.obey(command)

    node.on_rank = linger
    stop = asyncio.create_task(mesh.orchestrator.stop())
    await mesh.session(session["id"], "closing")
    status, body = await mesh.call("POST", "/api/sessions", {**MODEL, "name": "late"})
    assert (status, body["error"]["code"]) == (503, "session_closed")
    assert body["error"]["message"] == "the orchestrator is shutting down"
    go_on.set()
    await stop


async def test_a_rank_that_fails_fails_the_session_for_good_to_see(mesh: Any, new_node: Any) -> None:
    good, bad = await mesh.join(new_node("good")), await mesh.join(new_node("bad"))

    async def fail(command: RankCommand) -> None:
        if command.WhichOneof("body") == "assign":
            await bad.event(command, failed=Failure(code="weights_missing", message="no model.safetensors"))

    bad.on_rank = fail
    status, body = await mesh.call("POST", "/api/sessions?wait=ready", {**MODEL, "nodes": ["good", "bad"]})
    assert (status, body["error"]["code"]) == (500, "weights_missing")
    assert body["error"]["message"] == "node 'bad' (rank 1): no model.safetensors"
    _, listed = await mesh.call("GET", "/api/sessions")
    (session,) = listed["sessions"]
    assert (session["state"], session["failure"]["rank"]) == ("failed", 1)
    await good.until(lambda: good.commands[-1].WhichOneof("body") == "release")
    await mesh.serve(nodes=["good"])  # the name is free again
    _, listed = await mesh.call("GET", "/api/sessions")
    assert [s["state"] for s in listed["sessions"] if s["state"] != "closing"] == ["ready"]


async def test_a_lost_node_fails_the_session_and_releases_the_rest(mesh: Any, new_node: Any) -> None:
    stays, goes = await mesh.join(new_node("stays")), await mesh.join(new_node("goes"))
    session = await mesh.serve(recover=False)
    await goes.leave()
    await mesh.poll("/api/nodes", lambda body: body["nodes"][1]["state"] == "lost")
    lost = Failure(code="peer_lost", message="rank 1 has gone", lost_rank=2)
    await stays.event(stays.commands[0], failed=lost)
    failed = await mesh.session(session["id"], "failed")
    assert failed["failure"]["code"] == "node_lost"
    assert "node 'goes'" in failed["failure"]["message"]
    assert (await mesh.call("DELETE", f"/api/sessions/{session['id']}"))[0] == 200


async def test_a_model_that_does_not_fit(mesh: Any, new_node: Any, profile: ModelProfile) -> None:
    await mesh.join(new_node("pc", memory=30_000))
    await mesh.join(new_node("toaster", memory=500))
    status, body = await mesh.call("POST", "/api/sessions", {**MODEL, "context": 10})
    assert (status, body["error"]["code"]) == (422, "insufficient_memory")
    assert "pc: 30.00 kB available" in body["error"]["message"]
    assert "toaster" not in body["error"]["message"]  # left out: it could not hold anything
    status, body = await mesh.call("POST", "/api/sessions", {**MODEL, "nodes": ["toaster"]})
    assert (status, body["error"]["code"]) == (422, "insufficient_memory")
    assert "toaster: 500 bytes available" in body["error"]["message"]
    assert await mesh.call("GET", "/api/sessions") == (200, {"sessions": []})


async def test_shares_that_do_not_fit_are_refused_and_not_changed(mesh: Any, new_node: Any) -> None:
    for name in ("a", "b", "c"):
        await mesh.join(new_node(name, memory=50_000))
    wanted = {**MODEL, "context": 10, "shares": [1, 1, 8]}
    status, body = await mesh.call("POST", "/api/sessions", wanted)
    assert (status, body["error"]["code"]) == (422, "insufficient_memory")
    message = body["error"]["message"]
    assert "does not fit in shares 1,1,8:\n  a: 50.00 kB available, " in message
    nearest = message.partition("The nearest that fit: `--shares ")[2].partition("`")[0]
    session = await mesh.serve(context=10, shares=[float(share) for share in nearest.split(",")])
    assert [rank["node"] for rank in session["ranks"]] == ["a", "b", "c"]


async def test_what_would_fit_is_told(mesh: Any, new_node: Any, profile: ModelProfile) -> None:
    node = new_node("pc", memory=400_000)
    node.capabilities.engines[0].reads_far_blocks = True
    await mesh.join(node)
    narrow = ModelProfile()
    narrow.CopyFrom(profile)
    narrow.mlp_unit_bytes //= 2
    narrow.vocabulary_unit_bytes //= 2
    node.on_describe = lambda order: Described(profile=narrow if order.model.quantisation == "int4" else profile)

    async def told(**wanted: Any) -> str:
        status, body = await mesh.call("POST", "/api/sessions", {**MODEL, **wanted})
        assert (status, body["error"]["code"]) == (422, "insufficient_memory")
        return str(body["error"]["message"].splitlines()[-1])

    assert await told() == "It fits with a context of 1280."
    assert await told(context=1000, cache_tokens=2000) == "It fits with 1280 cache tokens."
    assert await told(context=2000, cache_tokens=3000) == "It fits with a context of 1280 and as many cache tokens."
    on_disk = {"cache_tokens": 2000, "cache_disk_tokens": 2000}
    assert await told(context=2000, **on_disk) == "It fits with 1280 cache tokens."
    on_disk = {"cache_tokens": 2000, "cache_disk_tokens": 100}
    assert await told(context=2000, **on_disk) == "It fits with a context of 1380 and 1280 cache tokens."
    assert (await mesh.serve(context=1280))["context"] == 1280
    assert await told(name="second", context=10) == "It does not fit in a shorter context or narrower weights."
    box = await mesh.join(new_node("box", memory=120_000))
    box.on_describe = node.on_describe
    assert await told(name="second", nodes=["box"], context=200) == "It fits quantised to int4."
    assert await told(name="second", nodes=["box"], context=200, quantisations={"box": "int8"}) == (
        "It fits quantised to int4 on every node."
    )
    assert await told(name="second", nodes=["box"], context=300, quantisation="int8") == (
        "It fits quantised to int4 with a context of 256."
    )
    box.on_describe = node.on_describe = lambda order: (
        Described(failure=Failure(code="invalid_model", message="not int4"))
        if order.model.quantisation == "int4"
        else Described(profile=profile)
    )
    assert await told(name="second", nodes=["box"], context=300) == "It does not fit in a shorter context."
    assert (await mesh.call("GET", "/api/sessions"))[1]["sessions"][0]["context"] == 1280


async def test_narrower_caches_are_told_where_they_fit(mesh: Any, new_node: Any, profile: ModelProfile) -> None:
    node = new_node("pc", memory=400_000)
    node.capabilities.engines[0].cache_formats.extend(["fp32", "int8"])
    await mesh.join(node)
    narrow = ModelProfile()
    narrow.CopyFrom(profile)
    narrow.cache_bytes_per_token //= 4
    node.on_describe = lambda order: Described(profile=narrow if order.model.cache_format == "int8" else profile)
    for quantisation, cache_format, told in (
        ("int4", "fp32", "It fits with a context of 1280, or with caches in int8."),
        ("int4", "int8", ""),
    ):
        wanted = {**MODEL, "context": 2000, "quantisation": quantisation, "cache_format": cache_format}
        status, body = await mesh.call("POST", "/api/sessions", wanted)
        assert status == (422 if told else 201), body
        assert not told or body["error"]["message"].splitlines()[-1] == told


@pytest.mark.parametrize("why", ["silence", "node_lost"])
async def test_what_nobody_found_out_is_not_told(
    mesh: Any, new_node: Any, profile: ModelProfile, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    node = await mesh.join(new_node("pc", memory=30_000))
    asked = asyncio.Event()

    def describe(order: Describe) -> Described | None:
        if order.model.quantisation == "stored":
            return Described(profile=profile)
        asked.set()
        return None

    node.on_describe = describe
    if why == "silence":
        monkeypatch.setattr(fitting, "HINT_S", 0.01)
    post = asyncio.create_task(mesh.call("POST", "/api/sessions", MODEL))
    if why == "node_lost":
        await asked.wait()
        await node.leave()
    status, body = await post
    assert (status, body["error"]["code"]) == (422, "insufficient_memory")
    assert "pc: 30.00 kB available" in body["error"]["message"]
    assert "It does not fit" not in body["error"]["message"]


@pytest.mark.parametrize("who", ["client", "orchestrator"])
async def test_a_session_closed_while_it_is_sought_what_fits_was_closed(
    mesh: Any, new_node: Any, moe: ModelProfile, who: str
) -> None:
    moe.expert_bytes = 10**8
    node = await mesh.join(new_node())
    asked, described = asyncio.Event(), []

    def describe(order: Describe) -> Described | None:
        described.append(order.model.quantisation)
        if order.model.quantisation == "int8":
            asked.set()
            return None
        return Described(profile=moe)

    node.on_describe = describe
    wanted = {**MODEL, "experts": "parallel", "quantisation": "fp32"}
    post = asyncio.create_task(mesh.call("POST", "/api/sessions", wanted))
    await asked.wait()
    (session,) = (await mesh.call("GET", "/api/sessions"))[1]["sessions"]
    if who == "client":
        await mesh.call("DELETE", f"/api/sessions/{session['id']}")
    else:
        await mesh.orchestrator.stop()
    status, body = await post
    assert (status, body["error"]["code"]) == (503, "session_closed")
    assert described == ["fp32", "int8"]


async def test_memory_that_is_promised_is_not_promised_twice(mesh: Any, new_node: Any) -> None:
    await mesh.join(new_node("pc", memory=100_000))
    await mesh.serve(context=10)
    status, body = await mesh.call("POST", "/api/sessions", {**MODEL, "name": "second", "context": 10})
    assert (status, body["error"]["code"]) == (422, "insufficient_memory")


async def test_what_is_free_is_not_promised_twice_while_ranks_load(mesh: Any, new_node: Any) -> None:
    """Where others have taken most of what a node offers, what it says is free counts, less what ranks will take."""
    node = await mesh.join(new_node("pc"))

    async def has_free(free: int) -> None:
        node.capabilities.memory_bytes = free  # which its heartbeats tell
        await mesh.poll("/api/nodes", lambda body: body["nodes"][0]["memory_available_bytes"] == free)

    async def load(command: RankCommand) -> None:
        if command.WhichOneof("body") != "peers":
            await node.obey(command)

    await has_free(100_000)
    node.on_rank = load
    status, first = await mesh.call("POST", "/api/sessions", {**MODEL, "context": 10})
    planned = first["ranks"][0]["memory"]["planned_bytes"]
    assert (status, 50_000 < planned < 100_000) == (201, True)
    second = {**MODEL, "name": "second", "context": 10}
    status, body = await mesh.call("POST", "/api/sessions", second)
    assert (status, body["error"]["code"]) == (422, "insufficient_memory")
    assert f"pc: {(100_000 - planned) / 1000:.2f} kB available" in body["error"]["message"]
    await node.until(lambda: len(node.commands) == 2)
    await node.event(node.commands[1], ready=Ready(rss_bytes=planned))
    await mesh.session(first["id"], "ready")
    await has_free(99_000)  # beside what the first has taken
    assert (await mesh.call("POST", "/api/sessions", second))[0] == 201


async def test_a_model_that_cannot_be_served(mesh: Any, new_node: Any) -> None:
    node = await mesh.join(new_node())
    node.on_describe = lambda _: Described(failure=Failure(code="unknown_family", message="no family 'mamba'"))
    status, body = await mesh.call("POST", "/api/sessions", MODEL)
    assert (status, body["error"]["code"]) == (422, "unknown_family")
    assert body["error"]["message"] == "node 'pc': no family 'mamba'"
    node.on_describe = lambda _: Described(profile=ModelProfile(name="hollow"))
    status, body = await mesh.call("POST", "/api/sessions", MODEL)
    assert (status, body["error"]["code"]) == (422, "invalid_profile")


@pytest.mark.parametrize("event", ["node_lost", "session_closed"])
async def test_planning_ends_early(mesh: Any, new_node: Any, event: str) -> None:
    node = await mesh.join(new_node())
    asked: list[Describe] = []
    node.on_describe = asked.append
    post = asyncio.create_task(mesh.call("POST", "/api/sessions", MODEL))
    body = await mesh.poll("/api/sessions", lambda body: body["sessions"])
    (session,) = body["sessions"]
    assert (session["state"], session["ranks"]) == ("planning", [])
    if event == "node_lost":
        await node.leave()
    else:
        assert (await mesh.call("DELETE", f"/api/sessions/{session['id']}"))[0] == 200
        assert await asyncio.wait_for(node.cancelled.get(), DEADLINE_S) == asked[0].request_id
    status, body = await post
    assert (status, body["error"]["code"]) == (503, event)
    assert await mesh.call("GET", "/api/sessions") == (200, {"sessions": []})


async def test_names_are_unique(mesh: Any, bard: Any) -> None:
    for body in (MODEL, {"model": "other", "name": "bard"}):
        status, answer = await mesh.call("POST", "/api/sessions", body)
        assert (status, answer["error"]["code"]) == (409, "name_in_use")
    assert (await mesh.serve(name="second"))["name"] == "second"
    for body, code in (({"nodes": ["moon"], "name": "bard"}, "unknown_node"), ({"context": 4096}, "invalid_request")):
        status, answer = await mesh.call("POST", "/api/sessions", {**MODEL, **body})
        assert (status, answer["error"]["code"]) == (400, code)  # what cannot be, whatever it is called


async def test_without_nodes_there_is_advice(mesh: Any) -> None:
    status, body = await mesh.call("POST", "/api/sessions", MODEL)
    assert (status, body["error"]["code"]) == (503, "no_nodes")
    assert "motley join" in body["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "code", "match"),
    [
        ({"nodes": ["moon"]}, "unknown_node", "no live node is named 'moon'; live nodes: pc"),
        ({"engine": "warp"}, "unknown_engine", "node 'pc' has no engine 'warp'; it has: onnxruntime"),
        ({"shares": [1, 2]}, "invalid_request", "2 shares given for 1 rank (pc)"),
        ({"context": 4096}, "invalid_request", "bard allows 2048"),
        (
            {"context": 100, "cache_tokens": 99},
            "invalid_request",
            "caches of 99 tokens were asked for; one sequence",
        ),
        ({"cache_tokens": 2047}, "invalid_request", "one sequence may have 2048 (the context)"),
        ({"cache_tokens": -1}, "invalid_value", "cache_tokens must be at least 0, not -1"),
        ({"nodes": "pc"}, "invalid_value", "nodes must be a list, not"),
        ({"nodes": [1]}, "invalid_value", "nodes[0] must be a string, not 1"),
        ({"shares": [0]}, "invalid_value", "must not be all 0"),
        ({"shares": [-1]}, "invalid_value", "shares[0] must be at least 0, not -1"),
        ({"shares": ["1"]}, "invalid_value", "shares[0] must be a number"),
        ({"quantisation": "int3"}, "invalid_value", "must be one of fp32, fp16, int8, int4, stored, not 'int3'"),
        ({"block": 0}, "invalid_value", "block must be one of 16, 32, 64, 128, 256, not 0"),
        ({"block": 48}, "invalid_value", "block must be one of 16, 32, 64, 128, 256, not 48"),
        ({"block": 32, "quantisation": "fp32"}, "invalid_value", "block is for quantised weights"),
        ({"block": 32, "quantisation": "fp16"}, "invalid_value", "quantisation 'fp16' has no blocks"),
        ({"name": "a/b"}, "invalid_value", "name must not be blank or have a / in it"),
        ({"name": " "}, "invalid_value", "name must not be blank"),
        ({"exact": True, "engine": "reference"}, "invalid_value", "engine 'reference' cannot keep exact=true"),
        ({"context": -1}, "invalid_value", "context must be at least 0, not -1"),
        ({"threads": 1.5}, "invalid_value", "threads must be"),
        ({"exact": 1}, "invalid_value", "exact must be true or false"),
        ({"exact": True, "wire": "bf16"}, "invalid_value", "wire 'bf16' rounds sums by rank"),
        ({"model": ""}, "invalid_value", "model must not be empty"),
        (
            {"engines": {"moon": "onnxruntime"}},
            "invalid_request",
            "engines names 'moon', which takes no part; these do: pc",
        ),
        ({"quantisations": {"moon": "int8"}}, "invalid_request", "quantisations names 'moon', which takes no part"),
        ({"engines": {"pc": "warp"}}, "unknown_engine", "node 'pc' has no engine 'warp'; it has: onnxruntime"),
        ({"engines": ["warp"]}, "invalid_value", "engines must be an object"),
        ({"quantisations": {"pc": 8}}, "invalid_value", "quantisations.pc must be one of fp32"),
        (
            {"quantisations": {"pc": "int3"}},
            "invalid_value",
            "quantisations.pc must be one of fp32, fp16, int8, int4, stored",
        ),
        (
            {"exact": True, "quantisation": "int8", "quantisations": {"pc": "int4"}},
            "invalid_value",
            "quantisations of node 'pc' is 'int4', of others 'int8': exact=true needs the same on all",
        ),
        ({"exact": True, "engines": {"pc": "reference"}}, "invalid_value", "engines of node 'pc' is 'reference'"),
        (
            {"block": 32, "quantisation": "fp32", "quantisations": {"pc": "fp16"}},
            "invalid_value",
            "block is for quantised weights",
        ),
        ({"quantization": "int8"}, "unknown_parameter", "quantization is not a known parameter; known: adapter_rank"),
    ],
)
async def test_bad_requests(mesh: Any, new_node: Any, fields: Any, code: str, match: str) -> None:
    await mesh.join(new_node())
    status, body = await mesh.call("POST", "/api/sessions", {**MODEL, **fields})
    assert (status, body["error"]["code"]) == (400, code)
    assert match in body["error"]["message"]
    assert re.split(r"[.[]", body["error"]["param"])[0] in fields
    assert await mesh.call("GET", "/api/sessions") == (200, {"sessions": []})


async def test_bad_queries(mesh: Any) -> None:
    status, body = await mesh.call("POST", "/api/sessions?wait=never", MODEL)
    assert (status, body["error"]["param"]) == (400, "wait")
    for method in ("GET", "DELETE"):
        status, body = await mesh.call(method, "/api/sessions/nope")
        assert (status, body["error"]["code"]) == (404, "session_not_found")
