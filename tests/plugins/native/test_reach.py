"""How far ahead products fetch weights: no result depends on it, and the fastest is taken."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from motley.plugins.native import reach as under_test
from motley.plugins.native.library import library
from motley.plugins.native.matmul import Pool, QuantisedMatrix
from motley.plugins.native.reach import LEAST, MOST, PASSES, REACHES, choose_reach
from tests.plugins.native.native_levels import LEVELS, assert_same, at_the_end, set_level


@pytest.fixture
def _usual_reach_again() -> Iterator[None]:
    yield
    set_level(LEVELS[-1])
    for bits in (4, 8):
        library().motley_set_reach(bits, *REACHES[0])


@pytest.mark.usefixtures("_usual_reach_again")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_reach_changes_no_bit_and_may_go_beyond_the_end(bits: int, level: str) -> None:
    random = np.random.default_rng(bits)
    codes = at_the_end(random.integers(0, 256, (70, 5, 128 * bits // 8), np.uint8))
    scales, x = random.standard_normal((70, 5), np.float32), random.standard_normal((3, 640), np.float32)
    set_level(level)
    results = []
    for reach in REACHES:
        library().motley_set_reach(bits, *reach)
        y = np.full((3, 70), np.nan, np.float32)
        QuantisedMatrix(codes, scales, None, None, bits, 128, Pool(1)).bind(x, y)()
        results.append(y)
    for y in results[1:]:
        assert_same(y, results[0])


class Machine:
    """A processor and a clock: what a product takes depends on what was chosen, and on how busy others are."""

    def __init__(self, costs: dict[tuple[int, int], float]) -> None:
        self.costs, self.now, self.reaches, self.products = costs, 0.0, dict[int, tuple[int, int]](), 0

    def motley_set_reach(self, bits: int, far: int, near: int) -> None:
        self.reaches[bits] = far, near

    def perf_counter(self) -> float:
        return self.now

    def product(self) -> None:
        self.products += 1
        busy = 5 if self.products <= 3 * len(REACHES) else 0  # but for the last pass
        self.now += self.costs[self.reaches[4]] + busy * (self.products % 3)


@pytest.mark.parametrize("best", REACHES)
def test_the_fastest_is_taken_once(best: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(dict.fromkeys(REACHES, 2.0) | {best: 1.0})
    monkeypatch.setattr(under_test, "library", lambda: machine)
    monkeypatch.setattr(under_test, "time", SimpleNamespace(perf_counter=machine.perf_counter))
    monkeypatch.setattr(under_test, "_chosen", {})
    choose_reach(4, [(MOST, machine.product), (MOST, lambda: pytest.fail("that is more than is read"))])
    assert machine.reaches == {4: best}
    assert machine.products == PASSES * len(REACHES)
    choose_reach(4, [(MOST, lambda: pytest.fail("it was measured already"))])


def test_few_weights_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "_chosen", {})
    choose_reach(8, [(LEAST - 1, lambda: pytest.fail("it was measured"))])
    choose_reach(8, [])
