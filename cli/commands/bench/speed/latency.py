"""`motley bench latency`: time per token, and where it goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from motley.cli.commands.bench.options import (
    AsJson,
    EngineName,
    ModelFolder,
    StageLayers,
    Threads,
    check_output,
    parse_choice,
    parse_stage_layers,
)
from motley.cli.commands.bench.tables import show_latency, show_sweep
from motley.cli.errors import CliError
from motley.cli.interrupt import run
from motley.cli.shown.show import loading_bars
from motley.cli.typed.options import CacheFormats, Exact, Quantisation, parse_counts, parse_link, parse_shares

LATENCY_EXAMPLE = "Example: motley bench latency --model ./tinyllama --ranks 1,2 --quant int4,int8 --plot where.png"


def latency(
    model: ModelFolder,
    ranks: Annotated[str, typer.Option(help="Rank processes to start here, such as 2 or 1,2.")] = "1",
    stages: StageLayers = "",
    shares: Annotated[str, typer.Option(help="Relative shares, one per rank, such as 3,2,1. Default: equal.")] = "",
    quant: Annotated[
        str,
        typer.Option(
            help="How weights are held: stored, fp32, fp16, int8, int4, or several of them.",
            show_default="int4, or as they are quantised",
        ),
    ] = "",
    block: Annotated[int, typer.Option(help="Quantisation block: weights per scale.")] = 128,
    prompt_tokens: Annotated[str, typer.Option(help="Random tokens in the prompt, such as 64 or 100,2000.")] = "64",
    tokens: Annotated[int, typer.Option(min=1, max=4000, help="Tokens to time, after a warm-up of 5.")] = 64,
    link: Annotated[
        list[str] | None,
        typer.Option(help="Emulate a network: 0.1ms,1Gbit or 20ms,100Mbit,jitter=2ms,loss=0.1%; none: this machine's."),
    ] = None,
    threads: Threads = 1,
    engine: EngineName = "onnxruntime",
    cache_format: CacheFormats = None,
    exact: Exact = False,
    csv: Annotated[Path | None, typer.Option(help="Write every token of every rank to this CSV file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw where the time went to this PNG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time per token of a model cut over rank processes on this machine, and where it goes.

    Ranks, quantisations and prompt lengths may be lists, as in 1,2, and links several options:
    every combination is measured, and the JSON of several is {"rows": [...]}.
    """
    from motley.bench.measurements.speed.latency import measure_sweep, write_csv
    from motley.bench.meshes.local_mesh import MeshSpec
    from motley.bench.reports.plots import plot_latency, require_plotting
    from motley.daemon.models.files import open_model
    from motley.daemon.weights.hub import resolve

    staged = parse_stage_layers(stages)
    rank_counts = [sum(own.ranks for own in staged)] if staged else parse_counts("--ranks", ranks, at_most=16)
    prompts = parse_counts("--prompt-tokens", prompt_tokens)
    if shares and len(rank_counts) > 1:
        raise CliError("--shares wants one number of --ranks")
    check_output("--csv", csv)
    check_output("--plot", plot)
    if plot:
        require_plotting()
    folder = resolve(str(model), None)
    with open_model(folder) as opened:
        vocabulary = opened.model.vocabulary
        quantised = any(form.block for form in opened.stored.values())
    default = Quantisation.STORED if quantised else Quantisation.INT4
    quantisations = [parse_choice("--quant", Quantisation, name) for name in (quant or default).split(",")]
    specs = [
        MeshSpec(
            model=folder,
            weights=parse_shares(shares, count) if shares else [1.0] * count,
            quantisation=quantisation,
            block=block,
            context=max(prompts) + tokens + 8,
            cache_format=cache_format or MeshSpec.cache_format,
            engine=engine,
            threads=threads,
            pin=True,
            exact=exact,
            link=network,
            stages=staged,
        )
        for network in map(parse_link, link or ["none"])
        for quantisation in quantisations
        for count in rank_counts
    ]
    with loading_bars() as progress:
        reports = run(measure_sweep(specs, prompts, tokens, vocabulary, progress.advance_to))
    if csv:
        write_csv(reports, csv)
    if plot:
        plot_latency(reports, plot)
    if as_json:
        print(json.dumps(reports[0].as_json() if len(reports) == 1 else {"rows": [row.as_json() for row in reports]}))
    elif len(reports) == 1:
        show_latency(reports[0])
    else:
        show_sweep(reports)
