"""How many requests a session takes, and when those that it refuses are to come again."""

from __future__ import annotations

import pytest

from motley.orchestrator.serving.answering.places import ENDS, Places


def left(*ends: float) -> Places:
    """Places of which some have become free, at these times."""
    places = Places(len(ends) + 1)
    for _ in ends:
        places.take()
    for end in ends:
        places.leave(end)
    return places


def test_there_are_so_many_places_and_each_serves_again() -> None:
    places = Places(2)
    assert [places.take() for _ in range(3)] == [True, True, False]
    assert places.taken == 2
    places.leave(1.0)
    assert [places.take() for _ in range(2)] == [True, False]


def test_requests_that_come_together_have_places_together_or_not_at_all() -> None:
    places = Places(3)
    places.take()
    assert [places.take(count) for count in (3, 2, 1)] == [False, True, False]
    assert places.taken == 3


@pytest.mark.parametrize(
    ("ends", "wait"),
    [
        ((), 60),
        ((0.0, 4.0, 8.0), 4),
        ((8.0, 9.9), 1),
        ((9.99,), 1),
        ((5.5,), 5),
        ((-51.0, -20.0), 30),
        ((-49.0,), 59),
        ((-100.0, -51.0), 60),
        (tuple(second / 10 for second in range(100)), 1),
    ],
)
def test_whoever_is_refused_is_told_when_a_place_may_be_free(ends: tuple[float, ...], wait: int) -> None:
    assert left(*ends).retry_after(10.0) == wait


def test_the_latest_ends_count() -> None:
    slowly = [3.0 * number for number in range(19)]
    fast = [55.0 + number / ENDS for number in range(ENDS)]
    assert left(*slowly).retry_after(56.0) == 3
    assert left(*slowly, *fast).retry_after(56.0) == 1
