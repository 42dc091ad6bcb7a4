"""A node that waits for an orchestrator says so before it measures its machine, which takes long."""

from __future__ import annotations

import socket

import pytest

from motley.daemon.node import app
from motley.daemon.node.app import DaemonConfig, Observer, run_daemon


class _MeasuringError(Exception):
    pass


class Waiting(Observer):
    """Keeps what it is told of an orchestrator that is not there."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float]] = []

    def waits(self, why: str, retry_s: float, left_s: float) -> None:
        self.told.append((why, left_s))


async def test_it_is_said_at_once_where_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def measuring() -> None:
        raise _MeasuringError

    monkeypatch.setattr(app, "installed_engines", measuring)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        where, observer = f"127.0.0.1:{taken.getsockname()[1]}", Waiting()
        with pytest.raises(_MeasuringError):
            await run_daemon(DaemonConfig(where, f"secret.{'ab' * 32}", wait_s=60.0), observer)
    ((why, left_s),) = observer.told
    assert f"cannot reach an orchestrator at {where}" in why
    assert left_s == 60.0
