"""`motley bench adapters`: what it costs that every request has an adapter of its own."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from motley.cli.commands.bench.options import AsJson, EngineName, Link, ModelFolder, Ranks, Threads
from motley.cli.commands.bench.tables import show_adapters
from motley.cli.interrupt import run
from motley.cli.shown.show import loading_bars
from motley.cli.typed.options import Quant, Quantisation, parse_counts, parse_link
from motley.protocol import CACHE_BLOCK, MAX_ADAPTER_RANK

ADAPTERS_EXAMPLE = "Example: motley bench adapters --model ./tinyllama --ranks 2 --adapters 1,16 --rank 16"


def adapters(
    model: ModelFolder,
    ranks: Ranks = 1,
    adapters: Annotated[str, typer.Option(help="Numbers of requests at once, with one each.")] = "1,4,16,64",
    rank: Annotated[str, typer.Option(help="Ranks of the adapters.")] = "8,16,64",
    quant: Quant = Quantisation.INT4,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Random tokens in each prompt.")] = 16,
    tokens: Annotated[int, typer.Option(min=2, max=4000, help="Tokens of each answer.")] = 64,
    link: Link = "none",
    threads: Threads = 1,
    engine: EngineName = "onnxruntime",
    as_json: AsJson = False,
) -> None:
    """Tokens per second of requests that have an adapter each, and of as many that have none."""
    from motley.bench.measurements.speed.adapters import measure_adapters
    from motley.bench.meshes.local_mesh import MeshSpec
    from motley.daemon.models.files import open_model
    from motley.daemon.weights.hub import resolve

    counts = parse_counts("--adapters", adapters, at_most=64)
    sizes = parse_counts("--rank", rank, at_most=MAX_ADAPTER_RANK)
    folder = resolve(str(model), None)
    with open_model(folder) as opened:
        described = opened.model
    spec = MeshSpec(
        model=folder,
        weights=[1.0] * ranks,
        quantisation=quant,
        context=prompt_tokens + tokens,
        cache_tokens=max(counts) * (prompt_tokens + tokens + CACHE_BLOCK),
        engine=engine,
        threads=threads,
        pin=True,
        link=parse_link(link),
        adapters=max(counts) + 1,
        adapter_rank=max(sizes),
    )
    with loading_bars() as progress, TemporaryDirectory(prefix="motley-adapters-") as place:
        work = measure_adapters(spec, described, counts, sizes, prompt_tokens, tokens, Path(place), progress.advance_to)
        rows = run(work)
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
    else:
        show_adapters(rows)
