"""What demonstrations share: daemons on this machine that act as several, and what one process alone writes."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from motley.cli.errors import CliError
from motley.cli.reaching.client import Client
from motley.cli.reaching.mesh_of_one import wait_for_nodes
from motley.cli.shown.show import console
from motley.daemon.node.child import start_child
from motley.protocol.wording import short_bytes

STOP_S = 10.0
UP_S = 60.0
"""An orchestrator that is a process of its own listens so soon."""
TEMPERATURE = 0.8
TOP_K = 40


def node_names(count: int) -> list[str]:
    """What the daemons of a demonstration are called, eight at most."""
    return [f"machine-{letter}" for letter in "abcdefgh"[:count]]


def completion(model: Path, prompt: str, tokens: int, seed: int) -> dict[str, Any]:
    """The request that a demonstration makes."""
    return {
        "model": model.name,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": TEMPERATURE,
        "top_k": TOP_K,
        "seed": seed,
        "ignore_eos": True,
    }


@dataclass(frozen=True)
class DemoMesh:
    """An orchestrator's API and its address, and daemons by name.

    Attributes:
        start: starts a daemon with so many bytes of memory; it joins by itself.
        orchestrator: where that is a process of its own.
    """

    url: str
    client: Client
    daemons: dict[str, asyncio.subprocess.Process]
    start: Callable[[str, int], Awaitable[None]]
    orchestrator: OrchestratorProcess | None = None


class OrchestratorProcess:
    """An orchestrator in a process of its own, on loopback, which can be killed and started again where it was.

    Attributes:
        process: as it runs now.
        http_url, local_target, join_token: as `motley.orchestrator.app.Orchestrator` has them.
    """

    process: asyncio.subprocess.Process

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = ("0", "0")
        self.http_url = self.local_target = self.join_token = ""

    async def start(self) -> None:
        """Start it, with the state that it had.

        Raises:
            CliError: it does not come up.
        """
        log = self._folder / "orchestrator.log"
        where = ("--host", "127.0.0.1", "--port", self._ports[0], "--http-port", self._ports[1])
        state = str(self._folder / "state")
        with log.open("wb") as stderr:
            self.process = await start_child(
                *("motley.cli.main", "up", "--no-node", *where, "--state", state, "--end-with-stdin"),
                env={**os.environ, "COLUMNS": "500", "MOTLEY_HOME": str(self._folder / "home")},
                stdout=asyncio.subprocess.DEVNULL,
                stderr=stderr,
            )
        until = time.monotonic() + UP_S
        while time.monotonic() < until and self.process.returncode is None:
            said = await asyncio.to_thread(log.read_text, "utf-8", "replace")
            api, join = (
                re.search(r"API: (http://\S+:(\d+))/v1", said),
                re.search(r"join (\S+:(\d+)) --token (\S+)", said),
            )
            if api and join:
                self.http_url, self.local_target, self.join_token = api[1], join[1], join[3]
                self._ports = (join[2], api[2])
                return
            await asyncio.sleep(0.05)
        raise CliError("the orchestrator does not come up")

    async def stop(self) -> None:
        """End it, politely at first."""
        await _end(self.process)


@asynccontextmanager
async def mesh_of_processes(
    limits: list[int], threads: int = 1, *, apart: bool = False, software: bool = False
) -> AsyncIterator[DemoMesh]:
    """An orchestrator here and a daemon process per memory limit, all on loopback, ended with the context.

    Args:
        apart: the orchestrator is a process of its own, too.
        software: drivers that compute on the processor are taken for GPUs.
    """
    from motley.orchestrator.app import Orchestrator, OrchestratorConfig

    with tempfile.TemporaryDirectory(prefix="motley-demo-") as folder:
        orchestrator: Orchestrator | OrchestratorProcess = OrchestratorProcess(Path(folder))
        if not apart:
            own = OrchestratorConfig(host="127.0.0.1", grpc_port=0, http_port=0, state_dir=Path(folder))
            orchestrator = Orchestrator(own)
        await orchestrator.start()
        daemons: dict[str, asyncio.subprocess.Process] = {}
        ends: list[asyncio.Task[str]] = []
        try:

            async def start(name: str, limit: int) -> None:
                where = orchestrator.local_target, orchestrator.join_token
                daemons[name] = await _start_daemon(*where, name, limit, threads, _log(folder, name), software)

            for name, limit in zip(node_names(len(limits)), limits, strict=True):
                console.print(f"starting {name} with {short_bytes(limit)} of memory")
                await start(name, limit)
            ends = [asyncio.create_task(_last_words(daemon, _log(folder, name))) for name, daemon in daemons.items()]
            async with Client(orchestrator.http_url) as client:
                await wait_for_nodes(client, len(daemons), *ends)
                process = orchestrator if isinstance(orchestrator, OrchestratorProcess) else None
                yield DemoMesh(orchestrator.http_url, client, daemons, start, process)
        finally:
            try:
                await orchestrator.stop()
            finally:
                await asyncio.gather(*map(_end, daemons.values()))
                await asyncio.gather(*ends, return_exceptions=True)


async def written(client: Client, request: dict[str, Any], quiet: bool) -> AsyncGenerator[str, None]:
    """Have a text written and print it, unless `quiet`; gives its pieces as they come.

    Args:
        request: as `completion` makes it.
    """
    if not quiet:
        print(request["prompt"], end="", flush=True)
    try:
        async for event in client.stream("/v1/completions", request):
            for choice in event["choices"]:
                if not quiet:
                    print(choice["text"], end="", flush=True)
                yield choice["text"]
    finally:
        if not quiet:
            print("\n", flush=True)  # whatever follows, an error too, begins a line


async def kill_halfway(mesh: DemoMesh, victim: str, body: dict[str, Any], quiet: bool) -> tuple[str, list[float], int]:
    """Have a text written, and kill a daemon in the middle of it: the text, when each piece of it came, and after which
    of them that was."""
    pieces: list[str] = []
    times: list[float] = []
    killed_at = body["max_tokens"] // 2 - 1
    async with aclosing(written(mesh.client, body, quiet)) as coming:
        async for piece in coming:
            pieces.append(piece)
            times.append(time.perf_counter())
            if len(pieces) == killed_at + 1:
                kill_daemon(mesh.daemons[victim].pid)
                if not quiet:
                    console.print(f"\n[red]<{victim} is killed>[/]")  # the text goes on in a line of its own
    return "".join(pieces), times, killed_at


def family(daemon: int) -> list[psutil.Process]:
    """All that a daemon has started, and it itself, which comes last; none, if it is gone."""
    try:
        itself = psutil.Process(daemon)
        return [*itself.children(recursive=True), itself]
    except psutil.NoSuchProcess:
        return []


def kill_daemon(daemon: int) -> None:
    """End a daemon and its workers at once, as a power cut would."""
    for process in family(daemon):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def check_text(text: str, alone: str) -> bool:
    """Whether the mesh wrote what a single process writes; says so."""
    if text == alone:
        console.print("[green]identical[/] to the text of a single process")
    else:
        console.print("[red]different[/] from the text of a single process:")
        print(alone, file=sys.stderr)
    return text == alone


async def single_process(model: Path, prompt: str, tokens: int, seed: int) -> str:
    """What one rank process writes that has the whole model, without an orchestrator."""
    from motley.bench.meshes.local_mesh import LocalMesh, MeshSpec
    from motley.daemon.text.generation import Generation
    from motley.daemon.text.tokenizer import Tokenizer
    from motley.protocol import mesh_pb2 as pb

    sampling = pb.Sampling(temperature=TEMPERATURE, top_k=TOP_K, top_p=1.0, repetition_penalty=1.0, seed=seed)
    request = pb.Generate(prompt=prompt, max_tokens=tokens, sampling=sampling, ignore_eos=True)
    generation = Generation(request, Tokenizer.load(model), context=1024)
    decode = generation.start()
    async with LocalMesh(MeshSpec(model, context=1024)) as mesh:
        said = await mesh.decode(decode.prompt, decode.max_tokens, decode.sampling, decode.stop_tokens)
    deltas = (generation.on_tokens(tokens) for tokens in said)
    return "".join(delta.text for delta in deltas if delta is not None)


def _log(folder: str, name: str) -> Path:
    return Path(folder) / f"{name}.log"


async def _start_daemon(
    target: str, token: str, name: str, limit: int, threads: int, log: Path, software: bool
) -> asyncio.subprocess.Process:
    from motley.daemon.weights.cache import default_folder
    from motley.plugins.onnxruntime_gpu.preference import SOFTWARE

    with log.open("wb") as stderr:
        return await start_child(
            *("motley.cli.main", "join", target),
            *("--name", name, "--memory", str(limit), "--threads", str(threads), "--end-with-stdin"),
            env={
                **os.environ,
                **({SOFTWARE: "1"} if software else {}),
                "MOTLEY_TOKEN": token,
                "MOTLEY_HOME": str(log.parent / "home"),
                "MOTLEY_CACHE": str(default_folder()),  # where it is known how fast this machine is
            },
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
            async with asyncio.timeout(STOP_S):
                await daemon.wait()
        except TimeoutError:
            daemon.kill()
            await daemon.wait()
