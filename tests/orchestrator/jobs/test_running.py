"""The shell around jobs: what is left to be done after a restart."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from motley.orchestrator.jobs import running
from motley.orchestrator.jobs.deliveries import Deliveries
from motley.orchestrator.jobs.files import pack
from motley.orchestrator.jobs.job import Job, Mode, Papers, Request, State
from motley.orchestrator.jobs.running import Jobs
from motley.orchestrator.mesh.nodes import NodeTable
from motley.orchestrator.serving.errors import refusal


class Adapters:
    """Knows every adapter at once, or refuses all."""

    refuses = False

    async def add(self, session: Any, name: str, source: str, pin: bool) -> Any:
        if self.refuses:
            raise refusal("adapter_not_found", f"no node has {source!r}")
        return SimpleNamespace(name=name)


@pytest.mark.parametrize("refuses", [False, True])
async def test_what_was_to_be_served_is_served_after_a_restart_once_its_session_is_back(
    refuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "TICK_S", 0.01)
    request = Request("letters", "model", Mode.MERGE, "a", ("a",), "0" * 32, serve="letters")
    job = Job("12345678", request, 0.0, {}, lambda session, members: Papers(b"", []), state=State.DONE)
    job.result, job.ended = {"adapter": "/out/adapter"}, 1.0
    (tmp_path / "12345678.json").write_bytes(pack(job))
    sessions: list[Any] = []
    adapters = Adapters()
    adapters.refuses = refuses
    nodes, nothing = NodeTable(time.monotonic), cast(Any, None)
    deliveries = Deliveries(nodes, nothing, nothing, nothing)
    jobs = Jobs(nodes, deliveries, cast(Any, sessions), cast(Any, adapters), time.monotonic, tmp_path)
    (read,) = jobs
    watching = asyncio.create_task(jobs.watch())
    asked = SimpleNamespace(adapters=1, model="model")
    asyncio.get_running_loop().call_later(
        0.05, sessions.append, SimpleNamespace(alive=True, answers=True, name="m", request=asked)
    )
    try:
        async with asyncio.timeout(30):
            while True:
                if not read.is_to_be_served:
                    break
                await asyncio.sleep(0.01)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await jobs.finish()
    assert (read.served_as, read.unserved) == (("", "no node has '/out/adapter'") if refuses else ("m:letters", ""))


def test_an_id_counts_before_a_name(tmp_path: Path) -> None:
    for number, name in (("12345678", "letters"), ("87654321", "12345678")):
        request = Request(name, "model", Mode.MERGE, "a", ("a",), "0" * 32)
        job = Job(number, request, float(number), {}, lambda session, members: Papers(b"", []), state=State.STOPPED)
        (tmp_path / f"{number}.json").write_bytes(pack(job))
    nothing: Any = None
    jobs = Jobs(NodeTable(time.monotonic), nothing, nothing, nothing, time.monotonic, tmp_path)
    assert jobs.find("12345678").id == "12345678"
    assert jobs.find("letters").id == "12345678"
