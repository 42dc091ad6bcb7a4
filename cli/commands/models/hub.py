"""`motley models search` and `pull`: models of the Hugging Face hub."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from motley.cli.bundled import bundled
from motley.cli.errors import CliError
from motley.cli.interrupt import run
from motley.cli.reaching.client import ApiKey, Client, Refused, Unreachable, Url
from motley.cli.reaching.home import meshes
from motley.cli.reaching.shares import shares_folder
from motley.cli.shown.show import console, loading_bars, results, table
from motley.cli.typed.node_options import CacheHere, CacheLimit
from motley.cli.typed.options import AsJson, Context, size
from motley.daemon.node.joining.membership import all_kept
from motley.orchestrator.known_models.names import perhaps_meant, source_of
from motley.protocol.wording import short_bytes

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

    from motley.daemon.models.cutting.share import Share
    from motley.daemon.weights.cache import ShareCache
    from motley.daemon.weights.hub import PublishedFile

SHOWN = 20
"""Models that a search finds, unless asked for more."""


def search(
    words: Annotated[list[str], typer.Argument(help="Of a model's name.")],
    everything: Annotated[bool, typer.Option("--all", help="Those that Motley cannot run, too.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=500, help="Models to look at, the most fetched first.")] = SHOWN,
    as_json: AsJson = False,
) -> None:
    """Search the Hugging Face hub, and say which of the models Motley can run."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils.logging import set_verbosity_error

    set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        found = list(
            HfApi().list_models(
                search=" ".join(words),
                sort="downloads",
                limit=limit,
                expand=["config", "downloads", "gated", "gguf", "safetensors", "tags"],
            )
        )
    except Exception as error:  # each version of huggingface_hub lets another HTTP library's errors through
        raise CliError(f"the hub does not answer a search ({type(error).__name__}: {error})") from error
    told = [_judged(each) for each in found]
    shown = [each for each in told if everything or not each["why_not"]]
    if as_json:
        print(json.dumps({"models": shown}))
        return
    rows = [
        [each["name"], each["family"], each["format"], _billions(each["parameters"]), each["why_not"] or "yes"]
        for each in shown
    ]
    results.print(table(["model", "family", "format", "parameters", "runs"], rows))
    if left := len(told) - len(shown):
        results.print(f"{left} more that Motley cannot run: --all shows them")


def _judged(found: ModelInfo) -> dict[str, Any]:
    from motley.daemon.models.on_hub import verdict

    judged = verdict(found.config, found.gguf, found.tags or ())
    counted: Any = found.gguf.get("total") if found.gguf else found.safetensors and found.safetensors.total
    return {
        "name": found.id,
        "family": judged.family,
        "format": judged.format,
        "parameters": counted or None,
        "downloads": found.downloads,
        "gated": bool(found.gated),
        "why_not": judged.why_not or None,
    }


def _billions(parameters: int | None) -> str:
    return f"{parameters / 1e9:.1f} billion" if parameters else "-"


