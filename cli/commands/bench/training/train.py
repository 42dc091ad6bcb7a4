"""`motley bench train`: what training takes of memory and time, with each way to spare memory."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from motley.cli.commands.bench.options import AsJson
from motley.cli.errors import CliError
from motley.cli.shown.show import console, counting_bar, results, table

TRAIN_EXAMPLE = "Example: motley bench train --contexts 1024,4096 --json"
RATIO_AT = 4096
"""Tokens of context at which plain LoRA is held against all techniques together."""


def train(
    contexts: Annotated[str, typer.Option(help="Tokens of the example that is trained on.")] = "1024,2048,4096",
    near: Annotated[int, typer.Option(min=1, help="Tokens near to each that is learnt.")] = 1000,
    plot: Annotated[Path | None, typer.Option(help="Draw the peaks to this PNG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Peak memory and time of a training step: LoRA in float32, and each way to spare memory added.

    A random Llama, as deep as Llama 3.2 3B and a 16th as wide; 30 % of the tokens are learnt. Needs the extra `train`,
    and Linux.
    """
    from motley.bench.measurements.training.memory import measure_training, ratio_at
    from motley.bench.reports.plots import plot_training, require_plotting

    if plot:
        require_plotting()

    try:
        lengths = [int(each) for each in contexts.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 2:
        raise CliError(f"--contexts wants numbers of tokens such as 1024,4096, and not {contexts!r}")
    with counting_bar("measured") as told:
        rows = measure_training(lengths, near=near, progress=told)
    if plot:
        plot_training(rows, plot)
    ratio = ratio_at(rows, RATIO_AT)
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in rows], f"ratio_{RATIO_AT}": ratio}))
        return
    cells = [[str(row.context), row.technique, f"{row.peak_mb:.0f}", f"{row.step_s:.2f}"] for row in rows]
    results.print(table(["context", "technique", "peak MB", "s per step"], cells))
    if ratio is not None:
        console.print(f"together {ratio:.1f} x below LoRA in float32 at {RATIO_AT} tokens")
