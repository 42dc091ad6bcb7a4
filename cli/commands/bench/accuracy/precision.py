"""`motley bench precision`: what wire formats, ranks and narrow caches add to a model's error."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from motley.cli.commands.bench.options import AsJson, check_output
from motley.cli.commands.bench.tables import show_cache_formats, show_drift, show_products, show_wire_formats
from motley.cli.errors import CliError
from motley.cli.shown.show import console
from motley.cli.typed.options import Activations, ActivationsOption

PRECISION_EXAMPLE = "Example: motley bench precision --model ./tinyllama --ranks 2 --plot drift.png --json"


def precision(
    model: Annotated[
        Path | None, typer.Option(help="Model folder or file, to see how far ranks drift from one process.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=2, max=16, help="Ranks whose values are summed.")] = 2,
    activations: ActivationsOption = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the drift over layers to this PNG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Error that each wire format adds to a sum over ranks; with --model, that ranks add, and narrow caches.

    Ranks add it layer by layer: the model runs in FP32 and in simulated FP16, over ranks and in one process, and in
    float64. Errors are relative to the largest activation of the layer. What caches in fp16 and int8 do to the
    distribution of the next token is held against caches in fp32, as the model reads a text; so is, with
    --activations fp16, what products in fp16 on this machine's graphics card do to it.
    """
    from motley.bench.measurements.accuracy.cache_precision import measure_cache_formats
    from motley.bench.measurements.accuracy.drift import measure_drift
    from motley.bench.measurements.accuracy.precision import measure_wire_formats
    from motley.bench.measurements.accuracy.product_precision import measure_products
    from motley.bench.reports.plots import plot_drift, require_plotting
    from motley.daemon.weights.hub import resolve

    check_output("--plot", plot)
    if plot and model is None:
        raise CliError("--plot draws the drift of a model: give it with --model")
    in_fp16 = activations == Activations.FP16
    if in_fp16 and model is None:
        raise CliError("--activations is about a model: give it with --model")
    if plot:
        require_plotting()
    rows = measure_wire_formats(ranks)
    if as_json:
        print(json.dumps({"wire_formats": [asdict(row) for row in rows]}))
    else:
        show_wire_formats(rows, ranks)
    if model is None:
        return
    with console.status("reading") as status:
        folder = resolve(str(model), None)
        drift = measure_drift(folder, ranks, lambda done, total: status.update(f"layer {done} of {total}"))
        caches = measure_cache_formats(folder, lambda done, total: status.update(f"caches: layer {done} of {total}"))
        moved = None
        if in_fp16:
            moved = measure_products(folder, lambda done, total: status.update(f"products: layer {done} of {total}"))
    if plot:
        plot_drift(drift, plot)
    if as_json:
        also = {"activations": asdict(moved)} if moved else {}
        print(json.dumps({**drift.as_json(), "caches": [asdict(row) for row in caches], **also}))
    else:
        show_drift(drift)
        show_cache_formats(caches)
        if moved:
            show_products(moved)
