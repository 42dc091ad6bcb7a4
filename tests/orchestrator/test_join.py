"""Joining and leaving the mesh, over real TLS sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import grpc
import grpc.aio
import pytest

from motley.daemon.node.app import DaemonConfig, Observer, run_daemon
from motley.daemon.node.joining.control import NameTaken, TokenRefused
from motley.daemon.node.joining.membership import all_kept
from motley.daemon.node.joining.trust import NotThere
from motley.daemon.weights.cache import ShareCache
from motley.orchestrator import app, control
from motley.orchestrator.app import Orchestrator, OrchestratorConfig
from motley.orchestrator.mesh import nodes
from motley.orchestrator.mesh.addresses import own_addresses
from motley.orchestrator.trust.limits import HELLO_BYTES
from motley.protocol.mesh_pb2 import Capabilities, Described, Empty, Hello, NodeMessage, RankEvent
from motley.protocol.mesh_pb2_grpc import MeshStub
from motley.protocol.versions import OLDEST, PROTOCOL, VERSION


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


@pytest.mark.parametrize(
    ("told", "speaks", "older"),
    [
        (str(VERSION + 1), f"version {VERSION + 1}, the", "the orchestrator has the older one"),
        (str(OLDEST - 1), f"version {OLDEST - 1}, the", "this node has the older one; update this machine"),
        ("", "version before 4, the", "this node has the older one"),
        ("9" * 5000, "version before 4, the", "this node has the older one"),
        ("x", "version before 4, the", "this node has the older one"),
    ],
)
async def test_another_protocol_version_is_refused_at_once_and_named(
    mesh: Any, told: str, speaks: str, older: str
) -> None:
    """Whatever the token is: it was once told elsewhere."""
    async with call(mesh.orchestrator.local_target, "any", version=told) as stream:
        code, details = await refused(stream)  # and it has said nothing
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert f"{speaks} orchestrator version {OLDEST} to {VERSION}" in details
    assert older in details
    assert "motley update" in details


async def test_a_live_nodes_name_is_taken(mesh: Any, new_node: Any) -> None:
    await mesh.join(new_node("pc"))
    code, details = await refusal(mesh, new_node("pc"))
    assert code is grpc.StatusCode.ALREADY_EXISTS
    assert "--name" in details


async def test_a_machine_that_comes_back_takes_the_place_of_its_own_old_connection(mesh: Any, new_node: Any) -> None:
    """At once, though that has not been missed yet."""
    before, after = new_node("pc"), new_node("pc")
    before.process = after.process = "the same daemon"
    await mesh.join(before)
    await after.join(mesh.orchestrator.local_target, f"{before.key}.{mesh.orchestrator.fingerprint}")
    mesh.nodes.append(after)
    assert await before.ended() is grpc.StatusCode.ABORTED
    _, body = await mesh.call("GET", "/api/nodes")
    assert [(node["id"], node["state"]) for node in body["nodes"]] == [(after.node_id, "alive")]


async def test_nobody_else_takes_the_place_of_a_node(
    mesh: Any, new_node: Any, unmeasured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither another machine, whatever it says of itself, nor another daemon of the same one, unless that has missed a
    beat."""
    node, laptop = await mesh.join(new_node("pc")), await mesh.join(new_node("laptop"))
    own, other = (f"{each.key}.{mesh.orchestrator.fingerprint}" for each in (node, laptop))
    node.process = "the daemon"
    await node.leave()
    await mesh.poll("/api/nodes", lambda body: states_of(body)["pc"] == "lost")
    await node.join(mesh.orchestrator.local_target, own)
    impostor, second = new_node("pc"), new_node("pc")
    impostor.process, second.process = node.process, "another daemon"
    monkeypatch.setattr(nodes, "MISSED_S", 60.0)
    refusals = [await refusal(mesh, second, own), *[await refusal(mesh, impostor, token) for token in (None, other)]]
    assert [code for code, _ in refusals] == 3 * [grpc.StatusCode.ALREADY_EXISTS]
    config = DaemonConfig(mesh.orchestrator.local_target, own, name="pc")
    with pytest.raises(NameTaken):
        await run_daemon(config, Observer())
    monkeypatch.setattr(nodes, "MISSED_S", 0.0)
    refusals = [await refusal(mesh, impostor, token) for token in (None, other)]
    assert [code for code, _ in refusals] == 2 * [grpc.StatusCode.ALREADY_EXISTS]
    with pytest.raises(AssertionError, match="this takes long"):  # nothing stands in the way
        await run_daemon(config, Observer())
    await second.join(mesh.orchestrator.local_target, own)
    mesh.nodes.append(second)
    assert await node.ended() is grpc.StatusCode.ABORTED
    assert await states(mesh) == {"pc": "alive", "laptop": "alive"}


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon fails that measures its machine."""

    async def too_late() -> NoReturn:
        raise AssertionError("this takes long: it would have been told sooner that it cannot join")

    monkeypatch.setattr("motley.daemon.node.app.installed_engines", too_late)


async def test_who_cannot_join_hears_it_before_the_machine_is_measured(
    mesh: Any, new_node: Any, unmeasured: None, caplog: pytest.LogCaptureFixture
) -> None:
    await mesh.join(new_node("pç"))
    target, token = mesh.orchestrator.local_target, mesh.orchestrator.join_token
    with pytest.raises(NameTaken, match=r"is in the mesh already .*--name"):
        await run_daemon(DaemonConfig(target, token, name="pç"), Observer())
    with pytest.raises(TokenRefused, match="wrong join token"):
        await run_daemon(DaemonConfig(target, f"wrong.{token.partition('.')[2]}", name="new"), Observer())
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    with pytest.raises(NotThere, match="is `motley up` running there"):
        await run_daemon(DaemonConfig(f"127.0.0.1:{port}", token), Observer())
    with pytest.raises(AssertionError, match="this takes long"):  # nothing stands in the way
        await run_daemon(DaemonConfig(target, token, name="new"), Observer())
    said = [record.getMessage().partition(": ")[2] for record in caplog.records if record.levelno > logging.INFO]
    assert [words.split()[:2] for words in said] == [["a", "node"], ["wrong", "join"]]  # asking is no trouble


async def test_who_is_revoked_hears_that_alone_and_how_to_join_anew(mesh: Any, tmp_path: Path) -> None:
    class Revoked(Observer):
        def joined(self, *_: object) -> None:
            self.revoking = asyncio.create_task(mesh.call("DELETE", "/api/members/new"))

        def lost(self, why: str, retry_s: float) -> None:
            raise AssertionError(f"it looks for the orchestrator again: {why}")

    target, token, kept = mesh.orchestrator.local_target, mesh.orchestrator.join_token, tmp_path / "meshes"
    config = DaemonConfig(target, token, name="new", meshes=kept, cache=ShareCache(tmp_path / "shares"))
    with pytest.raises(
        TokenRefused, match=r"^this node is out of the mesh: it was revoked .* anew: `motley join`, with"
    ):
        await run_daemon(config, Revoked())
    assert not all_kept(kept)


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


async def test_whatever_a_node_says_is_a_sign_of_life(mesh: Any, new_node: Any) -> None:
    node = new_node()
    node.heartbeats = False
    await mesh.join(node)

    async def silence_s() -> float:
        _, body = await mesh.call("GET", "/api/nodes")
        return float(body["nodes"][0]["silence_s"])

    before = await silence_s()
    while (now := await silence_s()) >= before:  # until it is lost, if what it says does not count
        before = now
        await node.send(rank=RankEvent(session="gone", epoch=1, rank=0, released=Empty()))
    assert await states(mesh) == {"pc": "alive"}


async def test_what_cannot_be_sent_to_a_node_loses_it_at_once(
    mesh: Any, new_node: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said = control.OrchestratorMessage
    monkeypatch.setattr(control, "OrchestratorMessage", lambda **body: "nonsense" if "beat" in body else said(**body))
    await mesh.join(new_node())
    body = await mesh.poll("/api/nodes", lambda body: body["nodes"][0]["state"] == "lost")
    assert body["nodes"][0]["lost"].startswith("sending to it failed: ")
    assert "cannot send to a node" in caplog.text


async def test_a_node_that_reads_nothing_is_lost(mesh: Any, new_node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def stuck(context: Any, stream: Any) -> None:
        """As where the node's window for what comes to it is full."""
        await context.write(await stream.outbox.get())
        await asyncio.Event().wait()

    monkeypatch.setattr(control, "OUTBOX", 3)
    monkeypatch.setattr(control, "_write", stuck)
    node = await mesh.join(new_node())
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the stream has ended
        for _ in range(5):  # each is answered
            await node.send(rank=RankEvent(session="forgotten", epoch=1, rank=0, listening="x:1"))
    body = await mesh.poll("/api/nodes", lambda body: body["nodes"][0]["state"] == "lost")
    assert body["nodes"][0]["lost"] == "it has not read 3 messages"


