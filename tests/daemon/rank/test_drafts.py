"""Guesses of how a text goes on, and how many are worth their time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.rank.guessing import drafts
from motley.daemon.rank.guessing.drafts import F64, GRAM, HOPELESS, MOST, PROBE, Lookup, Luck, how_many


def numbers(chances: Sequence[Sequence[float]], steps_of: Callable[[F64], F64]) -> list[int]:
    return how_many(chances, lambda least, most: steps_of(np.arange(float(least), most + 1)))[0]


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(0, 9))
def test_a_text_is_guessed_to_go_on_as_after_the_same_tokens_before(text: list[int], most: int) -> None:
    lookup = Lookup()
    for end in range(len(text) + 1):
        known = text[:end]
        guessed = lookup.guess(known, most)
        places = [at for at in range(GRAM, end) if known[at - GRAM : at] == known[-GRAM:]]
        if not places:
            assert guessed == []
            continue
        going_on = known[places[-1] :]
        while len(going_on) < most:
            going_on += going_on
        assert guessed == going_on[:most]


def test_a_long_prompt_is_looked_at_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 131 072 tokens at once it took 0.1 s, for which everybody's step waited."""
    monkeypatch.setattr(drafts, "AT_ONCE", 10)
    lookup, text = Lookup(), [*range(100), 20, 21, 22]
    guessed = [lookup.guess(text, 2) for _ in range(4)]
    assert guessed == [[], [], [23, 24], [23, 24]]


def test_guesses_of_a_repetition_repeat_it() -> None:
    assert Lookup().guess([1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3], 7) == [4, 1, 2, 3, 4, 1, 2]


def test_right_guesses_make_more_of_them_and_wrong_ones_fewer() -> None:
    def steps_of(rows: F64) -> F64:
        return 10.0 + rows

    lucky, unlucky = Luck(), Luck()
    for _ in range(30):
        lucky.tried(right=5, wrong=False)
        unlucky.tried(right=0, wrong=True)
    assert numbers([lucky.worth()], steps_of)[0] > 8
    assert numbers([unlucky.worth()], steps_of)[0] == 0
    assert numbers([lucky.worth(), unlucky.worth()], steps_of)[0] > 5


def test_where_rows_are_dear_nothing_is_guessed() -> None:
    assert numbers([[0.9] * MOST], lambda rows: rows) == [0]
    assert numbers([[0.9] * MOST], np.ones_like) == [MOST]


def test_the_rate_is_of_tokens_in_the_time_of_the_step() -> None:
    assert how_many([[1.0] * 3], lambda least, most: np.full(most - least + 1, 4.1)) == ([3], pytest.approx(4 / 4.1))


def test_an_unlucky_request_gets_a_guess_now_and_then() -> None:
    luck = Luck()
    for _ in range(50):
        luck.tried(right=0, wrong=True)
    tried = [numbers([luck.worth()], lambda rows: 10.0 + rows)[0] for _ in range(3 * PROBE)]
    assert sum(tried) == 3


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8), st.floats(0.0, 5.0))
def test_the_number_of_guesses_is_the_best_one_for_one_request(chances: list[float], slope: float) -> None:
    falling = sorted(chances, reverse=True)

    def rate(count: int) -> float:
        return (1 + sum(hopeful[:count])) / (10 + slope * (1 + count))

    hopeful = [chance for chance in falling if chance >= HOPELESS]
    (count,) = numbers([falling], lambda rows: 10 + slope * rows)
    assert rate(count) == pytest.approx(max(map(rate, range(len(hopeful) + 1))))
