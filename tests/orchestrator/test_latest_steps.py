"""Where the time of a rank's latest steps went, as it is told piece by piece."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from motley.orchestrator.workers import LATEST_STEPS, LatestSteps
from motley.protocol.mesh_pb2 import Steps


@given(st.lists(st.tuples(st.integers(0, 300), st.booleans()), max_size=8))
def test_what_is_kept_are_the_last_steps_without_a_gap(pieces: list[tuple[int, bool]]) -> None:
    steps, first, expected = LatestSteps(), 0, list[int]()
    for count, lost in pieces:
        if lost and count:  # steps that nobody was told of
            first, expected = first + 1, []
        numbers = list(range(first, first + count))
        values = {f"{part}_ms": numbers for part in ("compute", "wire", "wait")}
        steps.add(Steps(first=first, **values))
        first += count
        expected = [*expected, *numbers][-LATEST_STEPS:]
        assert steps.compute_ms == steps.wire_ms == steps.wait_ms == expected
        assert not expected or steps.first == expected[0]
