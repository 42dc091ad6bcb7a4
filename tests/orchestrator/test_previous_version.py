"""Machines whose motley speaks the version of the protocol before this one: both ways, over real gRPC.

`previous/mesh_9.proto` is the schema as it was then. When the protocol's version grows again, the file of the version
before takes its place.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_tools import protoc

from motley.daemon.node.app import DaemonConfig, Observer, run_daemon
from motley.daemon.node.joining.control import JoinRefused
from motley.daemon.weights.cache import ShareCache
from motley.orchestrator.trust.identity import load_identity
from motley.protocol.versions import OLDEST, VERSION
from tests.e2e.node import measure_less
from tests.e2e.processes import BUNDLED, in_thread
from tests.orchestrator.conftest import small_profile

PREVIOUS = 9
JOIN = "/motley.protocol.Mesh/Join"


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The messages of the previous schema, by name."""
    folder = Path(__file__).parent / "previous"
    made = tmp_path_factory.mktemp("previous") / "mesh"
    schema = f"mesh_{PREVIOUS}.proto"
    assert protoc.main(["", f"--proto_path={folder}", f"--descriptor_set_out={made}", schema]) == 0
    pool = descriptor_pool.DescriptorPool()
    (file,) = descriptor_pb2.FileDescriptorSet.FromString(made.read_bytes()).file
    pool.Add(file)  # type: ignore[no-untyped-call]
    found = message_factory.GetMessageClassesForFiles([schema], pool)
    return type("Previous", (), {name.rpartition(".")[2]: kind for name, kind in found.items()})


def test_neighbours_are_let_in() -> None:
    assert OLDEST <= PREVIOUS == VERSION - 1, "or nothing here says that both work together"


async def test_an_older_node_takes_part(mesh: Any, previous: Any) -> None:
    host, _, port = mesh.orchestrator.local_target.rpartition(":")
    secret, _, fingerprint = mesh.orchestrator.join_token.partition(".")
    pem = await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))
    assert hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest() == fingerprint
    credentials = grpc.ssl_channel_credentials(root_certificates=pem.encode())
    named = [("grpc.ssl_target_name_override", "motley")]
    async with grpc.aio.secure_channel(mesh.orchestrator.local_target, credentials, options=named) as channel:
        join = channel.stream_stream(
            JOIN,
            request_serializer=previous.NodeMessage.SerializeToString,
            response_deserializer=previous.OrchestratorMessage.FromString,
        )
        stream = join(metadata=[("motley-protocol", str(PREVIOUS)), ("motley-token", secret)])
        assert "motley-address" in await stream.initial_metadata()
        engine = previous.Engine(name="onnxruntime")
        able = previous.Capabilities(platform="linux", cores=4, memory_bytes=16 * 10**9, engines=[engine])
        able.memory_bandwidth = 20e9
        hello = previous.Hello(
            protocol=PREVIOUS, version="0.0.9", name="old-pc", address="127.0.0.1", capabilities=able
        )
        await stream.write(previous.NodeMessage(hello=hello))
        assert (await stream.read()).WhichOneof("body") == "welcome"
        _, told = await mesh.call("GET", "/api/nodes")
        assert [(node["name"], node["version"]) for node in told["nodes"]] == [("old-pc", "0.0.9")]

        asked = asyncio.create_task(mesh.call("POST", "/api/plan", {"model": "bard"}))
        while (order := await stream.read()).WhichOneof("body") != "describe":
            pass
        profile = previous.ModelProfile.FromString(small_profile().SerializeToString())
        described = previous.Described(request_id=order.describe.request_id, profile=profile)
        await stream.write(previous.NodeMessage(described=described))
        status, body = await asked
        assert (status, [rank["node"] for rank in body["plan"]["ranks"]]) == (200, ["old-pc"])

        status, body = await mesh.call("POST", "/api/plan", {"model": "qwen3-8b", "by_shape": True})
        assert (status, body["error"]["code"]) == (422, "outdated_node")
        assert "the motley on old-pc is too old" in body["error"]["message"]
        status, out, err = await in_thread("update", "--url", mesh.orchestrator.http_url)
        assert (status, "old-pc: there: `motley update` says how; usually pipx upgrade" in out) == (0, True), err


class Joined(Observer):
    """Knows when its daemon was welcomed."""

    def __init__(self) -> None:
        self.yes = asyncio.Event()

    def joined(self, *_: Any) -> None:
        self.yes.set()


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of this process measures less."""
    measure_less(monkeypatch.setattr)


async def orchestrate(previous: Any, folder: Path, handler: Any) -> tuple[grpc.aio.Server, DaemonConfig]:
    """A server of the previous schema, and how a daemon of today joins it."""
    identity = load_identity(folder)
    server = grpc.aio.server()
    join = grpc.stream_stream_rpc_method_handler(
        handler,
        request_deserializer=previous.NodeMessage.FromString,
        response_serializer=previous.OrchestratorMessage.SerializeToString,
    )
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("motley.protocol.Mesh", {"Join": join})])
    credentials = grpc.ssl_server_credentials([(identity.key_pem, identity.certificate_pem)])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    cache = ShareCache(folder / "cache")
    return server, DaemonConfig(f"127.0.0.1:{port}", identity.join_token("secret"), "new-pc", cache=cache)


@pytest.mark.usefixtures("node")
async def test_a_node_of_today_serves_an_older_orchestrator(previous: Any, tmp_path: Path) -> None:
    answers: asyncio.Queue[Any] = asyncio.Queue()

    async def handler(_: Any, context: Any) -> None:
        told = dict(context.invocation_metadata())
        assert told["motley-protocol"] == str(PREVIOUS), "the only number that it takes"
        await context.send_initial_metadata([("motley-address", "")])
        answers.put_nowait((await context.read()).hello)
        welcome = previous.Welcome(node_id="1", heartbeat_s=5, silence_s=30, key="key")
        await context.write(previous.OrchestratorMessage(welcome=welcome))
        spec = previous.ModelSpec(source=str(BUNDLED), quantisation="int8", block=128)
        describe = previous.Describe(request_id="7", model=spec)
        await context.write(previous.OrchestratorMessage(describe=describe))
        while True:
            message = await context.read()
            if message.WhichOneof("body") == "described":
                answers.put_nowait(message.described)

    server, config = await orchestrate(previous, tmp_path, handler)
    observer = Joined()
    daemon = asyncio.create_task(run_daemon(config, observer))
    try:
        async with asyncio.timeout(60):
            hello, described = await answers.get(), await answers.get()
        assert (hello.name, observer.yes.is_set()) == ("new-pc", True)
        assert hello.capabilities.engines
        assert (described.request_id, described.failure.message) == ("7", "")
        assert (described.profile.family, described.profile.layers) == ("llama", 6)
    finally:
        daemon.cancel()
        await asyncio.gather(daemon, return_exceptions=True)
        await server.stop(0)


@pytest.mark.usefixtures("node")
async def test_a_node_that_is_too_new_or_old_hears_which_side_to_update(previous: Any, tmp_path: Path) -> None:
    why = "this node speaks protocol version 9, the orchestrator version 8; the orchestrator has the older one"

    async def handler(_: Any, context: Any) -> None:
        context.set_code(grpc.StatusCode.FAILED_PRECONDITION)
        context.set_details(why)

    server, config = await orchestrate(previous, tmp_path, handler)
    try:
        with pytest.raises(JoinRefused, match="the orchestrator has the older one"):
            async with asyncio.timeout(60):
                await run_daemon(config, Observer())
    finally:
        await server.stop(0)
