"""`motley keys`, `motley token` and `motley nodes`: who may use the mesh, and who belongs to it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any
from urllib.parse import quote

import typer

from motley.cli.errors import CliError
from motley.cli.interrupt import run
from motley.cli.reaching.client import ApiKey, Client, Url
from motley.cli.shown.show import console, results, table
from motley.cli.typed.command_group import CommandGroup
from motley.cli.typed.durations import seconds
from motley.cli.typed.options import AsJson, one_of

Note = Annotated[str, typer.Option(help="For people: who or what it is for.")]


class Scope(StrEnum):
    """What a key is for: to use the mesh, or also to say who belongs to it."""

    USE = "use"
    ADMIN = "admin"


def register(app: typer.Typer) -> None:
    keys = CommandGroup("API keys: for clients that are not nodes of the mesh.")
    keys.command("create", epilog="Example: motley keys create --note 'Open WebUI'")(create_key)
    keys.command("ls", epilog="Example: motley keys ls --json")(list_keys)
    keys.command("rm", epilog="Example: motley keys rm 1f3a90bc")(remove_key)
    keys.command("usage", epilog="Example: motley keys usage --json")(usage)
    app.add_typer(keys, name="keys")
    token = CommandGroup("Join tokens: with one, a machine can become a node of the mesh.")
    token.command("create", epilog="Example: motley token create --single-use --expires 1h")(create_token)
    token.command("ls", epilog="Example: motley token ls --json")(list_tokens)
    token.command("rm", epilog="Example: motley token rm 1f3a90bc")(remove_token)
    token.command("codes", epilog="Example: motley token codes")(list_codes)
    app.add_typer(token, name="token")
    nodes = CommandGroup("Machines that belong to the mesh, whether they are on or not.")
    nodes.command("ls", epilog="Example: motley nodes ls --json")(list_nodes)
    nodes.command("revoke", epilog="Example: motley nodes revoke laptop")(revoke)
    app.add_typer(nodes, name="nodes")


def create_key(
    note: Note = "",
    scope: Annotated[
        Scope,
        typer.Option(
            help="use: ask models, load and close them. admin: besides, make keys and tokens, revoke nodes.",
            parser=one_of(Scope),
            metavar="|".join(Scope),
        ),
    ] = Scope.USE,
    url: Url = "",
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Make an API key. It is shown once: the orchestrator keeps no more than how to recognise it."""
    made = _call(url, api_key, "POST", "/api/keys", {"note": note, "scope": str(scope)})
    console.print(f"key {made['id']}, scope {made['scope']}; it is not shown again")
    print(json.dumps(made) if as_json else made["key"])


def list_keys(url: Url = "", api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """List the API keys."""
    keys = _call(url, api_key, "GET", "/api/keys")["keys"]
    rows = [[key["id"], key["scope"], key["note"] or "-", _when(key["created"])] for key in keys]
    _show(keys, ["key", "scope", "for", "made"], rows, as_json)


def remove_key(
    key: Annotated[str, typer.Argument(help="As `motley keys ls` shows it.")], url: Url = "", api_key: ApiKey = ""
) -> None:
    """Make an API key invalid, at once."""
    _call(url, api_key, "DELETE", f"/api/keys/{quote(key, safe='')}")
    print(f"key {key} is no longer valid")


def usage(url: Url = "", api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """Show who has asked how much of which model, by day (UTC)."""
    told = _call(url, api_key, "GET", "/api/usage")["usage"]
    columns = ["day", "caller", "model", "requests", "prompt_tokens", "completion_tokens"]
    rows = [[str(each[column]) for column in columns] for each in told]
    _show(told, [column.replace("_", " ") for column in columns], rows, as_json)


def create_token(
    note: Note = "",
    expires: Annotated[
        str, typer.Option(metavar="DURATION", help="How long it is valid, such as 1h; or never.")
    ] = "24h",
    single_use: Annotated[bool, typer.Option("--single-use", help="One machine can join with it.")] = False,
    url: Url = "",
    api_key: ApiKey = "",
    as_json: AsJson = False,
) -> None:
    """Make a join token. It is shown once; a machine that has joined needs it no more."""
    body: dict[str, Any] = {"note": note, **({"uses": 1} if single_use else {})}
    if expires != "never":
        try:
            body["expires_s"] = seconds(expires)
        except ValueError as error:
            raise CliError(f"--expires: {error}") from None
    made = _call(url, api_key, "POST", "/api/tokens", body)
    console.print(f"token {made['id']}, {_validity(made)}; it is not shown again")
    print(json.dumps(made) if as_json else made["token"])


def list_tokens(url: Url = "", api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """List the join tokens that are valid."""
    tokens = _call(url, api_key, "GET", "/api/tokens")["tokens"]
    rows = [[token["id"], token["note"] or "-", _validity(token), _when(token["created"])] for token in tokens]
    _show(tokens, ["token", "for", "valid", "made"], rows, as_json)


def list_codes(url: Url = "", api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """List the machines that want to join now, with the code that is to be typed on each."""
    wanting = _call(url, api_key, "GET", "/api/pairings")["pairings"]
    rows = [[each["name"], each["address"], each["code"]] for each in wanting]
    _show(wanting, ["machine", "address", "code"], rows, as_json)


def remove_token(
    token: Annotated[str, typer.Argument(help="As `motley token ls` shows it.")], url: Url = "", api_key: ApiKey = ""
) -> None:
    """Make a join token invalid; machines that have joined with it stay."""
    _call(url, api_key, "DELETE", f"/api/tokens/{quote(token, safe='')}")
    print(f"token {token} is no longer valid")


def list_nodes(url: Url = "", api_key: ApiKey = "", as_json: AsJson = False) -> None:
    """List the machines that belong to the mesh; `motley status` shows what those that are on have and do."""
    members = _call(url, api_key, "GET", "/api/members")["members"]
    rows = [
        [each["name"], each["address"] or "not there", f"token {each['token']}", _when(each["joined"])]
        for each in members
    ]
    _show(members, ["node", "address", "joined by", "since"], rows, as_json)


def revoke(
    node: Annotated[str, typer.Argument(help="As `motley nodes ls` shows it.")], url: Url = "", api_key: ApiKey = ""
) -> None:
    """Shut a machine out, at once and until it gets another join token; its sessions go on without it."""
    gone = _call(url, api_key, "DELETE", f"/api/members/{quote(node, safe='')}")
    print(f"{gone['name']} is shut out; the join token by which it came ({gone['token']}) is no longer valid either")


def _call(url: str, api_key: str, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        async with Client(url, api_key) as client:
            return await client.call(method, path, body)

    return run(ask())


def _show(data: Sequence[dict[str, Any]], titles: list[str], rows: list[list[str]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(data))
    else:
        results.print(table(titles, rows) if rows else "none")


def _validity(token: dict[str, Any]) -> str:
    uses = {None: "any number of machines", 1: "one machine"}.get(token["uses_left"], f"{token['uses_left']} machines")
    if token["expires"] is None:
        return f"for {uses}, for ever"
    return f"for {uses}, for {max(0.0, token['expires'] - time.time()) / 3600:.1f} h"


def _when(unix: float) -> str:
    return datetime.fromtimestamp(unix).strftime("%Y-%m-%d %H:%M")
