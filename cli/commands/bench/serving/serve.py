"""`motley bench serve`: clients that come at their own pace, to a server that is started here or runs already."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from motley.cli.commands.bench.options import AsJson, Threads
from motley.cli.commands.bench.tables import show_served
from motley.cli.errors import CliError
from motley.cli.interrupt import run
from motley.cli.reaching.client import ApiKey
from motley.cli.shown.show import counting_bar, loading_bars
from motley.cli.typed.options import ENGINES_ON, CacheFormats, CacheTokens, Device, Quant, Quantisation

if TYPE_CHECKING:
    from motley.bench.measurements.serving.serve import Load, Served

SERVE_EXAMPLE = "Example: motley bench serve --model ./tinyllama --ranks 2 --requests 40 --rate 0.5,1,2"


def serve(
    model: Annotated[str, typer.Option(help="Model folder; with --url, the name of a model that is served there.")],
    ranks: Annotated[int, typer.Option(min=1, max=8, help="Daemons to start here.")] = 1,
    url: Annotated[str, typer.Option(help="Measure a server that runs already, of any make, instead.")] = "",
    api_key: ApiKey = "",
    requests: Annotated[int, typer.Option(min=1, max=10000, help="Requests for each rate.")] = 32,
    rate: Annotated[str, typer.Option(help="Requests per second that come, such as 2 or 0.5,1,2.")] = "1",
    prompts: Annotated[
        Path | None, typer.Option(help="A file with a prompt per line, asked in turn. Default: random tokens.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Random tokens in each prompt.")] = 64,
    shared_prefix: Annotated[int, typer.Option(min=0, help="Of these, so many are the same in all prompts.")] = 0,
    vocabulary: Annotated[int, typer.Option(min=1, help="With --url: random tokens are below this.")] = 256,
    tokens: Annotated[int, typer.Option(min=2, max=4000, help="Tokens of each answer.")] = 64,
    quant: Quant = Quantisation.INT4,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prompt and its answer.", show_default="the model's")
    ] = None,
    cache_tokens: CacheTokens = None,
    cache_format: CacheFormats = None,
    threads: Threads = 1,
    plot: Annotated[Path | None, typer.Option(help="Draw throughput and waiting by rate to this PNG file.")] = None,
    as_json: AsJson = False,
) -> None:
    """What clients see of a server when requests come at their own pace: throughput, first tokens, gaps.

    Arrivals are open-loop: nobody waits for another's end. Rates may be a list; the JSON of several is {"rows": [...]}.
    """
    from motley.bench.measurements.serving.serve import Load, random_prompts
    from motley.bench.reports.plots import plot_served, require_plotting

    rates = parse_rates(rate)
    if shared_prefix > prompt_tokens:
        raise CliError(f"--shared-prefix {shared_prefix} is more than --prompt-tokens {prompt_tokens}")
    if plot is not None:
        require_plotting()
    given = read_prompts(prompts) if prompts else None
    if not url:
        from motley.daemon.models.files import open_model
        from motley.daemon.weights.hub import resolve

        folder = resolve(model, None)
        with open_model(folder) as opened:
            vocabulary = opened.model.vocabulary
        model = str(folder)
    asked = given or random_prompts(vocabulary, 1 + requests * len(rates), prompt_tokens, shared_prefix)
    load = Load(model, asked, requests, tokens)
    if url:
        measured = run(_measure_served(url, api_key, load, rates))
    else:
        wanted = {"quantisation": quant, "context": context, "cache_tokens": cache_tokens, "cache_format": cache_format}
        measured = run(_serve_and_measure(ranks, threads, wanted, load, rates))
    if plot is not None:
        plot_served(measured, plot)
    if as_json:
        rows = [asdict(row) for row in measured]
        print(json.dumps({"rows": rows} if len(rows) > 1 else rows[0]))
    else:
        show_served(measured)


async def _serve_and_measure(
    ranks: int, threads: int, wanted: dict[str, Any], load: Load, rates: Sequence[float]
) -> list[Served]:
    """Start daemons here that serve `load.model`, a folder, in equal shares, and measure them."""
    import psutil

    from motley.cli.commands.demo.mesh import mesh_of_processes, node_names

    memory = int(0.9 * psutil.virtual_memory().available) // ranks
    async with mesh_of_processes([memory] * ranks, threads) as mesh:
        body = {"model": load.model, "nodes": node_names(ranks), "shares": [1] * ranks}
        if ranks > 1:  # which are all on this machine, and would share its GPU
            body["engine"] = ENGINES_ON[Device.CPU][0]
        body |= {key: value for key, value in wanted.items() if value is not None}
        with loading_bars() as bars:
            session = await mesh.client.wait_ready(
                await mesh.client.call("POST", "/api/sessions", body), bars.advance_to
            )
        return await _measure_served(mesh.url, "", replace(load, model=session["name"]), rates)


async def _measure_served(url: str, api_key: str, load: Load, rates: Sequence[float]) -> list[Served]:
    from motley.bench.measurements.serving.serve import measure_load

    with counting_bar("answers") as bar:
        return await measure_load(url, api_key, load, rates, bar)


def parse_rates(text: str) -> list[float]:
    """Read ``0.5,1,2`` or ``0.5/s,1/s,2/s``: requests per second.

    Raises:
        CliError: it is no such list.
    """
    try:
        rates = [float(rate.strip().removesuffix("/s")) for rate in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise CliError(f"--rate wants numbers of requests per second like 0.5,1,2, not {text!r}")
    return rates


def read_prompts(path: Path) -> list[str]:
    """The lines of a file that are not blank.

    Raises:
        CliError: the file cannot be read, or has none.
    """
    try:
        lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"--prompts: cannot read {path}: {error}") from error
    if not any(lines):
        raise CliError(f"--prompts: {path} has no line that is a prompt")
    return [line for line in lines if line]
