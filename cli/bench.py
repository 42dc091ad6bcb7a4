"""`motley bench`: measurements that a user can run. The last line of `--json` output is one JSON object."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from motley.cli.errors import CliError
from motley.cli.interrupt import run
from motley.cli.options import Quantisation
from motley.cli.show import console, loading_bars, table

bench = typer.Typer(help="Measure this machine and its ranks.", no_args_is_help=True, rich_markup_mode="rich")


def register(app: typer.Typer) -> None:
    app.add_typer(bench, name="bench")


@bench.command(epilog="Example: motley bench latency --model ./tinyllama --ranks 2 --quant int4 --json")
def latency(
    model: Annotated[Path, typer.Option(help="Model folder (see `motley bench synth`).")],
    ranks: Annotated[int, typer.Option(min=1, max=16, help="Rank processes to start here.")] = 1,
    shares: Annotated[str, typer.Option(help="Relative shares, one per rank, such as 3,2,1. Default: equal.")] = "",
    quant: Annotated[Quantisation, typer.Option(help="How weights are stored.")] = Quantisation.INT4,
    block: Annotated[int, typer.Option(help="Quantisation block: weights per scale.")] = 32,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Random tokens in the prompt.")] = 64,
    tokens: Annotated[int, typer.Option(min=1, max=4000, help="Tokens to time, after a warm-up of 5.")] = 64,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads per rank.")] = 1,
    engine: Annotated[str, typer.Option(help="Engine by name.")] = "onnxruntime",
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Time per token of a model cut over rank processes on this machine, and where it goes."""
    from motley.bench.latency import measure_latency
    from motley.bench.local_mesh import MeshSpec
    from motley.daemon.models.config import read_config
    from motley.daemon.weights.hub import resolve

    weights = parse_shares(shares, ranks) if shares else [1.0] * ranks
    folder = resolve(str(model), None)
    spec = MeshSpec(
        model=folder,
        weights=weights,
        quantisation=quant,
        block=block,
        context=prompt_tokens + tokens + 8,
        engine=engine,
        threads=threads,
        pin=True,
    )
    with loading_bars() as progress:
        vocabulary = read_config(folder).vocabulary
        report = run(measure_latency(spec, prompt_tokens, tokens, vocabulary, progress.advance_to))
    if as_json:
        print(json.dumps(report.as_json()))
        return
    ms = report.ms_per_token
    console.print(
        f"[bold]{ms['p50']:.2f} ms/token[/] p50, {ms['p95']:.2f} p95, {ms['p99']:.2f} p99; first token after "
        f"{report.ttft_ms:.0f} ms ({report.prefill_tokens_per_s:.0f} prompt tokens/s)"
    )
    console.print(
        table(
            ["rank", "attention", "mlp", "vocabulary", "compute ms", "wire ms", "wait ms", "share MB", "peak RSS MB"],
            [
                [
                    str(rank),
                    *(str(report.shares[rank][part]) for part in ("attention", "mlp", "vocabulary")),
                    *(f"{report.per_rank[rank][part]:.2f}" for part in ("compute_ms", "wire_ms", "wait_ms")),
                    f"{report.shard_mb[rank]:.0f}",
                    f"{report.peak_rss_mb[rank]:.0f}",
                ]
                for rank in range(report.ranks)
            ],
        )
    )


@bench.command(epilog="Example: motley bench synth --like tinyllama-1.1b --out ./tinyllama")
def synth(
    out: Annotated[Path | None, typer.Option(help="Folder to write; must be new or empty.")] = None,
    like: Annotated[str, typer.Option(help="A known shape; see --list.")] = "",
    config: Annotated[Path | None, typer.Option(help="A config.json to take the shape from instead.")] = None,
    dtype: Annotated[str, typer.Option(help="float16 or bfloat16.")] = "float16",
    seed: Annotated[int, typer.Option(help="Equal seeds write equal files.")] = 0,
    list_shapes: Annotated[bool, typer.Option("--list", help="List the known shapes and exit.")] = False,
) -> None:
    """Write a model folder of a real shape with random weights."""
    from motley.bench.synth import SHAPES, synthesise

    if list_shapes:
        print("\n".join(SHAPES))
        return
    if out is None:
        raise CliError("say where to write the model: --out FOLDER")
    if bool(like) == (config is not None):
        raise CliError("say which shape: either --like NAME or --config FILE")
    if config is not None:
        try:
            shape = json.loads(config.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise CliError(f"cannot read a model config from {config}: {error}") from error
    elif like in SHAPES:
        shape = SHAPES[like]
    else:
        raise CliError(f"no shape is called {like!r}; known: {', '.join(SHAPES)}")
    with loading_bars("writing") as progress:
        synthesise(shape, out, dtype, seed, lambda done, total: progress.advance_to(0, done, total))
    console.print(f"wrote {out}")


@bench.command(epilog="Example: motley bench collectives --ranks 2 --sizes 8192,65536 --json")
def collectives(
    ranks: Annotated[int, typer.Option(min=2, max=16, help="Rank processes to start here.")] = 2,
    sizes: Annotated[str, typer.Option(help="Payloads in bytes, multiples of 4.")] = "8192,65536,1048576",
    rounds: Annotated[int, typer.Option(min=1, help="All-reduces of each size to time.")] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Time of an all-reduce between rank processes on this machine."""
    from motley.bench.collectives import measure

    try:
        payloads = [int(size) for size in sizes.split(",")]
    except ValueError:
        raise CliError(f"--sizes wants numbers of bytes like 8192,65536, not {sizes!r}") from None
    if any(size < 0 or size % 4 for size in payloads):
        raise CliError(f"--sizes wants multiples of 4, the size of a float32, not {sizes!r}")
    rows = measure(ranks, payloads, rounds)
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
        return
    cells = [[str(row.size_bytes), f"{row.p50_us:.1f}", f"{row.p99_us:.1f}"] for row in rows]
    console.print(table(["bytes", "p50 us", "p99 us"], cells, title=f"all-reduce, {ranks} ranks"))


def parse_shares(text: str, ranks: int | None = None) -> list[float]:
    """Read ``3,2,1``.

    Raises:
        CliError: it is no such list, or not one for each of `ranks`.
    """
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        raise CliError(f"--shares wants numbers like 3,2,1, not {text!r}") from None
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise CliError(f"--shares wants non-negative numbers that are not all zero, not {text!r}")
    if ranks is not None and len(weights) != ranks:
        raise CliError(f"--shares names {len(weights)} shares for {ranks} ranks")
    return weights
