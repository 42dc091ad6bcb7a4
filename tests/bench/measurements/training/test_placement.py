from __future__ import annotations

import pytest

from motley.bench.measurements.training.placement import measure_placement


def test_the_best_is_worth_more_than_the_others() -> None:
    pytest.importorskip("scipy")
    rows = measure_placement(8, [8, 16])
    assert [row.nodes for row in rows] == [8, 16]
    assert all(row.best > row.greedy > row.random for row in rows)
