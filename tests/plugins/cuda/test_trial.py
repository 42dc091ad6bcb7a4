"""Which form of the host step an engine ends with."""

from __future__ import annotations

import pytest

from motley.plugins.cuda.trial import COUNTED, UNTOLD, Trial
from motley.transport.cuda.host_step import HostStep

TURN = UNTOLD + COUNTED


@pytest.mark.parametrize("quickest", [HostStep.MEMORY, HostStep.SPLIT])
def test_the_form_of_the_quickest_step_stays(quickest: HostStep) -> None:
    """Whatever the first steps of a form take, and however long others wait for peers."""
    forms = [HostStep.FUNCTION, HostStep.MEMORY, HostStep.SPLIT]
    trial, had = Trial(forms), []
    for step in range(TURN * len(forms) + 20):
        had.append(trial.form)
        in_turn = step % TURN
        least = 1.0 if trial.form is quickest else 2.0
        changed = trial.took(0.001 if in_turn < UNTOLD else least if in_turn == UNTOLD else 9.0)
        assert changed == (trial.form is not had[-1])
    assert had[: TURN * len(forms)] == [form for form in forms for _ in range(TURN)]
    assert set(had[TURN * len(forms) :]) == {quickest}
    assert trial.least_s == {form: 1.0 if form is quickest else 2.0 for form in forms}


def test_one_form_is_not_tried() -> None:
    trial = Trial([HostStep.SPLIT])
    assert not any(trial.took(1.0) for _ in range(100))
    assert (trial.form, trial.least_s) == (HostStep.SPLIT, {})
