"""The pictures: where the milliseconds of a token go, and how precision drifts over layers.

Matplotlib is the optional extra ``plot``, imported when a picture is drawn; nothing needs a display.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from motley.protocol.installing import how_to_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

    from motley.bench.measurements.accuracy.drift import Drift
    from motley.bench.measurements.serving.serve import Served
    from motley.bench.measurements.speed.latency import LatencyReport
    from motley.bench.measurements.training.memory import TrainingRow
    from motley.bench.measurements.training.placement import Placed
    from motley.training.files import Point

COLOURS = {"compute": "#3b6fb6", "wire": "#d1495b", "wait": "#f0c067", "lead": "#c4c4c4"}
MEANINGS = {
    "compute": "compute",
    "wire": "wire: sending and summing",
    "wait": "wait: for other ranks, and latency",
    "lead": "lead: choosing",
}
BOUND = "bound: bytes read / bandwidth"
INK = "#1a1a1a"
FP32, FP16 = "#3b6fb6", "#d1495b"
LEGEND: dict[str, Any] = {"loc": "outside lower center", "fontsize": 8, "frameon": False, "columnspacing": 1.4}
DPI = 150


class PlotError(Exception):
    """A picture cannot be drawn; the message says what is missing."""


def require_plotting() -> None:
    """Find out before a measurement whether its picture can be drawn after it.

    Raises:
        PlotError: matplotlib is not installed.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise PlotError(f"a plot needs matplotlib: {how_to_install('plot')}, or pip install matplotlib") from None


def plot_latency(reports: Sequence[LatencyReport], path: Path) -> None:
    """Draw to a PNG file where the time of tokens went: of one report token by token, of several a bar for each.

    Raises:
        PlotError: matplotlib is missing, or the file cannot be written.
    """
    if len(reports) > 1:
        figure = _figure(9, 1.8 + 0.45 * len(reports))
        draw_settings(figure, reports)
        figure.suptitle(f"{reports[0].model}: where the milliseconds of a token go", fontweight="bold")
    else:
        (report,) = reports
        figure = _figure(9, 1.9 + 1.7 * report.ranks)
        draw_timeline(figure, report)
        figure.suptitle(f"{report.model}, {report.setting}: {_verdict(report)}", fontweight="bold")
    _save(figure, path)


def plot_drift(drift: Drift, path: Path) -> None:
    """Draw to a PNG file how far ranks are from one process after every layer.

    Raises:
        PlotError: matplotlib is missing, or the file cannot be written.
    """
    figure = _figure(8, 4.8)
    draw_drift(figure, drift)
    figure.suptitle(f"{drift.model}: {drift.ranks} ranks against one process", fontweight="bold")
    _save(figure, path)


def plot_served(rows: Sequence[Served], path: Path) -> None:
    """Draw to a PNG file throughput, and what clients wait for, by the rate at which requests come.

    Raises:
        PlotError: matplotlib is missing, or the file cannot be written.
    """
    from matplotlib.ticker import LogLocator

    figure = _figure(10, 4.2)
    throughput, waits = figure.subplots(1, 2)
    rates = [row.rate for row in rows]
    throughput.plot(rates, [row.output_tokens_per_s for row in rows], color=FP32, marker="o")
    throughput.set_ylabel("tokens/s of all answers")
    throughput.set_ylim(bottom=0)
    for name, colour, told in (("first token", FP16, "ttft_ms"), ("gap between tokens", FP32, "gap_ms")):
        for quantile, style in (("p50", "-"), ("p99", ":")):
            heights = [getattr(row, told).get(quantile, math.nan) for row in rows]
            waits.plot(rates, heights, color=colour, linestyle=style, marker="o", label=f"{name}, {quantile}")
    waits.set_ylabel("ms")
    waits.set_yscale("log")
    waits.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    waits.yaxis.set_major_formatter("{x:g}")
    waits.yaxis.set_minor_formatter("")
    for axes in (throughput, waits):
        axes.set_xticks(rates)
        axes.set_xlabel("requests per second")
        axes.grid(alpha=0.3)
        _tidy(axes)
    figure.legend(*waits.get_legend_handles_labels(), ncols=4, **LEGEND)
    figure.suptitle(f"{rows[0].requests} requests at each rate", fontweight="bold")
    _save(figure, path)


