"""Who is let in: join tokens, members, API keys and their scopes, web pages; over real sockets and TLS."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest

from motley.orchestrator import app
from motley.orchestrator.app import Orchestrator, OrchestratorConfig, OrchestratorError
from motley.protocol.mesh_pb2 import Empty


async def refused(node: Any, mesh: Any, token: str) -> str:
    """Why a node may not join."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await node.join(mesh.orchestrator.local_target, token)
    assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
    return str(error.value.details())


async def gone(node: Any) -> None:
    await node.send(leaving=Empty())
    await node.ended()
    await node.leave()


async def token(mesh: Any, **wanted: Any) -> dict[str, Any]:
    status, made = await mesh.call("POST", "/api/tokens", wanted)
    assert status == 201, made
    return dict(made)


async def test_a_single_use_token_lets_one_machine_in_which_comes_back_by_its_own_secret(
    mesh: Any, new_node: Any
) -> None:
    single = await token(mesh, uses=1, note="for the laptop")
    node = new_node("laptop")
    await node.join(mesh.orchestrator.local_target, single["token"])
    assert "expired or is used up" in await refused(new_node("other"), mesh, single["token"])
    await gone(node)
    own = f"{node.key}.{mesh.orchestrator.fingerprint}"
    again = new_node("laptop")
    await again.join(mesh.orchestrator.local_target, own)
    assert again.key == "", "it has one"
    await gone(again)
    with pytest.raises(grpc.aio.AioRpcError, match="known as 'laptop'"):
        await new_node("desktop").join(mesh.orchestrator.local_target, own)
    assert (await mesh.call("GET", "/api/tokens"))[1]["tokens"][-1]["id"] != single["id"]


async def test_a_name_that_is_taken_uses_no_token_up(mesh: Any, new_node: Any) -> None:
    await mesh.join(new_node("pc"))
    single = await token(mesh, uses=1)
    with pytest.raises(grpc.aio.AioRpcError, match="is in the mesh already"):
        await new_node("pc").join(mesh.orchestrator.local_target, single["token"])
    other = new_node("other")
    await other.join(mesh.orchestrator.local_target, single["token"])
    await other.leave()


async def test_tokens_expire_and_can_be_removed(mesh: Any, new_node: Any) -> None:
    brief = await token(mesh, expires_s=1e-6)
    assert "expired" in await refused(new_node(), mesh, brief["token"])
    lasting = await token(mesh)
    assert (await mesh.call("DELETE", f"/api/tokens/{lasting['id']}"))[0] == 200
    assert "wrong join token" in await refused(new_node(), mesh, lasting["token"])
    status, body = await mesh.call("DELETE", f"/api/tokens/{lasting['id']}")
    assert (status, body["error"]["code"]) == (404, "token_not_found")
    for wrong in ({"uses": 0}, {"expires_s": -1}, {"uses": "many"}, {"for": "me"}):
        assert (await mesh.call("POST", "/api/tokens", wrong))[0] == 400


async def test_who_is_revoked_is_out_at_once_and_neither_secret_nor_token_lets_it_in_again(
    mesh: Any, new_node: Any
) -> None:
    reusable = await token(mesh)
    node = new_node("laptop")
    await node.join(mesh.orchestrator.local_target, reusable["token"])
    assert [one["alive"] for one in (await mesh.call("GET", "/api/members"))[1]["members"]] == [True]
    assert (await mesh.call("DELETE", "/api/members/laptop"))[0] == 200
    assert await node.ended() is grpc.StatusCode.UNAUTHENTICATED
    await node.leave()
    own = f"{node.key}.{mesh.orchestrator.fingerprint}"
    for shown in (own, reusable["token"]):
        assert "wrong join token" in await refused(new_node("laptop"), mesh, shown)
    assert (await mesh.call("GET", "/api/members"))[1]["members"] == []
    assert (await mesh.call("GET", "/api/nodes"))[1]["nodes"][0]["lost"].startswith("it was revoked")
    assert (await mesh.call("DELETE", "/api/members/laptop"))[0] == 404
    fresh = new_node("laptop")
    await fresh.join(mesh.orchestrator.local_target, (await token(mesh))["token"])
    await fresh.leave()


