"""`motley run`: text from a model, served by the mesh, or by this machine alone if there is no mesh."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from motley.cli.client import DEFAULT_URL, ApiKey, Client, Refused, Unreachable, Url
from motley.cli.errors import CliError
from motley.cli.interrupt import run as run_interruptibly
from motley.cli.options import (
    Context,
    Device,
    DeviceOption,
    Engines,
    Exact,
    Experts,
    Nodes,
    Quantisation,
    Quants,
    Shares,
    by_node,
    one_of,
    parse_nodes,
    parse_shares,
)
from motley.cli.show import console, counted, loading_bars
from motley.daemon.weights.hub import no_model

OPTIONS = {"quantisation": "--quant", "quantisations": "--quant", "engines": "--engine", "engine_options": "--device"}
"""Of a request's fields, where they are not called alike..."""
IN_OPTIONS = {
    "exact=true": "--exact",
    "experts 'sliced'": "--experts sliced",
    "experts, replicas and trunk": "--experts, --replicas and --trunk",
}
"""...and what the orchestrator says of values."""
JOIN_S = 60.0
"""The local node of a mesh of one has this long to measure itself and join."""


def register(app: typer.Typer) -> None:
    app.command(
        epilog='Examples: motley run ./tinyllama "Why is the sky blue?"   echo "ROMEO:" | motley run ./model - --raw'
    )(run)


def run(
    command: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A served model's name, a folder or .gguf file, or a hub id (owner/name).")
    ],
    prompt: Annotated[str, typer.Argument(help="What to say; - reads standard input.")],
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    quant: Quants = None,
    engine: Engines = None,
    device: DeviceOption = None,
    context: Context = None,
    nodes: Nodes = "",
    shares: Shares = "",
    exact: Exact = False,
    experts: Annotated[
        Experts,
        typer.Option(
            help="Where experts are: in every rank's share (sliced), or whole on nodes (parallel).",
            parser=one_of(Experts),
            metavar="|".join(Experts),
        ),
    ] = Experts.AUTO,
    replicas: Annotated[int, typer.Option(min=1, help="Nodes that have each expert, where they are parallel.")] = 1,
    trunk: Annotated[int, typer.Option(min=1, help="Ranks of the rest of the model, where experts are parallel.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0: always the likeliest token.")] = 0.7,
    top_k: Annotated[int, typer.Option(help="Only the k likeliest tokens. 0: off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Only the likeliest tokens that make up this mass. 1: off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Only tokens this likely, relative to the likeliest. 0: off.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Equal seeds give equal answers.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON instead of the text.")] = False,
) -> None:
    """Have a model answer a prompt. It is loaded first if it is not served yet, and stays loaded."""
    text = sys.stdin.read() if prompt == "-" else prompt
    if not (text if raw else text.strip()):
        what = "standard input" if prompt == "-" else "the prompt"
        raise CliError(f"{what} is empty; say what the model shall {'continue' if raw else 'answer'}")
    path = Path(model)
    if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
        model = str(path.resolve())  # for a daemon with another working directory
    body: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "stream_options": {"include_usage": True},
        **({"seed": seed} if seed is not None else {}),
        **({"stop": stop} if stop else {}),
        **({"prompt": text} if raw else {"messages": [{"role": "user", "content": text}]}),
    }
    _check(body)
    given = command.get_parameter_source("url")
    may_be_alone = given is not None and given.name == "DEFAULT"
    whole, quants = by_node("--quant", quant or (), [*Quantisation])
    everywhere, engines = by_node("--engine", engine or ())
    wanted = Wanted(
        model=model,
        quant=whole,
        quants=quants,
        engine=everywhere,
        engines=engines,
        device=device,
        context=context,
        nodes=parse_nodes(nodes) if nodes else [],
        shares=parse_shares(shares) if shares else [],
        exact=exact,
        experts=experts,
        replicas=replicas,
        trunk=trunk,
    )
    run_interruptibly(_run(wanted, body, url, api_key, may_be_alone, as_json))


