"""`motley run`: its options, and how it tells what cannot be, in its own words."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from motley.cli.errors import CliError
from motley.cli.reaching.client import Client, broke_off
from motley.cli.reaching.loading import load
from motley.cli.shown.show import LINE_S, LoadingLines, counting_bar, what_goes_on
from motley.cli.typed.wanted import Wanted
from motley.orchestrator.app import Orchestrator, OrchestratorConfig
from motley.orchestrator.session_request import SessionRequest
from motley.protocol.mesh_pb2 import Delta, Describe, Described, Empty, Failure, Generate, ModelProfile, RankCommand
from tests.orchestrator.conftest import of_kind

Motley = Callable[..., Awaitable[tuple[int, str, str]]]
LATE_S = 0.3
"""So late comes the first token of a slow answer."""
ALIKE_AND_NOT: tuple[dict[str, Any], ...] = ({"nodes": ("a", "b")}, {"context": 200}, {"nodes": ("a",)})


def wanted(**asked: Any) -> Wanted:
    """The model "bard", with what is asked for."""
    return Wanted(SessionRequest("bard", **asked))


async def test_a_session_that_has_failed_is_in_nobodys_way(mesh: Any, new_node: Any, motley: Motley) -> None:
    """Whoever asks by its name or id, with other options, has its model loaded anew, and is told why it failed."""
    node = await mesh.join(new_node())
    asked = {"quantisation": "int4", "context": 100, "cache_tokens": 200, "queue": 0, "nodes": ["pc"], "exact": True}
    asked["recover"] = False
    for by_name in (True, False):
        session = await mesh.serve(model="/models/a bard", **asked)
        (begun,) = [each for each in of_kind(node, "assign") if each.session == session["id"]]
        await node.event(begun, failed=Failure(code="wrong_results", message="this rank computes wrongly"))
        await mesh.session(session["id"], "failed")
        called = session["name"] if by_name else session["id"]
        status, out, err = await motley("run", called, "Hi", "--context", "200")
        assert (status, out) == (0, "Hello, world\n"), err
        assert err.startswith(
            f"session {called!r} failed before: node 'pc' (rank 0): this rank computes wrongly\nIt is closed, and its"
            f" model loaded by what this command says\n{called} is not served yet: looking for it\n"
        )
        (now,) = (await mesh.call("GET", "/api/sessions"))[1]["sessions"]
        assert (now["model"], now["context"], now["exact"]) == ("/models/a bard", 200, False)
        await mesh.call("DELETE", f"/api/sessions/{now['id']}")
    last = await mesh.serve(model="/models/a bard", **asked)  # nor in the way of its model's own name
    await node.event(of_kind(node, "assign")[-1], failed=Failure(code="wrong_results", message="wrong"))
    await mesh.session(last["id"], "failed")
    status, out, err = await motley("run", "/models/a bard", "Hi")
    assert (status, out) == (0, "Hello, world\n"), err
    assert err.startswith("/models/a bard is not served yet: looking for it\n")
    other = await mesh.serve(model="/models/a bard", name="other", **asked)
    await node.event(of_kind(node, "assign")[-1], failed=Failure(code="wrong_results", message="wrong"))
    await mesh.session(other["id"], "failed")
    status, out, err = await motley("run", "other", "Hi")
    assert (status, out) == (0, "Hello, world\n"), err
    assert "failed before" not in err, "its model is served"


async def test_what_others_saw_of_it_is_not_the_reason(mesh: Any, new_node: Any, motley: Motley) -> None:
    first, second = [await mesh.join(new_node(name)) for name in ("a", "b")]

    async def lose(command: Any) -> None:
        if command.WhichOneof("body") == "peers":
            failed = Failure(code="peer_lost", message="rank 0 is lost: it gave up", lost_rank=1)
            await second.event(command, failed=failed)

    async def explain(command: Any) -> None:
        if command.WhichOneof("body") == "release":
            await first.event(command, failed=Failure(code="wrong_results", message="this rank computes wrongly"))
        elif command.WhichOneof("body") == "assign":
            await first.obey(command)

    async def listen(command: Any) -> None:
        await (second.obey(command) if command.WhichOneof("body") == "assign" else lose(command))

    first.on_rank, second.on_rank = explain, listen
    status, _, err = await motley("run", "bard", "Hi", "--nodes", "a,b")
    assert status == 1
    assert err.endswith("session 'bard' did not come up: node 'a' (rank 0): this rank computes wrongly\n")


async def test_the_last_word_of_a_session_that_is_closed_meanwhile(mesh: Any, new_node: Any) -> None:
    first, second = [await mesh.join(new_node(name)) for name in ("a", "b")]
    session = await mesh.serve(nodes=["a", "b"], recover=False)

    async def wait(_: RankCommand) -> None:
        pass

    first.on_rank = wait
    failed = Failure(code="peer_lost", message="rank 0 is lost: it gave up", lost_rank=1)
    await second.event(second.commands[-1], failed=failed)
    session = await mesh.session(session["id"], "failed")
    assert not session["explained"]
    first.on_rank = first.obey
    await first.event(first.commands[-1], released=Empty())
    await mesh.call("DELETE", f"/api/sessions/{session['id']}")
    async with Client(mesh.orchestrator.http_url) as client:
        why = r"node 'a' \(rank 0\), as node 'b' \(rank 1\) has found: rank 0 is lost"
        with pytest.raises(CliError, match=f"session 'bard' did not come up: {why}"):
            await client.wait_ready(session, lambda *_: None)


async def test_what_is_in_planning_is_compared_once_it_is_planned(
    mesh: Any, new_node: Any, profile: ModelProfile
) -> None:
    nodes = [await mesh.join(new_node(name)) for name in ("a", "b")]
    asked = asyncio.Queue[Describe]()
    nodes[0].on_describe = asked.put_nowait
    post = asyncio.create_task(mesh.call("POST", "/api/sessions", {"model": "bard", "context": 100}))
    order = await asked.get()

    class Watched(Client):
        async def wait_ready(self, session: dict[str, Any], show: Callable[[str, int, int], None]) -> dict[str, Any]:
            assert session["state"] == "planning"
            waiting.set()
            return await super().wait_ready(session, show)

    waiting = asyncio.Event()
    async with Watched(mesh.orchestrator.http_url) as client:
        own = []
        for asking in ALIKE_AND_NOT:
            waiting.clear()
            own.append(asyncio.create_task(load(client, wanted(**asking), lambda *_: None)))
            own[-1].add_done_callback(lambda _: waiting.set())
            await waiting.wait()
        await nodes[0].send(described=Described(request_id=order.request_id, profile=profile))
        alike, longer, elsewhere = await asyncio.gather(*own, return_exceptions=True)
    assert (await post)[0] == 201
    assert alike["state"] == "ready"
    assert "loaded for 100 tokens: leave out --context" in str(longer)
    assert "loaded on a, b: leave out --nodes" in str(elsewhere)


async def test_context_nodes_and_shares(mesh: Any, new_node: Any, motley: Motley) -> None:
    for name in ("a", "b", "c"):
        await mesh.join(new_node(name))
    wanted = ("--context", "100", "--cache-tokens", "300", "--sequences", "3", "--queue", "0", "--nodes", "b,a")
    wanted += ("--shares", "3,1")
    for _ in range(2):
        status, _, err = await motley("run", "bard", "Hi", *wanted)
        assert status == 0, err
    (session,) = (await mesh.call("GET", "/api/sessions"))[1]["sessions"]
    assert (session["context"], session["cache_tokens"]) == (100, 300)
    assert (session["sequences"], session["queue"]) == (3, 0)
    assert "bard: stored (), context 100, 300 tokens in caches, ready" in (await motley("status"))[1]
    assert [(rank["node"], rank["share"]["mlp"]) for rank in session["ranks"]] == [("b", 12), ("a", 4)]
    assert (await motley("run", "bard", "Hi", "--nodes", "a,b"))[0] == 0
    for option, value, how in (
        ("--context", "200", "for 100 tokens"),
        ("--cache-tokens", "200", "with caches of 300 tokens"),
        ("--sequences", "4", "for 3 requests at a time"),
        ("--queue", "1", "for 0 requests that may wait"),
        ("--nodes", "a,c", "on a, b"),
        ("--shares", "1,1", "in other shares"),
    ):
        status, _, err = await motley("run", "bard", "Hi", option, value)
        assert (
            status,
            f"loaded {how}: leave out {option}, or close it first" in err and "and run this again" in err,
        ) == (1, True), err


async def test_refusals_are_in_its_own_words(mesh: Any, new_node: Any, motley: Motley, tmp_path: Path) -> None:
    await mesh.join(new_node())
    file = tmp_path / "README.md"
    file.write_text("# Not a model")
    for arguments, match in (
        (
            ("bard", "--quant", "int8@nobody"),
            "--quant: quantisations names 'nobody', which takes no part; these do: pc",
        ),
        (("bard", "--engine", "warp@nobody"), "--engine: engines names 'nobody', which takes no part"),
        (
            ("bard", "--exact", "--engine", "reference"),
            "--engine 'reference' cannot keep exact=true; use engine 'onnxr",
        ),
        (("bard", "--experts", "sliced", "--trunk", "2"), "--trunk is for experts on nodes of their own: leave out"),
        (("bard", "--replicas", "2"), "leave out experts, replicas and trunk"),
        (("bard", "--shares", "1,2"), "2 shares given for 1 rank (pc); give one for each"),
        (
            ("bard", "--cache-tokens", "9"),
            "--cache-tokens: caches of 9 tokens were asked for; one sequence",
        ),
        (("bard", "--context", "9999"), "--context: a context of 9999 tokens was asked for; bard allows 2048"),
        ((str(file),), f"{file} is a file, but not a model: give a folder with config.json"),
    ):
        status, _, err = await motley("run", arguments[0], "Hi", *arguments[1:])
        assert (status, match in err) == (1, True), err
    assert await mesh.call("GET", "/api/sessions") == (200, {"sessions": []})


async def test_another_model_of_the_same_name_does_not_answer(mesh: Any, new_node: Any, motley: Motley) -> None:
    await mesh.join(new_node())
    await mesh.serve(model="/models/bard")
    status, out, err = await motley("run", "/other/bard", "Hi")
    assert (status, out) == (1, "")
    assert "session 'bard' serves another model of that name, /models/bard: end it first, with `motley stop" in err


async def test_an_answer_that_the_context_cuts_short(mesh: Any, bard: Any, motley: Motley) -> None:
    asked: list[Generate] = []

    async def long(generate: Generate) -> AsyncIterator[Delta]:
        asked.append(generate)
        yield Delta(text="Hello", ids=[1])
        yield Delta(finish="length", prompt_tokens=2047, completion_tokens=1)

    bard.answer = long
    for raw in ([], ["--raw"]):
        status, _, err = await motley("run", "bard", "Hi", *raw)
        assert status == 0
        assert "ended by the context, which is full" in err
    assert [(each.max_tokens, each.usual_tokens) for each in asked] == [(0, 0), (0, 0)]
    assert "ended by length" in (await motley("run", "bard", "Hi", "--max-tokens", "1"))[2]

    async def limited(_: Generate) -> AsyncIterator[Delta]:
        yield Delta(text="Hello", ids=[1])
        yield Delta(finish="length", prompt_tokens=5, completion_tokens=1)

    bard.answer = limited
    err = (await motley("run", "bard", "Hi"))[2]
    assert "ended by the model's own limit; --max-tokens asks for more" in err

    async def refuse(_: Generate) -> AsyncIterator[Delta]:
        yield Delta(failure=Failure(code="context_length_exceeded", message="This model's", param="messages"))

    bard.answer = refuse
    status, _, err = await motley("run", "bard", "Hi")
    assert status == 1
    assert "the prompt is too long for the context of 2048 tokens: shorten it, or close the session with `motley" in err
    status, _, err = await motley("run", "bard", "Hi", "--max-tokens", "2048")
    assert status == 1
    assert (
        "the prompt and --max-tokens 2048 together are too long for the context of 2048 tokens: shorten it, ask" in err
    )


async def test_a_base_model_that_is_not_served_is_not_loaded_for_nothing(
    mesh: Any, new_node: Any, profile: ModelProfile, motley: Motley
) -> None:
    profile.chats = False
    node = new_node()
    node.on_describe = lambda _: Described(profile=profile)
    await mesh.join(node)
    status, out, err = await motley("run", "/models/a bard", "Hi")
    assert (status, out) == (1, "")
    assert err.endswith("motley: bard has no chat template, so it can only continue the prompt as it is: add --raw\n")
    await mesh.poll("/api/sessions", lambda body: body["sessions"] == [])
    status, out, err = await motley("run", "/models/a bard", "Hi", "--raw")
    assert (status, out) == (0, "Hello, world\n"), err


async def test_a_base_model_wants_raw(mesh: Any, bard: Any, motley: Motley) -> None:
    async def refuse(_: Generate) -> AsyncIterator[Delta]:
        yield Delta(failure=Failure(code="no_chat_template", message="whatever", param="messages"))

    bard.answer = refuse
    status, _, err = await motley("run", "bard", "Hi")
    assert status == 1
    assert err == "motley: bard has no chat template, so it can only continue the prompt as it is: add --raw\n"


async def test_the_times_of_an_answer_are_of_its_tokens(mesh: Any, bard: Any, motley: Motley) -> None:
    """What opens a chat is no token, and one token alone has no pace."""

    async def late(_: Generate) -> AsyncIterator[Delta]:
        yield Delta()  # which opens the stream
        await asyncio.sleep(LATE_S)
        yield Delta(text="Yes", ids=[1])
        yield Delta(finish="stop", prompt_tokens=5, completion_tokens=1)

    bard.answer = late
    status, out, err = await motley("run", "bard", "Hi", "--json")
    assert status == 0, err
    answer = json.loads(out)
    assert answer["ttft_ms"] >= 1e3 * LATE_S
    assert answer["ms_per_token"] is None


async def test_a_machine_that_is_lost_on_the_way_is_told(mesh: Any, new_node: Any, motley: Motley) -> None:
    first, second = [await mesh.join(new_node(name)) for name in ("a", "b")]

    async def lose_the_other(generate: Generate) -> AsyncIterator[Delta]:
        if not generate.written:
            yield Delta(text="Hello", ids=[1])
            await second.leave()
            failed = Failure(code="peer_lost", message="rank 1 has gone", lost_rank=2)
            await first.event(first.commands[0], failed=failed)
            return
        yield Delta(text=", world", ids=[2])
        yield Delta(finish="stop", prompt_tokens=5, completion_tokens=2)

    first.answer = lose_the_other
    status, out, err = await motley("run", "bard", "Hi", "--nodes", "a,b", "--shares", "1,1")
    assert (status, out) == (0, "Hello, world\n"), err
    assert "lost on the way, and gone on without: node 'b' (rank 1) is lost: its connection ended" in err
    assert re.search(r"2 tokens, .*, on 1 rank; ended by stop", err)


async def test_the_wrong_port(mesh: Any, motley: Motley) -> None:
    status, _, err = await motley("status", "--url", f"http://{mesh.orchestrator.local_target}")
    assert status == 1
    assert "has gone, or is no HTTP server (" in err
    assert "The API has its own, http://127.0.0.1:8000 unless" in err


def test_who_breaks_off_at_the_usual_port_may_have_gone() -> None:
    assert broke_off("http://there:8000", aiohttp.ServerDisconnectedError()) == (
        "what listens at http://there:8000 has gone, or is no HTTP server (ServerDisconnectedError)"
    )


async def test_the_api_key_s_option_is_named(motley: Motley, tmp_path: Path) -> None:
    where = {"host": "127.0.0.1", "grpc_port": 0, "http_port": 0, "state_dir": tmp_path / "own"}
    orchestrator = Orchestrator(OrchestratorConfig(**where, api_key="secret"))
    await orchestrator.start()
    try:
        status, _, err = await motley("status", MOTLEY_URL=orchestrator.http_url)
        assert status == 1
        assert "is missing or wrong: give one with --api-key, or as MOTLEY_API_KEY (`motley keys create`" in err
        assert (await motley("status", "--api-key", "secret", MOTLEY_URL=orchestrator.http_url))[0] == 0
    finally:
        await orchestrator.stop()


def test_lines_of_loading(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter((0.0, 1.0, LINE_S, LINE_S + 1, LINE_S + 2))
    lines = LoadingLines("loading", lambda: next(times))
    for done in (0, 10, 20, 100, 100):
        lines.advance_to("pc (rank 0)", done, 100)
    assert capsys.readouterr().err.splitlines() == [
        f"pc (rank 0) loading: {done} bytes of 100 bytes" for done in (0, 20, 100)
    ]


def test_what_goes_on_is_told_at_once_and_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter((0.0, 0.0, 1.0, LINE_S, LINE_S))
    with what_goes_on(lambda: next(times)) as tell:
        for what in ("loads", "token 1", "token [2]"):
            tell(what)
    assert capsys.readouterr().err.splitlines() == ["loads", "token [2]"]


def test_how_many_are_done_is_told_at_once_now_and_then_and_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    times = iter((0.0, 0.0, 1.0, LINE_S, LINE_S, LINE_S + 1))
    with counting_bar("models", lambda: next(times)) as tell:
        for done in range(4):
            tell(done, 3)
    assert capsys.readouterr().err.splitlines() == [f"models: {done} of 3" for done in (0, 2, 3)]


async def test_without_a_prompt_a_model_is_loaded_and_stays(mesh: Any, new_node: Any, motley: Motley) -> None:
    node = await mesh.join(new_node())
    status, out, err = await motley("run", "bard", "--nodes", "pc")
    assert (status, out) == (0, ""), err
    assert err.endswith("bard is served; `motley chat bard` talks to it\n")
    assert await motley("run", "bard", "--json") == (0, '{"model": "bard"}\n', "")
    assert not node.generated
    status, _, err = await motley("run", "bard", "--seed", "1", "--raw")
    assert (status, err) == (1, "motley: --raw, --seed: without a prompt there is no answer; say what to answer\n")


async def test_a_model_is_told_whether_to_think(mesh: Any, bard: Any, motley: Motley) -> None:
    for option, effort in (((), ""), (("--think",), "medium"), (("--no-think",), "none")):
        assert (await motley("run", "bard", "Hi", *option))[0] == 0
        assert bard.generated[-1].reasoning_effort == effort
    status, _, err = await motley("run", "bard", "Hi", "--raw", "--no-think")
    assert status == 1
    assert err.startswith("motley: --raw tells the model's chat template nothing; leave out --think")
