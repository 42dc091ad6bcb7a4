"""`motley experts` and the options of `motley run` and `motley status` that concern experts, as processes."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from motley.protocol.mesh_pb2 import Described, Empty, ExpertLoad, ExpertReport, ModelProfile, RankCommand

Motley = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture
async def nodes(mesh: Any, new_node: Any, moe: ModelProfile) -> list[Any]:
    moe.expert_bytes = 10_000_000  # so large that all nodes get some
    joined = [await mesh.join(new_node(name, zone=zone)) for name, zone in (("pc", ""), ("box", "attic"))]
    for node in joined:
        node.on_describe = lambda _: Described(profile=moe)
    return joined


async def test_run_asks_for_experts_and_says_what_it_got(mesh: Any, nodes: list[Any], motley: Motley) -> None:
    wanted = ("--experts", "parallel", "--replicas", "2")
    status, out, err = await motley("run", "mix", "Hi", *wanted)
    assert (status, out) == (0, "Hello, world\n")
    assert "on 1 rank, experts on 2 nodes; ended by stop" in err
    assert "experts on pc, box: that is not forecast, and may be slower than --experts sliced" in err
    _, body = await mesh.call("GET", "/api/sessions")
    assert (body["sessions"][0]["experts"], body["sessions"][0]["replicas"]) == ("parallel", 2)
    assert (await motley("run", "mix", "Hi", *wanted))[0] == 0
    for option, value, how in (
        ("--experts", "sliced", "with experts parallel"),
        ("--replicas", "3", "with 2 replicas of every expert"),
        ("--trunk", "2", "on 1 rank"),
    ):
        status, _, err = await motley("run", "mix", "Hi", option, value)
        expected = f"session 'mix' has 'mix' loaded {how}: leave out {option}, or close it first with `motley stop mix`"
        assert (status, err) == (1, f"motley: {expected} and run this again\n")


async def test_a_model_without_experts_says_so(mesh: Any, bard: Any, motley: Motley) -> None:
    for option, value in (("--experts", "parallel"), ("--replicas", "9"), ("--trunk", "2")):
        status, _, err = await motley("run", "bard", "Hi", option, value)
        assert (status, err) == (1, f"motley: 'bard' has no experts, which {option} is about; leave it out\n")
    assert (await motley("run", "bard", "Hi", "--experts", "sliced"))[0] == 0


async def test_the_map_and_the_status(mesh: Any, nodes: list[Any], motley: Motley) -> None:
    session = await mesh.serve(replicas=2)
    status, out, _ = await motley("experts", "mix")
    assert status == 0
    assert "mix: 2 of each expert asked for, 2 there at least" in out
    for caption in ("experts: that it computes", "wait: for it, while the trunk", "0 1 x1.3: the nodes no. 0 and 1"):
        assert caption in out
    assert "attic" in out
    assert re.search(r"│ box +│ +1 │ attic │ ready │ +32 │ +0 % │ +0\.00 │ +0\.0 │ +- │", out)
    lines = [line for line in out.splitlines() if "0 1 x1.0" in line]
    assert len(lines) == 8
    status, out, _ = await motley("experts", session["id"], "--json")
    assert (status, [group["layers"] for group in json.loads(out)["groups"]]) == (0, [[0], [1], [2], [3]])
    status, out, _ = await motley("status", COLUMNS="")
    assert max(map(len, out.splitlines())) <= 100
    status, out, _ = await motley("status", COLUMNS="80")
    assert max(map(len, out.splitlines())) <= 80
    assert re.search(r"pc .* mix \(rank 0\)", out)
    assert "mix (experts)" in out
    assert "pc (rank 0)" in out
    assert "box (experts)" in out
    assert "32 experts" in out


async def test_what_is_missing_is_shown(mesh: Any, nodes: list[Any], motley: Motley) -> None:
    session = await mesh.serve()

    async def slow(command: RankCommand) -> None:
        if command.WhichOneof("body") != "host":
            await nodes[0].obey(command)

    nodes[0].on_rank = slow
    await nodes[1].leave()
    await mesh.poll(f"/api/sessions/{session['id']}/experts", lambda body: body["hosts"][0]["fetching"])
    _, out, _ = await motley("experts", "mix")
    assert "+0 †1 x1.0" in out
    assert "+: on its way there. †: lost there, and nowhere else yet." in out
    assert "box: node 'box' is lost" in out
    for shown in (out, (await motley("status"))[1]):
        assert " more: requests that need it wait" in shown


async def test_the_status_of_nodes_that_are_gone(mesh: Any, nodes: list[Any], new_node: Any, motley: Motley) -> None:
    """One line each; and no row for the experts of a lost one."""
    await mesh.serve(replicas=2)
    guest = await mesh.join(new_node("guest"))
    await guest.send(leaving=Empty())
    await guest.ended()
    await nodes[1].leave()
    await mesh.poll("/api/nodes", lambda body: body["nodes"][1]["state"] == "lost")
    _, out, _ = await motley("status")
    assert re.search(r"^box was lost \d+ s ago: its connection ended$", out, re.MULTILINE)
    assert re.search(r"^guest left \d+ s ago$", out, re.MULTILINE)
    assert "box (experts)" not in out
    assert "pc (experts)" in out
    assert [line for line in out.splitlines() if "GB/s" in line and ("box" in line or "guest" in line)] == []


async def test_rebalancing(mesh: Any, nodes: list[Any], motley: Motley, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motley.orchestrator.experts.moves.RETIRE_S", 1e9)  # longer than a command takes to start
    session = await mesh.serve()
    status, out, _ = await motley("experts", "rebalance", "mix")
    assert status == 0
    assert out.startswith("nothing to gain: the busiest node is busy for ")
    path = f"/api/sessions/{session['id']}/experts"
    _, experts = await mesh.call("GET", f"{path}?layers=each")
    loads = [
        ExpertLoad(layer=layer, rows=[100 * (e["hosts"][0]["host"] == 1) for e in group["experts"]])
        for layer, group in enumerate(experts["groups"])
    ]
    trunk = next(command for command in nodes[0].commands if command.WhichOneof("body") == "assign")
    await nodes[0].event(trunk, experts=ExpertReport(loads=loads, bytes_out=1))
    await mesh.poll(path, lambda body: body["bytes_out"])
    status, out, _ = await motley("experts", "rebalance", "mix", "--json")
    moved = json.loads(out)
    assert (status, moved["moves"] > 0, moved["busy_ms_after"] < moved["busy_ms"]) == (0, True, True)
    status, _, err = await motley("experts", "rebalance", "mix")
    assert (status, "are on the move" in err) == (1, True)


async def test_without_a_session_it_is_the_only_one(mesh: Any, nodes: list[Any], motley: Motley) -> None:
    status, _, err = await motley("experts", "rebalance")
    assert (status, err) == (1, "motley: no session has its experts on nodes\n")
    await mesh.serve()
    assert (await motley("experts", "rebalance"))[1].startswith("nothing to gain: ")
    assert "mix: 1 of each expert asked for" in (await motley("experts"))[1]
    await mesh.serve(name="mix2")
    status, _, err = await motley("experts", "rebalance")
    assert (status, err) == (1, "motley: name one of the sessions: mix, mix2\n")


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("nope",), "there is no session 'nope'"),
        (("shuffle", "mix"), "say `motley experts SESSION` or `motley experts rebalance SESSION`, not 'shuffle mix'"),
        (("rebalance", "mix", "now"), "not 'rebalance mix now'"),
    ],
)
async def test_bad_words(mesh: Any, motley: Motley, words: tuple[str, ...], match: str) -> None:
    status, _, err = await motley("experts", *words)
    assert (status, match in err) == (1, True), err
