"""`motley bench quantisation`: what narrow weights cost."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from motley.cli.commands.bench.options import AsJson
from motley.cli.commands.bench.tables import show_foresight, show_weight_errors
from motley.cli.shown.show import console

QUANTISATION_EXAMPLE = "Example: motley bench quantisation --model ./tinyllama --json"


def quantisation(
    model: Annotated[
        Path | None, typer.Option(help="Model folder or file, to see how well it foresees a text.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Error of weights in int8 and int4; with --model, what that does to how well the model foresees a text."""
    from motley.bench.measurements.accuracy.quantisation import measure_foresight, measure_weight_errors
    from motley.daemon.weights.hub import resolve

    errors, found = measure_weight_errors(), []
    if model is not None:
        with console.status("reading") as status:
            folder = resolve(str(model), None)
            found = measure_foresight(folder, lambda done, total: status.update(f"layer {done} of {total}"))
    if as_json:
        print(json.dumps({"weights": [asdict(row) for row in errors], "text": [asdict(row) for row in found]}))
        return
    show_weight_errors(errors)
    if found:
        show_foresight(found)
