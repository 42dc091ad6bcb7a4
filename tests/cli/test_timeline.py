from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.cli.shown.timeline import BLOCKS, LEVELS, legend, sparkline, stacked_bar

TIMES = st.floats(0, 1e4)


def test_a_bar_shows_the_parts_in_proportion() -> None:
    bar = stacked_bar({"compute": 5.0, "wire": 1.0, "wait": 2.0, "lead": 0.0}, full=10.0, width=20)
    assert bar.plain == "█" * 10 + "▓" * 2 + "▒" * 4
    assert [(span.start, span.end, span.style) for span in bar.spans][:2] == [(0, 10, "blue"), (10, 12, "red")]


@given(st.tuples(TIMES, TIMES, TIMES, TIMES), TIMES, st.integers(1, 80))
def test_a_bar_is_never_longer_than_its_width(parts: tuple[float, ...], full: float, width: int) -> None:
    assert len(stacked_bar(dict(zip(BLOCKS, parts, strict=True)), full, width)) <= width


def test_the_legend_names_every_part() -> None:
    assert legend().plain == "█ compute  ▓ wire  ▒ wait  ░ lead"


@pytest.mark.parametrize(
    ("values", "drawn"), [([], ""), ([0.0], "▁"), ([8.0, 4.0, 0.5], "█▅▁"), ([1, 1, 1, 8, 1, 1], "▂█▂")]
)
def test_a_sparkline_shows_the_peaks(values: list[float], drawn: str) -> None:
    assert sparkline(values, width=3) == drawn


@given(st.lists(TIMES, min_size=1), st.integers(1, 80))
def test_a_sparkline_always_fits(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(width, len(values))
    assert set(line) <= set(LEVELS)
    if max(values) > 0:
        assert LEVELS[-1] in line
