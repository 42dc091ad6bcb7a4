"""`motley bench`: measurements that a user can run. The last line of `--json` output is one JSON object."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from motley.cli.commands.bench.adapters import ADAPTERS_EXAMPLE, adapters
from motley.cli.commands.bench.caches import CACHES_EXAMPLE, caches
from motley.cli.commands.bench.chaos import chaos
from motley.cli.commands.bench.device import DEVICE_EXAMPLE, device
from motley.cli.commands.bench.drafts import DRAFTS_EXAMPLE, drafts
from motley.cli.commands.bench.families import FAMILIES_EXAMPLE, families
from motley.cli.commands.bench.forecast import FORECAST_EXAMPLE, forecast
from motley.cli.commands.bench.options import (
    AsJson,
    EngineName,
    Link,
    ModelFolder,
    StageLayers,
    Threads,
    parse_stage_layers,
)
from motley.cli.commands.bench.parts import PARTS_EXAMPLE, parts
from motley.cli.commands.bench.quantisation import QUANTISATION_EXAMPLE, quantisation
from motley.cli.commands.bench.reading import READING_EXAMPLE, reading
from motley.cli.commands.bench.serve import SERVE_EXAMPLE, serve
from motley.cli.commands.bench.tables import (
    show_cache_formats,
    show_drift,
    show_latency,
    show_moe,
    show_sweep,
    show_wire_formats,
)
from motley.cli.commands.bench.throughput import THROUGHPUT_EXAMPLE, throughput
from motley.cli.commands.bench.train import TRAIN_EXAMPLE, train
from motley.cli.errors import CliError
from motley.cli.interrupt import run
from motley.cli.shown.show import console, loading_bars, table
from motley.cli.typed.options import (
    CacheFormats,
    Choice,
    Exact,
    Quant,
    Quantisation,
    parse_counts,
    parse_link,
    parse_shares,
)
from motley.protocol import CACHE_BLOCK

bench = typer.Typer(
    help="Measure this machine and its ranks.",
    epilog="Examples: motley bench synth --like tinyllama-1.1b --out ./tinyllama   "
    "motley bench latency --model ./tinyllama --ranks 1,2",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

LIKE = "mixtral-quarter"
"""The shape that `motley bench moe` measures, if not told otherwise."""


def register(app: typer.Typer) -> None:
    app.add_typer(bench, name="bench")


bench.command(epilog=SERVE_EXAMPLE)(serve)
bench.command(epilog=CACHES_EXAMPLE)(caches)
bench.command(epilog="Example: motley bench chaos --minutes 5 --seed 3 --json")(chaos)
bench.command(epilog=DEVICE_EXAMPLE)(device)
bench.command(epilog=ADAPTERS_EXAMPLE)(adapters)
bench.command(epilog=DRAFTS_EXAMPLE)(drafts)
bench.command(epilog=FAMILIES_EXAMPLE)(families)
bench.command(epilog=FORECAST_EXAMPLE)(forecast)
bench.command(epilog=PARTS_EXAMPLE)(parts)
bench.command(epilog=QUANTISATION_EXAMPLE)(quantisation)
bench.command(epilog=READING_EXAMPLE)(reading)
bench.command(epilog=THROUGHPUT_EXAMPLE)(throughput)
bench.command(epilog=TRAIN_EXAMPLE)(train)


@bench.command(
    epilog="Example: motley bench latency --model ./tinyllama --ranks 1,2 --quant int4,int8 --plot where.png"
)
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


@bench.command(epilog="Example: motley bench moe --nodes 4 --replicas 2 --link 2ms,1Gbit")
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
    as_json: AsJson = False,
) -> None:
    """Time of collectives between rank processes on this machine: measured, predicted, and gloo's (where torch is)."""
    from motley.bench.measurements.speed.collectives import Setup, measure
    from motley.bench.meshes.emulator import LinkSpec
    from motley.transport import WireFormat
    from motley.transport.schedules.schedule import Operation

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


