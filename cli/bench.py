"""`motley bench`: measurements that a user can run. The last line of `--json` output is one JSON object."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

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
    block: Annotated[int, typer.Option(help="Quantisation block: weights per scale.")] = 128,
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


@bench.command(epilog="Example: motley bench collectives --ranks 4 --sizes 8192,65536 --link 0.1ms,1Gbit --json")
def collectives(
    ranks: Annotated[int, typer.Option(min=2, max=16, help="Rank processes to start here.")] = 2,
    sizes: Annotated[str, typer.Option(help="Payloads in bytes, multiples of 4.")] = "8192,16384,65536,1048576",
    op: Annotated[
        str, typer.Option(help="all_reduce, reduce_scatter, all_gather, broadcast, all_to_all.")
    ] = "all_reduce",
    wire: Annotated[str, typer.Option(help="How values travel: fp32, bf16 or int8.")] = "fp32",
    tls: Annotated[bool, typer.Option("--tls", help="Encrypt the links.")] = False,
    link: Annotated[
        str, typer.Option(help="Emulate a network: 0.1ms,1Gbit or 20ms,100Mbit,jitter=2ms,loss=0.1%.")
    ] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Calls to time for each row; fewer where they are slow.")] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Time of collectives between rank processes on this machine: measured, predicted, and gloo's (where torch is)."""
    from motley.bench.collectives import Setup, measure
    from motley.bench.emulator import LinkSpec
    from motley.transport import WireFormat
    from motley.transport.schedule import Operation

    try:
        spec = LinkSpec.parse(link) if link else None
    except ValueError as error:
        raise CliError(f"--link: {error}") from None
    setup = Setup(
        ranks=ranks,
        sizes=parse_sizes(sizes),
        operations=[parse_choice("--op", Operation, name) for name in op.split(",")],
        rounds=rounds,
        tls=tls,
        link=spec,
        wire_format=parse_choice("--wire", WireFormat, wire),
    )
    rows = measure(setup)
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
        return
    network = f", {link}" if link else ""
    for operation in setup.operations:
        cells = [
            [
                *(str(row.bytes), row.algorithm, f"{row.p50_us:.1f}", f"{row.p99_us:.1f}", f"{row.predicted_us:.1f}"),
                f"{row.p50_us / row.predicted_us:.2f}",
                "-" if row.gloo_p50_us is None else f"{row.gloo_p50_us:.1f}",
            ]
            for row in rows
            if row.op == operation
        ]
        columns = ["bytes", "algorithm", "p50 us", "p99 us", "predicted", "ratio", "gloo p50"]
        title = f"{operation}, {ranks} ranks, {wire}, {'TLS' if tls else 'plain'}{network}"
        console.print(table(columns, cells, title=title))


@bench.command(epilog="Example: motley bench precision --ranks 4 --json")
def precision(
    ranks: Annotated[int, typer.Option(min=2, max=16, help="Ranks whose values are summed.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Error that each wire format adds to a sum over ranks."""
    from motley.bench.precision import measure_wire_formats

    rows = measure_wire_formats(ranks)
    if as_json:
        print(json.dumps({"wire_formats": [asdict(row) for row in rows]}))
        return
    columns = ["format", "activations", "mean error", "max error", "bytes per value"]
    cells = [
        [row.format, row.activations, f"{row.mean_error:.2e}", f"{row.max_error:.2e}", f"{row.bytes_per_value:.3f}"]
        for row in rows
    ]
    console.print(table(columns, cells, title=f"all-reduce over {ranks} ranks, relative to the RMS of the sums"))


Choice = TypeVar("Choice", bound=StrEnum)


def parse_choice(option: str, kind: type[Choice], text: str) -> Choice:
    """Read one of the values of `kind`.

    Raises:
        CliError: it is none of them.
    """
    try:
        return kind(text.strip())
    except ValueError:
        raise CliError(f"{option} knows {', '.join(kind)}, not {text!r}") from None


def parse_sizes(text: str) -> list[int]:
    """Read ``8192,65536``.

    Raises:
        CliError: these are no multiples of the size of a float32.
    """
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError:
        raise CliError(f"--sizes wants numbers of bytes like 8192,65536, not {text!r}") from None
    if any(size < 0 or size % 4 for size in sizes):
        raise CliError(f"--sizes wants multiples of 4, the size of a float32, not {text!r}")
    return sizes


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
