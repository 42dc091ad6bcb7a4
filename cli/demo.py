"""`motley demo`: three mismatched "machines" on this one, from nothing to text, and a check that it is right."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from motley.cli.client import Client
from motley.cli.errors import CliError
from motley.cli.interrupt import run
from motley.cli.run import wait_for_nodes
from motley.cli.show import console, counted, human_size, loading_bars, session_table

MODEL = Path(__file__).parent / "models" / "shakespeare-2.6m"
STOP_S = 10.0


def register(app: typer.Typer) -> None:
    app.command(epilog='Example: motley demo --ranks 3 --prompt "ROMEO:"')(demo)


def demo(
    ranks: Annotated[int, typer.Option(min=1, max=8, help="Daemon processes to start.")] = 3,
    prompt: Annotated[str, typer.Option(help="What the model continues.")] = "ROMEO:",
    tokens: Annotated[int, typer.Option(min=1, max=900, help="Tokens to write.")] = 120,
    seed: Annotated[int, typer.Option(help="Equal seeds write equal text.")] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="End with one line of JSON.")] = False,
) -> None:
    """Start an orchestrator and daemons with different memory limits, and have them write together."""
    report = run(_demo(ranks, prompt, tokens, seed, quiet=as_json))
    if as_json:
        print(json.dumps(report))
    if not report["identical_to_single_process"]:
        raise CliError("the text differs from what one process writes: this is a bug, please report it")


async def _demo(ranks: int, prompt: str, tokens: int, seed: int, quiet: bool) -> dict[str, Any]:
    body = {
        "model": MODEL.name,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.8,
        "top_k": 40,
        "seed": seed,
        "ignore_eos": True,
    }
    async with mesh_of_processes(memory_limits(ranks)) as client:
        console.print(f"[bold]{counted(ranks, 'daemon')}[/] joined; loading [bold]{MODEL.name}[/] in uneven shares")
        wanted = {"model": str(MODEL), "quantisation": "fp32", "nodes": node_names(ranks)}
        with loading_bars() as bars:
            session = await client.wait_ready(await client.call("POST", "/api/sessions", wanted), bars.advance_to)
        if not quiet:
            print(prompt, end="", flush=True)
        pieces = []
        try:
            async for event in client.stream("/v1/completions", body):
                for choice in event["choices"]:
                    pieces.append(choice["text"])
                    if not quiet:
                        print(choice["text"], end="", flush=True)
        finally:
            if not quiet:
                print("\n", flush=True)  # whatever follows, an error too, begins a line
        session = await _with_timing(client, session["id"])
    console.print(session_table(session))
    text = "".join(pieces)
    alone = await _single_process(prompt, tokens, seed)
    if text == alone:
        console.print("[green]identical[/] to the text of a single process")
    else:
        console.print("[red]different[/] from the text of a single process:")
        print(alone, file=sys.stderr)
    return {
        "ranks": ranks,
        "shares": [rank["share"] for rank in session["ranks"]],
        "tokens": tokens,
        "text": text,
        "identical_to_single_process": text == alone,
        "ms_per_token": _percentiles(session["step_ms"]),
    }


def node_names(ranks: int) -> list[str]:
    return [f"machine-{letter}" for letter in "abcdefgh"[:ranks]]


def memory_limits(ranks: int) -> list[int]:
    """Different limits, in proportion N, ..., 2, 1, which together hold the model with a fifth to spare."""
    from motley.daemon.describe import describe
    from motley.protocol import mesh_pb2 as pb

    profile = describe(pb.ModelSpec(source=str(MODEL), quantisation="fp32"), None)
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


@asynccontextmanager
async def mesh_of_processes(limits: list[int]) -> AsyncIterator[Client]:
    """An orchestrator here and a daemon process per memory limit, all on loopback, ended with the context."""
    from motley.orchestrator.app import Orchestrator, OrchestratorConfig

    with tempfile.TemporaryDirectory(prefix="motley-demo-") as folder:
        orchestrator = Orchestrator(
            OrchestratorConfig(host="127.0.0.1", grpc_port=0, http_port=0, state_dir=Path(folder))
        )
        await orchestrator.start()
        daemons: list[asyncio.subprocess.Process] = []
        ends: list[asyncio.Task[str]] = []
        try:
            for name, limit in zip(node_names(len(limits)), limits, strict=True):
                console.print(f"starting {name} with {human_size(limit)} of memory")
                where = orchestrator.join_target, orchestrator.join_token
                daemons.append(await _start_daemon(*where, name, limit, Path(folder) / f"{name}.log"))
            ends = [
                asyncio.create_task(_last_words(daemon, Path(folder) / f"{name}.log"))
                for name, daemon in zip(node_names(len(limits)), daemons, strict=True)
            ]
            async with Client(orchestrator.http_url) as client:
                await wait_for_nodes(client, len(daemons), *ends)
                yield client
        finally:
            try:
                await orchestrator.stop()
            finally:
                await asyncio.gather(*(_end(daemon) for daemon in daemons))
                await asyncio.gather(*ends, return_exceptions=True)


async def _with_timing(client: Client, session_id: str) -> dict[str, Any]:
    """The session once every rank has told its timing, which each does on its own after a request."""
    async with asyncio.timeout(STOP_S):
        while True:
            session = await client.call("GET", f"/api/sessions/{session_id}")
            if all(rank["timing"] for rank in session["ranks"]):
                return session
            await asyncio.sleep(0.05)


async def _start_daemon(target: str, token: str, name: str, limit: int, log: Path) -> asyncio.subprocess.Process:
    with log.open("wb") as stderr:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "motley.cli.main", "join", target),
            *("--name", name, "--memory", str(limit), "--threads", "1", "--end-with-stdin"),
            env={**os.environ, "MOTLEY_TOKEN": token},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=stderr,
        )


async def _last_words(daemon: asyncio.subprocess.Process, log: Path) -> str:
    """Wait for a daemon's end; the last thing it said."""
    status = await daemon.wait()
    lines = (await asyncio.to_thread(log.read_text, "utf-8", "replace")).splitlines()
    return lines[-1] if lines else f"status {status}"