def plot_losses(points: Sequence[Point], path: Path) -> None:
    """Draw to a PNG file the losses of a training by step, and those of examples that it did not learn.

    Raises:
        PlotError: matplotlib is missing, or the file cannot be written.
    """
    with _lines(path, "What the adapter has learnt", "step", "loss, nats per token") as axes:
        learnt = [(point.step, point.loss) for point in points if point.loss is not None]
        held_out = [(point.step, point.held_out) for point in points if point.held_out is not None]
        axes.plot(*zip(*learnt, strict=True), color=FP32, linewidth=1, label="what is learnt")
        if held_out:
            axes.plot(*zip(*held_out, strict=True), color=FP16, marker="o", label="held-out")


def plot_placement(rows: Sequence[Placed], path: Path) -> None:
    """Draw to a PNG file what assignments of parts to nodes are worth, by the number of nodes.

    Raises:
        PlotError: matplotlib is missing, or the file cannot be written.
    """
    nodes = [row.nodes for row in rows]
    with _lines(path, f"{rows[0].parts} parts of a model on nodes", "nodes", "affinity per part") as axes:
        for name, colour in (("best", FP32), ("greedy", FP16), ("random", COLOURS["wait"])):
            axes.plot(nodes, [getattr(row, name) for row in rows], color=colour, marker="o", label=name)
        axes.set_xticks(nodes)


def plot_training(rows: Sequence[TrainingRow], path: Path) -> None:
    """Draw to a PNG file how much memory training takes, by the context, with each way to spare it added.

    Raises:
        PlotError: matplotlib is missing, or the file cannot be written.
    """
    title = "What training takes, each way to spare memory added"
    with _lines(path, title, "tokens of context", "peak memory, MB") as axes:
        for technique in dict.fromkeys(row.technique for row in rows):
            own = [(row.context, row.peak_mb) for row in rows if row.technique == technique]
            axes.plot(*zip(*own, strict=True), marker="o", label=technique)
        axes.set_yscale("log")
        axes.set_xticks(list(dict.fromkeys(row.context for row in rows)))


def plot_report(reports: Sequence[LatencyReport], shown: LatencyReport, drift: Drift, path: Path) -> None:
    """Draw the standard measurements to one PNG file: all settings, the tokens of `shown`, and the drift.

    Raises:
        PlotError: matplotlib is missing, or the file cannot be written.
    """
    heights = [1.5 + 0.4 * len(reports), 1.3 + 1.5 * shown.ranks]
    figure = _figure(12, sum(heights))
    rows = figure.add_gridspec(2, 1, height_ratios=heights)
    upper, lower = figure.add_subfigure(rows[0]), figure.add_subfigure(rows[1])
    columns = lower.add_gridspec(1, 2, width_ratios=[1.3, 1])
    left, right = lower.add_subfigure(columns[0]), lower.add_subfigure(columns[1])
    draw_settings(upper, reports)
    upper.suptitle(f"{shown.model}: where the milliseconds of a token go", fontweight="bold")
    draw_timeline(left, shown, legend=False)
    left.suptitle(f"Token by token: {shown.setting}", fontweight="bold")
    draw_drift(right, drift)
    right.suptitle(f"Precision: {drift.ranks} ranks against one process", fontweight="bold")
    _save(figure, path)


# -- parts of pictures ----------------------------------------------------------------------------------------------


@contextmanager
def _lines(path: Path, title: str, x: str, y: str) -> Iterator[Axes]:
    """Axes to draw labelled lines to; when the context ends they are saved as a picture with a legend.

    Args:
        x, y: what is along them.
    """
    figure = _figure(8, 4.2)
    axes = figure.subplots()
    yield axes
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    _tidy(axes)
    figure.legend(ncols=len(axes.lines), **LEGEND)
    figure.suptitle(title, fontweight="bold")
    _save(figure, path)


