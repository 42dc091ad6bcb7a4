"""How long waits spin, by how long they took lately and by what they get of the processor."""

from __future__ import annotations

import pytest

from motley.transport.links import waiting
from motley.transport.links.waiting import CROWDED_SPIN_S, FUTILE_SPIN_S, PARK_S, PROBE_NS, SPIN_S, Patience, Spin

LIMIT_NS = int(SPIN_S * 1e9)


def test_patience_spins_as_long_as_that_is_likely_to_end_a_wait() -> None:
    patience = Patience(outnumbered=False)
    assert (patience.budget_ns, patience.crowded) == (LIMIT_NS, False)
    patience.waited(60 * 10**9)  # once is no habit
    assert patience.budget_ns == LIMIT_NS
    for _ in range(5):
        patience.waited(10 * LIMIT_NS)
    assert patience.budget_ns == FUTILE_SPIN_S * 1e9
    for _ in range(20):
        patience.waited(20_000)
    assert patience.budget_ns == LIMIT_NS


def test_patience_gives_way_where_the_core_is_shared() -> None:
    assert Patience(outnumbered=True).crowded
    assert Patience(outnumbered=True).budget_ns == CROWDED_SPIN_S * 1e9
    patience = Patience(outnumbered=False)
    for _ in range(10):
        patience.spun(100_000, 30_000)
    assert (patience.crowded, patience.budget_ns) == (True, CROWDED_SPIN_S * 1e9)
    for _ in range(30):
        patience.spun(100_000, 100_000)
    assert (patience.crowded, patience.budget_ns) == (False, LIMIT_NS)


def test_a_given_spin_is_kept() -> None:
    patience = Patience(outnumbered=True, spin_s=0.01)
    patience.waited(10**9)
    patience.spun(100, 0)
    assert patience.budget_ns == 10_000_000
    assert Patience(outnumbered=True, spin_s=60.0).budget_ns == PARK_S * 1e9


class Processor:
    """Time on a core of which this thread gets a part, and how often it gave way to others."""

    def __init__(self, part: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1
        self.gave_way = 0
        self._part = part
        monkeypatch.setattr(waiting, "thread_time_ns", lambda: int(self.now * self._part))
        monkeypatch.setattr(waiting, "give_way", self._give_way)

    def wait(self, spin: Spin, nanoseconds: int) -> int:
        """Wait so long, looking every microsecond; returns for how many nanoseconds it spun."""
        began = self.now
        spun = 0
        while self.now < began + nanoseconds:
            self.now += 1000
            if spin.goes_on(self.now, self.now - began):
                spun = self.now - began
        spin.end(self.now, nanoseconds)
        return spun

    def _give_way(self) -> None:
        self.gave_way += 1


def test_a_spin_ends_with_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    processor, spin = Processor(1.0, monkeypatch), Spin(outnumbered=False)
    assert processor.wait(spin, 2 * LIMIT_NS) == pytest.approx(LIMIT_NS, abs=1000)
    assert processor.wait(spin, LIMIT_NS // 2) == LIMIT_NS // 2
    assert not processor.gave_way


def test_a_spin_sees_that_its_core_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    processor, spin = Processor(0.3, monkeypatch), Spin(outnumbered=False)
    for _ in range(10):
        processor.wait(spin, PROBE_NS // 2)  # too short to see anything
    assert not processor.gave_way
    for _ in range(10):
        processor.wait(spin, LIMIT_NS // 2)
    assert processor.gave_way
    assert processor.wait(spin, LIMIT_NS // 2) == pytest.approx(CROWDED_SPIN_S * 1e9, abs=1000)


def test_a_wait_that_says_nothing_about_the_next_one_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    processor, spin = Processor(1.0, monkeypatch), Spin(outnumbered=False)
    for _ in range(10):
        spin.end(processor.now, None)
    assert processor.wait(spin, 2 * LIMIT_NS) == pytest.approx(LIMIT_NS, abs=1000)
