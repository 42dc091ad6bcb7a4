"""Starting and stopping, ports, and who may call."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from motley.daemon.node.joining.trust import TrustError, fetch_certificate
from motley.orchestrator.api.access.certificate import CertificateError
from motley.orchestrator.app import Orchestrator, OrchestratorConfig, OrchestratorError
from motley.transport.certificates import Authority


def config(tmp_path: Path, **fields: Any) -> OrchestratorConfig:
    ports = {"host": "127.0.0.1", "grpc_port": 0, "http_port": 0, "state_dir": tmp_path}
    return OrchestratorConfig(**{**ports, **fields})


async def status(url: str, trust: bytes = b"", **headers: str) -> int:
    """What the API answers; by HTTPS, if its certificate is signed by `trust` for the address in the URL."""
    tls = ssl.create_default_context(cadata=trust.decode() or None)
    async with (
        aiohttp.TCPConnector(ssl=tls) as connector,
        aiohttp.request("GET", url, headers=headers, connector=connector) as response,
    ):
        assert response.content_type == "application/json"
        return response.status


@pytest.mark.parametrize("which", ["grpc_port", "http_port"])
async def test_a_taken_port_is_named_and_nothing_stays_behind(tmp_path: Path, which: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OrchestratorError, match=f"port {port} .*Choose another with --"):
            await Orchestrator(config(tmp_path, **{which: port})).start()
    orchestrator = Orchestrator(config(tmp_path, **{which: port}))
    await orchestrator.start()
    await orchestrator.stop()


async def test_two_orchestrators_cannot_share_a_port(tmp_path: Path) -> None:
    first = Orchestrator(config(tmp_path))
    await first.start()
    port = int(first.local_target.rpartition(":")[2])
    with pytest.raises(OrchestratorError, match="for nodes"):
        await Orchestrator(config(tmp_path, grpc_port=port)).start()
    await first.stop()


async def test_a_start_that_is_cancelled_leaves_its_folder_alone(tmp_path: Path) -> None:
    """It may be a temporary one, which is removed then."""
    folder = tmp_path / "state"
    starting = asyncio.create_task(Orchestrator(config(folder)).start())
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    shutil.rmtree(folder, ignore_errors=True)
    await asyncio.get_running_loop().shutdown_default_executor()
    assert not folder.exists()


async def test_a_join_token_outlives_a_restart_and_each_start_makes_another(tmp_path: Path, new_node: Any) -> None:
    tokens = []
    for _ in range(2):
        orchestrator = Orchestrator(config(tmp_path))
        await orchestrator.start()
        tokens.append(orchestrator.join_token)
        node = new_node()
        await node.join(orchestrator.local_target, tokens[0])
        await node.leave()
        await orchestrator.stop()
        await orchestrator.stop()
    assert tokens[0] != tokens[1]


async def test_bound_to_the_network_the_api_has_tls_and_wants_a_key(tmp_path: Path) -> None:
    orchestrator = Orchestrator(config(tmp_path, host="0.0.0.0", http_host="0.0.0.0"))
    await orchestrator.start()
    host, _, port = orchestrator.local_target.rpartition(":")
    assert host != "0.0.0.0"
    _, writer = await asyncio.open_connection(host, int(port))
    writer.close()
    await writer.wait_closed()
    key = orchestrator.api_key
    assert key is not None
    assert orchestrator.http_url.startswith("https://127.0.0.1:")
    trust = orchestrator.api_trust
    for path in ("/v1/models", "/api/nodes", "/nothing"):
        url = orchestrator.http_url + path
        assert await status(url, trust) == 401
        assert await status(url, trust, Authorization="Bearer wrong") == 401
        assert await status(url, trust, Authorization=f"Basic {key}") == 401
        there = 404 if path == "/nothing" else 200
        assert await status(url, trust, Authorization=f"Bearer {key}") == there
        assert await status(url, trust, **{"x-api-key": key}) == there, "as Anthropic's clients send it"
        assert await status(url, trust, **{"x-api-key": "wrong"}) == 401
        assert await status(url, trust, Authorization="Bearer wrong", **{"x-api-key": key}) == 401
    url = f"{orchestrator.http_url}/v1/models"
    assert await status(url, trust, Authorization=f"Bearer {key}", Host="motley.example") == 200
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await status(url, Authorization=f"Bearer {key}")
    with pytest.raises(aiohttp.ClientError):
        await status(url.replace("https:", "http:"), Authorization=f"Bearer {key}")
    await orchestrator.stop()
    again = Orchestrator(config(tmp_path, http_host="0.0.0.0"))
    await again.start()
    assert again.api_key is None, "it was shown once"
    assert await status(f"{again.http_url}/v1/models", trust, Authorization=f"Bearer {key}") == 200
    await again.stop()


async def test_without_tls_off_loopback_only_who_says_so(tmp_path: Path) -> None:
    orchestrator = Orchestrator(config(tmp_path, http_host="0.0.0.0", insecure=True))
    await orchestrator.start()
    assert orchestrator.http_url.startswith("http://127.0.0.1:")
    assert await status(f"{orchestrator.http_url}/v1/models") == 401, "and never without a key"
    await orchestrator.stop()


async def test_beside_an_open_loopback_other_machines_have_tls_and_keys(tmp_path: Path) -> None:
    orchestrator = Orchestrator(config(tmp_path, host="0.0.0.0"))
    await orchestrator.start()
    assert await status(f"{orchestrator.http_url}/v1/models") == 200
    if orchestrator.network_url is None:
        pytest.skip("no network")
    url, trust = f"{orchestrator.network_url}/v1/models", orchestrator.api_trust
    assert url.startswith("https://")
    assert await status(url, trust) == 401
    assert await status(url, trust, Authorization=f"Bearer {orchestrator.api_key}") == 200
    await orchestrator.stop()


async def test_a_certificate_that_is_given_is_shown_and_one_that_is_none_is_named(tmp_path: Path) -> None:
    papers = Authority("a company").issue("motley.example", "127.0.0.1")
    files = tmp_path / "own.crt", tmp_path / "own.key"
    for file, content in zip(files, papers, strict=True):
        file.write_bytes(content)
    orchestrator = Orchestrator(config(tmp_path, http_host="0.0.0.0", certificate=files))
    await orchestrator.start()
    port = int(orchestrator.http_url.split(":")[-1])
    shown = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))
    assert shown.encode() == papers.certificate
    with pytest.raises(TrustError, match=r"is not where machines join .* join at 127.0.0.1:7337, unless"):
        await fetch_certificate("127.0.0.1", port)
    await orchestrator.stop()
    files[0].write_bytes(papers.certificate + papers.key)  # which programs take, too
    orchestrator = Orchestrator(config(tmp_path, http_host="0.0.0.0", certificate=(files[0], files[0])))
    await orchestrator.start()
    assert orchestrator.api_trust.strip() == papers.certificate.strip(), "the key is nobody else's"
    await orchestrator.stop()
    files[1].write_bytes(b"nothing")
    with pytest.raises(CertificateError, match=r"own.crt and .*own.key are no certificate with its key"):
        await Orchestrator(config(tmp_path, http_host="0.0.0.0", certificate=files)).start()


async def test_who_joins_at_the_port_of_the_page_is_told_where_machines_join(tmp_path: Path) -> None:
    orchestrator = Orchestrator(config(tmp_path))
    await orchestrator.start()
    port = int(orchestrator.http_url.split(":")[-1])
    told = r"is not where machines join \(does not speak TLS\): it may be .* join at 127.0.0.1:7337, unless"
    with pytest.raises(TrustError, match=told):
        await fetch_certificate("127.0.0.1", port)
    await orchestrator.stop()


async def test_bound_to_every_address_it_tells_one_for_other_machines(tmp_path: Path) -> None:
    orchestrator = Orchestrator(config(tmp_path, http_host="0.0.0.0"))
    await orchestrator.start()
    assert orchestrator.http_url.startswith("https://127.0.0.1:")
    if orchestrator.network_url is None:
        pytest.skip("no network")
    url, key = f"{orchestrator.network_url}/v1/models", orchestrator.api_key
    assert await status(url, orchestrator.api_trust, Authorization=f"Bearer {key}") == 200
    assert orchestrator.network_url != orchestrator.http_url
    await orchestrator.stop()


async def test_on_loopback_there_is_no_address_for_other_machines(mesh: Any) -> None:
    assert mesh.orchestrator.network_url is None


async def test_a_given_api_key_is_asked_for_on_loopback_too(tmp_path: Path) -> None:
    orchestrator = Orchestrator(config(tmp_path, api_key="sesame"))
    await orchestrator.start()
    url = f"{orchestrator.http_url}/v1/models"
    assert await status(url) == 401
    assert await status(url, Authorization="Bearer sesame") == 200
    await orchestrator.stop()


async def test_web_pages_cannot_reach_an_open_loopback(mesh: Any) -> None:
    url = f"{mesh.orchestrator.http_url}/v1/models"
    host = mesh.orchestrator.http_url.removeprefix("http://")
    assert await status(url) == 200
    assert await status(url, Host="localhost:1") == 200
    assert await status(url, Host="[::1]") == 200
    assert await status(url, Origin=f"http://{host}") == 200
    for headers in (
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "192.168.0.7"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
    ):
        assert await status(url, **headers) == 403


async def test_a_request_without_a_sensible_host_is_refused(mesh: Any) -> None:
    host, _, port = mesh.orchestrator.http_url.removeprefix("http://").rpartition(":")
    for line in (b"Host: a:b:c\r\n", b"Host: \r\n", b"Host: [\r\n"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /v1/models HTTP/1.1\r\n" + line + b"Connection: close\r\n\r\n")
        answer = (await reader.read()).split(b" ", 2)
        writer.close()
        await writer.wait_closed()
        assert answer[1] == b"403", (line, answer)


async def test_stopping_releases_ranks_and_ends_requests(tmp_path: Path, new_node: Any) -> None:
    orchestrator = Orchestrator(config(tmp_path))
    await orchestrator.start()
    node = new_node()
    await node.join(orchestrator.local_target, orchestrator.join_token)
    async with aiohttp.ClientSession(orchestrator.http_url) as http:
        async with http.post("/api/sessions?wait=ready", json={"model": "bard"}) as response:
            assert response.status == 201

        async def silent(_: object) -> Any:
            await orchestrator.stop()
            return
            yield

        node.answer = silent
        async with http.post("/v1/completions", json={"model": "bard", "prompt": "Hi"}) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (503, "session_closed")
    await node.until(lambda: node.commands[-1].WhichOneof("body") == "release")
    await node.ended()
    await node.leave()