async def test_a_worker_that_outlived_its_session_is_released(mesh: Any, new_node: Any) -> None:
    node = await mesh.join(new_node())
    await node.send(rank=RankEvent(session="forgotten", epoch=3, rank=2, listening="x:1"))
    await node.send(rank=RankEvent(session="gone", epoch=1, rank=0, released=Empty()))
    await node.until(lambda: node.commands)
    (command,) = node.commands
    assert (command.session, command.epoch, command.rank) == ("forgotten", 3, 2)
    assert command.WhichOneof("body") == "release"


@asynccontextmanager
async def call(target: str, token: str, version: str = str(VERSION), raw: bool = False) -> AsyncIterator[Any]:
    """A stream of whoever trusts the orchestrator, with any token; nothing is said on it yet.

    Args:
        version: that of the protocol which it tells; empty: none.
        raw: bytes are said on it, and not messages.
    """
    host, _, port = target.rpartition(":")
    pem = await asyncio.to_thread(ssl.get_server_certificate, (host.strip("[]"), int(port)))
    credentials = grpc.ssl_channel_credentials(root_certificates=pem.encode())
    named = [("grpc.ssl_target_name_override", "motley")]
    async with asyncio.timeout(30), grpc.aio.secure_channel(target, credentials, options=named) as channel:
        told = [(PROTOCOL, version)] if version else []
        join = channel.stream_stream("/motley.protocol.Mesh/Join") if raw else MeshStub(channel).Join
        yield join(metadata=[*told, ("motley-token", token)])


