"""`motley bench drafts`: what guessing the next tokens is worth for a text."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from motley.cli.commands.bench.options import AsJson, EngineName, Link, ModelFolder, Ranks, Threads
from motley.cli.errors import CliError
from motley.cli.interrupt import run
from motley.cli.shown.show import console, loading_bars, table
from motley.cli.typed.options import Quant, Quantisation, parse_link
from motley.protocol import OWN_HEAD

DRAFTS_EXAMPLE = "Example: motley bench drafts --model ./tinyllama --prompt notes.txt --link 1ms,1Gbit"


def drafts(
    model: ModelFolder,
    prompt: Annotated[Path, typer.Option(help="A text file to be continued, such as code, or a text with quotes.")],
    draft_model: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="A small model with the same tokenizer that guesses tokens too; or own: the model's own head.",
        ),
    ] = None,
    ranks: Ranks = 2,
    tokens: Annotated[int, typer.Option(min=8, max=4000, help="Tokens of each answer.")] = 128,
    quant: Quant = Quantisation.INT4,
    link: Link = "none",
    threads: Threads = 1,
    engine: EngineName = "onnxruntime",
    as_json: AsJson = False,
) -> None:
    """What guessing the next tokens is worth: the same greedy answer with guesses and without.

    A text that repeats itself, or its prompt, is guessed well. No text depends on it.
    """
    from motley.bench.measurements.speed.drafts import measure_drafts
    from motley.bench.meshes.local_mesh import MeshSpec
    from motley.daemon.models.files import load_tokenizer, open_model
    from motley.daemon.weights.hub import resolve

    folder = resolve(str(model), None)
    try:
        text = prompt.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"--prompt: {prompt} cannot be read as text: {error}") from None
    ids = load_tokenizer(folder).encode(text)
    with open_model(folder) as opened:
        longest = opened.model.context
    if not ids or len(ids) + tokens > longest:
        raise CliError(f"--prompt: {len(ids)} tokens and an answer of {tokens} do not fit this model's {longest}")
    spec = MeshSpec(
        model=folder,
        weights=[1.0] * ranks,
        quantisation=quant,
        context=len(ids) + tokens,
        engine=engine,
        threads=threads,
        pin=True,
        link=parse_link(link),
        draft_model=resolve(draft_model, None) if draft_model and draft_model != OWN_HEAD else None,
        own_head=draft_model == OWN_HEAD,
    )
    with loading_bars() as progress:
        measured = run(measure_drafts(spec, ids, tokens, progress.advance_to))
    if as_json:
        print(json.dumps(asdict(measured)))
        return
    without, guessed = measured.without_tokens_per_s, measured.with_tokens_per_s
    cells = [f"{without:.1f}", f"{guessed:.1f}", f"{guessed / without:.2f}", f"{measured.accepted_per_step:.2f}"]
    console.print(table(["tokens/s without", "with guesses", "x", "right guesses a step"], [cells]))
    console.print(f"the text {'did not change' if measured.same_text else '[red]changed[/]'}")