def _check(body: dict[str, Any]) -> None:
    """Refuse what no answer can be asked for with, before a model is loaded for it.

    Raises:
        CliError: naming the option.
    """
    from motley.orchestrator.api.errors import ApiError
    from motley.orchestrator.api.parameters import chat_parameters, completion_parameters

    parameters = completion_parameters if "prompt" in body else chat_parameters
    try:
        parameters({**body, "model": "any", "stream": True})
    except ApiError as error:
        raise CliError(_in_options(str(error), error.param)) from error


def _in_options(refusal: str, param: str | None) -> str:
    """What the orchestrator refuses, in the words of the command line; `param` is the request's field to blame."""
    if param and refusal.startswith(f"{param} "):
        is_text = param.startswith(("messages", "prompt"))
        option = "the prompt" if is_text else OPTIONS.get(param, f"--{param.replace('_', '-')}")
        refusal = option + refusal.removeprefix(param)
    for word, option in IN_OPTIONS.items():
        refusal = refusal.replace(word, option)
    return refusal


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A model and how it should be loaded."""

    model: str
    quant: str | None
    quants: Mapping[str, str]
    """By node."""
    engine: str | None
    engines: Mapping[str, str]
    """By node."""
    device: str | None = None
    """Where `engine` computes, if it can do either."""
    context: int | None
    nodes: Sequence[str]
    """One per rank; empty: whichever there are."""
    shares: Sequence[float]
    """One per rank; empty: the planner's choice."""
    exact: bool
    experts: Experts
    replicas: int
    trunk: int

    @property
    def body(self) -> dict[str, Any]:
        """Of the request for a session."""
        return {
            "model": self.model,
            "quantisation": self.quant or Quantisation.STORED,
            "exact": self.exact,
            "experts": self.experts,
            "replicas": self.replicas,
            "trunk": self.trunk,
            "quantisations": dict(self.quants),
            "engines": dict(self.engines),
            **({"engine": self.engine} if self.engine else {}),
            **({"engine_options": {"device": self.device}} if self.device else {}),
            **({"context": self.context} if self.context else {}),
            **({"nodes": list(self.nodes)} if self.nodes else {}),
            **({"shares": list(self.shares)} if self.shares else {}),
        }

    def check(self, session: dict[str, Any]) -> None:
        """Refuse a session that was loaded otherwise.

        Raises:
            CliError: which option it is not loaded by, and what to do.
        """
        layout, replicas, planned = session["experts"], session["replicas"], bool(session["ranks"])
        if planned and layout is None:
            for option, meant in (
                ("--experts", self.experts is Experts.PARALLEL),
                ("--replicas", self.replicas > 1),
                ("--trunk", self.trunk > 1),
            ):
                if meant:
                    raise CliError(f"{self.model!r} has no experts, which {option} is about; leave it out")
        ranks = len(session["ranks"]) or self.trunk  # not known while it is in planning
        placed = self.experts in (Experts.AUTO, layout or Experts.SLICED)

        def unlike_on(wanted: Mapping[str, str], kind: str) -> list[str]:
            loaded = {node: session[f"{kind}s"].get(node, session[kind]) for node in wanted}
            return [f"{own} on {node}" for node, own in loaded.items() if own != wanted[node]]

        used = {name for worker in session["ranks"] + session["hosts"] for name in _nodes_of(worker)}
        elsewhere = planned and list(self.nodes) not in ([], session["nodes"]) and set(self.nodes) != used
        length, device = session["context"], session["engine_options"].get("device", Device.CPU)
        quants, engines = unlike_on(self.quants, "quantisation"), unlike_on(self.engines, "engine")
        for option, unlike, how in (
            ("--quant", self.quant not in (None, session["quantisation"]), f"as {session['quantisation']}"),
            ("--quant", bool(quants), f"as {', '.join(quants)}"),
            ("--engine", self.engine not in (None, session["engine"]), f"by {session['engine']}"),
            ("--engine", bool(engines), f"by {', '.join(engines)}"),
            ("--device", self.device not in (None, device), f"on device {device}"),
            ("--context", planned and self.context not in (None, length), f"for {length} tokens"),
            ("--nodes", elsewhere, f"on {', '.join(sorted(used))}"),
            ("--shares", list(self.shares) not in ([], session["shares"]), "in other shares"),
            ("--exact", self.exact and not session["exact"], "without exact sums"),
            ("--experts", planned and not placed, f"with experts {layout}"),
            ("--replicas", self.replicas > replicas, f"with {counted(replicas, 'replica')} of every expert"),
            ("--trunk", self.trunk not in (1, ranks), f"on {counted(ranks, 'rank')}"),
        ):
            if unlike:
                name = session["name"] or session["id"]
                raise CliError(
                    f"session {name!r} has {self.model!r} loaded {how}: leave out {option}, or close it first with"
                    f" `{_stop(session)}`"
                )