async def refused(stream: Any) -> tuple[grpc.StatusCode, str]:
    return await stream.code(), await stream.details()


async def test_without_the_token_nobody_is_listened_to(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "HELLO_S", 1000.0)
    async with call(mesh.orchestrator.local_target, "wrong") as stream:
        assert "motley-address" not in await stream.initial_metadata()
        assert (await refused(stream))[0] is grpc.StatusCode.UNAUTHENTICATED  # and it has said nothing


async def test_what_is_no_message_ends_a_stream_and_nothing_else(
    mesh: Any, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    target, token = mesh.orchestrator.local_target, mesh.orchestrator.join_token
    async with call(target, token, raw=True) as stream:
        await stream.write(b"\xff\xff")
        code, why = await refused(stream)
    assert (code, "the first message must be a Hello" in why) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    able = Capabilities(memory_bandwidth=1e9)
    hello = Hello(protocol=VERSION, name="pc", address="127.0.0.1", capabilities=able)
    async with call(target, token, raw=True) as stream:
        await stream.write(NodeMessage(hello=hello).SerializeToString())
        await mesh.poll("/api/nodes", lambda body: states_of(body) == {"pc": "alive"})
        await stream.write(b"\xff\xff")
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in stream:
                pass
        code, why = await refused(stream)
    assert (code, "what it said is no message" in why) == (grpc.StatusCode.ABORTED, True)
    await mesh.poll("/api/nodes", lambda body: states_of(body) == {"pc": "lost"})
    assert "Traceback" not in caplog.text + capfd.readouterr().err


async def test_a_node_with_the_token_says_hello_soon_and_briefly(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    token = mesh.orchestrator.join_token
    async with call(mesh.orchestrator.local_target, token) as stream:
        await stream.initial_metadata()
        await stream.write(NodeMessage(hello=Hello(protocol=VERSION, name="x" * HELLO_BYTES)))
        code, why = await refused(stream)
        assert (code, f"needs more than {HELLO_BYTES}" in why) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    monkeypatch.setattr(control, "HELLO_S", 0.1)
    async with call(mesh.orchestrator.local_target, token) as stream:
        assert (await refused(stream))[0] is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_what_a_node_said_is_forgotten_with_its_stream(mesh: Any, new_node: Any) -> None:
    async with call(mesh.orchestrator.local_target, mesh.orchestrator.join_token) as stream:
        await stream.initial_metadata()
        await stream.write(NodeMessage(hello=Hello(name="refused" * HELLO_BYTES)))
        await refused(stream)
    node = await mesh.join(new_node())
    await node.send(described=Described(request_id="nobody's" * HELLO_BYTES))
    await node.send(leaving=Empty())
    await node.ended()
    async with asyncio.timeout(30):
        while True:
            if not _long_messages():
                return
            await asyncio.sleep(0.01)


def _long_messages() -> list[NodeMessage]:
    kept = [it for it in gc.get_objects() if isinstance(it, NodeMessage)]
    return [message for message in kept if message.ByteSize() > HELLO_BYTES]


async def test_strangers_who_say_nothing_leave_room_for_nodes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_node: Any
) -> None:
    monkeypatch.setattr(app, "SHAKE_HANDS_S", 1)
    orchestrator = Orchestrator(OrchestratorConfig("127.0.0.1", 0, http_port=0, state_dir=tmp_path))
    await orchestrator.start()
    host, _, port = orchestrator.local_target.rpartition(":")
    node = await joined(orchestrator, new_node("pc"))
    idle = [await asyncio.open_connection(host, int(port)) for _ in range(20)]
    async with asyncio.timeout(30):
        for reader, writer in idle:
            assert await reader.read() == b""
            writer.close()
    other = await joined(orchestrator, new_node("box"))
    for each in (node, other):
        await each.send(leaving=Empty())
        await each.ended()
        await each.leave()
    await orchestrator.stop()


async def joined(orchestrator: Orchestrator, node: Any) -> Any:
    await node.join(orchestrator.local_target, orchestrator.join_token)
    return node


async def test_a_node_on_the_orchestrators_machine_is_told_where_others_reach_it(tmp_path: Path) -> None:
    config = OrchestratorConfig("0.0.0.0", 0, http_port=0, state_dir=tmp_path, advertise="gaming-pc.home")
    orchestrator = Orchestrator(config)
    await orchestrator.start()
    assert [target.rpartition(":")[0] for target in orchestrator.join_targets] == ["gaming-pc.home"]
    async with call(orchestrator.local_target, orchestrator.join_token) as stream:
        assert dict(await stream.initial_metadata())["motley-address"] == "gaming-pc.home"
    for address in own_addresses()[:1]:  # none without a network
        async with call(f"{address}:{orchestrator.local_target.rpartition(':')[2]}", orchestrator.join_token) as stream:
            assert dict(await stream.initial_metadata())["motley-address"] == ""
            await stream.write(NodeMessage(hello=Hello(protocol=VERSION, name="box", address="127.0.0.1")))
            code, why = await refused(stream)
            assert (code, "--advertise" in why) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    await orchestrator.stop()


async def test_on_loopback_there_is_nothing_for_other_machines_to_dial(mesh: Any) -> None:
    assert mesh.orchestrator.join_targets == []
    async with call(mesh.orchestrator.local_target, mesh.orchestrator.join_token) as stream:
        assert dict(await stream.initial_metadata())["motley-address"] == ""


async def test_a_loopback_address_is_not_told_to_other_machines(mesh: Any, new_node: Any) -> None:
    await mesh.join(new_node("pc"))
    elsewhere = new_node("box")
    elsewhere.address = "192.168.1.11"
    await mesh.join(elsewhere)
    status, body = await mesh.call("POST", "/api/sessions?wait=ready", {"model": "bard"})
    message = body["error"]["message"]
    assert (status, "'pc' has the address 127.0.0.1" in message, "--advertise" in message) == (400, True, True)
    await mesh.serve(nodes=["pc"])
