"""`motley bench families`: time per token of each family of models, beside what reading its weights takes."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from motley.cli.commands.bench.options import AsJson
from motley.cli.errors import CliError, explain
from motley.cli.interrupt import run
from motley.cli.shown.show import console, counting_bar, results, table
from motley.cli.typed.options import Quant, Quantisation, parse_counts

if TYPE_CHECKING:
    from motley.bench.measurements.speed.families import FamilyRow

PARTS = "compute ms", "wire ms", "wait ms"
FAMILIES_EXAMPLE = "Example: motley bench families --family llama,qwen3_next --ranks 1,2 --json"


def families(
    family: Annotated[
        str, typer.Option(metavar="NAME,...", help="Which families.", show_default="one of each kind of layer")
    ] = "",
    ranks: Annotated[str, typer.Option(help="Rank processes to start here, such as 2 or 1,2.")] = "1,2",
    quant: Quant = Quantisation.INT4,
    tokens: Annotated[int, typer.Option(min=1, max=4000, help="Tokens to time, after a warm-up of 5.")] = 64,
    as_json: AsJson = False,
) -> None:
    """Time per token of each family of models beside the memory's bound: random weights in published widths.

    Layers, experts and words become fewer, until a model fits most machines: 1 to 2 GB on disk while it is measured.
    The bound is what a token reads (weights of chosen experts, caches, states) at the memory's measured speed.
    """
    from motley.bench.measurements.speed.families import REPRESENTATIVES, measure_family

    counts = parse_counts("--ranks", ranks, at_most=16)
    names = family.split(",") if family else [*REPRESENTATIVES]
    if unknown := [name for name in names if name not in REPRESENTATIVES]:
        raise CliError(f"--family: no {unknown[0]!r} is known; there are: {', '.join(REPRESENTATIVES)}")
    rows: list[FamilyRow] = []
    failed: list[str] = []
    done, whole = 0, len(names) * len(counts)
    with counting_bar("measured") as bar:

        def measured() -> None:
            nonlocal done
            done += 1
            bar(done, whole)

        bar(done, whole)
        for name in names:
            try:
                rows += run(measure_family(name, REPRESENTATIVES[name], counts, quant, tokens, measured))
            except Exception as error:  # the others take half an hour, and are not to be lost with it
                if (why := explain(error)) is None:
                    raise
                failed.append(name)
                console.print(f"{name} cannot be measured: {why}", markup=False)
    columns = ["family", "layers", "experts", "ranks", "ms/token", "MB", "GB/s", "bound ms", "ratio", *PARTS]
    cells = [
        [
            row.family,
            str(row.layers),
            str(row.experts or "-"),
            str(row.ranks),
            f"{row.ms_per_token:.2f}",
            f"{row.mb_per_token:.0f}",
            f"{row.bandwidth_gb_s:.1f}",
            f"{row.bound_ms:.2f}",
            f"{row.ratio:.2f}",
            *(f"{part:.2f}" for part in (row.compute_ms, row.wire_ms, row.wait_ms)),
        ]
        for row in rows
    ]
    results.print(table(columns, cells, title=f"{quant}, one thread per rank"))
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
    if failed:
        raise CliError(f"not measured: {', '.join(failed)}")
