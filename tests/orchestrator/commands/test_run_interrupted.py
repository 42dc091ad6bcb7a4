"""Ctrl-C while `motley run` waits for a model: what it began is closed, what others began goes on, and it says so."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from motley.orchestrator.serving.lifecycle import Lifecycle
from motley.orchestrator.session_request import SessionRequest
from motley.orchestrator.sessions.session import Session
from motley.protocol.mesh_pb2 import Loading, RankCommand

INTERRUPTED = 130


@asynccontextmanager
async def running(mesh: Any, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A `motley` command against the mesh."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "motley.cli.main", *arguments),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "MOTLEY_URL": mesh.orchestrator.http_url},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def line(process: asyncio.subprocess.Process, word: str) -> str:
    """The next line with a word in it."""
    assert process.stderr is not None
    async with asyncio.timeout(60):
        while said := await process.stderr.readline():
            if word in said.decode():
                return said.decode()
    raise AssertionError(f"{word!r} was not said")


async def interrupted(process: asyncio.subprocess.Process) -> str:
    """What a command still says if it is interrupted; its status is that of an interrupt."""
    process.send_signal(signal.SIGINT)
    async with asyncio.timeout(60):
        _, err = await process.communicate()
    assert process.returncode == INTERRUPTED
    return err.decode()


@pytest.fixture
async def slow(mesh: Any, new_node: Any) -> Any:
    """A node that loads half of a model and no more."""
    node = await mesh.join(new_node())

    async def load_half(command: RankCommand) -> None:
        if command.WhichOneof("body") == "peers":
            await node.event(command, loading=Loading(done_bytes=50, total_bytes=100))
        else:
            await node.obey(command)

    node.on_rank = load_half
    return node


async def test_what_it_began_is_closed(mesh: Any, slow: Any) -> None:
    async with running(mesh, "run", "bard", "Hi") as process:
        await line(process, "pc (rank 0) loading: 50 bytes of 100 bytes")
        assert await interrupted(process) == "closing session 'bard', which is not ready yet\n"
    assert await mesh.call("GET", "/api/sessions") == (200, {"sessions": []})
    assert slow.commands[-1].WhichOneof("body") == "release"


async def test_what_is_still_in_planning_is_given_up(mesh: Any, new_node: Any) -> None:
    node = await mesh.join(new_node())
    asked = asyncio.Event()
    node.on_describe = lambda _: asked.set()
    async with running(mesh, "run", "bard", "Hi") as process:
        async with asyncio.timeout(60):
            await asked.wait()
        await interrupted(process)
    await mesh.poll("/api/sessions", lambda body: not body["sessions"])


async def test_what_was_made_while_its_answer_was_on_its_way_is_told(
    mesh: Any, slow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = asyncio.Event()
    create = Lifecycle.create

    async def create_and_stop_short_of_telling(self: Lifecycle, request: SessionRequest) -> Session:
        await create(self, request)
        made.set()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(Lifecycle, "create", create_and_stop_short_of_telling)
    async with running(mesh, "run", "bard", "Hi") as process:
        async with asyncio.timeout(60):
            await made.wait()
        assert (await interrupted(process)).splitlines()[1:] == [
            "session 'bard' was made already, by this command or another; to end it: `motley stop bard`"
        ]


async def test_what_somebody_else_began_goes_on(mesh: Any, slow: Any) -> None:
    _, session = await mesh.call("POST", "/api/sessions", {"model": "bard"})
    async with running(mesh, "run", "bard", "Hi") as process:
        await line(process, "pc (rank 0) loading: 50 bytes of 100 bytes")
        assert await interrupted(process) == (
            "session 'bard' is not of this command and goes on loading; to end it: `motley stop bard`\n"
        )
    _, listed = await mesh.call("GET", "/api/sessions")
    assert [(each["id"], each["state"]) for each in listed["sessions"]] == [(session["id"], "loading")]


async def test_what_cannot_be_closed_is_told(mesh: Any, slow: Any) -> None:
    async with running(mesh, "run", "bard", "Hi") as process:
        await line(process, "loading: 50 bytes")
        await mesh.orchestrator.stop()
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(60):
            _, err = await process.communicate()
    assert process.returncode in (1, INTERRUPTED)  # it may have noticed by itself
    assert "has gone or cannot be reached any more" in err.decode()
