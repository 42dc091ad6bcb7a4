"""`motley plan`: who would have what of a model, what a token would take, and what each machine is worth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from motley.cli.bundled import bundled
from motley.cli.errors import CliError
from motley.cli.interrupt import run
from motley.cli.reaching.client import ApiKey, Refused, Url
from motley.cli.reaching.loading import for_daemons
from motley.cli.reaching.mesh_of_one import mesh_or_alone
from motley.cli.reaching.misnamed import MISSING, misnamed
from motley.cli.shown.show import (
    forecast_line,
    of_layers,
    percentages,
    results,
    show_set_aside,
    table,
    without_part,
)
from motley.cli.typed.given import left_alone
from motley.cli.typed.options import (
    ActivationsOption,
    AsJson,
    AtOnce,
    Context,
    DeviceOption,
    Engines,
    Nodes,
    Quantisation,
    Quants,
    Stages,
    WhatIf,
    by_node,
    on_device,
    parse_nodes,
    parse_stages,
)
from motley.orchestrator.known_models.names import has_experts, short_name_of, source_of
from motley.protocol.wording import short_bytes

KINDS = {
    "tensor": "every layer on all of them",
    "pipeline": "in stages",
    "mixed": "in stages of several",
}
"""How a model is cut, for people."""
FILE_FIELDS = ("machines",)
"""What a file of machines has."""


def register(app: typer.Typer) -> None:
    app.command(epilog='Example: motley plan ./tinyllama --what-if "RTX 4070 12GB, 1Gbit"')(plan)


def plan(
    command: typer.Context,
    model: Annotated[str, typer.Argument(help="A folder or .gguf file, a short name, or a hub id (owner/name).")],
    machines: Annotated[
        Path | None,
        typer.Option(
            help='Plan for the machines of this JSON file, {"machines": [{"name", "gb_per_s", "memory_gb", ...}]}, in'
            " place of the nodes that are there.",
            dir_okay=False,
            exists=True,
        ),
    ] = None,
    requests: AtOnce = 1,
    context: Context = None,
    quant: Quants = None,
    engine: Engines = None,
    device: DeviceOption = None,
    activations: ActivationsOption = None,
    nodes: Nodes = "",
    stages: Stages = "",
    what_if: WhatIf = None,
    url: Url = "",
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Forecast what a model takes on the nodes that are there, or on others, without loading it.

    A model with a short name is planned by its published sizes, without its files; of another a node reads the headers.
    """
    whole, quants = by_node("--quant", quant or (), [*Quantisation])
    everywhere, engines = by_node("--engine", engine or ())
    computing, settings = on_device(everywhere, device, activations)
    if machines and nodes:
        raise CliError("--machines is in place of the nodes that are there, of which --nodes names some: leave out one")
    wanted = bundled(for_daemons(model))
    known = short_name_of(wanted)
    asked: dict[str, Any] = {
        "model": wanted,
        # Experts on nodes of their own are not forecast.
        **({"by_shape": True, "experts": "sliced"} if known else {}),
        "quantisation": whole,
        "quantisations": quants or None,
        "engine": computing,
        "engines": engines or None,
        "engine_options": settings or None,
        "nodes": parse_nodes(nodes) if nodes else None,
        "context": context,
        "stages": parse_stages(stages) if stages else None,
        "requests": requests,
        "what_if": list(what_if) if what_if else None,
        **(read_machines(machines) if machines else {}),
    }
    alone = left_alone(command, "url") and not (nodes or quants or engines)
    answer, there = run(_plan(asked, url, api_key, "planned for this machine" if alone else ""))
    if as_json:
        print(json.dumps(answer))
    else:
        if known:
            experts = "; experts in the ranks' shares, not on nodes of their own" if has_experts(known) else ""
            results.print(
                f"By the published sizes of {known} ({source_of(known)}): nothing was fetched{experts}",
                soft_wrap=True,
            )
        show_plan(answer, requests)
        if not machines and not nodes:
            show_set_aside(there)
        for names in [] if machines else on_one_machine(answer, there):
            results.print(
                f"{escape(' and '.join(names))} are on one machine, and were measured one by one: as they share its"
                " memory and its cores, a token may take longer",
                soft_wrap=True,
            )


