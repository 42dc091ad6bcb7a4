"""Experts in one call: the bits of experts computed one by one, at every level and for any number of threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.plugins.mixture import I64, Sent, add_mixture, as_terms, deal
from motley.plugins.native.library import F32
from motley.plugins.native.matmul import Pool, QuantisedMatrix
from motley.plugins.native.mixture import GatedExpert, GatedExperts
from motley.plugins.native.rows import ANY, bind_gated
from tests.plugins.native.native_levels import LEVELS, assert_same, at_all_levels, at_the_end, normal, set_level

POOLS = {threads: Pool(threads) for threads in (1, 3)}


def matrix(random: np.random.Generator, rows: int, blocks: int, bits: int, more: bool, threads: int) -> QuantisedMatrix:
    """Random codes in blocks of 32, and with `more` zero points and a bias."""
    codes = random.integers(0, 256, (rows, blocks, 4 * bits), np.uint8)
    zeros = random.integers(0, 256, (rows, -(-blocks * bits // 8)), np.uint8)
    scales, bias = normal(random, rows, blocks), normal(random, rows)
    scales /= 64
    pool = POOLS[threads]
    return QuantisedMatrix(codes, scales, zeros if more else None, bias if more else None, bits, 32, pool)


def experts(
    count: int,
    *,
    width: int = 3,
    inner: int = 2,
    bits: int = 4,
    activation: str = "silu",
    limits: tuple[float, float] = ANY,
    threads: int = 1,
) -> list[GatedExpert]:
    """Experts of `width` and `inner` blocks, every second one with zero points and biases."""
    random = np.random.default_rng([count, width, inner, bits])
    return [
        GatedExpert(
            matrix(random, 64 * inner, width, bits, bool(number % 2), threads),
            activation,
            matrix(random, 32 * width, inner, bits, bool(number % 2), threads),
            limits,
        )
        for number in range(count)
    ]


def together(all_experts: Sequence[GatedExpert], x: F32, chosen: I64, weights: F32, base: F32 | None) -> F32:
    total = np.full_like(x, np.nan)
    GatedExperts(all_experts).bind(x, chosen, weights, base, total)()
    return total


def one_by_one(all_experts: Sequence[GatedExpert], x: F32, chosen: I64, weights: F32, base: F32 | None) -> F32:
    """What `motley.plugins.mixture` says."""

    def result(own: Sent) -> F32:
        expert, rows = all_experts[own.expert], np.ascontiguousarray(x[own.rows])
        both = np.empty((len(rows), expert.gate_up.rows), np.float32)
        gated = np.empty((len(rows), expert.down.columns), np.float32)
        y = np.empty_like(rows)
        expert.gate_up.bind(rows, both)()
        bind_gated(both, gated, expert.activation, limits=expert.limits)()
        expert.down.bind(gated, y)()
        return y

    total = np.zeros_like(x) if base is None else base.copy()
    add_mixture([total], x, weights, deal(chosen, weights=weights), as_terms(lambda _, sent: map(result, sent)))
    return total


def choices(random: np.random.Generator, rows: int, count: int, most: int) -> tuple[I64, F32]:
    chosen = np.stack([random.permutation(count)[:most] for _ in range(rows)])
    return chosen, normal(random, rows, most)


@given(
    rows=st.integers(1, 20),
    count=st.integers(1, 9),
    most=st.integers(1, 4),
    width=st.integers(1, 20),
    inner=st.integers(1, 5),
    bits=st.sampled_from((4, 8)),
    activation=st.sampled_from(("silu", "gelu_tanh", "clamped")),
    limits=st.sampled_from((ANY, (0.5, 0.25))),
    based=st.booleans(),
)
def test_the_bits_of_experts_one_by_one(
    rows: int,
    count: int,
    most: int,
    width: int,
    inner: int,
    bits: int,
    activation: str,
    limits: tuple[float, float],
    based: bool,
) -> None:
    random = np.random.default_rng([rows, count, most])
    chosen, weights = choices(random, rows, count, min(most, count))
    x = normal(random, rows, 32 * width)
    base = normal(random, rows, 32 * width) if based else None
    kind: dict[str, Any] = {"width": width, "inner": inner, "bits": bits, "activation": activation, "limits": limits}
    total = at_all_levels(lambda: together(experts(count, **kind), x, chosen, weights, base))
    assert_same(total, one_by_one(experts(count, **kind), x, chosen, weights, base))
    assert_same(total, together(experts(count, threads=3, **kind), x, chosen, weights, base))


@pytest.mark.parametrize("based", [False, True])
def test_experts_that_weigh_nothing_are_not_computed(based: bool) -> None:
    """A row may have none, and an expert no row: what it would make is no number."""
    random = np.random.default_rng(1)
    x, base = normal(random, 3, 96), normal(random, 3, 96) if based else None
    chosen, weights = np.array([[0, 3], [3, 1], [2, 3]]), normal(random, 3, 2)
    weights[chosen == 3] = weights[2] = 0
    codes, scales = np.zeros((128, 3, 16), np.uint8), np.full((128, 3), np.nan, np.float32)
    no_numbers = QuantisedMatrix(codes, scales, None, None, 4, 32, POOLS[1])
    silent = [*experts(3), GatedExpert(no_numbers, "silu", experts(4)[3].down, ANY)]
    total = at_all_levels(lambda: together(silent, x, chosen, weights, base))
    assert_same(total, one_by_one(experts(3), x, chosen % 3, weights, base))
    assert_same(total[2], np.zeros(96, np.float32) if base is None else base[2])


@pytest.mark.parametrize("level", LEVELS)
def test_sums_are_added_where_their_base_is_and_nothing_beyond_operands_is_touched(level: str) -> None:
    random = np.random.default_rng(0)
    x, base = at_the_end(normal(random, 3, 96)), normal(random, 3, 96)
    chosen, weights = choices(random, 3, 5, 2)
    set_level(level)
    expected = together(experts(5), x, chosen, weights, base)
    total = at_the_end(base)
    GatedExperts(experts(5)).bind(x, at_the_end(chosen), at_the_end(weights), total, total)()
    assert_same(total, expected)


def test_calls_find_new_choices_each_time() -> None:
    random = np.random.default_rng(0)
    own, x, total = experts(6), normal(random, 4, 96), np.empty((4, 96), np.float32)
    chosen, weights = choices(random, 4, 6, 3)
    run = GatedExperts(own).bind(x, chosen, weights, None, total)
    for _ in range(5):
        chosen[...], weights[...] = choices(random, 4, 6, 3)
        run()
        assert_same(total, one_by_one(own, x, chosen, weights, None))


@pytest.mark.parametrize("number", [-1, 5])
def test_a_choice_that_is_none_of_the_experts(number: int) -> None:
    x, weights, total = np.ones((2, 96), np.float32), np.ones((2, 3), np.float32), np.zeros((2, 96), np.float32)
    chosen = np.array([[0, 1, 2], [2, number, 0]])
    run = GatedExperts(experts(5)).bind(x, chosen, weights, None, total)
    with pytest.raises(IndexError, match="choice 1 of row 1 is none of the 5 experts"):
        run()
    assert not total.any()
    chosen[1, 1] = 4
    run()
    assert total.any()


def test_experts_that_differ() -> None:
    one, *_ = experts(1)
    for other in (
        experts(1, inner=3),
        experts(1, bits=8),
        experts(1, activation="clamped"),
        experts(1, limits=(1.0, 1.0)),
    ):
        with pytest.raises(ValueError, match="as large, quantised and gated as each other"):
            GatedExperts([one, *other])
    with pytest.raises(ValueError, match="as each other"):
        GatedExperts([])
    with pytest.raises(ValueError, match="128 columns, not twice 96"):
        GatedExperts([GatedExpert(one.gate_up, "silu", experts(1, inner=3)[0].down)])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": np.ones((2, 95), np.float32)}, "x must be float32"),
        ({"chosen": np.zeros((2, 2), np.int32)}, "chosen must be int64"),
        ({"chosen": np.zeros(2, np.int64)}, "x must be float32"),
        ({"weights": np.ones((2, 1), np.float32)}, "weights must be float32"),
        ({"base": np.ones((1, 96), np.float32)}, "base must be float32"),
        ({"total": np.broadcast_to(np.float32(0), (2, 96))}, "total must be writeable"),
    ],
)
def test_operands_that_do_not_fit(wrong: dict[str, npt.NDArray[Any]], message: str) -> None:
    fitting: dict[str, Any] = {
        "x": np.ones((2, 96), np.float32),
        "chosen": np.zeros((2, 2), np.int64),
        "weights": np.ones((2, 2), np.float32),
        "base": None,
        "total": np.zeros((2, 96), np.float32),
    }
    with pytest.raises(ValueError, match=message):
        GatedExperts(experts(2)).bind(**fitting | wrong)
