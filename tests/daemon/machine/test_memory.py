"""The speed of this machine's memory."""

from __future__ import annotations

import pytest

from motley.daemon.machine import memory

MIB = 2**20


def test_bandwidth_is_physically_plausible() -> None:
    measured = memory.memory_bandwidth(1, seconds=0.02, size=32 * MIB)
    assert 0.2e9 < measured < 2e12


def test_bandwidth_is_measured_in_the_time_given_and_with_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 4 * MIB)
    assert memory.memory_bandwidth(2, seconds=0) > 0