def on_one_machine(answer: dict[str, Any], nodes: list[dict[str, Any]]) -> list[list[str]]:
    """The nodes of a plan that have an address in common, which is that of one machine.

    Args:
        answer: the plan, as the API tells it.
        nodes: of the mesh, likewise.
    """
    taking = {rank["node"] for rank in answer["plan"]["ranks"]}
    by_address: dict[str, list[str]] = {}
    for node in nodes:
        if node["name"] in taking and node["state"] == "alive":
            by_address.setdefault(node["address"], []).append(node["name"])
    return [names for names in by_address.values() if len(names) > 1]


def read_machines(file: Path) -> dict[str, Any]:
    """What a file says of machines; the orchestrator checks each of them.

    Raises:
        CliError: it is no such file; the message names what is unknown in it.
    """
    try:
        told = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CliError(f"--machines: {file} is no JSON file: {error}") from error
    if not isinstance(told, dict) or not isinstance(told.get("machines"), list):
        raise CliError(f'--machines: {file} has no list of machines: {{"machines": [...]}}')
    if unknown := sorted(told.keys() - set(FILE_FIELDS)):
        raise CliError(f"--machines: {file} has the unknown field {unknown[0]!r}; known: {', '.join(FILE_FIELDS)}")
    return told


async def _plan(
    asked: dict[str, Any], url: str, api_key: str, alone: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A plan, and the nodes of the mesh."""
    body = {name: value for name, value in asked.items() if value is not None}
    async with mesh_or_alone(url, api_key, alone, asked["model"]) as (client, _):
        try:
            answer = await client.call("POST", "/api/plan", body, patient=True)
            return answer, (await client.call("GET", "/api/nodes"))["nodes"]
        except Refused as refusal:
            if refusal.code == MISSING:
                raise misnamed(asked["model"], refusal) from refusal
            raise


def show_plan(answer: dict[str, Any], requests: int) -> None:
    """Print a plan: its ranks, its forecast, what else there is, and what each machine is worth."""
    ranks, forecast = answer["plan"]["ranks"], answer["forecast"]
    weights = sum(rank["weights_mb"] for rank in ranks)
    rows = [
        [
            rank["node"],
            share + of_layers(rank["share"]["layers"]),
            short_bytes(1e6 * rank["weights_mb"]),
            short_bytes(1e6 * rank["memory_mb"]),
        ]
        for rank, share in zip(ranks, percentages([rank["weights_mb"] / weights for rank in ranks]), strict=True)
    ]
    columns = ["node", "share", "weights", "memory, with caches"]
    results.print(table(columns, rows, title=f"Plan ({KINDS[answer['plan']['kind']]})"))
    many = f", for each of {requests} requests" if requests > 1 else ""
    results.print(f"Forecast: {forecast_line(forecast)}{many}", soft_wrap=True)
    if requests > 1:
        rate = 1e3 * requests / forecast["ms_per_token"]
        results.print(f"All requests together: {rate:.1f} tokens per second")
    for told in without_part(answer):
        results.print(f"[yellow]{escape(told)}[/]", soft_wrap=True)
    taking = {rank["node"] for rank in ranks}
    for each in answer["without"]:
        name = escape(each["node"])
        if each["node"] not in taking:
            worse = [
                one["ms_per_token"] for one in answer["alternatives"] if set(one["nodes"]) == {*taking, each["node"]}
            ]
            why = f" ({worse[0]:.1f} ms per token)" if worse else ""
            results.print(f"Left out: {name}: with it, a token takes no less{why}", soft_wrap=True)
        elif each["ms_per_token"] is None:
            results.print(f"Without {name}: the model does not fit", soft_wrap=True)
        else:
            results.print(f"Without {name}: {each['ms_per_token']:.1f} ms", soft_wrap=True)
    for other in answer["alternatives"][:1]:
        nodes, how = escape(", ".join(other["nodes"])), KINDS[other["kind"]]
        results.print(f"Next best: {other['ms_per_token']:.1f} ms on {nodes}, {how}", soft_wrap=True)