def draw_settings(figure: FigureBase, reports: Sequence[LatencyReport]) -> None:
    """A bar per setting, from top to bottom: what a mean token is made of, and the bound."""
    axes = figure.subplots()
    rows = np.arange(len(reports))
    left = np.zeros(len(reports))
    for part, widths in _parts([report.mean_parts() for report in reports]).items():
        axes.barh(rows, widths, 0.62, left=left, color=COLOURS[part], label=MEANINGS[part])
        left += widths
    for row, report in enumerate(reports):
        label = BOUND if row == 0 else None
        axes.plot([report.bound_ms] * 2, [row - 0.4, row + 0.4], color=INK, linewidth=2, label=label)
        end = max(left[row], report.bound_ms)
        axes.annotate(_verdict(report), (end, row), (6, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(rows, [report.setting for report in reports])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.5 * max(left.max(), *(report.bound_ms for report in reports)))
    axes.set_xlabel("ms per token, mean over tokens and ranks")
    axes.grid(axis="x", alpha=0.3)
    _tidy(axes)
    figure.legend(ncols=5, **LEGEND)


def draw_timeline(figure: FigureBase, report: LatencyReport, *, legend: bool = True) -> None:
    """A panel per rank: a stacked bar for every token."""
    panels = figure.subplots(report.ranks, 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    tokens = np.arange(1, len(report.timeline.step_ms) + 1)
    for rank, panel in enumerate(panels):
        bottom = np.zeros(len(tokens))
        for part, heights in _parts(report.token_parts(rank)).items():
            panel.bar(tokens, heights, 1.0, bottom=bottom, color=COLOURS[part], label=MEANINGS[part])
            bottom += heights
        panel.axhline(report.bound_ms, color=INK, linewidth=1.2, linestyle="--", label=BOUND)
        means = report.mean_parts(rank)
        mean = ", ".join(f"{part} {means[part]:.1f}" for part in MEANINGS)
        panel.set_title(f"rank {rank}, mean ms: {mean}", fontsize=9, loc="left")
        panel.set_ylabel("ms")
        panel.set_xlim(0.5, len(tokens) + 0.5)
        panel.grid(axis="y", alpha=0.3)
        _tidy(panel)
    # Rare slow tokens are cut off: they would flatten all the others.
    panels[0].set_ylim(0, 1.2 * max(report.ms_per_token["p95"], report.bound_ms))
    panels[-1].set_xlabel("token")
    if legend:
        handles, labels = panels[-1].get_legend_handles_labels()
        figure.legend(handles, labels, ncols=5, **LEGEND)


def draw_drift(figure: FigureBase, drift: Drift) -> None:
    """Errors after every layer, on a logarithmic scale."""
    axes = figure.subplots()
    layers = [layer.layer for layer in drift.layers]
    for name, colour in (("fp16", FP16), ("fp32", FP32)):
        mean, most, exact = (
            [_drawable(getattr(layer, f"{name}_{kind}")) for layer in drift.layers]
            for kind in ("error", "max_error", "float64_error")
        )
        axes.plot(layers, most, color=colour, linewidth=1, alpha=0.6, label=f"{name.upper()}: largest")
        axes.plot(layers, mean, color=colour, marker="o", markersize=4, label=f"{name.upper()}: mean")
        axes.plot(layers, exact, color=colour, linestyle=":", label=f"{name.upper()}: mean, against float64")
        if math.isfinite(mean[-1]):
            place = (layers[-1], mean[-1])
            axes.annotate(f"{mean[-1]:.1e}", place, (0, -14), textcoords="offset points", ha="right", fontsize=9)
    axes.set_yscale("log")
    axes.set_xticks(layers[:: -(-len(layers) // 12)])
    axes.set_xlabel("after layer (FP16 compute is simulated)")
    axes.set_ylabel("error / largest activation")
    axes.grid(alpha=0.3)
    _tidy(axes)
    figure.legend(ncols=2, **LEGEND)


def _parts(rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    return {part: np.array([row[part] for row in rows]) for part in COLOURS}


def _verdict(report: LatencyReport) -> str:
    return f"{report.ms_per_token['p50']:.1f} ms (p50), {report.ratio:.2f} x the bound"


def _drawable(error: float) -> float:
    return error if math.isfinite(error) and error > 0 else math.nan


def _tidy(axes: Axes) -> None:
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _figure(width: float, height: float) -> Figure:
    require_plotting()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path, dpi=DPI, format="png")
    except OSError as error:
        raise PlotError(f"cannot write {path}: {error.strerror or error}") from error