@bench.command(epilog="Example: motley bench precision --model ./tinyllama --ranks 2 --plot drift.png --json")
def precision(
    model: Annotated[
        Path | None, typer.Option(help="Model folder or file, to see how far ranks drift from one process.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=2, max=16, help="Ranks whose values are summed.")] = 2,
    plot: Annotated[Path | None, typer.Option(help="Draw the drift over layers to this PNG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Error that each wire format adds to a sum over ranks; with --model, that ranks add, and narrow caches.

    Ranks add it layer by layer: the model runs in FP32 and in simulated FP16, over ranks and in one process, and in
    float64. Errors are relative to the largest activation of the layer. What caches in fp16 and int8 do to the
    distribution of the next token is held against caches in fp32, as the model reads a text.
    """
    from motley.bench.measurements.accuracy.cache_precision import measure_cache_formats
    from motley.bench.measurements.accuracy.drift import measure_drift
    from motley.bench.measurements.accuracy.precision import measure_wire_formats
    from motley.bench.reports.plots import plot_drift, require_plotting
    from motley.daemon.weights.hub import resolve

    check_output("--plot", plot)
    if plot and model is None:
        raise CliError("--plot draws the drift of a model: give it with --model")
    if plot:
        require_plotting()
    rows = measure_wire_formats(ranks)
    if as_json:
        print(json.dumps({"wire_formats": [asdict(row) for row in rows]}))
    else:
        show_wire_formats(rows, ranks)
    if model is None:
        return
    with console.status("reading") as status:
        folder = resolve(str(model), None)
        drift = measure_drift(folder, ranks, lambda done, total: status.update(f"layer {done} of {total}"))
        caches = measure_cache_formats(folder, lambda done, total: status.update(f"caches: layer {done} of {total}"))
    if plot:
        plot_drift(drift, plot)
    if as_json:
        print(json.dumps({**drift.as_json(), "caches": [asdict(row) for row in caches]}))
    else:
        show_drift(drift)
        show_cache_formats(caches)


@bench.command(epilog="Example: motley bench report --readme docs/benchmarks.md")
def report(
    model: Annotated[
        Path | None,
        typer.Option(help="Model folder or file. Default: TinyLlama-1.1B's shape, synthesised and removed again."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the numbers (JSON) and the picture (PNG).")] = Path(
        "bench/results"
    ),
    readme: Annotated[
        Path | None, typer.Option(help="Rewrite the performance section of this file, between its two markers.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The standard measurements: latency, contexts, exact mode, collectives, precision. Takes about five minutes."""
    from motley.bench.random_models.writing import temporary_model
    from motley.bench.reports.plots import plot_report, require_plotting
    from motley.bench.reports.readme_section import check_markers, findings, rewrite_section
    from motley.bench.reports.standard import SHAPE, Standard, measure_standard, write_json
    from motley.daemon.weights.hub import resolve
    from motley.orchestrator.known_models.shapes import SHAPES

    require_plotting()
    if readme:
        check_markers(readme)
    if model is None:
        console.print(f"writing a model of shape {SHAPE}")
    measured = contextlib.nullcontext(resolve(str(model), None)) if model else temporary_model(SHAPES[SHAPE], SHAPE)
    with measured as folder:
        results = run(measure_standard(folder, Standard(), console.print))
    numbers, picture = write_json(results, out), out / f"{results.name}.png"
    plot_report(results.latency, results.shown, results.drift, picture)
    if readme:
        rewrite_section(readme, results, picture)
    if as_json:
        print(json.dumps(results.as_json()))
    else:
        show_sweep([*results.latency, *results.contexts])
        for finding in findings(results):
            console.print(finding)
        console.print(f"wrote {numbers} and {picture}{f', rewrote {readme}' if readme else ''}")


def parse_choice(option: str, kind: type[Choice], text: str) -> Choice:
    """Read one of the values of `kind`.

    Raises:
        CliError: it is none of them.
    """
    try:
        return kind(text.strip())
    except ValueError:
        raise CliError(f"{option} knows {', '.join(kind)}, not {text!r}") from None


def check_output(option: str, path: Path | None) -> None:
    """Find out before a measurement whether its result has a place.

    Raises:
        CliError: there is no such folder.
    """
    if path is not None and not path.parent.is_dir():
        raise CliError(f"{option}: there is no folder {path.parent}")


def parse_shape(like: str, config: Path | None) -> dict[str, Any]:
    """Find a model's shape, by its name or from a ``config.json``.

    Raises:
        CliError: not one of both was given, there is no such shape, or the file cannot be read.
    """
    from motley.orchestrator.known_models.shapes import SHAPES

    if bool(like) == (config is not None):
        raise CliError("say which shape: either --like NAME or --config FILE")
    if config is None:
        if like not in SHAPES:
            raise CliError(f"no shape is called {like!r}; known: {', '.join(SHAPES)}")
        return SHAPES[like]
    try:
        shape = json.loads(config.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CliError(f"cannot read a model config from {config}: {error}") from error
    if not isinstance(shape, dict):
        raise CliError(f"cannot read a model config from {config}: it is no object")
    return shape


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
