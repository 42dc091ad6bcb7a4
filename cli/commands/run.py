"""`motley run`: text from a model, served by the mesh, or by this machine alone if there is no mesh."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from motley.cli.client import POLL_S, ApiKey, Client, Refused, Unreachable, Url
from motley.cli.errors import CliError
from motley.cli.interrupt import run as run_interruptibly
from motley.cli.mesh_of_one import mesh_of_one
from motley.cli.options import (
    CacheDiskTokens,
    CacheFormats,
    CacheNodeTokens,
    CacheTokens,
    Context,
    DeviceOption,
    DraftEngine,
    DraftModel,
    Engines,
    Exact,
    Experts,
    KeepPrefixes,
    Nodes,
    Quantisation,
    Quants,
    Queue,
    Recover,
    Sequences,
    Shares,
    Stages,
    by_node,
    on_device,
    one_of,
    parse_nodes,
    parse_shares,
    parse_stages,
)
from motley.cli.place import USUAL_URL
from motley.cli.show import console, forecast_line, loading_bars
from motley.cli.wanted import Wanted, nodes_of, option_of, start_command, stop_command
from motley.daemon.weights.hub import no_model
from motley.orchestrator.session_request import SessionRequest
from motley.protocol.wording import counted

CLOSE_S = 20.0
"""Closing a session may take so long; longer than an orchestrator waits for its ranks."""
GIVE_UP_S = 5.0
"""An orchestrator gives up what is in planning, and nobody waits for any more, this soon."""


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
    cache_tokens: CacheTokens = None,
    cache_disk_tokens: CacheDiskTokens = None,
    cache_node_tokens: CacheNodeTokens = None,
    cache_format: CacheFormats = None,
    draft_model: DraftModel = None,
    draft_engine: DraftEngine = None,
    sequences: Sequences = SessionRequest.sequences,
    queue: Queue = SessionRequest.queue,
    nodes: Nodes = "",
    shares: Shares = "",
    stages: Stages = "",
    exact: Exact = False,
    recover: Recover = True,
    keep_prefixes: KeepPrefixes = False,
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
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer.", show_default="what the context has room for")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0: always the likeliest token.")] = 0.7,
    top_k: Annotated[int, typer.Option(help="Only the k likeliest tokens. 0: off.")] = 0,
    top_p: Annotated[float, typer.Option(help="Only the likeliest tokens that make up this mass. 1: off.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Only tokens this likely, relative to the likeliest. 0: off.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Equal seeds give equal answers.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    url: Url = "",
    api_key: ApiKey = "",
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON instead of the text.")] = False,
) -> None:
    """Have a model answer a prompt. It is loaded first if it is not served yet, and stays loaded."""
    text = sys.stdin.read() if prompt == "-" else prompt
    if not (text if raw else text.strip()):
        what = "standard input" if prompt == "-" else "the prompt"
        raise CliError(f"{what} is empty; say what the model shall {'continue' if raw else 'answer'}")
    model = for_daemons(model)
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
    computing, settings = on_device(everywhere, device)
    request = _session(
        {
            "model": model,
            "quantisation": whole,
            "quantisations": quants,
            "engine": computing,
            "engines": engines,
            "engine_options": settings,
            "context": context,
            "cache_tokens": cache_tokens,
            "cache_disk_tokens": cache_disk_tokens,
            "cache_node_tokens": cache_node_tokens,
            "cache_format": cache_format and cache_format.value,
            "draft_model": draft_model and for_daemons(draft_model),
            "draft_engine": draft_engine,
            "sequences": sequences,
            "queue": queue,
            "nodes": parse_nodes(nodes) if nodes else None,
            "shares": parse_shares(shares) if shares else None,
            "stages": parse_stages(stages) if stages else None,
            "exact": exact,
            "recover": recover,
            "keep_prefixes": keep_prefixes,
            "experts": experts.value,
            "replicas": replicas,
            "trunk": trunk,
        }
    )
    wanted = Wanted(
        request,
        device=device,
        any_quantisation=whole is None,
        any_engine=everywhere is None,
        any_cache_format=cache_format is None,
    )
    run_interruptibly(_run(wanted, body, url, api_key, may_be_alone, as_json))


def for_daemons(model: str) -> str:
    """A model as a daemon with another working directory finds it: a path in full."""
    path = Path(model)
    return str(path.resolve()) if path.is_dir() or (path.suffix == ".gguf" and path.is_file()) else model


def _check(body: dict[str, Any]) -> None:
    """Refuse what no answer can be asked for with, before a model is loaded for it.

    Raises:
        CliError: naming the option.
    """
    from motley.orchestrator.api.openai.generates import chat_generates, completion_generates
    from motley.orchestrator.api.schema import FieldError

    generates = completion_generates if "prompt" in body else chat_generates
    try:
        generates({**body, "model": "any", "stream": True})
    except FieldError as error:
        is_text = (error.param or "").startswith(("messages", "prompt"))
        raise CliError(f"{'the prompt' if is_text else option_of(error.param or '')} {error.why}") from error


def _session(body: dict[str, Any]) -> SessionRequest:
    """What the orchestrator is asked for, checked as it will do: fields that are None are left out.

    Raises:
        CliError: naming the option.
    """
    from motley.orchestrator.api.mesh.session_parameters import session_request
    from motley.orchestrator.api.schema import FieldError

    try:
        return session_request(body)
    except FieldError as error:
        raise CliError(f"{option_of(error.param or '')} {error.why}") from error


async def _run(wanted: Wanted, body: dict[str, Any], url: str, api_key: str, may_be_alone: bool, as_json: bool) -> None:
    try:
        async with Client(url, api_key) as client:
            await _answer(client, wanted, body, as_json)
    except Unreachable:
        if not may_be_alone:
            raise
        console.print(
            f"[dim]no mesh at {url or USUAL_URL}: this machine runs the model alone, and forgets it afterwards[/]"
        )
        async with mesh_of_one() as client:
            await _answer(client, wanted, body, as_json, lasting=False)


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
        raise CliError(f"session {model!r} has failed: {why}\nStart it again with:  {start_command(failed)}")
    return None


async def load(
    client: Client, wanted: Wanted, show: Callable[[str, int, int], None], *, lasting: bool = True
) -> dict[str, Any]:
    """A ready session of the model, made if there is none; for `show` see `Client.wait_ready`.

    An interrupt closes the session if it was made here, as whoever ends a command wants no more of what it began, least
    of all every node's memory; one that somebody else has begun goes on loading. Either is said.

    Args:
        lasting: the mesh goes on when this command ends; one that does not needs no closing.

    Raises:
        CliError: it cannot be, or is loaded otherwise than `wanted`.
    """
    model = wanted.request.model
    session = await _find(client, model)
    if session is None:
        if (path := Path(model)).is_file() and path.suffix != ".gguf":
            raise CliError(no_model(path))
        console.print(f"[dim]{escape(model)} is not served yet: loading it[/]")
        asked = wanted.request.body()
        try:
            # While it is in planning, the orchestrator gives it up by itself if nobody waits for the answer any more.
            made = await client.call("POST", "/api/sessions", asked, patient=True)
        except asyncio.CancelledError:
            if lasting:
                await _tell_if_made(client, model)
            raise
        except Refused as refusal:
            if refusal.code == "name_in_use":
                session = await _find(client, model)  # somebody else may have had the same idea a moment ago
                if session is None and (other := await _find(client, Path(model).name)):
                    raise CliError(
                        f"session {other['name']!r} serves another model of that name, {other['model']}: end it first,"
                        f" with `{stop_command(other)}`, or give your model's folder another name"
                    ) from refusal
            if session is None:
                field = refusal.param if refusal.param in asked and refusal.param != "model" else None
                raise CliError(f"{option_of(field)}: {refusal}" if field else str(refusal)) from refusal
        else:
            if made["forecast"]:
                console.print(f"[dim]forecast: {forecast_line(made['forecast'])}, on {_nodes_told(made)}[/]")
            try:
                return await client.wait_ready(made, show)
            except asyncio.CancelledError:
                if lasting:
                    await _close_unready(client, made)
                raise
    wanted.check(session)
    try:
        session = await client.wait_ready(session, show)
    except asyncio.CancelledError:
        goes_on = f"{_called(session)} is not of this command and goes on loading; to end it: {_to_stop(session)}"
        console.print(goes_on, soft_wrap=True)
        raise
    wanted.check(session)  # what was still in planning may have come out otherwise
    return session


async def _tell_if_made(client: Client, model: str) -> None:
    """Say so if a session of a model goes on though its planning was interrupted: the answer, with its id, may
    have been on its way. It may also be somebody else's by now, so it is not closed.
    """
    session = None
    with contextlib.suppress(CliError, TimeoutError):
        async with asyncio.timeout(GIVE_UP_S):
            session = await _find(client, model)
            while session is not None and session["state"] == "planning":
                await asyncio.sleep(POLL_S)
                session = await _find(client, model)
    if session is not None:
        was_made = f"{_called(session)} was made already, by this command or another; to end it: {_to_stop(session)}"
        console.print(was_made, soft_wrap=True)


async def _close_unready(client: Client, session: dict[str, Any]) -> None:
    """Close a session that was being loaded for this command alone, and say so."""
    console.print(f"closing {_called(session)}, which is not ready yet", soft_wrap=True)
    try:
        async with asyncio.timeout(CLOSE_S):
            await client.call("DELETE", f"/api/sessions/{session['id']}")
    except (CliError, TimeoutError) as error:
        if not isinstance(error, Refused) or error.code != "session_not_found":  # somebody was faster
            why = escape(str(error)) or f"no answer within {CLOSE_S:.0f} s"
            console.print(f"[yellow]it may go on loading[/] ({why}); to end it: {_to_stop(session)}", soft_wrap=True)


def _nodes_told(session: dict[str, Any]) -> str:
    return escape(", ".join(rank["node"] for rank in session["ranks"]))


def _called(session: dict[str, Any]) -> str:
    return escape(f"session {session['name'] or session['id']!r}")


def _to_stop(session: dict[str, Any]) -> str:
    return escape(f"`{stop_command(session)}`")


async def _answer(client: Client, wanted: Wanted, body: dict[str, Any], as_json: bool, *, lasting: bool = True) -> None:
    with loading_bars() as bars:
        session = await load(client, wanted, bars.advance_to, lasting=lasting)
    context, most = session["context"], body["max_tokens"]
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    began = time.perf_counter()
    first: float | None = None
    said: list[str] = []
    thoughts: list[str] = []
    finish = ""
    usage: dict[str, int] = {}
    timings: dict[str, float | None] = {}
    try:
        async for event in client.stream(path, {**body, "model": session["name"]}):
            usage = event.get("usage") or usage
            timings = event.get("timings") or timings
            for choice in event["choices"]:
                piece = choice["text"] if "prompt" in body else choice["delta"].get("content") or ""
                thought = choice.get("delta", {}).get("reasoning_content", "")
                if piece or thought:  # what opens or ends an answer is no token
                    first = first or time.perf_counter()
                finish = choice["finish_reason"] or finish
                if not as_json:
                    if thought:
                        console.out(thought, style="dim", end="", highlight=False)
                    elif any(thoughts) and piece and not any(said):
                        console.print()
                    print(piece, end="", flush=True)
                said.append(piece)
                thoughts.append(thought)
    except Refused as refusal:
        match refusal.code:
            case "context_length_exceeded":
                too_long = f"the prompt{f' and --max-tokens {most} together are' if most else ' is'} too long"
                raise CliError(
                    f"{too_long} for the context of {context} tokens: shorten it{', ask for fewer' if most else ''}, or"
                    f" close the session with `{stop_command(session)}` and load the model with a larger --context"
                ) from refusal
            case "no_chat_template":
                raise CliError(
                    f"{session['name']} has no chat template, so it can only continue the prompt as it is: add --raw"
                ) from refusal
            case _:
                raise
    finally:
        if any(said) and not as_json:
            print(flush=True)  # whatever follows, an error too, begins a line
    tokens = usage.get("completion_tokens", 0)
    ms = timings.get("ms_per_token")
    ttft_ms = 1e3 * ((first or time.perf_counter()) - began)
    if as_json:
        answer = {"model": session["name"], "text": "".join(said), "finish_reason": finish, "usage": usage}
        print(json.dumps({**answer, "ttft_ms": ttft_ms, "ms_per_token": ms}))
    else:
        elsewhere = sum(len(nodes_of(host)) for host in session["hosts"])
        by = "the context, which is full" if finish == "length" and most is None else finish
        hosts = f", experts on {counted(elsewhere, 'node')}" if elsewhere else ""
        then = "" if ms is None else f", then {ms:.1f} ms each"
        console.print(
            f"[dim]{counted(tokens, 'token')}, the first after {ttft_ms:.0f} ms{then}, on "
            f"{counted(len(session['ranks']), 'rank')}{hosts}; ended by {by}[/]"
        )