async def _run(wanted: Wanted, body: dict[str, Any], url: str, api_key: str, may_be_alone: bool, as_json: bool) -> None:
    try:
        async with Client(url, api_key) as client:
            await _answer(client, wanted, body, as_json)
    except Unreachable:
        if not may_be_alone:
            raise
        console.print(f"[dim]no mesh at {url}: this machine runs the model alone, and forgets it afterwards[/]")
        async with mesh_of_one() as client:
            await _answer(client, wanted, body, as_json)


async def _find(client: Client, model: str) -> dict[str, Any] | None:
    """The session that serves `model` or is about to.

    Raises:
        CliError: that is the name of one that has failed.
    """
    failed = None
    for session in await client.sessions():
        if session["state"] == "closing":
            continue
        if session["failure"]:
            failed = session if model in (session["name"], session["id"]) else failed
        elif model in (session["name"], session["id"], session["model"]):
            return session
    if failed and model != failed["model"]:
        why = failed["failure"]["message"]
        raise CliError(f"session {model!r} has failed: {why}\nStart it again with:  {_again(failed)}")
    return None


async def load(client: Client, wanted: Wanted, show: Callable[[str, int, int], None]) -> dict[str, Any]:
    """A ready session of the model, made if there is none; for `show` see `Client.wait_ready`.

    Raises:
        CliError: it cannot be, or is loaded otherwise than `wanted`.
    """
    session = await _find(client, wanted.model)
    if session is None:
        if (path := Path(wanted.model)).is_file() and path.suffix != ".gguf":
            raise CliError(no_model(path))
        console.print(f"[dim]{escape(wanted.model)} is not served yet: loading it[/]")
        try:
            made = await client.call("POST", "/api/sessions", wanted.body, patient=True)
        except Refused as refusal:
            # Somebody else may have had the same idea a moment ago.
            if refusal.code == "name_in_use":
                session = await _find(client, wanted.model) or await _find(client, Path(wanted.model).name)
            if session is None:
                raise CliError(_in_options(str(refusal), refusal.param)) from refusal
        else:
            return await client.wait_ready(made, show)
    wanted.check(session)
    session = await client.wait_ready(session, show)
    wanted.check(session)  # what was still in planning may have come out otherwise
    return session


def _stop(session: dict[str, Any]) -> str:
    """The command that closes a session, for a shell; one still in planning has no name."""
    return f"motley stop {shlex.quote(session['name'] or session['id'])}"


def _again(session: dict[str, Any]) -> str:
    """The command that starts a session anew as it was, for a shell; but for `block`, `wire`, `threads` and engine
    options other than the device, which only the API knows."""
    from motley.orchestrator.sessions import SessionRequest

    words = ["motley", "run", session["model"], "PROMPT"]
    for option, kind, default in (
        ("--quant", "quantisation", SessionRequest.quantisation),
        ("--engine", "engine", SessionRequest.engine),
    ):
        whole = [session[kind]] if session[kind] != default else []
        for value in whole + [f"{own}@{node}" for node, own in session[f"{kind}s"].items()]:
            words += [option, value]
    for option, value in (
        ("--device", session["engine_options"].get("device", "")),
        ("--context", session["context"]),
        ("--nodes", ",".join(session["nodes"])),
        ("--shares", ",".join(f"{share:g}" for share in session["shares"])),
        ("--experts", session["experts"]),
        ("--replicas", session["replicas"] if session["replicas"] > 1 else 0),
        ("--trunk", len(session["ranks"]) if session["hosts"] and len(session["ranks"]) > 1 else 0),
    ):
        words += [option, str(value)] if value else []
    return shlex.join(words + (["--exact"] if session["exact"] else []))


