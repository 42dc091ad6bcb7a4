"""The mesh that tests share, and no test leaves a process behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from motley.cli.reaching.client import Client
from tests.conftest import SHARED_MESH
from tests.e2e.faces.browsing import chromium
from tests.e2e.processes import START_S, Mesh, MotleyProcess, mesh

if TYPE_CHECKING:
    from playwright.async_api import Browser

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of this folder run in one event loop."""
    for item in items:
        if pytest_asyncio.is_async_test(item) and HERE in item.path.parents:
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def _shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    async with mesh(tmp_path_factory.mktemp("mesh"), "a", "b", "c") as shared:
        yield shared


@pytest_asyncio.fixture(loop_scope="session", params=[SHARED_MESH], ids=str)
async def there(_shared: Mesh) -> AsyncIterator[Mesh]:
    """A mesh of nodes a, b and c for tests that end none of them; sessions and further nodes end with the test."""
    async with Client(_shared.url) as client, asyncio.timeout(START_S):
        await _until_alive(client, "abc")  # one that was lost, on a busy machine, comes back
    yield _shared
    async with Client(_shared.url) as client:
        for session in await client.sessions():
            await client.call("DELETE", f"/api/sessions/{session['id']}")
    for name in _shared.nodes.keys() - set("abc"):
        await _shared.nodes.pop(name).end()
    assert not any(node.workers() for node in _shared.nodes.values()), "a closed session left a worker behind"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as opened:
        yield opened


async def _until_alive(client: Client, names: str) -> None:
    while True:
        nodes = (await client.call("GET", "/api/nodes"))["nodes"]
        if {node["name"] for node in nodes if node["state"] == "alive"} >= set(names):
            return
        await asyncio.sleep(0.1)


@pytest_asyncio.fixture(autouse=True, loop_scope="session")
async def _no_process_left() -> AsyncIterator[None]:
    before = set(MotleyProcess.started)
    yield
    for process in set(MotleyProcess.started) - before:
        await process.kill()
    MotleyProcess.started[:] = before
