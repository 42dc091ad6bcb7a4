"""Whatever is sent to HTTP routes and to the port where nodes join: refused in order, and nobody else is harmed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import quote

import grpc
import psutil
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from motley.cli.reaching.client import Client
from motley.protocol.address import parse_address
from motley.protocol.mesh_pb2 import Capabilities, Heartbeat, Hello, NodeMessage, Placement
from motley.protocol.versions import PROTOCOL, VERSION
from tests.e2e.processes import BUNDLED, Mesh

pytestmark = pytest.mark.soak

JOINS = 1000
REQUESTS = 1500
GROWTH = 20e6
"""Bytes that the orchestrator may have taken more at the end."""

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": BUNDLED.name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    "/v1/completions": {"model": BUNDLED.name, "prompt": "Hi", "max_tokens": 1},
    "/v1/embeddings": {"model": BUNDLED.name, "input": "Hi"},
    "/v1/responses": {"model": BUNDLED.name, "input": "Hi", "max_output_tokens": 1},
    "/v1/messages": {"model": BUNDLED.name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    "/tokenize": {"model": BUNDLED.name, "prompt": "Hi"},
    "/detokenize": {"model": BUNDLED.name, "tokens": [1]},
    "/api/plan": {"model": str(BUNDLED)},
}
"""Requests that are right, by their routes."""
KEYS = (
    *("tools", "tool_choice", "response_format", "regex", "grammar", "stop", "n", "logit_bias", "stream", "seed"),
    *("top_k", "temperature", "logprobs", "top_logprobs", "stream_options", "echo", "input", "prompt", "messages"),
)


@st.composite
def changed(draw: st.DrawFn) -> tuple[str, bytes]:
    """A route and the body of a request that is right but for what has been changed; or any bytes."""
    path = draw(st.sampled_from(sorted(BODIES)))
    if draw(st.integers(0, 9)) == 0:
        return path, draw(st.binary(max_size=60))
    body = dict(BODIES[path])
    for _ in range(draw(st.integers(0, 3))):
        key = draw(st.sampled_from((*KEYS, *body)) | st.text(max_size=8))
        body[key] = draw(JSON)
    return path, json.dumps(body).encode()


def asked(url: str, path: str, body: bytes) -> tuple[int, bytes]:
    """What an HTTP route answers."""
    request = urllib.request.Request(url + path, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


async def unharmed(there: Mesh, before: int) -> None:
    grown = psutil.Process(there.orchestrator.process.pid).memory_info().rss - before
    assert grown < GROWTH, f"the orchestrator has grown by {grown / 1e6:.1f} MB"
    async with Client(there.url) as client:
        nodes = (await client.call("GET", "/api/nodes"))["nodes"]
        assert {node["name"] for node in nodes if node["state"] == "alive"} == set("abc")
        answer = await client.call("POST", "/v1/completions", BODIES["/v1/completions"])
        assert answer["usage"]["completion_tokens"] == 1


async def test_http_routes(there: Mesh) -> None:
    await there.session(nodes=["a"])
    before = psutil.Process(there.orchestrator.process.pid).memory_info().rss

    @given(changed())
    @settings(max_examples=REQUESTS, deadline=None, suppress_health_check=list(HealthCheck))
    @example(("/v1/completions", b"[" * 100_000))
    @example(("/v1/completions", b"\xff\xfe"))
    @example(("/v1/chat/completions", b'{"model": 1e999}'))
    def holds(request: tuple[str, bytes]) -> None:
        status, body = asked(there.url, *request)
        assert status < 500, body
        if status != 200:
            assert json.loads(body)["error"]["message"]

    await asyncio.to_thread(holds)
    await unharmed(there, before)


ABLE = Capabilities(memory_bandwidth=1e9)
hellos = st.builds(
    Hello,
    protocol=st.just(VERSION),
    name=st.sampled_from(("stranger", "a", "")) | st.text(st.characters(exclude_categories=["Cs"]), max_size=70),
    version=st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    address=st.sampled_from(("", "nowhere", "10.0.0.1")),
    capabilities=st.sampled_from((Capabilities(), ABLE)),
)
LET_IN = NodeMessage(hello=Hello(protocol=VERSION, name="stranger", address="127.0.0.1", capabilities=ABLE))
said = st.one_of(
    st.binary(max_size=200),
    hellos.map(lambda hello: NodeMessage(hello=hello).SerializeToString()),
    st.just(LET_IN.SerializeToString()),
    st.just(NodeMessage(heartbeat=Heartbeat()).SerializeToString()),
    st.builds(
        lambda hello, at, byte: bytes([*hello[: at % len(hello)], byte, *hello[at % len(hello) + 1 :]]),
        st.just(LET_IN.SerializeToString()),
        st.integers(0, 100),
        st.integers(0, 255),
    ),
    st.just(Placement().SerializeToString()),
)


async def test_1000_malformed_joins(there: Mesh) -> None:
    """With a wrong token, or the right one and what is no Hello, a Hello of nobody who may be a node, or nonsense
    behind one that is right: nobody stays, and the mesh has the nodes that it had."""
    await there.session(nodes=["a"])
    before = psutil.Process(there.orchestrator.process.pid).memory_info().rss
    pem = await asyncio.to_thread(ssl.get_server_certificate, parse_address(there.target))
    credentials = grpc.ssl_channel_credentials(root_certificates=pem.encode())

    @given(st.lists(said, min_size=1, max_size=3), st.booleans(), st.sampled_from((str(VERSION), "0", "x", "")))
    @settings(max_examples=JOINS, deadline=None, suppress_health_check=list(HealthCheck))
    def holds(messages: list[bytes], shows_token: bool, version: str) -> None:
        metadata = [(PROTOCOL, version), ("motley-token", there.token if shows_token else "wrong")]
        options = [("grpc.ssl_target_name_override", "motley"), ("grpc.use_local_subchannel_pool", 1)]
        with grpc.secure_channel(there.target, credentials, options) as channel:
            join = channel.stream_stream("/motley.protocol.Mesh/Join")
            call = join(iter(messages), metadata=metadata, timeout=20)
            with contextlib.suppress(grpc.RpcError):
                for _ in call:
                    pass
            assert call.code() not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL), call.details()

    await asyncio.to_thread(holds)
    async with Client(there.url) as client:
        for member in (await client.call("GET", "/api/members"))["members"]:
            if member["name"] not in set("abc"):  # let in, and gone
                await client.call("DELETE", f"/api/members/{quote(member['name'], safe='')}")
    await unharmed(there, before)
