"""`motley experts`: which nodes have which experts of a session, how busy they are, and moving them."""

from __future__ import annotations

import json
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.markup import escape
from rich.text import Text

from motley.cli.errors import CliError
from motley.cli.interrupt import run
from motley.cli.reaching.client import ApiKey, Client, Url
from motley.cli.shown.show import results, table, waiting
from motley.protocol.wording import counted, short_bytes

MARKS = {"serving": "", "fetching": "+", "leaving": "-", "dead": "†"}
"""What stands before a node's number: its replica of an expert serves, is coming, going, or lost and not replaced."""
MEANING = {"fetching": "on its way there", "leaving": "let go there", "dead": "lost there, and nowhere else yet"}
HOST_COLUMNS = """\
no.: what it is called below.  experts: that it computes, + on their way to it.
rows: its part of all that were computed.  trip: to it and back.
wait: for it, while the trunk had nothing else to do, in all.
stalls: how late a token came each time that it failed, the last three."""


def register(app: typer.Typer) -> None:
    app.command(epilog="Examples: motley experts mixtral   motley experts rebalance mixtral")(experts)


def experts(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[rebalance] [SESSION]",
            help="A session's name or id, as `motley status` shows it; needless if only one has experts on nodes.",
        ),
    ] = None,
    url: Url = "",
    api_key: ApiKey = "",
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON, with every layer by itself.")] = False,
) -> None:
    """Show which nodes have which experts, with their load; or move experts so that the load is even."""
    typed = words or []
    rebalances = typed[:1] == ["rebalance"]
    named = typed[rebalances:]
    if len(named) > 1:
        raise CliError(f"say `motley experts SESSION` or `motley experts rebalance SESSION`, not {' '.join(typed)!r}")
    session = named[0] if named else None
    if rebalances:
        moved = run(_call("POST", session, "/experts/rebalance", url, api_key))
        print(json.dumps(moved) if as_json else _moved(moved))
        return
    found = run(_call("GET", session, "/experts?layers=each" if as_json else "/experts", url, api_key))
    if as_json:
        print(json.dumps(found))
    else:
        _show(found)


async def _call(method: str, wanted: str | None, path: str, url: str, api_key: str) -> dict[str, Any]:
    async with Client(url, api_key) as client:
        session = _choose(await client.sessions(), wanted)
        return await client.call(method, f"/api/sessions/{quote(session['id'])}{path}")


def _choose(sessions: list[dict[str, Any]], wanted: str | None) -> dict[str, Any]:
    """The session of that name or id; without one, the only session that has experts on nodes."""
    if wanted is not None:
        for session in sessions:
            if wanted in (session["id"], session["name"]):
                return session
        raise CliError(f"there is no session {wanted!r}; `motley status` lists them")
    having = [session for session in sessions if session["experts"] == "parallel"]
    if len(having) != 1:
        which = ", ".join(session["name"] for session in having)
        raise CliError(f"name one of the sessions: {which}" if which else "no session has its experts on nodes")
    return having[0]


def _moved(moved: dict[str, Any]) -> str:
    busy = f"the busiest node is busy for {moved['busy_ms']:.2f} ms per token"
    if not moved["moves"]:
        return f"nothing to gain: {busy}"
    moves = counted(moved["moves"], "replica")
    return f"moving {moves} in the background: {busy}, then for {moved['busy_ms_after']:.2f} ms"


def _show(found: dict[str, Any]) -> None:
    cells = [host for group in found["groups"] for expert in group["experts"] for host in expert["hosts"]]
    states, numbers = {cell["state"] for cell in cells}, {cell["host"] for cell in cells}
    zones = any(host["zone"] for host in found["hosts"])
    results.print(
        table(
            ["node", "no.", *(["zone"] if zones else []), "state", "experts", "rows", "trip ms", "wait s", "stalls ms"],
            [
                [
                    host["node"],
                    str(host["host"]),
                    *([host["zone"] or "-"] if zones else []),
                    host["state"],
                    f"{host['serving']}" + (f" +{host['fetching']}" if host["fetching"] else ""),
                    f"{100 * host['load']:.0f} %",
                    f"{host['round_trip_ms']:.2f}",
                    f"{host['wait_s']:.1f}",
                    " ".join(f"{stall:.0f}" for stall in host["stalls_ms"][-3:]) or "-",
                ]
                for host in found["hosts"]
                if host["state"] != "gone" or host["host"] in numbers
            ],
            title=f"{found['name']}: {_summary(found)}",
        )
    )
    _explain(HOST_COLUMNS)
    results.print(
        table(
            ["expert", *(_layers(group["layers"]) for group in found["groups"])],
            [
                [str(index), *(_cell(group["experts"][index]) for group in found["groups"])]
                for index in range(found["experts"])
            ],
            title="Where each expert is: a row for each, a column for each group of layers",
        )
    )
    some = " 0:3: in 3 layers of the group only." if any(len(group["layers"]) > 1 for group in found["groups"]) else ""
    marks = "".join(f" {mark}: {MEANING[state]}." for state, mark in MARKS.items() if mark and state in states)
    _explain(f"0 1 x1.3: the nodes no. 0 and 1 have it; it is chosen 1.3 times its even share.{some}{marks}")
    for host in found["hosts"]:
        if host["lost"]:
            results.print(f"[red]{escape(host['node'])}: {escape(host['lost'])}[/]", soft_wrap=True)
    for text in (found["short"], waiting(found)):
        if text:
            results.print(f"[yellow]{escape(text)}[/]", soft_wrap=True)


def _explain(text: str) -> None:
    results.print(Text(text, style="dim"))


def _summary(found: dict[str, Any]) -> str:
    replicas = found["replicas"]
    parts = [f"{replicas['asked']} of each expert asked for, {replicas['least']} there at least"]
    if found["moves"]:
        parts.append(f"{counted(found['moves'], 'replica')} on the move")
    parts.append(f"{short_bytes(found['bytes_out'])} sent, {short_bytes(found['bytes_in'])} received")
    return ", ".join(parts)


def _layers(layers: list[int]) -> str:
    return f"layer {layers[0]}" if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"


def _cell(expert: dict[str, Any]) -> str:
    """``0 1 x1.3``: nodes 0 and 1 have it. ``0:3 +1:2 x0.9``: node 0 in three layers, node 1 fetches it in two."""
    most = max((host["layers"] for host in expert["hosts"]), default=1)
    hosts = [
        f"{MARKS[host['state']]}{host['host']}" + (f":{host['layers']}" if most > 1 else "")
        for host in sorted(expert["hosts"], key=lambda host: (list(MARKS).index(host["state"]), host["host"]))
    ]
    return " ".join([*(hosts or ["nobody"]), f"x{expert['load']:.1f}"])
