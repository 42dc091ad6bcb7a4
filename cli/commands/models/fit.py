"""`motley models fit`: which of the known models the mesh can run, and how fast."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from motley.cli.errors import CliError
from motley.cli.interrupt import run
from motley.cli.reaching.client import ApiKey, Client, Refused, Url
from motley.cli.reaching.mesh_of_one import mesh_or_alone
from motley.cli.shown.show import counting_bar, results, show_set_aside, table
from motley.cli.typed.given import left_alone
from motley.cli.typed.options import AsJson, AtOnce, Context, WhatIf
from motley.protocol.wording import short_bytes

READABLE_MS = 200.0
"""Per token. What comes more slowly than people read is of less use than a smaller model."""
TOLD_WHY = 3
"""Of so many models it is told what they miss; of more it would hide the table."""


def fit(
    command: typer.Context,
    names: Annotated[list[str] | None, typer.Argument(help="Short names of models. Default: all.")] = None,
    requests: AtOnce = 1,
    context: Context = None,
    what_if: WhatIf = None,
    url: Url = "",
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Forecast what well-known models would take on the nodes that are there, by their sizes alone: none is fetched.

    First come those that answer as fast as people read, the largest before the others.
    """
    alone = "forecast for this machine" if left_alone(command, "url") else ""
    asked = {"requests": requests, "context": context, "what_if": list(what_if) if what_if else None}
    forecasts, nodes = run(_fit(names or [], asked, url, api_key, alone))
    found = sorted(forecasts, key=usefulness)
    if as_json:
        print(json.dumps({"models": found}))
        return
    _show(found, bool(what_if))
    show_set_aside(nodes)


def usefulness(each: dict[str, Any]) -> tuple[int, float, int, str]:
    """What models are sorted by: those that are quick enough, the largest first; slower ones, the quickest first, as
    far as speeds look different; those that do not fit."""
    if each["why_not"]:
        return 2, 0.0, 0, each["name"]
    rate = _rate(each)
    quick = rate >= 1e3 / READABLE_MS
    return (0 if quick else 1), (0.0 if quick else -rate), -each["parameters"], each["name"]


def _rate(each: dict[str, Any]) -> float:
    """Tokens per second, as they are shown."""
    return round(1e3 / float(each["forecast"]["ms_per_token"]), 1)


async def _fit(
    names: list[str], asked: dict[str, Any], url: str, api_key: str, alone: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What each model takes, and the nodes of the mesh."""
    async with mesh_or_alone(url, api_key, alone) as (client, _):
        return await _forecasts(client, names, asked), (await client.call("GET", "/api/nodes"))["nodes"]


async def _forecasts(client: Client, names: list[str], asked: dict[str, Any]) -> list[dict[str, Any]]:
    """What each model takes, or why not.

    Raises:
        CliError: the mesh cannot be asked, or refuses to forecast any of them.
    """
    known = (await client.call("GET", "/api/known-models"))["models"]
    wanted = [each for each in known if not names or each["name"] in names]
    unknown = [name for name in names if name not in {each["name"] for each in known}]
    if not wanted:
        told = ", ".join(each["name"] for each in known)
        raise CliError(
            f"{', '.join(unknown)}: no short name of a model; there are: {told}. Other models are forecast by"
            " `motley plan OWNER/NAME`"
        )
    why_not = "no short name: `motley plan OWNER/NAME` forecasts other models"
    found: list[dict[str, Any]] = [
        {"name": name, "forecast": None, "nodes": [], "why_not": why_not, "refused": True} for name in unknown
    ]
    refused: list[Refused] = []
    with counting_bar("models") as tell:
        for done, each in enumerate(wanted):
            tell(done, len(wanted))
            try:
                found.append({**each, **await _forecast(client, each["name"], asked)})
            except Refused as refusal:  # of one: the others are forecast all the same
                refused.append(refusal)
                found.append({**each, "forecast": None, "nodes": [], "why_not": str(refusal), "refused": True})
        tell(len(wanted), len(wanted))
    if refused and len(refused) == len(wanted):
        raise refused[0]
    return found


async def _forecast(client: Client, name: str, asked: dict[str, Any]) -> dict[str, Any]:
    """What a model takes, or why it does not fit.

    Raises:
        CliError: it cannot be asked for.
    """
    body = {"model": name, "by_shape": True, "experts": "sliced", **asked}
    try:
        answer = await client.call("POST", "/api/plan", body, patient=True)
    except Refused as refusal:
        if refusal.code != "insufficient_memory":
            raise
        return {"forecast": None, "nodes": [], "why_not": str(refusal), "refused": False}
    ranks = answer["plan"]["ranks"]
    return {
        "parameters": answer["parameters"],
        "forecast": answer["forecast"],
        "nodes": [rank["node"] for rank in ranks],
        "memory_mb": sum(rank["memory_mb"] for rank in ranks),
        "why_not": None,
        "refused": False,
    }


def _show(found: list[dict[str, Any]], imagined: bool) -> None:
    rows = [
        [
            each["name"],
            each.get("quantisation", "-"),
            *("-", "-", "-"),
            each["why_not"] if each["refused"] else "does not fit",
        ]
        if each["why_not"]
        else [
            each["name"],
            each["quantisation"],
            short_bytes(1e6 * each["memory_mb"]),
            f"{_rate(each):.1f}",
            f"{each['forecast']['ttft_ms'] / 1e3:.1f} s",
            ", ".join(each["nodes"]),
        ]
        for each in found
    ]
    columns = ["model", "held as", "memory", "tokens per second", "first after", "nodes"]
    prompts = {each["forecast"].get("prompt_tokens", 0) for each in found if each["forecast"]}
    title = "What fits, by forecast" + (
        f"; the first token of an answer to a prompt of {max(prompts)}" if any(prompts) else ""
    )
    results.print(table(columns, rows, title=title))
    results.print(
        f"In this order: those that answer as fast as people read ({1e3 / READABLE_MS:.0f} tokens per second), the"
        " largest first; slower ones, the quickest first; what does not fit.",
        soft_wrap=True,
    )
    too_large = [each for each in found if each["why_not"] and not each["refused"]]
    if len(found) <= TOLD_WHY:
        for each in too_large:
            results.print(each["why_not"], soft_wrap=True, markup=False)
    elif too_large:
        why = f"`motley models fit {too_large[0]['name']}` says what is missing"
        results.print(f"What does not fit may with a smaller --context; {why}.", soft_wrap=True)
    best = next((each["name"] for each in found if not each["why_not"]), None)
    if best and not imagined:  # else it may fit on what is not there alone
        results.print(f"To talk to one: `motley chat {best}`")
