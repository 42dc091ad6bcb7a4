"""`motley bench parts`: who trains which part of a model, as a linear program against simpler ways."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from motley.cli.commands.bench.options import AsJson
from motley.cli.shown.show import results, table

PARTS_EXAMPLE = "Example: motley bench parts --parts 32 --plot parts.png"
NODES = 1.0, 1.25, 1.5, 2.0, 3.0
"""Nodes that are drawn, in multiples of the parts."""


def parts(
    parts: Annotated[int, typer.Option(min=1, max=256, help="Parts of the model.")] = 32,
    plot: Annotated[Path | None, typer.Option(help="Draw what assignments are worth to this PNG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Affinity of parts and their nodes: the best assignment, a greedy and a random one. Needs the extra `train`."""
    from motley.bench.measurements.training.placement import measure_placement
    from motley.bench.reports.plots import plot_placement, require_plotting

    if plot:
        require_plotting()
    rows = measure_placement(parts, [round(each * parts) for each in NODES])
    if plot:
        plot_placement(rows, plot)
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
        return
    cells = [
        [str(row.nodes), f"{row.best:.3f}", f"{row.greedy:.3f}", f"{row.random:.3f}", f"{row.best_ms:.2f}"]
        for row in rows
    ]
    results.print(table(["nodes", "best", "greedy", "random", "ms for the best"], cells))
