"""`motley bench forecast`: what the planner says of plans on this machine, beside what they take."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from motley.cli.commands.bench.options import AsJson
from motley.cli.interrupt import run
from motley.cli.shown.show import console, counting_bar, results, table
from motley.cli.typed.options import Quant, Quantisation

if TYPE_CHECKING:
    from motley.bench.measurements.speed.forecast import Compared

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
    as_json: AsJson = False,
) -> None:
    """Forecast plans of 1 to 4 ranks, with parts of cores and emulated networks, run them, and compare.

    What the planner would choose on each set of these machines is run, too, beside the best. Takes about ten minutes on
    a machine that does nothing else, which it must not.
    """
    from motley.bench.measurements.speed.forecast import CASES, SHORT, Forecasts, summary
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
        forecasts = Forecasts(model, quant, prompt_tokens, tokens, vocabulary)
        chosen = run(forecasts.measure(cases, bar))
    rows = forecasts.rows
    told = summary(rows, chosen)
    columns = ["shares", "parts of a core", "link", "predicted", "measured", "off"]
    lines = [
        [
            _plan(row),
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
    columns = ["machines' parts of a core", "link", "chosen", "takes", "best that was run", "takes", "behind"]
    lines = [
        [
            ", ".join(f"{fraction:g}" for fraction in each.fractions),
            each.link or "none",
            _plan(each.plan),
            f"{each.plan.measured_ms:.1f} ms",
            _plan(each.best),
            f"{each.best.measured_ms:.1f} ms",
            f"{100 * each.behind:.0f} %",
        ]
        for each in chosen
    ]
    if chosen:
        results.print(table(columns, lines, title="What the planner chooses"))
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "chosen": [asdict(each) for each in chosen], **told}))


def _plan(row: Compared) -> str:
    least = min(row.shares)
    shares = ":".join(f"{share / least:.3g}" for share in row.shares) if row.ranks > 1 else "one rank"
    return shares + (f" in {len(row.stages)} stages" if row.stages else "")