def _nodes_of(worker: dict[str, Any]) -> list[str]:
    """The nodes of a rank or an expert host."""
    return [member["node"] for member in worker.get("group") or [worker]]


async def _answer(client: Client, wanted: Wanted, body: dict[str, Any], as_json: bool) -> None:
    with loading_bars() as bars:
        session = await load(client, wanted, bars.advance_to)
    context, most = session["context"], body["max_tokens"]
    if most > context:
        console.print(f"[yellow]--max-tokens {most}[/] is cut: prompt and answer have {context} tokens (the context)")
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    began = time.perf_counter()
    first: float | None = None
    said: list[str] = []
    finish = ""
    usage: dict[str, int] = {}
    try:
        async for event in client.stream(path, {**body, "model": session["name"]}):
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                piece = choice["text"] if "prompt" in body else choice["delta"].get("content") or ""
                first = first or time.perf_counter()
                finish = choice["finish_reason"] or finish
                said.append(piece)
                if not as_json:
                    print(piece, end="", flush=True)
    except Refused as refusal:
        if refusal.code != "context_length_exceeded":
            raise
        raise CliError(
            f"the prompt is too long for the context of {context} tokens: shorten it, or close the session with"
            f" `{_stop(session)}` and load the model with a larger --context"
        ) from refusal
    finally:
        if any(said) and not as_json:
            print(flush=True)  # whatever follows, an error too, begins a line
    ended = time.perf_counter()
    tokens = usage.get("completion_tokens", 0)
    ms = 1e3 * (ended - (first or ended)) / max(1, tokens - 1)
    ttft_ms = 1e3 * ((first or ended) - began)
    if as_json:
        answer = {"model": session["name"], "text": "".join(said), "finish_reason": finish, "usage": usage}
        print(json.dumps({**answer, "ttft_ms": ttft_ms, "ms_per_token": ms}))
    else:
        elsewhere = sum(len(_nodes_of(host)) for host in session["hosts"])
        by = "the context, which is full" if finish == "length" and tokens < most else finish
        hosts = f", experts on {counted(elsewhere, 'node')}" if elsewhere else ""
        console.print(
            f"[dim]{counted(tokens, 'token')}, the first after {ttft_ms:.0f} ms, then {ms:.1f} ms each, on "
            f"{counted(len(session['ranks']), 'rank')}{hosts}; ended by {by}[/]"
        )


@asynccontextmanager
async def mesh_of_one() -> AsyncIterator[Client]:
    """An orchestrator and a node in this process, on loopback, for as long as the context lasts."""
    from motley.daemon.node.app import DaemonConfig, Observer, run_daemon
    from motley.orchestrator.app import Orchestrator, OrchestratorConfig

    with tempfile.TemporaryDirectory(prefix="motley-") as state:
        orchestrator = Orchestrator(
            OrchestratorConfig(host="127.0.0.1", grpc_port=0, http_port=0, state_dir=Path(state))
        )
        await orchestrator.start()
        node = asyncio.create_task(
            run_daemon(DaemonConfig(orchestrator.join_target, orchestrator.join_token), Observer())
        )
        try:
            async with Client(orchestrator.http_url) as client:
                await wait_for_nodes(client, 1, node)
                yield client
        finally:
            await orchestrator.stop()
            node.cancel()
            await asyncio.gather(node, return_exceptions=True)


async def wait_for_nodes(client: Client, count: int, *parts: asyncio.Future[Any]) -> None:
    """Wait until so many nodes have joined.

    Raises:
        CliError: one of `parts` ended before that, or `JOIN_S` have passed.
    """
    deadline = time.monotonic() + JOIN_S
    while True:
        nodes = (await client.call("GET", "/api/nodes"))["nodes"]
        if sum(node["state"] == "alive" for node in nodes) >= count:
            return
        for part in parts:
            if part.done():
                raise CliError(f"a node ended before all had joined: {part.exception() or part.result()}")
        if time.monotonic() > deadline:
            raise CliError(f"{counted(count, 'node')} wanted, {len(nodes)} joined within {JOIN_S:.0f} s")
        await asyncio.sleep(0.05)
