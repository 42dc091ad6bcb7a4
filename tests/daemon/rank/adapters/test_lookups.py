"""What is looked for beside the steps: what hangs is given up, and keeps nothing else waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from motley.daemon.rank.adapters.lookups import SILENT_S, Alive, Lookups

SOON_S = 30.0


class Disks:
    """Things whose names begin with ``slow`` are found when that is allowed, and never without."""

    def __init__(self) -> None:
        self.now = 0.0
        self.goes_on = threading.Event()
        self.step = threading.Barrier(2)

    def look(self, name: str, alive: Alive) -> str:
        if name == "stepwise":
            for _ in range(3):
                self.step.wait(SOON_S)
                alive()
                self.step.wait(SOON_S)
        if name.startswith("slow"):
            self.goes_on.wait(SOON_S)
        if name == "broken":
            raise ValueError("it is broken")
        return name.upper()


@pytest.fixture(name="disks")
def _disks() -> Iterator[Disks]:
    disks = Disks()
    yield disks
    disks.goes_on.set()


def test_what_is_found_and_what_is_not(disks: Disks) -> None:
    lookups = Lookups(disks.look)
    assert lookups.ask("a", SOON_S) == "A"
    assert lookups.ask("broken", SOON_S) == "it is broken"
    assert lookups.ask("slow", 0.0) is None
    disks.goes_on.set()
    assert lookups.ask("slow", SOON_S) == "SLOW"


def test_what_hangs_is_given_up_and_others_are_found_meanwhile(disks: Disks) -> None:
    lookups = Lookups(disks.look, lambda: disks.now, at_once=2)
    assert lookups.ask("slow", 0.0) is None
    assert lookups.ask("a", SOON_S) == "A"
    disks.now = SILENT_S
    assert "has not answered for 20 s" in str(lookups.ask("slow", 0.0))
    assert lookups.ask("slow 2", 0.0) is None
    assert lookups.ask("a", 0.0) is None, "two are under way"
    disks.now = 2 * SILENT_S
    assert "has not answered" in str(lookups.ask("slow 2", 0.0))
    assert "nothing else is looked for" in str(lookups.ask("a", 0.0))
    disks.goes_on.set()
    for thread in threading.enumerate():
        if thread.name == "adapters":
            thread.join(SOON_S)
    assert lookups.ask("a", SOON_S) == "A", "the disks are back"


def test_what_is_slow_and_gets_on_is_not_given_up(disks: Disks) -> None:
    lookups = Lookups(disks.look, lambda: disks.now)
    for _ in range(3):
        assert lookups.ask("stepwise", 0.0) is None
        disks.now += 0.9 * SILENT_S
        disks.step.wait(SOON_S)
        disks.step.wait(SOON_S)
    assert lookups.ask("stepwise", SOON_S) == "STEPWISE"
