"""Faults of the orchestrator's own, which must stay where they are."""

from __future__ import annotations

from typing import Any

import pytest

from motley.orchestrator.control import Control
from motley.orchestrator.mesh.nodes import NodeTable
from motley.orchestrator.sessions.session import Session

MODEL = {"model": "bard"}


async def test_a_fault_in_one_session_ends_that_session_alone(
    mesh: Any, new_node: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = await mesh.join(new_node())
    good, bad = await mesh.serve(name="good", context=10, recover=False), await mesh.serve(name="bad", context=10)
    on_time = Session.on_time

    def fail(self: Session, now: float) -> Any:
        if self.id == bad["id"] and self.alive:
            raise ZeroDivisionError("a bug")
        return on_time(self, now)

    monkeypatch.setattr(Session, "on_time", fail)
    failed = await mesh.session(bad["id"], "failed")
    assert failed["failure"]["code"] == "internal_error"
    assert "ZeroDivisionError: a bug" in failed["failure"]["message"]
    assert len([record for record in caplog.records if record.name == "motley.orchestrator.serving.service"]) == 1
    await mesh.session(good["id"], "ready")
    await node.leave()  # deadlines still pass, and losses are noticed
    await mesh.session(good["id"], "failed")


async def test_a_session_that_cannot_even_end_is_forgotten(
    mesh: Any, new_node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await mesh.join(new_node())
    await mesh.serve()

    def fail(*_: object) -> Any:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Session, "on_time", fail)
    await mesh.poll("/api/sessions", lambda body: body["sessions"] == [])
    monkeypatch.undo()
    await mesh.serve()


@pytest.mark.parametrize("fault", [(Control, "drop_silent"), (NodeTable, "forget")])
async def test_deadlines_are_looked_at_whatever_happens(
    mesh: Any, new_node: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: Any
) -> None:
    silent = await mesh.join(new_node())
    looks = 0

    def fail(*_: object) -> Any:
        nonlocal looks
        looks += 1
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(*fault, fail)
        await mesh.poll("/api/nodes", lambda _: looks == 2)
    assert len([record for record in caplog.records if record.name == "motley.orchestrator.serving.service"]) == 1
    silent.heartbeats = False
    monkeypatch.setattr("motley.orchestrator.mesh.nodes.SILENCE_S", 0.2)
    await mesh.poll("/api/nodes", lambda body: body["nodes"][0]["state"] == "lost")
