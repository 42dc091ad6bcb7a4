"""`motley bench report`: the standard measurements, kept as numbers, a picture and a section of a page."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Annotated

import typer

from motley.cli.commands.bench.options import AsJson
from motley.cli.commands.bench.tables import show_sweep
from motley.cli.interrupt import run
from motley.cli.shown.show import console

REPORT_EXAMPLE = "Example: motley bench report --readme docs/benchmarks.md"


def report(
    model: Annotated[
        Path | None,
        typer.Option(help="Model folder or file. Default: TinyLlama-1.1B's shape, synthesised and removed again."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the numbers (JSON) and the picture (PNG).")] = Path(
        "bench/results"
    ),
    readme: Annotated[
        Path | None, typer.Option(help="Rewrite the performance section of this file, between its two markers.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The standard measurements: latency, contexts, exact mode, collectives, precision. Takes about five minutes."""
    from motley.bench.random_models.writing import temporary_model
    from motley.bench.reports.plots import plot_report, require_plotting
    from motley.bench.reports.readme_section import check_markers, findings, rewrite_section
    from motley.bench.reports.standard import SHAPE, Standard, measure_standard, write_json
    from motley.daemon.weights.hub import resolve
    from motley.orchestrator.known_models.shapes import SHAPES

    require_plotting()
    if readme:
        check_markers(readme)
    if model is None:
        console.print(f"writing a model of shape {SHAPE}")
    measured = contextlib.nullcontext(resolve(str(model), None)) if model else temporary_model(SHAPES[SHAPE], SHAPE)
    with measured as folder:
        results = run(measure_standard(folder, Standard(), console.print))
    numbers, picture = write_json(results, out), out / f"{results.name}.png"
    plot_report(results.latency, results.shown, results.drift, picture)
    if readme:
        rewrite_section(readme, results, picture)
    if as_json:
        print(json.dumps(results.as_json()))
    else:
        show_sweep([*results.latency, *results.contexts])
        for finding in findings(results):
            console.print(finding)
        console.print(f"wrote {numbers} and {picture}{f', rewrote {readme}' if readme else ''}")
