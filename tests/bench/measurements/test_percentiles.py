from __future__ import annotations

import pytest

from motley.bench.measurements.percentiles import percentiles


def test_percentiles_are_told_to_the_microsecond() -> None:
    times = [number / 7 for number in range(1, 102)]  # the 51st of them is the median, the 96th has 95 below it
    assert percentiles(times) == {"p50": 7.286, "p95": 13.714, "p99": 14.286}
    assert percentiles(times, (50,)) == {"p50": 7.286}


@pytest.mark.parametrize("percents", [(50, 99), (50, 95, 99)])
def test_one_time_is_every_percentile_and_none_has_none(percents: tuple[int, ...]) -> None:
    assert percentiles([12.3456], percents) == {f"p{percent}": 12.346 for percent in percents}
    assert percentiles([], percents) == {}
