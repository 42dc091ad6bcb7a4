"""`motley bench synth`: a model folder of a real shape with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from motley.cli.commands.bench.options import parse_shape
from motley.cli.errors import CliError
from motley.cli.shown.show import console, loading_bars

SYNTH_EXAMPLE = "Example: motley bench synth --like tinyllama-1.1b --out ./tinyllama"


def synth(
    out: Annotated[Path | None, typer.Option(help="Folder to write; must be new or empty.")] = None,
    like: Annotated[str, typer.Option(help="A known shape; see --list.")] = "",
    config: Annotated[Path | None, typer.Option(help="A config.json to take the shape from instead.")] = None,
    dtype: Annotated[str, typer.Option(help="float16 or bfloat16.")] = "float16",
    seed: Annotated[int, typer.Option(help="Equal seeds write equal files.")] = 0,
    list_shapes: Annotated[bool, typer.Option("--list", help="List the known shapes and exit.")] = False,
) -> None:
    """Write a model folder of a real shape with random weights."""
    from motley.bench.random_models.writing import synthesise
    from motley.orchestrator.known_models.shapes import SHAPES

    if list_shapes:
        print("\n".join(SHAPES))
        return
    if out is None:
        raise CliError("say where to write the model: --out FOLDER")
    shape = parse_shape(like, config)
    with loading_bars("writing") as progress:
        synthesise(shape, out, dtype, seed, lambda done, total: progress.advance_to(0, done, total))
    console.print(f"wrote {out}")
