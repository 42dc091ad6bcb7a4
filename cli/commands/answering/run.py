"""`motley run`: text from a model, served by the mesh, or by this machine alone if there is no mesh."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape

from motley.cli.bundled import FIRST
from motley.cli.errors import CliError
from motley.cli.interrupt import run as run_interruptibly
from motley.cli.reaching.client import ApiKey, Client, Refused, Url
from motley.cli.reaching.loading import as_it_is_now, checked_request, for_daemons, load, no_chat_template
from motley.cli.reaching.mesh_of_one import RUNS_ALONE, mesh_or_alone
from motley.cli.shown.show import console, limit_reached, loading_bars, lost_since
from motley.cli.typed.given import left_alone, refuse, typed
from motley.cli.typed.options import (
    MODELS_OWN,
    ActivationsOption,
    AdapterFolders,
    AdapterRank,
    Adapters,
    CacheDiskTokens,
    CacheFormats,
    CacheNodeTokens,
    CacheTokens,
    Context,
    DeviceOption,
    DraftEngine,
    DraftModel,
    Embedding,
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
    Think,
    by_node,
    effort_of,
    on_device,
    one_of,
    parse_nodes,
    parse_shares,
    parse_stages,
)
from motley.cli.typed.wanted import Wanted, nodes_of, option_of, stop_command
from motley.protocol import OWN_HEAD, QUEUE, SEQUENCES
from motley.protocol.wording import counted

OF_ANSWERS = ("raw", "think", "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop")
"""Options that say something of an answer, and nothing of how its model is loaded."""


def register(app: typer.Typer) -> None:
    app.command(
        epilog='Examples: motley run ./tinyllama "Why is the sky blue?"   echo "ROMEO:" | motley run ./model - --raw'
    )(run)


def run(
    command: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="A served model's name, a folder or .gguf file, a short name such as qwen3-0.6b, or a hub id"
            f" (owner/name). {FIRST} comes with Motley."
        ),
    ],
    prompt: Annotated[
        str | None, typer.Argument(help="What to say; - reads standard input. Without it the model is loaded only.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    quant: Quants = None,
    engine: Engines = None,
    device: DeviceOption = None,
    activations: ActivationsOption = None,
    context: Context = None,
    cache_tokens: CacheTokens = None,
    cache_disk_tokens: CacheDiskTokens = None,
    cache_node_tokens: CacheNodeTokens = None,
    cache_format: CacheFormats = None,
    draft_model: DraftModel = None,
    draft_engine: DraftEngine = None,
    sequences: Sequences = SEQUENCES,
    queue: Queue = QUEUE,
    nodes: Nodes = "",
    shares: Shares = "",
    stages: Stages = "",
    exact: Exact = False,
    recover: Recover = True,
    keep_prefixes: KeepPrefixes = False,
    embeddings: Embedding = None,
    adapter: AdapterFolders = None,
    adapters: Adapters = None,
    adapter_rank: AdapterRank = None,
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
    think: Think = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Longest answer.", show_default="the model's own limit, or the context"),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, max=2.0, help="0: always the likeliest token.", show_default=MODELS_OWN)
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Only the k likeliest tokens. 0: off.", show_default=MODELS_OWN)
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Only the likeliest tokens that make up this mass. 1: off.", show_default=MODELS_OWN),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Only tokens this likely, relative to the likeliest. 0: off.", show_default=MODELS_OWN),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Equal seeds give equal answers.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    url: Url = "",
    api_key: ApiKey = "",
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON instead of the text.")] = False,
) -> None:
    """Have a model answer a prompt, or embed it. It is loaded first if it is not served yet, and stays loaded."""
    text = sys.stdin.read() if prompt == "-" else prompt
    if text is not None and not (text if raw else text.strip()):
        what = "standard input" if prompt == "-" else "the prompt"
        raise CliError(f"{what} is empty; say what the model shall {'continue' if raw else 'answer'}")
    if raw and think is not None:
        raise CliError("--raw tells the model's chat template nothing; leave out --think or --no-think")
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
        **effort_of(think),
        **({"prompt": text} if raw else {"messages": [{"role": "user", "content": text}]}),
    }
    own = named_adapters(adapter or ())
    if own:
        body["adapter"] = next(iter(own))
    if text is None:
        refuse(typed(command), OF_ANSWERS, "without a prompt there is no answer; say what to answer")
    else:
        _check(body)
    whole, quants = by_node("--quant", quant or (), [*Quantisation])
    everywhere, engines = by_node("--engine", engine or ())
    computing, settings = on_device(everywhere, device, activations)
    request = checked_request(
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
            "draft_model": draft_model if draft_model == OWN_HEAD else draft_model and for_daemons(draft_model),
            "draft_engine": draft_engine,
            "sequences": sequences,
            "queue": queue,
            "nodes": parse_nodes(nodes) if nodes else None,
            "shares": parse_shares(shares) if shares else None,
            "stages": parse_stages(stages) if stages else None,
            "exact": exact,
            "recover": recover,
            "keep_prefixes": keep_prefixes,
            "embeddings": embeddings and embeddings.value,
            "adapters": max(2, len(own)) if own and adapters is None else adapters,
            "adapter_rank": adapter_rank,
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
        any_adapters=adapters is None,
        chats=text is not None and not raw and embeddings is None,
    )
    may_be_alone = text is not None and left_alone(command, "url") and not request.all_named
    run_interruptibly(_run(wanted, None if text is None else body, own, url, api_key, may_be_alone, as_json))


def named_adapters(words: Sequence[str]) -> dict[str, str]:
    """What ``--adapter`` names, with the folder of each as every daemon finds it; empty where none is given.

    Raises:
        CliError: one has no name, or two have the same.
    """
    found: dict[str, str] = {}
    for word in words:
        name, _, folder = word.partition("=")
        if not name or name in found:
            raise CliError(f"--adapter wants NAME=FOLDER, each name once, and not {word!r}")
        found[name] = for_daemons(folder) if folder else ""
    return found


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


async def _run(
    wanted: Wanted,
    body: dict[str, Any] | None,
    adapters: Mapping[str, str],
    url: str,
    api_key: str,
    may_be_alone: bool,
    as_json: bool,
) -> None:
    alone = RUNS_ALONE if may_be_alone else ""
    async with mesh_or_alone(url, api_key, alone, wanted.request.model) as (client, lasting):
        await _answer(client, wanted, body, adapters, as_json, lasting)


async def _answer(
    client: Client,
    wanted: Wanted,
    body: dict[str, Any] | None,
    adapters: Mapping[str, str],
    as_json: bool,
    lasting: bool,
) -> None:
    with loading_bars() as bars:
        session = await load(client, wanted, bars.advance_to, lasting=lasting)
    for name, folder in adapters.items():
        if folder:
            await client.add_adapter(session["name"], name, folder)
    if body is None:
        if as_json:
            print(json.dumps({"model": session["name"]}))
        else:
            console.print(f"{escape(session['name'])} is served; `motley chat {escape(session['name'])}` talks to it")
        return
    if wanted.request.embeddings:
        text = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        told = await client.call("POST", "/v1/embeddings", {"model": session["name"], "input": text})
        print(json.dumps(told if as_json else told["data"][0]["embedding"]))
        return
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
                        console.out(thought, style="dim", end="")
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
                raise no_chat_template(session) from refusal
            case _:
                raise
    finally:
        if any(said) and not as_json:
            print(flush=True)  # whatever follows, an error too, begins a line
    before, session = session, await as_it_is_now(client, session)
    tokens = usage.get("completion_tokens", 0)
    ms = timings.get("ms_per_token")
    ttft_ms = 1e3 * ((first or time.perf_counter()) - began)
    if as_json:
        answer = {"model": session["name"], "text": "".join(said), "finish_reason": finish, "usage": usage}
        print(json.dumps({**answer, "ttft_ms": ttft_ms, "ms_per_token": ms}))
    else:
        if lost := lost_since(before, session):
            console.print(f"[yellow]{escape(lost)}[/]", soft_wrap=True)
        elsewhere = sum(len(nodes_of(host)) for host in session["hosts"])
        by = finish
        if finish == "length" and most is None:
            by = limit_reached(usage, context)
        hosts = f", experts on {counted(elsewhere, 'node')}" if elsewhere else ""
        then = "" if ms is None else f", then {ms:.1f} ms each"
        console.print(
            f"[dim]{counted(tokens, 'token')}, the first after {ttft_ms:.0f} ms{then}, on "
            f"{counted(len(session['ranks']), 'rank')}{hosts}; ended by {by}[/]"
        )