async def _end(daemon: asyncio.subprocess.Process) -> None:
    if daemon.returncode is None:
        daemon.terminate()
        try:
            await asyncio.wait_for(daemon.wait(), STOP_S)
        except TimeoutError:
            daemon.kill()
            await daemon.wait()


async def _single_process(prompt: str, tokens: int, seed: int) -> str:
    """What one rank process writes that has the whole model, without an orchestrator."""
    from motley.bench.local_mesh import LocalMesh, MeshSpec
    from motley.daemon.generation import Generation
    from motley.daemon.text import Tokenizer
    from motley.protocol import mesh_pb2 as pb

    sampling = pb.Sampling(temperature=0.8, top_k=40, top_p=1.0, repetition_penalty=1.0, seed=seed)
    request = pb.Generate(prompt=prompt, max_tokens=tokens, sampling=sampling, ignore_eos=True)
    generation = Generation(request, Tokenizer.load(MODEL), context=1024)
    decode = generation.start()
    async with LocalMesh(MeshSpec(MODEL, context=1024)) as mesh:
        said = await mesh.decode(decode.prompt, decode.max_tokens, decode.sampling, decode.stop_tokens)
    deltas = (generation.on_tokens(tokens) for tokens in said)
    return "".join(delta.text for delta in deltas if delta is not None)


def _percentiles(step_ms: list[float]) -> dict[str, float]:
    import numpy as np

    return (
        {f"p{q}": round(float(np.percentile(step_ms, q)), 3) for q in (50, 99)} if step_ms else {"p50": 0.0, "p99": 0.0}
    )