def pull(
    model: Annotated[
        str, typer.Argument(help="A short name such as qwen3-8b, or a hub id: owner/name, owner/name:file.gguf.")
    ],
    whole: Annotated[bool, typer.Option("--whole", help="All of it, whatever this node's share is.")] = False,
    node: Annotated[str, typer.Option(help="The node whose share is meant. Default: this machine's.")] = "",
    context: Context = None,
    cache: CacheHere = None,
    cache_limit: CacheLimit = "50GB",
    url: Url = "",
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Fetch of a model what this node's share needs, as the mesh would cut it now; all of it where there is no mesh.

    What another plan needs besides is fetched when it is loaded.
    """
    from huggingface_hub.utils.logging import set_verbosity_error
    from huggingface_hub.utils.tqdm import disable_progress_bars

    from motley.daemon.weights.hub import find_fetched, is_hub_id, published

    disable_progress_bars()  # there is one for all files, below
    set_verbosity_error()  # type: ignore[no-untyped-call]
    source = source_of(model)
    if bundled(model) != model:
        raise CliError(f"{model} comes with Motley and is here: `motley chat {model}`")
    if not is_hub_id(source):
        raise CliError(
            f"{model!r} is neither a short name nor owner/name of a model on huggingface.co.{perhaps_meant(model)}"
            " `motley models fit` lists short names, `motley models search` finds others"
        )
    files = published(source)
    if not whole and find_fetched(source) is None:
        try:
            plan = run(_planned(model, context, url, api_key))
        except Unreachable:
            if url or node:
                raise
            console.print("[dim]no mesh: this machine would have all of the model[/]")
        else:
            _pull_share(source, plan, node, _shares(cache, cache_limit), as_json)
            return
    _pull_whole(source, files, as_json)


def _shares(cache: Path | None, limit: str) -> ShareCache:
    from motley.daemon.weights.cache import ShareCache

    shares = ShareCache(shares_folder(cache), size("--cache-limit", limit))
    shares.limit = max(shares.limit, sum(entry.size for entry in shares.entries()))  # a node's folder may hold more
    return shares


def _pull_whole(source: str, files: Sequence[PublishedFile], as_json: bool) -> None:
    from motley.daemon.loading.fetching import fetch
    from motley.daemon.weights.hub import fetched_bytes

    total, missing = sum(each.size for each in files), sum(each.size for each in files if not each.here)
    before = fetched_bytes(source)
    with loading_bars("fetching") as bars:
        place = fetch(source, None, lambda done, _: bars.advance_to(source, min(done - before, missing), missing))
    if as_json:
        print(json.dumps({"model": source, "path": str(place), "bytes": total, "fetched_bytes": missing}))
        return
    what = f"fetched {short_bytes(missing)} of" if missing else "was here already:"
    results.print(f"{source}: {what} {short_bytes(total)}, {place}", soft_wrap=True, markup=False)


async def _planned(model: str, context: int | None, url: str, api_key: str) -> dict[str, Any]:
    """How the mesh would cut a model now.

    Raises:
        CliError: it cannot be asked, or has no plan.
    """
    async with Client(url, api_key) as client:
        try:
            answer = await client.call("POST", "/api/plan", {"model": model, "context": context}, patient=True)
        except Refused as refusal:
            raise CliError(
                f"{str(refusal).rstrip('.')}. To fetch all of the model here: `motley models pull --whole {model}`"
            ) from refusal
    plan: dict[str, Any] = answer["plan"]
    return plan


def _pull_share(source: str, plan: dict[str, Any], node: str, cache: ShareCache, as_json: bool) -> None:
    """Fetch what the ranks of a node need, by a plan as ``POST /api/plan`` tells it.

    Raises:
        CliError: it has none there, or what they need does not come.
    """
    from motley.daemon.lending.hub_mirror import begin_pull, open_pulled
    from motley.daemon.lending.wire import LendingError
    from motley.daemon.loading.pulling import pull_shares
    from motley.orchestrator.session_request import SessionRequest

    ranks = plan["ranks"]
    names = {node} if node else {kept.name for kept in all_kept(meshes())} | {socket.gethostname()}
    own = [number for number, rank in enumerate(ranks) if rank["node"] in names]
    if not own:
        having = ", ".join(dict.fromkeys(rank["node"] for rank in ranks))
        raise CliError(
            f"as the mesh would cut {source} now, {' or '.join(sorted(names))} has no share of it; {having} would have"
            " it. Say which node this machine is (`--node NAME`), or fetch all of the model (`--whole`)"
        )
    try:
        with (
            open_pulled(source, None, cache.folder, cache.limit)
            or begin_pull(source, cache.folder, cache.limit) as mirror,
            loading_bars("fetching") as bars,
        ):
            shares, block = [_share(rank["share"]) for rank in ranks], SessionRequest(source).block
            came = pull_shares(
                mirror, shares, own, plan["held"], block, lambda done, total: bars.advance_to(source, done, total)
            )
            place, total = mirror.place, mirror.total
    except LendingError as error:
        raise CliError(str(error)) from error
    if as_json:
        print(json.dumps({"model": source, "path": str(place), "bytes": total, "fetched_bytes": came}))
        return
    nodes = ", ".join(dict.fromkeys(ranks[number]["node"] for number in own))
    what = f"fetched {short_bytes(came)}" if came else "was here already"
    told = f"{source}: what {nodes} needs of {short_bytes(total)}: {what}, {place}"
    results.print(told, soft_wrap=True, markup=False)


def _share(told: dict[str, Any]) -> Share:
    """A share as ``POST /api/plan`` tells it."""
    from motley.daemon.models.cutting.share import Share

    layers = range(*told["layers"]) if told["layers"] else None
    attention, mlp, vocabulary = (range(*told[each]) for each in ("attention", "mlp", "vocabulary"))
    return Share(told["attention_split"], attention, mlp, vocabulary, layers)
