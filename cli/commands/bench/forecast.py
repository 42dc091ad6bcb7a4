"""`motley bench forecast`: what the planner says of plans on this machine, beside what they take."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from motley.cli.interrupt import run
from motley.cli.shown.show import console, counting_bar, results, table
from motley.cli.typed.options import Quant, Quantisation

FORECAST_EXAMPLE = "Example: motley bench forecast --json"
LIKE = "tinyllama-1.1b"
"""The shape that is measured, if no model is given."""


def forecast(
    model: Annotated[
        Path | None, typer.Option(help="Model folder.", show_default=f"random weights like {LIKE}, for this once")
    ] = None,
    quant: Quant = Quantisation.INT4,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Random tokens in the prompt.")] = 64,
    tokens: Annotated[int, typer.Option(min=4, max=1000, help="Tokens to time.")] = 48,
    short: Annotated[bool, typer.Option("--short", help="A few of the plans, in a minute.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Forecast plans of 1 to 4 ranks, with parts of cores and emulated networks, run them, and compare.

    Takes about five minutes on a machine that does nothing else, which it must not.
    """
    from motley.bench.measurements.forecast import CASES, SHORT, measure_forecasts, summary
    from motley.bench.random_models.writing import temporary_model
    from motley.daemon.models.files import open_model
    from motley.orchestrator.known_models.shapes import SHAPES

    with ExitStack() as stack:
        if model is None:
            console.print(f"writing {LIKE} with random weights")
            model = stack.enter_context(temporary_model(SHAPES[LIKE], LIKE))
        with open_model(model) as opened:
            vocabulary = opened.model.vocabulary
        cases = [CASES[number] for number in SHORT] if short else CASES
        bar = stack.enter_context(counting_bar("plans"))
        rows = run(measure_forecasts(model, quant, cases, prompt_tokens, tokens, vocabulary, bar))
    told = summary(rows)
    columns = ["shares", "parts of a core", "link", "predicted", "measured", "off"]
    lines = [
        [
            ":".join(f"{share:g}" for share in row.shares) + (f" in {len(row.stages)} stages" if row.stages else ""),
            ", ".join(f"{fraction:g}" for fraction in row.fractions),
            row.link or "none",
            f"{row.predicted_ms:.1f} ms",
            f"{row.measured_ms:.1f} ms",
            f"{100 * row.off:+.0f} %",
        ]
        for row in rows
    ]
    results.print(table(columns, lines, title="Forecast and measurement"))
    results.print(f"Median off by {100 * told['median_off']:.0f} %, at worst {100 * told['worst_off']:.0f} %")
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in rows], **told}))
