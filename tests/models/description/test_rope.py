"""Rotary tables against the formulas, one number at a time."""

from __future__ import annotations

from math import ceil, cos, floor, log, pi, sin

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.models.description import rope as ropes
from motley.daemon.models.description.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ProportionalScaling,
    Rope,
    RopeScaling,
    YarnScaling,
    rotary_tables,
)

LONG = LongScaling((1.0, 1.0, 1.0, 1.0), (2.0, 3.0, 4.0, 5.0), 32, 1.1)


def test_default_tables() -> None:
    cosines, sines = rotary_tables(Rope(10000.0, 8), positions=5)
    assert cosines.shape == sines.shape == (5, 4)
    assert cosines.dtype == sines.dtype == np.float32
    for position in range(5):
        for pair in range(4):
            angle = position / 10000.0 ** (2 * pair / 8)
            assert cosines[position, pair] == pytest.approx(cos(angle), abs=1e-7)
            assert sines[position, pair] == pytest.approx(sin(angle), abs=1e-7)


def test_far_positions_keep_their_precision() -> None:
    _, sines = rotary_tables(Rope(10000.0, 2), positions=131072)
    assert sines[131071, 0] == pytest.approx(sin(131071.0), abs=1e-7)


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    _, plain = rotary_tables(Rope(500000.0, 128), positions=2)
    _, scaled = rotary_tables(Rope(500000.0, 128, scaling), positions=2)
    blended = 0
    for pair in range(64):
        frequency = 500000.0 ** (-2 * pair / 128)
        wavelength = 2 * pi / frequency
        if wavelength < 8192 / 4.0:
            assert scaled[1, pair] == plain[1, pair]
        elif wavelength > 8192 / 1.0:
            assert scaled[1, pair] == pytest.approx(sin(frequency / 8.0), rel=1e-6)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            expected = (1 - smooth) * frequency / 8.0 + smooth * frequency
            assert scaled[1, pair] == pytest.approx(sin(expected), rel=1e-6)
            blended += 1
    assert blended > 0


def test_linear_is_the_plain_table_at_a_fraction_of_the_position() -> None:
    plain = rotary_tables(Rope(10000.0, 16), positions=25)
    scaled = rotary_tables(Rope(10000.0, 16, LinearScaling(4.0)), positions=97)
    for table, expected in zip(scaled, plain, strict=True):
        assert np.abs(table[::4] - expected).max() < 1e-7


def test_of_proportional_frequencies_only_the_first_turn() -> None:
    plain, part = (rotary_tables(Rope(100.0, 16, scaling), 9) for scaling in (None, ProportionalScaling(3)))
    for table, expected, still in zip(part, plain, (1.0, 0.0), strict=True):
        np.testing.assert_array_equal(table[:, :3], expected[:, :3])
        np.testing.assert_array_equal(table[:, 3:], still)
    slow = rotary_tables(Rope(100.0, 16, ProportionalScaling(8, factor=2.0)), 9)
    for table, expected in zip(slow, plain, strict=True):
        np.testing.assert_allclose(table[::2], expected[:5], atol=1e-7)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_keeps_fast_pairs_and_stretches_slow_ones(truncate: bool) -> None:
    """With the values of Qwen2.5's long contexts."""
    scaling = YarnScaling(4.0, 32768, 32.0, 1.0, truncate, attention_factor=1.25)
    cosines, sines = rotary_tables(Rope(1e6, 128, scaling), positions=2)
    assert np.all(cosines[0] == 1.25)
    low, high = (128 * log(32768 / (turns * 2 * pi)) / (2 * log(1e6)) for turns in (32.0, 1.0))
    if truncate:
        low, high = floor(low), ceil(high)
    blended = 0
    for pair in range(64):
        frequency = 1e6 ** (-2 * pair / 128)
        if pair <= low:
            expected = frequency
        elif pair >= high:
            expected = frequency / 4.0
        else:
            divided = (pair - low) / (high - low)
            expected = divided * frequency / 4.0 + (1 - divided) * frequency
            blended += 1
        assert sines[1, pair] == pytest.approx(1.25 * sin(expected), rel=1e-6)
    assert 0 < blended < 60


@pytest.mark.parametrize(
    ("theta", "scaling", "expected"),
    [
        (1e4, YarnScaling(4.0, 128, 32.0, 1.0, True, 1.0), [0.23717, 0.05, 0.0079057, 0.0025, 0.00079057]),
        # Blended over a range of length zero, over one that ends before it starts, and not from whole pairs:
        (1e4, YarnScaling(4.0, 1024, 32.0, 32.0, False, 1.0), [0.31623, 0.025, 0.0079057, 0.0025, 0.00079057]),
        (1e4, YarnScaling(4.0, 16, 32.0, 16.0, True, 1.0), [0.31623, 0.1, 0.031623, 0.01, 0.0031623]),
        (1e4, YarnScaling(4.0, 100000, 32.0, 1.0, False, 1.0), [0.31623, 0.1, 0.031623, 0.01, 0.0031623, 0.00084885]),
    ],
)
def test_yarn_like_transformers(theta: float, scaling: YarnScaling, expected: list[float]) -> None:
    """The frequencies after the first that transformers 5.23 computes for heads of 16."""
    _, sines = rotary_tables(Rope(theta, 16, scaling), positions=2)
    assert np.arcsin(sines[1, 1 : 1 + len(expected)]) == pytest.approx(expected, rel=1e-4)


@given(scaling=st.sampled_from([None, LinearScaling(4.0), DynamicScaling(4.0, 32), LONG]), prompt=st.integers(0, 80))
def test_prompts_with_the_same_tables_are_known_by_the_shortest_of_them(
    scaling: RopeScaling | None, prompt: int
) -> None:
    rope = Rope(10000.0, 8, scaling)
    tables = rotary_tables(rope, 90, prompt)
    same = rope.same_tables(prompt)
    assert same <= prompt
    np.testing.assert_array_equal(tables, rotary_tables(rope, 90, same))
    if same:
        assert not np.array_equal(tables, rotary_tables(rope, 90, same - 1))


def test_long_tables_are_made_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 all of one would take some times what it takes in the end."""
    for scaling in (None, DynamicScaling(4.0, 32), LONG):
        whole = rotary_tables(Rope(10000.0, 8, scaling), 90, 40)
        with monkeypatch.context() as patch:
            patch.setattr(ropes, "_AT_ONCE", 7)
            np.testing.assert_array_equal(rotary_tables(Rope(10000.0, 8, scaling), 90, 40), whole)