async def test_a_session_goes_on_at_once_without_a_node_that_is_revoked(mesh: Any, new_node: Any) -> None:
    """It is not waited for as one that is cut off would be: its process goes on with what it has until it is ended."""
    for name in ("pc", "laptop"):
        await mesh.join(new_node(name))
    session = await mesh.serve(nodes=["pc", "laptop"])
    assert [rank["node"] for rank in session["ranks"]] == ["pc", "laptop"]
    assert (await mesh.call("DELETE", "/api/members/laptop"))[0] == 200

    def is_planned_anew(body: Any) -> bool:
        return body["epoch"] == 2 and body["state"] == "ready"

    after = await mesh.poll(f"/api/sessions/{session['id']}", is_planned_anew)
    assert [rank["node"] for rank in after["ranks"]] == ["pc"]


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Orchestrator]:
    """An orchestrator that wants a key on loopback, too."""
    config = OrchestratorConfig("127.0.0.1", 0, http_port=0, state_dir=tmp_path / "guarded", api_key="sesame")
    orchestrator = Orchestrator(config)
    await orchestrator.start()
    yield orchestrator
    await orchestrator.stop()


async def ask(url: str, method: str, path: str, key: str, body: Any = None) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {key}"}) as http,
        http.request(method, path, json=body) as response,
    ):
        return response.status, await response.json()


async def test_a_key_of_scope_use_may_not_say_who_belongs_to_the_mesh(guarded: Orchestrator) -> None:
    url = guarded.http_url
    _, made = await ask(url, "POST", "/api/keys", "sesame", {"note": "a friend"})
    assert made["scope"] == "use"
    _, admin = await ask(url, "POST", "/api/keys", "sesame", {"scope": "admin"})
    assert (await ask(url, "GET", "/v1/models", made["key"]))[0] == 200
    for method, path in (("GET", "/api/keys"), ("POST", "/api/tokens"), ("DELETE", "/api/members/pc")):
        status, body = await ask(url, method, path, made["key"])
        assert (status, body["error"]["code"]) == (403, "insufficient_scope")
    for method, path in (
        ("PUT", "/api/nodes/pc/lease"),
        ("DELETE", "/api/nodes/pc/lease"),
        ("PUT", "/api/nodes/pc/budget"),
    ):
        status, body = await ask(url, method, path, made["key"], {})
        assert (status, body["error"]["code"]) == (403, "insufficient_scope"), path
    assert (await ask(url, "GET", "/api/tokens", admin["key"]))[0] == 200
    assert (await ask(url, "GET", "/api/tokens", guarded.operator_key))[0] == 200
    assert (await ask(url, "DELETE", f"/api/keys/{made['id']}", admin["key"]))[0] == 200
    assert (await ask(url, "GET", "/v1/models", made["key"]))[0] == 401
    assert (await ask(url, "DELETE", f"/api/keys/{made['id']}", admin["key"]))[0] == 404


async def test_a_node_uses_the_api_by_its_own_secret_until_it_is_revoked(guarded: Orchestrator, new_node: Any) -> None:
    node = new_node("pc")
    await node.join(guarded.local_target, guarded.join_token)
    assert (await ask(guarded.http_url, "GET", "/v1/models", node.key))[0] == 200
    assert (await ask(guarded.http_url, "GET", "/api/members", node.key))[0] == 403
    assert (await ask(guarded.http_url, "POST", "/api/nodes/laptop/leave", node.key))[0] == 403
    assert (await ask(guarded.http_url, "PUT", "/api/nodes/pc/lease", node.key, {"device": "none"}))[0] == 400, (
        "its own"
    )
    await ask(guarded.http_url, "DELETE", "/api/members/pc", "sesame")
    assert (await ask(guarded.http_url, "GET", "/v1/models", node.key))[0] == 401
    await node.leave()


