"""`motley bench reading`: what those who are being answered notice while somebody's long prompt is read."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from motley.cli.commands.bench.options import AsJson, EngineName, Link, ModelFolder, Ranks, Threads
from motley.cli.errors import CliError
from motley.cli.interrupt import run
from motley.cli.shown.show import console, loading_bars
from motley.cli.typed.options import CacheFormats, Quant, Quantisation, parse_link
from motley.protocol import CACHE_BLOCK
from motley.protocol.wording import counted

READING_EXAMPLE = "Example: motley bench reading --model ./tinyllama --ranks 2 --requests 8 --read 2000"


def reading(
    model: ModelFolder,
    ranks: Ranks = 1,
    requests: Annotated[int, typer.Option(min=1, max=63, help="Requests that are being answered.")] = 8,
    read: Annotated[int, typer.Option(min=1, help="Random tokens in the long prompt that comes meanwhile.")] = 2000,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Random tokens in the prompts of the others.")] = 16,
    tokens: Annotated[
        int, typer.Option(min=8, max=4000, help="Tokens of each answer; they must last until the prompt is read.")
    ] = 400,
    quant: Quant = Quantisation.INT4,
    link: Link = "none",
    threads: Threads = 1,
    engine: EngineName = "onnxruntime",
    cache_format: CacheFormats = None,
    as_json: AsJson = False,
) -> None:
    """How much longer answers wait for their next tokens while a long prompt is read, against when none is."""
    from motley.bench.measurements.speed.reading import measure_reading
    from motley.bench.meshes.local_mesh import MeshSpec
    from motley.daemon.models.files import open_model
    from motley.daemon.weights.hub import resolve

    folder = resolve(str(model), None)
    with open_model(folder) as opened:
        vocabulary, longest = opened.model.vocabulary, opened.model.context
    context = max(prompt_tokens + tokens, read + 1)
    if context > longest:
        raise CliError(
            f"--read {read}, or --prompt-tokens {prompt_tokens} with --tokens {tokens}, is too long for this model: it"
            f" has {longest} tokens of context"
        )
    spec = MeshSpec(
        model=folder,
        weights=[1.0] * ranks,
        quantisation=quant,
        context=context,
        cache_tokens=requests * (prompt_tokens + tokens + CACHE_BLOCK) + read + CACHE_BLOCK,
        cache_format=cache_format or MeshSpec.cache_format,
        engine=engine,
        threads=threads,
        pin=True,
        link=parse_link(link),
    )
    with loading_bars() as progress:
        measured = run(measure_reading(spec, requests, prompt_tokens, tokens, read, vocabulary, progress.advance_to))
    if as_json:
        print(json.dumps(asdict(measured)))
        return
    gap, longer = measured.gap_ms["p99"], measured.gap_while_reading_ms["p99"]
    console.print(
        f"{counted(requests, 'answer')}: p99 gap of [bold]{longer:.1f} ms[/] while {read} tokens are read in"
        f" {measured.read_s:.1f} s, {gap:.1f} ms otherwise: [bold]{measured.x_p99:.2f} x[/]"
    )
