"""`motley bench caches`: what it costs to have a part of a long context on disks or other nodes."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from motley.cli.commands.bench.options import AsJson, EngineName, Link, ModelFolder, Ranks, Threads
from motley.cli.errors import CliError
from motley.cli.interrupt import run
from motley.cli.shown.show import loading_bars, results, table
from motley.cli.typed.options import CacheFormats, Quant, Quantisation, parse_link

CACHES_EXAMPLE = "Example: motley bench caches --model ./tinyllama --ranks 2 --context 2048 --memory 512"


def caches(
    model: ModelFolder,
    ranks: Ranks = 1,
    context: Annotated[int, typer.Option(min=8, help="Tokens of prompt and answer together.")] = 1024,
    memory: Annotated[
        int, typer.Option(min=1, help="Tokens that memory has room for; the others are on the disk of every rank.")
    ] = 256,
    nodes: Annotated[
        int, typer.Option(min=0, help="Tokens of those others that are on other nodes: in processes across --link.")
    ] = 0,
    tokens: Annotated[int, typer.Option(min=2, max=4000, help="Tokens of the answer.")] = 32,
    quant: Quant = Quantisation.INT4,
    link: Link = "none",
    threads: Threads = 1,
    engine: EngineName = "onnxruntime",
    cache_format: CacheFormats = None,
    as_json: AsJson = False,
) -> None:
    """How fast a long context is read and continued with a part of its caches elsewhere, against all in memory."""
    from motley.bench.measurements.speed.far_caches import measure_far_caches
    from motley.bench.meshes.local_mesh import MeshSpec
    from motley.daemon.models.files import open_model
    from motley.daemon.weights.hub import resolve

    folder = resolve(str(model), None)
    with open_model(folder) as opened:
        vocabulary, longest = opened.model.vocabulary, opened.model.context
    if context > longest:
        raise CliError(f"--context {context} is too long for this model: it has {longest} tokens of context")
    if tokens >= context:
        raise CliError(f"--tokens {tokens} leaves no room for a prompt in --context {context}")
    if memory >= context:
        raise CliError(f"--memory {memory} has room for all of --context {context}: nothing would be elsewhere")
    if memory + nodes > context:
        raise CliError(f"--nodes {nodes} are more than --context {context} has beside --memory {memory}")
    spec = MeshSpec(
        model=folder,
        weights=[1.0] * ranks,
        quantisation=quant,
        context=context,
        cache_format=cache_format or MeshSpec.cache_format,
        engine=engine,
        threads=threads,
        pin=True,
        link=parse_link(link),
    )
    with loading_bars() as progress:
        measured = run(measure_far_caches(spec, memory, nodes, tokens, vocabulary, progress.advance_to))
    if as_json:
        print(json.dumps(asdict(measured)))
        return
    rows = [
        [
            *map(str, (own.memory_tokens, own.disk_tokens, own.node_tokens)),
            f"{own.prompt_tokens_per_s:.0f}",
            f"{own.ms_per_token:.2f}",
        ]
        for own in (measured.in_memory, measured.elsewhere)
    ]
    title = f"a context of {context} tokens, {'the same text' if measured.same_text else 'not the same text'}"
    results.print(table(["tokens in memory", "on disks", "on nodes", "prompt tokens/s", "ms/token"], rows, title=title))
