"""`motley models search` and `pull`: models of the Hugging Face hub."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from motley.cli.errors import CliError
from motley.cli.shown.show import loading_bars, results, table
from motley.orchestrator.known_models.names import perhaps_meant, source_of
from motley.protocol.wording import short_bytes

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

SHOWN = 20
"""Models that a search finds, unless asked for more."""


def search(
    words: Annotated[list[str], typer.Argument(help="Of a model's name.")],
    everything: Annotated[bool, typer.Option("--all", help="Those that Motley cannot run, too.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=500, help="Models to look at, the most fetched first.")] = SHOWN,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON.")] = False,
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
        results.print(f"{left} more that Motley cannot run: --all shows them", highlight=False)


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
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON.")] = False,
) -> None:
    """Fetch a model to this machine, whole. Other nodes then borrow from it what their shares need, and no more."""
    from huggingface_hub.utils.logging import set_verbosity_error
    from huggingface_hub.utils.tqdm import disable_progress_bars

    from motley.daemon.loading.fetching import fetch
    from motley.daemon.weights.hub import fetched_bytes, is_hub_id, published

    disable_progress_bars()  # there is one for all files, below
    set_verbosity_error()  # type: ignore[no-untyped-call]
    source = source_of(model)
    if not is_hub_id(source):
        raise CliError(
            f"{model!r} is neither a short name nor owner/name of a model on huggingface.co.{perhaps_meant(model)}"
            " `motley models fit` lists short names, `motley models search` finds others"
        )
    files = published(source)
    total, missing = sum(each.size for each in files), sum(each.size for each in files if not each.here)
    before = fetched_bytes(source)
    with loading_bars("fetching") as bars:
        place = fetch(source, None, lambda done, _: bars.advance_to(source, min(done - before, missing), missing))
    if as_json:
        print(json.dumps({"model": source, "path": str(place), "bytes": total, "fetched_bytes": missing}))
        return
    what = f"fetched {short_bytes(missing)} of" if missing else "was here already:"
    results.print(f"{source}: {what} {short_bytes(total)}, {place}", soft_wrap=True, highlight=False, markup=False)
