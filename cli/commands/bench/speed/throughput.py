"""`motley bench throughput`: how many tokens a second several requests get together."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from motley.cli.commands.bench.options import (
    AsJson,
    EngineName,
    Link,
    ModelFolder,
    Ranks,
    StageLayers,
    Threads,
    parse_stage_layers,
)
from motley.cli.commands.bench.tables import show_throughput
from motley.cli.errors import CliError
from motley.cli.interrupt import run
from motley.cli.shown.show import loading_bars
from motley.cli.typed.options import CacheFormats, Exact, Quant, Quantisation, parse_counts, parse_link
from motley.protocol import CACHE_BLOCK

THROUGHPUT_EXAMPLE = "Example: motley bench throughput --model ./tinyllama --ranks 2 --requests 1,2,4,8"


def throughput(
    model: ModelFolder,
    ranks: Ranks = 1,
    stages: StageLayers = "",
    requests: Annotated[str, typer.Option(help="Numbers of requests to answer at once.")] = "1,2,4,8",
    quant: Quant = Quantisation.INT4,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Random tokens in each prompt.")] = 16,
    tokens: Annotated[int, typer.Option(min=2, max=4000, help="Tokens of each answer.")] = 64,
    link: Link = "none",
    threads: Threads = 1,
    engine: EngineName = "onnxruntime",
    cache_format: CacheFormats = None,
    exact: Exact = False,
    temperature: Annotated[
        float, typer.Option(min=0, max=2, help="At which tokens are drawn; 0: the likeliest is taken.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Draw among the likeliest whose probabilities sum up to this.")
    ] = 1.0,
    one_wave: Annotated[
        bool,
        typer.Option("--one-wave", help="Compute no step in halves, one beside the sums of the other: to compare."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Tokens per second of a session that answers several requests at once."""
    from motley.bench.measurements.speed.throughput import measure_throughput
    from motley.bench.meshes.local_mesh import MeshSpec
    from motley.daemon.models.files import open_model
    from motley.daemon.weights.hub import resolve
    from motley.protocol import mesh_pb2 as pb

    if top_p < 1 and not temperature:
        raise CliError("--top-p draws tokens, for which there is no --temperature")
    counts, staged = parse_counts("--requests", requests, at_most=64), parse_stage_layers(stages)
    folder = resolve(str(model), None)
    with open_model(folder) as opened:
        vocabulary = opened.model.vocabulary
    spec = MeshSpec(
        model=folder,
        weights=[1.0] * (sum(own.ranks for own in staged) or ranks),
        quantisation=quant,
        context=prompt_tokens + tokens,
        cache_tokens=max(counts) * (prompt_tokens + tokens + CACHE_BLOCK),
        cache_format=cache_format or MeshSpec.cache_format,
        engine=engine,
        threads=threads,
        pin=True,
        exact=exact,
        link=parse_link(link),
        one_wave=one_wave,
        stages=staged,
    )
    sampling = pb.Sampling(temperature=temperature, top_p=top_p, repetition_penalty=1.0)
    with loading_bars() as progress:
        rows = run(measure_throughput(spec, counts, prompt_tokens, tokens, vocabulary, progress.advance_to, sampling))
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
    else:
        show_throughput(rows)
