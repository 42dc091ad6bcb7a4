"""Nodes that come and go: who is set aside, and for how long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from motley.orchestrator.mesh.flapping import ASIDE_S, TIMES, WITHIN_S, Flapping

from .test_links import Clock


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 700)), max_size=12), st.integers(0, 1500))
def test_who_went_often_lately_is_set_aside_for_a_while(events: list[tuple[str, int]], later: int) -> None:
    clock, gone = Clock(), dict[str, list[float]](a=[], b=[])
    table = Flapping(clock)
    for name, passed in events:
        clock.now += passed
        table.went(name)
        gone[name].append(clock.now)
    clock.now += later
    for name, times in gone.items():
        last = times[-TIMES:]
        flaps = len(last) == TIMES and last[-1] - last[0] <= WITHIN_S
        assert table.aside_s(name) == (max(0, last[-1] + ASIDE_S - clock.now) if flaps else 0)
