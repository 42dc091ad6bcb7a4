"""`motley demo`: mismatched "machines" on this one, from nothing to text, and a check that it is right."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import Annotated, Any

import typer

from motley.cli.bundled import FIRST, FOLDER
from motley.cli.commands.demo.mesh import (
    STOP_S,
    check_text,
    completion,
    mesh_of_processes,
    node_names,
    single_process,
    written,
)
from motley.cli.errors import CliError
from motley.cli.interrupt import run
from motley.cli.reaching.client import Client
from motley.cli.shown.show import console, loading_bars, session_table
from motley.cli.typed.options import ENGINES_ON, Device, one_of
from motley.protocol.wording import counted

MODEL = FOLDER / FIRST
RANKS = 3
MOE_RANKS = 4


def register(app: typer.Typer) -> None:
    app.command(epilog='Examples: motley demo --ranks 3 --prompt "ROMEO:"   motley demo --survive --kill leader')(demo)


def demo(
    moe: Annotated[
        bool, typer.Option("--moe", help="Experts on all daemons, two replicas of each; one daemon is killed.")
    ] = False,
    survive: Annotated[
        bool, typer.Option("--survive", help="One daemon is killed in the middle, and the text goes on.")
    ] = False,
    kill: Annotated[
        str,
        typer.Option(metavar="NAME|leader", help="Who is killed with --survive.", show_default="the last of them"),
    ] = "",
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, max=8, help="Daemon processes to start.", show_default=f"{RANKS}, or {MOE_RANKS} with --moe"
        ),
    ] = None,
    prompt: Annotated[str, typer.Option(help="What the model continues.")] = "ROMEO:",
    tokens: Annotated[int, typer.Option(min=1, max=900, help="Tokens to write.")] = 120,
    seed: Annotated[int, typer.Option(help="Equal seeds write equal text.")] = 7,
    device: Annotated[
        Device,
        typer.Option(
            parser=one_of(Device),
            metavar="|".join(Device),
            help="What the first machine computes on, a driver in software if there is no other; the other machines"
            " compute on their processors.",
        ),
    ] = Device.CPU,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Start an orchestrator and daemons with different memory limits, and have them write together."""
    if moe and survive:
        raise CliError("--moe and --survive are demonstrations of their own: leave out one of them")
    if kill and not survive:
        raise CliError("--kill is for the demonstration --survive: leave it out, or give that too")
    if (moe or survive) and device != Device.CPU:
        which = "--moe" if moe else "--survive"
        raise CliError(f"--device {device} is for the demonstration without {which}: leave out one of them")
    if moe:
        from motley.cli.commands.demo.moe import demo_moe

        report = run(demo_moe(ranks or MOE_RANKS, prompt, tokens, seed, quiet=as_json))
    elif survive:
        from motley.cli.commands.demo.survive import demo_survive

        report = run(demo_survive(ranks or RANKS, prompt, tokens, seed, kill, quiet=as_json))
    else:
        report = run(_demo(ranks or RANKS, prompt, tokens, seed, device, quiet=as_json))
    if as_json:
        print(json.dumps(report))
    if not report["identical_to_undisturbed" if survive else "identical_to_single_process"]:
        what = "an undisturbed run" if survive else "one process"
        raise CliError(f"the text differs from what {what} writes: this is a bug, please report it")


async def _demo(ranks: int, prompt: str, tokens: int, seed: int, device: Device, quiet: bool) -> dict[str, Any]:
    from motley.bench.measurements.percentiles import percentiles

    async with mesh_of_processes(memory_limits(ranks), software=device != Device.CPU) as mesh:
        client = mesh.client
        console.print(f"[bold]{counted(ranks, 'daemon')}[/] joined; loading [bold]{MODEL.name}[/] in uneven shares")
        wanted: dict[str, Any] = {"model": str(MODEL), "quantisation": "fp32", "nodes": node_names(ranks)}
        wanted["engine"] = ENGINES_ON[Device.CPU][0]  # all machines are this one, and would share one GPU
        if device != Device.CPU:  # whose speed must not decide how much of the model it shows
            engine, (first, *others) = ENGINES_ON[device][0], node_names(ranks)
            wanted |= {"nodes": [f"{engine}@{first}", *others], "shares": list(range(ranks, 0, -1))}
        with loading_bars() as bars:
            session = await client.wait_ready(await client.call("POST", "/api/sessions", wanted), bars.advance_to)
        async with aclosing(written(client, completion(MODEL, prompt, tokens, seed), quiet)) as pieces:
            text = "".join([piece async for piece in pieces])
        session = await _with_timing(client, session["id"])
        nodes = {node["name"]: node for node in (await client.call("GET", "/api/nodes"))["nodes"]}
    console.print(session_table(session))
    identical = check_text(text, await single_process(MODEL, prompt, tokens, seed))
    return {
        "ranks": ranks,
        "shares": [rank["share"] for rank in session["ranks"]],
        "devices": [_device_name(rank, nodes[rank["node"]]) for rank in session["ranks"]],
        "tokens": tokens,
        "text": text,
        "identical_to_single_process": identical,
        "ms_per_token": percentiles(session["step_ms"] or [0.0], (50, 99)),  # the first token comes without a step
    }


def _device_name(rank: dict[str, Any], node: dict[str, Any]) -> str:
    """What a rank computes on."""
    name: str = node["gpus"][0]["name"] if rank["device"] == "gpu" else node["cpu"]
    return name


def memory_limits(ranks: int) -> list[int]:
    """Different limits, in proportion N, ..., 2, 1, which together hold the model with a fifth to spare."""
    from motley.daemon.node.survey.describe import describe
    from motley.protocol import mesh_pb2 as pb

    profile = describe(pb.ModelSpec(source=str(MODEL), quantisation="fp32"), None).profile
    group = (
        profile.attention_query_bytes
        + profile.attention_kv_bytes
        + profile.cache_bytes_per_token * profile.context_length
    )
    model = (
        group * profile.kv_groups
        + profile.mlp_unit_bytes * profile.mlp_units
        + profile.vocabulary_unit_bytes * profile.vocabulary_units
    )
    parts = range(ranks, 0, -1)
    return [profile.fixed_bytes + int(1.2 * model * part / sum(parts)) for part in parts]


async def _with_timing(client: Client, session_id: str) -> dict[str, Any]:
    """The session once every rank has told its timing, which each does on its own after a request."""
    async with asyncio.timeout(STOP_S):
        while True:
            session = await client.call("GET", f"/api/sessions/{session_id}")
            if all(rank["timing"] for rank in session["ranks"]):
                return session
            await asyncio.sleep(0.05)
