"""The sizes of steps: every size of prompts is tried and the smallest of the fastest kept; answers wait no longer than
they can bear."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.rank.scheduling.pace import BEARABLE, MIXED, REVISIT, SIZES, TRIES, Pace, Size


def learn(pace: Pace, seconds: Callable[[Size], float], prompts: int, length: int = 1000) -> list[Size]:
    """Compute prompts while nobody is being answered; the steps of the last."""
    sizes: list[Size] = []
    for _ in range(prompts):
        sizes, position = [], 0
        while position < length:
            size = pace.choose(0, length - position, position == 0)
            pace.took(size, 0, position == 0, seconds(size))
            sizes.append(size)
            position += size.rows
    return sizes


def beside(pace: Pace, answers: int, seconds: Callable[[int], float], steps: int = 20) -> int:
    """The rows of a step that computes prompts beside answers, once it is known how long steps take."""
    for _ in range(20):
        pace.took(pace.choose(answers, 0, False), answers, False, seconds(answers))
    for _ in range(steps):
        size = pace.choose(answers, 1000, False)
        pace.took(size, answers, False, seconds(size.rows))
    return pace.choose(answers, 1000, False).rows


@given(
    st.integers(1, 300),
    st.booleans(),
    st.lists(st.floats(1e-6, 1e3), max_size=20),
    st.integers(0, 64),
    st.integers(0, 999),
)
def test_steps_have_all_answers_and_fit(
    max_rows: int, halves: bool, times: list[float], answers: int, prompts: int
) -> None:
    answers = min(answers, max_rows)
    pace = Pace(max_rows, halves)
    for fresh in (True, False):
        for seconds in [*times, 1.0]:
            size = pace.choose(answers, prompts, fresh)
            assert answers <= size.rows <= min(answers + prompts, max_rows)
            assert size.rows > answers or not prompts or answers == max_rows
            assert halves or not size.halved
            pace.took(size, answers, fresh, seconds)


def test_every_size_is_tried_then_the_fastest_is_kept() -> None:
    cost = {64: 1.0, 128: 0.8, 256: 0.9}
    pace = Pace(256, halves=True)
    sizes = learn(pace, lambda size: size.rows * cost[size.rows] * (0.5 if size.halved else 1.0), 6 * TRIES + 1, 256)
    assert sizes == [Size(128, True)] * 2


def test_a_little_slower_is_better_than_to_keep_others_waiting() -> None:
    assert learn(Pace(256, halves=True), lambda size: size.rows + 1.0, 6 * TRIES + 1, 256) == [Size(64)] * 4


def test_the_first_time_is_not_the_last_word() -> None:
    met: set[Size] = set()

    def seconds(size: Size) -> float:
        cold = size not in met
        met.add(size)
        return size.rows * (100.0 if cold and size.rows == 256 else 2.0 if size.rows < 256 else 1.0)

    assert learn(Pace(256, halves=False), seconds, 3 * TRIES + 1, 256) == [Size(256)]


def test_only_steps_that_begin_a_prompt_are_compared() -> None:
    """Later ones attend to more."""
    pace = Pace(256, halves=False)
    for _ in range(50):
        pace.took(Size(64), 0, False, 1e-9)
    learn(pace, lambda size: 1.0, 3 * TRIES, 256)
    assert pace.choose(0, 999, False) == Size(SIZES[-1])


def test_short_prompts_are_one_step() -> None:
    pace = Pace(256, halves=True)
    assert pace.choose(0, 40, True) == Size(40)
    learn(pace, lambda size: 1.0 if size.halved else 2.0, 6 * TRIES, 256)
    assert pace.choose(0, 40, True) == Size(40, True)
    assert pace.choose(0, 20, True) == Size(20)


def test_answers_wait_no_longer_than_they_can_bear() -> None:
    """A step of n rows takes 10 ms and another 1 ms a row: one answer alone 11 ms."""
    assert beside(Pace(256, halves=False), 1, lambda rows: 10 + rows) == max(size for size in MIXED if 10 + size <= 22)


def test_prompts_get_something_however_slow_that_is() -> None:
    assert beside(Pace(256, halves=False), 1, lambda rows: rows**2) == MIXED[0]
    assert beside(Pace(256, halves=False), 20, lambda rows: rows**2) == 64


def test_rows_of_prompts_that_cost_nothing_more_are_taken() -> None:
    """On a GPU a step with a prompt takes ten times as long as one of answers, whatever is in it."""
    assert beside(Pace(256, halves=False), 1, lambda rows: 0.6 if rows == 1 else 5.5 + 0.001 * rows) == 256


def test_what_was_slow_once_is_tried_again_when_answers_have_become_slower() -> None:
    pace = Pace(256, halves=False)
    assert beside(pace, 1, lambda rows: 10 + rows) == 8
    assert beside(pace, 1, lambda rows: 500 + rows, steps=60) == 256
    assert BEARABLE * 501 > 756


def test_one_slow_moment_is_not_the_last_word_on_a_size_of_steps_beside_answers() -> None:
    """The first step of a size is slow as plans are made for it; any other may meet a busy machine."""
    met: dict[int, int] = {}

    def seconds(rows: int) -> float:
        met[rows] = met.get(rows, 0) + 1
        return 1000.0 if rows > 8 and met[rows] in (1, 4) else 10.0

    assert beside(Pace(256, halves=False), 1, seconds, steps=10 * REVISIT) == 256


def answered(pace: Pace, answers: int, seconds: Callable[[Size], float], steps: int) -> list[Size]:
    """The sizes of steps that have answers only."""
    sizes = []
    for _ in range(steps):
        sizes.append(pace.choose(answers, 0, False))
        pace.took(sizes[-1], answers, False, seconds(sizes[-1]), pace.revisits)
    return sizes


def test_answers_are_computed_in_halves_where_that_is_quicker() -> None:
    pace = Pace(256, halves=True)
    assert answered(pace, 8, lambda size: 1.0 if size.halved else 1.5, 50)[-40:] == [Size(8, True)] * 40
    assert answered(pace, 3, lambda size: 2.0 if size.halved else 1.5, 50)[-40:] == [Size(3)] * 40
    assert answered(pace, 1, lambda size: 1.0, 20) == [Size(1)] * 20
    assert answered(Pace(256, halves=False), 8, lambda size: 1.0, 20) == [Size(8)] * 20
    assert pace.seconds(8) == 1.0
    assert pace.seconds(3) == 1.5


def test_the_slower_way_is_tried_again_now_and_then() -> None:
    pace = Pace(256, halves=True)
    answered(pace, 8, lambda size: 2.0 if size.halved else 1.0, 50)
    later = answered(pace, 8, lambda size: 0.1 if size.halved else 1.0, 20 * REVISIT)
    assert later[:100] == [Size(8)] * 100
    assert later[-100:].count(Size(8, True)) >= 99


def test_a_step_that_was_held_up_is_forgotten_when_its_way_is_tried_again() -> None:
    pace = Pace(256, halves=True)

    def seconds(size: Size) -> float:
        return 1.0 if size.halved else 1.3

    answered(pace, 8, seconds, 50)
    held_up = pace.choose(8, 0, False)
    assert held_up.halved
    pace.took(held_up, 8, False, 10 * seconds(held_up))
    later = answered(pace, 8, seconds, 2 * REVISIT)
    assert [size.halved for size in later[REVISIT + 2 :]].count(False) <= 1
