"""Rows to experts and back: everything arrives once, and the sum does not depend on how the experts are computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from motley.plugins.mixture import Sent, add_mixture, as_terms, deal


@st.composite
def choices(draw: st.DrawFn) -> Any:
    """i64[T, K]: every row's experts, all different."""
    experts, rows = draw(st.integers(1, 9)), draw(st.integers(1, 12))
    count = draw(st.integers(1, experts))
    return np.array([draw(st.permutations(range(experts)))[:count] for _ in range(rows)], np.int64)


@given(choices())
def test_every_expert_gets_its_rows_once_and_in_order(chosen: Any) -> None:
    sent = deal(chosen)
    assert [own.expert for own in sent] == sorted(set(chosen.ravel().tolist()))
    for own in sent:
        rows, places = np.nonzero(chosen == own.expert)
        assert (own.rows.tolist(), own.places.tolist()) == (rows.tolist(), places.tolist())


@given(choices(), st.integers(0, 2**32 - 1))
def test_an_expert_gets_no_rows_for_which_it_weighs_nothing(chosen: Any, seed: int) -> None:
    weights = np.random.default_rng(seed).integers(0, 2, chosen.shape).astype(np.float32)
    sent = deal(chosen, weights=weights)
    assert [own.expert for own in sent] == sorted(set(chosen[weights != 0].tolist()))
    for own in sent:
        rows, places = np.nonzero((chosen == own.expert) & (weights != 0))
        assert (own.rows.tolist(), own.places.tolist()) == (rows.tolist(), places.tolist())


@given(choices(), st.integers(0, 2**32 - 1))
def test_the_sum_is_over_experts_in_order_wherever_a_row_stands(chosen: Any, seed: int) -> None:
    """The bits of a row that is computed alone, and of the sum as it is written in `motley.plugins.engine`."""
    random = np.random.default_rng(seed)
    x, base = random.standard_normal((2, len(chosen), 5)).astype(np.float32)
    weights = random.random(chosen.shape).astype(np.float32)
    factors = random.standard_normal(chosen.max() + 1).astype(np.float32)

    def compute(x: Any, sent: Sequence[Sent]) -> Iterator[Any]:
        finished = {own.expert: x[own.rows] * factors[own.expert] for own in reversed(sent)}  # in any order
        return iter([finished[own.expert] for own in sent])

    def twice(x: Any, sent: Sequence[Sent]) -> Iterator[Any]:
        return ([result, -result] for result in compute(x, sent))

    total, first, second = base.copy(), base.copy(), -base
    add_mixture([total], x, weights, deal(chosen), as_terms(compute))
    add_mixture([first, second], x, weights, deal(chosen), twice)
    for row, picks in enumerate(chosen):
        alone = base[row].copy()
        for place in np.argsort(picks):
            alone += weights[row, place] * (x[row] * factors[picks[place]])
        np.testing.assert_array_equal(total[row], alone)
    np.testing.assert_array_equal(first, total)
    np.testing.assert_array_equal(second, -total)
