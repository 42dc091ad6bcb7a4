"""`motley bench moe`: experts sliced over nodes against experts as services of nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from motley.cli.commands.bench.options import AsJson, EngineName, Link, parse_shape
from motley.cli.commands.bench.tables import show_moe
from motley.cli.interrupt import run
from motley.cli.shown.show import console, loading_bars
from motley.cli.typed.options import Quant, Quantisation, parse_counts, parse_link
from motley.protocol import CACHE_BLOCK

MOE_EXAMPLE = "Example: motley bench moe --nodes 4 --replicas 2 --link 2ms,1Gbit"

LIKE = "mixtral-quarter"
"""The shape that is measured, if not told otherwise."""


def moe(
    like: Annotated[
        str, typer.Option(help="A known shape with experts; see `motley bench synth --list`.", show_default=LIKE)
    ] = "",
    config: Annotated[Path | None, typer.Option(help="A config.json to take the shape from instead.")] = None,
    nodes: Annotated[int, typer.Option(min=2, max=15, help="Nodes to act.")] = 4,
    replicas: Annotated[int, typer.Option(min=1, help="Nodes that have each expert. 2 or more: some are lost.")] = 2,
    link: Link = "none",
    requests: Annotated[str, typer.Option(help="Numbers of requests to answer at once.")] = "1,2,4,8",
    quant: Quant = Quantisation.INT4,
    tokens: Annotated[int, typer.Option(min=8, max=4000, help="Tokens of each answer.")] = 48,
    engine: EngineName = "onnxruntime",
    as_json: AsJson = False,
) -> None:
    """Experts sliced over nodes against experts as services of nodes: random weights, a process per rank and host."""
    from motley.bench.measurements.speed.moe import PROMPT, measure_moe
    from motley.bench.meshes.local_mesh import MeshSpec
    from motley.bench.random_models.writing import temporary_model
    from motley.orchestrator.known_models.shapes import SCALED

    counts = parse_counts("--requests", requests, at_most=64)
    like = like if like or config else LIKE
    shape = parse_shape(like, config)
    name = like or "model"
    network = parse_link(link)
    console.print(f"writing {name} with random weights")
    with temporary_model(shape, name) as folder, loading_bars() as progress:
        spec = MeshSpec(
            model=folder,
            quantisation=quant,
            context=PROMPT + tokens + 8,
            cache_tokens=max(counts) * (PROMPT + tokens + CACHE_BLOCK),
            engine=engine,
            link=network,
            cache=folder.parent / "shares",
        )
        measured = measure_moe(
            spec,
            nodes=nodes,
            replicas=replicas,
            requests=counts,
            tokens=tokens,
            vocabulary=shape["vocab_size"],
            scale=SCALED.get(like, f"{like} in full" if like else str(config)),
            progress=progress.advance_to,
        )
        report = run(measured)
    if as_json:
        print(json.dumps(report.as_json()))
    else:
        show_moe(report)
