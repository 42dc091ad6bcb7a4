"""Counting rows per expert, under a clock of our own."""

from __future__ import annotations

import numpy as np
import pytest

from motley.orchestrator.experts.loads import HALF_LIFE_S, PRIOR_ROWS, ExpertLoads
from motley.protocol.mesh_pb2 import ExpertLoad, ExpertReport


def report(*loads: tuple[int, list[int]]) -> ExpertReport:
    return ExpertReport(loads=[ExpertLoad(layer=layer, rows=rows) for layer, rows in loads])


@pytest.fixture
def loads() -> ExpertLoads:
    """Layers 1 and 3 have four experts each, of which a token reads two."""
    return ExpertLoads([1, 3], 4, 2)


def test_the_load_is_even_until_measured(loads: ExpertLoads) -> None:
    assert loads.per_token() == pytest.approx(np.full((2, 4), 0.5))


def test_ranks_tell_totals_and_differences_are_added(loads: ExpertLoads) -> None:
    loads.count(0, report((1, [10, 0, 0, 0])), 0)
    loads.count(1, report((1, [0, 5, 0, 0]), (3, [1, 1, 1, 1])), 0)
    loads.count(0, report((1, [30, 0, 2, 0])), 0)
    assert loads.rows.tolist() == [[30, 5, 2, 0], [1, 1, 1, 1]]
    assert loads.fresh == 41


def test_the_measured_load_wins_with_many_rows_and_adds_up_to_the_chosen(loads: ExpertLoads) -> None:
    loads.count(0, report((1, [10**6, 10**6, 0, 0])), 0)
    assert loads.per_token()[0] == pytest.approx([1, 1, 0, 0], abs=1e-3)
    assert loads.per_token().sum(axis=1) == pytest.approx([2, 2])
    few = ExpertLoads([0], 4, 2)
    few.count(0, report((0, [2, 2, 0, 0])), 0)
    assert few.per_token()[0] == pytest.approx([0.5] * 4, abs=0.02)


def test_old_rows_are_forgotten(loads: ExpertLoads) -> None:
    loads.count(0, report((1, [8 * int(PRIOR_ROWS), 0, 0, 0])), 0)
    before = loads.per_token()[0, 0]
    loads.count(0, report(), 3 * HALF_LIFE_S)  # an eighth is left: as much as the prior
    assert loads.per_token()[0, 0] == pytest.approx(2 * (1 + 1 / 4) / 2)
    assert loads.per_token()[0, 0] < before
    assert loads.rows[0, 0] == 8 * PRIOR_ROWS


def test_counts_that_make_no_sense_are_left_out(loads: ExpertLoads) -> None:
    loads.count(0, report((1, [5, 5, 5, 5])), 0)
    loads.count(0, report((2, [1, 1, 1, 1]), (1, [9, 9, 9, 9, 9]), (3, [])), 0)
    loads.count(0, report((1, [2**63, 0, 0, 0]), (3, [2**62, 2**62, 2**62])), 0)
    loads.count(0, report((1, [1, 1, 1, 1])), 0)  # totals never fall
    assert loads.rows.tolist() == [[5, 5, 5, 5], [0, 0, 0, 0]]
    loads.count(0, report((1, [6, 6])), 0)  # the last experts need not be told
    assert loads.rows.tolist() == [[6, 6, 5, 5], [0, 0, 0, 0]]


def test_what_was_counted_lately_is_kept_and_begun_with(loads: ExpertLoads) -> None:
    loads.count(0, report((1, [4000, 4000, 0, 0]), (3, [1, 2, 3, 4])), 0)
    kept = loads.lately()
    assert kept == {1: [4000, 4000, 0, 0], 3: [1, 2, 3, 4]}
    again = ExpertLoads([1, 3], 4, 2)
    again.resume(kept, 10 * HALF_LIFE_S)
    again.count(0, report((1, [8, 0, 0, 0])), 10 * HALF_LIFE_S)
    assert again.per_token()[0] == pytest.approx(loads.per_token()[0], abs=0.01), "it has not aged meanwhile"
    assert again.rows.sum() == again.fresh == 8, "what was counted before is not counted again"


def test_what_was_kept_of_other_experts_is_left_out(loads: ExpertLoads) -> None:
    loads.resume({0: [9, 9, 9, 9], 1: [9000] * 5, 3: [-1, 9000, 9000, 9000]}, 0)
    assert loads.per_token() == pytest.approx(np.full((2, 4), 0.5))