async def test_no_secret_is_in_a_file_and_every_change_is_in_the_audit(
    mesh: Any, new_node: Any, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    made = await token(mesh, note="for the laptop")
    _, key = await mesh.call("POST", "/api/keys", {})
    node = new_node("laptop")
    await node.join(mesh.orchestrator.local_target, made["token"])
    await mesh.call("DELETE", f"/api/keys/{key['id']}")
    await mesh.call("DELETE", "/api/members/laptop")
    await node.leave()
    secrets = [made["token"].partition(".")[0], key["key"], node.key, mesh.orchestrator.operator_key]
    for file in (each for each in state.rglob("*") if each.is_file()):
        content = file.read_bytes()
        assert not [secret for secret in secrets if secret.encode() in content], file
        if os.name != "nt":
            assert file.stat().st_mode & 0o077 == 0, file
    lines = [json.loads(line) for line in (state / "audit.log").read_text().splitlines()]
    assert [line["what"] for line in lines] == [
        "token created",
        "key created",
        "node joined",
        "key removed",
        "node revoked",
    ]
    assert lines[2]["by"] == f"token {made['id']}"
    assert lines[4]["by"] == "this machine"


async def test_web_pages_read_answers_only_if_their_origin_was_named(tmp_path: Path) -> None:
    where = {"host": "127.0.0.1", "grpc_port": 0, "http_port": 0, "state_dir": tmp_path / "own"}
    for wrong in ("*", "chat.example", "https://chat.example/path", "null"):
        with pytest.raises(OrchestratorError, match="is not an origin"):
            await Orchestrator(OrchestratorConfig(**where, cors_origins=(wrong,))).start()
    orchestrator = Orchestrator(OrchestratorConfig(**where, cors_origins=("http://localhost:3000",)))
    await orchestrator.start()
    allowed = "Access-Control-Allow-Origin"
    asks = {"Access-Control-Request-Method": "POST"}
    async with aiohttp.ClientSession(orchestrator.http_url) as http:
        for origin, status, there in (("http://localhost:3000", 200, True), ("http://evil.example", 403, False)):
            async with http.get("/v1/models", headers={"Origin": origin}) as response:
                assert (response.status, allowed in response.headers) == (status, there)
            async with http.post("/api/keys", json={}, headers={"Origin": origin}) as response:
                assert response.status == 403, "no page may make keys"
            async with http.options("/v1/models", headers={"Origin": origin, **asks}) as response:
                assert (response.status == 204, allowed in response.headers) == (there, there)
            wanted = {
                "Access-Control-Request-Headers": "authorization,x-stainless-lang"
            }  # as OpenAI's client in a page
            async with http.options("/v1/models", headers={"Origin": origin, **asks, **wanted}) as response:
                told = response.headers.get("Access-Control-Allow-Headers")
                assert told == ("authorization,x-stainless-lang" if there else None)
                assert response.headers["Vary"] == "Origin", "a cache must not give one origin's answer to another"
    await orchestrator.stop()


async def test_of_two_machines_that_want_one_name_the_first_stays_a_member(mesh: Any, new_node: Any) -> None:
    made = (await token(mesh))["token"]
    two = [new_node("laptop"), new_node("laptop")]
    came = await asyncio.gather(
        *(node.join(mesh.orchestrator.local_target, made) for node in two), return_exceptions=True
    )
    assert sorted(isinstance(each, grpc.aio.AioRpcError) for each in came) == [False, True]
    first = two[came.index(None)]
    await gone(first)
    await first.join(mesh.orchestrator.local_target, f"{first.key}.{mesh.orchestrator.fingerprint}")
    await first.leave()


async def test_the_tokens_of_the_latest_starts_only_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "TOKENS_KEPT", 2)
    ids = []
    for _ in range(3):
        orchestrator = Orchestrator(OrchestratorConfig("127.0.0.1", 0, http_port=0, state_dir=tmp_path))
        await orchestrator.start()
        _, body = await ask(orchestrator.http_url, "GET", "/api/tokens", "")
        ids.append([each["id"] for each in body["tokens"]])
        await orchestrator.stop()
    assert [len(each) for each in ids] == [1, 2, 2]
    assert ids[2][0] == ids[1][1]
