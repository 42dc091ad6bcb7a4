"""Telling work that goes on from work that hangs."""

from __future__ import annotations

import pytest

from motley.daemon.loading import progress
from motley.daemon.loading.progress import Watch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_work_that_moves_does_not_hang_however_slow_it_is(clock: list[float]) -> None:
    watch = Watch(5.0)
    for come in range(10):
        assert not watch.hangs(come)
        clock[0] += 4.9
        assert not watch.hangs(come)
    clock[0] += 0.2
    assert watch.hangs(9)
    assert not watch.hangs(10)  # it has gone on after all


def test_without_anything_to_count_all_the_time_counts(clock: list[float]) -> None:
    watch = Watch(5.0)
    clock[0] += 5.0
    assert not watch.hangs()
    clock[0] += 0.1
    assert watch.hangs()
