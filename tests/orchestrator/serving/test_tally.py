"""Counting how requests go."""

from __future__ import annotations

import pytest

from motley.orchestrator.serving.answering.tally import Histogram, Outcome, outcome_of


def test_times_are_counted_between_bounds_that_belong_to_what_is_below() -> None:
    histogram = Histogram((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.11, 1.0, 7.0, 8.0):
        histogram.add(seconds)
    assert histogram.counts == [2, 2, 2]
    assert histogram.sum == pytest.approx(16.26)


@pytest.mark.parametrize(
    ("finish", "code", "outcome"),
    [
        ("stop", "", Outcome.ANSWERED),
        ("length", "", Outcome.ANSWERED),
        ("cancelled", "", Outcome.FAILED),  # by the node: no client that has gone is told
        ("error", "context_length_exceeded", Outcome.REFUSED),
        ("", "no_chat_template", Outcome.REFUSED),
        ("error", "peer_lost", Outcome.FAILED),
        ("error", "anything", Outcome.FAILED),
    ],
)
def test_who_is_to_blame_for_an_end(finish: str, code: str, outcome: Outcome) -> None:
    assert outcome_of(finish, code) is outcome
