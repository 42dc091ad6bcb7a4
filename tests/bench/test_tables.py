"""Tables in a narrow terminal: numbers stay whole, paths are cut where they say least."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from motley.bench.drift import Drift, LayerDrift
from motley.cli import bench_tables
from motley.cli.cache import end_of


def test_drift_fits_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(bench_tables, "console", Console(file=out, width=80))
    layer = LayerDrift(21, 1.2e-7, 9.9e-6, 2.3e-7, 4.5e-4, 7.7e-3, 6.7e-4, 1234.5, 67.89)
    bench_tables.show_drift(Drift("a-model-with-a-long-name-1.1b", 2, [layer]))
    row = next(line for line in out.getvalue().splitlines() if "21" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["21", "1.2e-07", "2.3e-07", "4.5e-04", "6.7e-04", "1.23e+03", "67.9"]


def test_the_end_of_a_path_keeps_whole_names() -> None:
    assert end_of("/home/somebody/models/shakespeare-2.6m", 28) == "…/models/shakespeare-2.6m"
    assert end_of("C:\\models\\shakespeare-2.6m", 20) == "…\\shakespeare-2.6m"
    assert end_of("owner/name", 10) == "owner/name"
    assert end_of("shakespeare-2.6m", 5) == "…2.6m"


@given(st.text(max_size=60), st.integers(2, 80))
def test_the_end_of_a_path_fits(path: str, room: int) -> None:
    end = end_of(path, room)
    assert len(end) <= room
    assert path.endswith(end.removeprefix("…"))
