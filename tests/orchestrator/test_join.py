"""Joining and leaving the mesh, over real TLS sockets."""

from __future__ import annotations

import logging
from typing import Any

import grpc
import grpc.aio
import pytest

from motley.orchestrator import control, nodes
from motley.protocol import VERSION
from motley.protocol.mesh_pb2 import Empty, Hello, RankEvent


def states_of(body: Any) -> dict[str, str]:
    return {node["name"]: node["state"] for node in body["nodes"]}


async def states(mesh: Any) -> dict[str, str]:
    _, body = await mesh.call("GET", "/api/nodes")
    return states_of(body)


async def test_a_node_joins_leaves_and_returns_under_its_name(mesh: Any, new_node: Any) -> None:
    node = await mesh.join(new_node("pc", memory=123, bandwidth=5e9))
    _, body = await mesh.call("GET", "/api/nodes")
    (shown,) = body["nodes"]
    assert shown["id"] == node.node_id
    assert (shown["memory_bytes"], shown["memory_bandwidth"], shown["state"]) == (123, 5e9, "alive")
    await node.leave()
    await mesh.poll("/api/nodes", lambda body: states_of(body) == {"pc": "lost"})
    await mesh.join(new_node("pc"))
    assert await states(mesh) == {"pc": "alive"}


async def test_a_node_that_says_so_has_left_and_the_log_tells_who_comes_and_goes(
    mesh: Any, new_node: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "motley.orchestrator.control")
    node = await mesh.join(new_node("pc"))
    await mesh.join(new_node("box"))
    await node.send(leaving=Empty())
    await node.ended()
    _, body = await mesh.call("GET", "/api/nodes")
    pc, box = body["nodes"]
    assert (pc["state"], box["state"], box["gone_s"]) == ("left", "alive", None)
    assert 0 <= pc["gone_s"] < pc["silence_s"] + 60
    assert pc["colour"] != box["colour"]
    await mesh.join(new_node("pc"))
    _, body = await mesh.call("GET", "/api/nodes")
    assert [(shown["name"], shown["colour"]) for shown in body["nodes"]] == [
        ("pc", pc["colour"]),
        ("box", box["colour"]),
    ]
    assert [record.getMessage() for record in caplog.records] == [
        "node pc joined (127.0.0.1)",
        "node box joined (127.0.0.1)",
        "node pc has left: its daemon was ended there",
        "node pc joined (127.0.0.1)",
    ]


async def refusal(mesh: Any, node: Any, token: str | None = None) -> tuple[grpc.StatusCode, str]:
    orchestrator = mesh.orchestrator
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await node.join(orchestrator.local_target, token or orchestrator.join_token)
    return caught.value.code(), caught.value.details() or ""


async def test_a_wrong_token_is_refused(mesh: Any, new_node: Any) -> None:
    fingerprint = mesh.orchestrator.join_token.partition(".")[2]
    code, details = await refusal(mesh, new_node(), f"wrong-secret.{fingerprint}")
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert "wrong join token" in details
    assert await states(mesh) == {}


async def test_another_protocol_version_is_refused_with_both_versions(mesh: Any, new_node: Any) -> None:
    node = new_node()
    node.protocol = VERSION + 1
    code, details = await refusal(mesh, node)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert f"version {VERSION + 1}, the orchestrator version {VERSION}" in details
    assert "install the same motley" in details


async def test_a_live_nodes_name_is_taken(mesh: Any, new_node: Any) -> None:
    await mesh.join(new_node("pc"))
    code, details = await refusal(mesh, new_node("pc"))
    assert code is grpc.StatusCode.ALREADY_EXISTS
    assert "--name" in details


async def test_senseless_capabilities_are_refused(mesh: Any, new_node: Any) -> None:
    code, details = await refusal(mesh, new_node(bandwidth=0))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "bandwidth" in details


async def test_a_second_hello_ends_the_stream(mesh: Any, new_node: Any) -> None:
    node = await mesh.join(new_node())
    await node.send(hello=Hello(name="again"))
    assert await node.ended() is grpc.StatusCode.ABORTED
    assert await states(mesh) == {"pc": "lost"}


async def test_a_silent_node_is_lost(mesh: Any, new_node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "HEARTBEAT_S", 0.05)
    await mesh.join(new_node("lively"))
    silent = await mesh.join(new_node("silent"))
    silent.heartbeats = False
    monkeypatch.setattr(nodes, "SILENCE_S", 2.0)
    assert await silent.ended() is grpc.StatusCode.ABORTED
    assert await states(mesh) == {"lively": "alive", "silent": "lost"}
    _, body = await mesh.call("GET", "/api/nodes")
    assert "no heartbeat" in body["nodes"][1]["lost"]


async def test_a_worker_that_outlived_its_session_is_released(mesh: Any, new_node: Any) -> None:
    node = await mesh.join(new_node())
    await node.send(rank=RankEvent(session="forgotten", epoch=3, rank=2, listening="x:1"))
    await node.send(rank=RankEvent(session="gone", epoch=1, rank=0, released=Empty()))
    await node.until(lambda: node.commands)
    (command,) = node.commands
    assert (command.session, command.epoch, command.rank) == ("forgotten", 3, 2)
    assert command.WhichOneof("body") == "release"
