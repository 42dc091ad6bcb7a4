from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from motley.bench.measurements.training.memory import TrainingRow
from motley.bench.measurements.training.placement import Placed
from motley.bench.reports.plots import (
    DPI,
    PlotError,
    plot_drift,
    plot_latency,
    plot_losses,
    plot_placement,
    plot_report,
    plot_training,
    require_plotting,
)
from motley.protocol.installing import how_to_install
from motley.training.files import Point
from tests.bench.made_reports import DRIFT, latency_report

PICTURES: dict[str, Callable[[Path], None]] = {
    "tokens": lambda path: plot_latency([latency_report(ranks=3)], path),
    "settings": lambda path: plot_latency([latency_report(), latency_report(link="1ms,1Gbit")], path),
    "drift": lambda path: plot_drift(DRIFT, path),
    "losses": lambda path: plot_losses([Point(0, held_out=2.0), Point(1, 2.1), Point(2, 1.9, 1e-4, 1.8)], path),
    "placement": lambda path: plot_placement(
        [Placed(4, 4, 0.9, 0.8, 0.5, 1.0), Placed(8, 4, 0.95, 0.9, 0.5, 1.0)], path
    ),
    "training": lambda path: plot_training(
        [TrainingRow(context, name, 9.0 * context, 1.0) for context in (64, 128) for name in ("lora", "+ int4")], path
    ),
    "report": lambda path: plot_report([latency_report()] * 4, latency_report(), DRIFT, path),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_drawn_without_a_display(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.delenv("DISPLAY", raising=False)
    picture = tmp_path / "picture.png"
    PICTURES[name](picture)
    head = picture.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", head[16:])
    assert 6 * DPI < width < 14 * DPI
    assert 2 * DPI < height < 10 * DPI


def test_no_folder_to_draw_to(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(PlotError, match=r"cannot write .*nowhere.*No such file"):
        plot_drift(DRIFT, tmp_path / "nowhere" / "picture.png")


def test_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotError, match=re.escape(how_to_install("plot"))):
        require_plotting()
