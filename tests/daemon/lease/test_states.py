"""The course of a device that is taken back, whatever happens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.lease.states import DRAIN_S, RESTORE_S, Course, State

DEVICES = ["", "all", "cpu", "gpu:0"]
EVENTS = st.lists(st.tuples(st.sampled_from(DEVICES), st.sets(st.sampled_from(DEVICES[1:])), st.integers(0, 50)))


@given(EVENTS)
def test_it_is_what_leases_and_ranks_say(events: list[tuple[str, set[str], int]]) -> None:
    course, now = Course(), 0
    for wanted, busy, passed in events:
        now += passed
        before, course = course, course.next(wanted, busy.__contains__, now)
        match course.state:
            case State.NORMAL:
                assert (wanted, course.device) == ("", "")
            case State.DRAINING:
                assert course.device == wanted != ""
                assert wanted in busy
            case State.LEASED:
                assert course.device == wanted != ""
                assert wanted not in busy
            case State.RESTORING:
                assert wanted == ""
                assert course.device == before.device
                assert before.state is not State.NORMAL, "there was nothing to give back"
                assert now - course.since < RESTORE_S
        assert course.overdue(now) == (course.state is State.DRAINING and now - course.since >= DRAIN_S)
        assert (course.since == before.since) == (course is before) or passed == 0
        assert course.next(wanted, busy.__contains__, now).state in (course.state, State.NORMAL), "and stays so"
    assert course.next("", lambda _: False, now).next("", lambda _: False, now + RESTORE_S).state is State.NORMAL


def test_a_lease_and_its_end() -> None:
    normal = Course()
    draining = normal.next("gpu:0", lambda _: True, 1.0)
    leased = draining.next("gpu:0", lambda _: False, 3.0)
    restoring = leased.next("", lambda _: False, 9.0)
    assert [each.state for each in (draining, leased, restoring)] == ["draining", "leased", "restoring"]
    assert restoring.next("", lambda device: device == "gpu:0", 10.0).state is State.NORMAL, "a rank is back"
    assert leased.next("gpu:0", lambda _: True, 4.0).state is State.DRAINING, "a rank came all the same"
