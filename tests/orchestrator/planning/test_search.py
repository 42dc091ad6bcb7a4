"""The search among many arrangements: how far it goes down, and what of it is forecast."""

from __future__ import annotations

from collections.abc import Iterator

from motley.orchestrator.planning.choosing.arrangement import Choice, Members
from motley.orchestrator.planning.choosing.search import Descent
from motley.orchestrator.planning.cost import Forecast

TIMES = [9.0, 5.0, 6.0, 4.0, 3.0, 1.0]
"""Of arrangements (0,), (1,), ...: what each takes by the estimate."""


def estimate(one: Members) -> float:
    return TIMES[one[0]]


def neighbours(one: Members) -> Iterator[Members]:
    yield from ((number,) for number in (one[0] - 1, one[0] + 1) if number in range(len(TIMES)))


def choice(number: int, token_s: float) -> Choice:
    return Choice((number,), [], Forecast(token_s, 0.0, 0.0, 0.0))


def met_from(start: int, rounds: int | None = None) -> set[int]:
    """Which arrangements are met from a beginning."""
    met: set[int] = set()

    def noted(one: Members) -> float:
        met.update(one)
        return estimate(one)

    Descent[Members](noted).descend([(start,)], 1, neighbours, rounds)
    return met


def test_it_goes_down_as_long_as_it_gets_better() -> None:
    assert met_from(0) == {0, 1, 2}
    assert met_from(2) == {1, 2, 3, 4, 5}
    assert met_from(2, rounds=1) == {1, 2, 3}


def test_it_begins_with_the_best_few() -> None:
    descent = Descent[Members](estimate)
    descent.descend([(0,), (4,), (0,)], 1, neighbours)
    forecast: list[int] = []

    def none_fits(one: Members) -> None:
        forecast.extend(one)

    descent.best(none_fits, 10)
    assert forecast == [5, 4, 3, 0]  # from (0,) it would have met (1,)


def test_the_best_of_those_that_look_best_is_chosen_by_the_forecast() -> None:
    descent = Descent[Members](estimate)
    descent.descend([(0,), (2,)], 2, neighbours)
    real = {5: 3.0, 4: 2.5, 3: 0.5}
    best = descent.best(lambda one: choice(one[0], real[one[0]]), 2)
    assert best is not None
    assert best.members == (4,)  # the third was not looked at
    best = descent.best(lambda one: choice(one[0], 0.5) if one == (3,) else None, 1)
    assert best is not None
    assert best.members == (3,)  # more are looked at while none is possible
    assert descent.best(lambda one: choice(one[0], 1.0), 2, bound=1.0) is None


def test_what_is_estimated_to_take_much_longer_is_not_forecast() -> None:
    descent = Descent[Members](estimate)
    descent.descend([(0,), (2,)], 2, neighbours)
    forecast: list[int] = []

    def noted(one: Members) -> Choice:
        forecast.extend(one)
        return choice(one[0], 2.5)

    descent.best(noted, 6)
    assert forecast == [5, 4]  # 3.0 may be less than 2.5, 4.0 is not


def test_the_best_of_each_size_is_forecast_first() -> None:
    descent = Descent[Members](lambda one: {(0, 1): 1.0, (0, 2): 1.1, (0, 3): 1.2, (4,): 1.22}[one])
    descent.descend([(0, 1), (0, 2), (0, 3), (4,)], 4, lambda _: ())
    real = {(0, 1): 1.2, (0, 2): 1.0, (0, 3): 1.0, (4,): 1.0}
    best = descent.best(lambda one: Choice(one, [], Forecast(real[one], 0.0, 0.0, 0.0)), 2)
    assert best is not None
    assert best.members == (4,)
