"""A model that a command wants to have loaded: it is found among what is served, or loaded, or not waited for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from motley.cli.bundled import bundled
from motley.cli.errors import CliError
from motley.cli.reaching.client import POLL_S, Client, Refused
from motley.cli.reaching.misnamed import MISSING, misnamed
from motley.cli.shown.show import console, devices_told, forecast_line, without_part
from motley.cli.typed.devices import UNUSABLE, no_device
from motley.cli.typed.wanted import Wanted, nodes_of, option_of, stop_command
from motley.daemon.weights.hub import no_model

if TYPE_CHECKING:
    from motley.orchestrator.session_request import SessionRequest

CLOSE_S = 20.0
"""Closing a session may take so long; longer than an orchestrator waits for its ranks."""
GIVE_UP_S = 5.0
"""An orchestrator gives up what is in planning, and nobody waits for any more, this soon."""


def for_daemons(model: str) -> str:
    """A model as a daemon with another working directory finds it: a path in full."""
    path = Path(model)
    return str(path.resolve()) if path.is_dir() or (path.suffix == ".gguf" and path.is_file()) else model


def checked_request(body: dict[str, Any]) -> SessionRequest:
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


async def _find(client: Client, model: str) -> dict[str, Any] | None:
    """The session that serves `model` or is about to."""
    for session in await client.sessions():
        called = session["name"], session["id"], session["model"]
        if session["state"] != "closing" and not session["failure"] and model in called:
            return session
    return None


async def _find_failed(client: Client, named: str) -> dict[str, Any] | None:
    """The session that has failed and has this name or id."""
    for session in await client.sessions():
        if session["state"] == "failed" and named in (session["name"], session["id"]):
            return session
    return None


def forecast_told(session: dict[str, Any]) -> str:
    """What a session that loads will be like, and where it is."""
    return f"forecast: {forecast_line(session['forecast'])}, on {nodes_told(session)}"


async def load(
    client: Client,
    wanted: Wanted,
    show: Callable[[str, int, int], None],
    *,
    lasting: bool = True,
    forecast: Callable[[dict[str, Any]], str] = forecast_told,
) -> dict[str, Any]:
    """A ready session of the model, made if there is none; for `show` see `Client.wait_ready`.

    One that has failed is in nobody's way: whoever asks by its name has its model loaded anew, is told why it failed,
    and hears of it no more.

    An interrupt closes the session if it was made here, as whoever ends a command wants no more of what it began, least
    of all every node's memory; one that somebody else has begun goes on loading. Either is said.

    Args:
        lasting: the mesh goes on when this command ends; one that does not needs no closing.
        forecast: says in a line what a session with a forecast will be like.

    Raises:
        CliError: it cannot be, or is loaded otherwise than `wanted`, or cannot be talked to as wanted, which shows
            before it is loaded.
    """
    named = model = wanted.request.model
    session = await _find(client, model)
    if session is None and (place := bundled(model)) != model:
        model, wanted = place, replace(wanted, request=replace(wanted.request, model=place))
        session = await _find(client, model)
    if session is None and (failed := await _find_failed(client, named)):
        model = failed["model"]
        wanted = replace(wanted, request=replace(wanted.request, model=model))
        if (session := await _find(client, model)) is None:
            told = f"session {named!r} failed before: {failed['failure']['message']}"
            anew = "It is closed, and its model loaded by what this command says"
            console.print(f"[dim]{escape(told)}\n{anew}[/]", soft_wrap=True)
            await client.call("DELETE", f"/api/sessions/{failed['id']}")
    if session is None:
        if (path := Path(model)).is_file() and path.suffix != ".gguf":
            raise CliError(no_model(path))
        base, _, adapter = model.rpartition(":")
        if base and await _find(client, base):
            raise CliError(
                f"{base} is served; for an answer of its adapter {adapter!r}: motley run {base} --adapter {adapter}"
            )
        console.print(f"[dim]{escape(named)} is not served yet: looking for it[/]")
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
                if refusal.code == MISSING and field is None:
                    served = [session["name"] for session in await client.sessions()]
                    raise misnamed(model, refusal, served) from refusal
                if field == "engine" and wanted.device and wanted.any_engine and refusal.code in UNUSABLE:
                    asked_for = {place.node for place in wanted.request.places}
                    taking = [node for node in await _alive(client) if node["name"] in asked_for or not asked_for]
                    raise no_device(wanted.device, taking) from refusal
                raise CliError(f"{option_of(field)}: {refusal}" if field else str(refusal)) from refusal
        else:
            if made["forecast"]:
                console.print(f"[dim]{forecast(made)}[/]")
            elif made["hosts"]:
                names = dict.fromkeys(name for host in made["hosts"] for name in nodes_of(host))
                told = f"experts on {', '.join(names)}: that is not forecast, and may be slower than --experts sliced"
                console.print(f"[dim]{escape(told)}[/]", soft_wrap=True)
            _tell_without_part(made)
            for told in devices_told(made):
                console.print(f"[dim]{escape(told)}[/]", soft_wrap=True)
            if wanted.chats and not made["chats"]:
                await _close_unready(client, made)
                raise no_chat_template(made)
            try:
                return await client.wait_ready(made, show)
            except asyncio.CancelledError:
                if lasting:
                    await _close_unready(client, made)
                raise
    await _check_nodes(client, wanted.request, session)
    wanted.check(session)
    if wanted.request.nodes:
        _tell_without_part(session)
    try:
        session = await client.wait_ready(session, show)
    except asyncio.CancelledError:
        goes_on = f"{_called(session)} is not of this command and goes on loading; to end it: {_to_stop(session)}"
        console.print(goes_on, soft_wrap=True)
        raise
    wanted.check(session)  # what was still in planning may have come out otherwise
    return await _on_its_nodes(client, wanted.request, session)


def _tell_without_part(session: dict[str, Any]) -> None:
    """Say which nodes were to take part, and do not."""
    for told in without_part(session):
        console.print(f"[yellow]{escape(told)}[/]", soft_wrap=True)


async def _check_nodes(client: Client, request: SessionRequest, session: dict[str, Any]) -> None:
    """Refuse nodes that are not there, as planning would, though nothing is to be planned: the model is loaded.

    Raises:
        CliError: a node is not there, and is not one that the session was asked for with, and goes on without.
    """
    if list(request.nodes) in ([], session["nodes"]):
        return
    alive = sorted(node["name"] for node in await _alive(client))
    for place in request.places:
        if place.node not in alive:
            raise CliError(f"--nodes: no live node is named {place.node!r}; live nodes: {', '.join(alive) or 'none'}")


async def _alive(client: Client) -> list[dict[str, Any]]:
    """The nodes that are there, as the API tells them."""
    nodes = (await client.call("GET", "/api/nodes"))["nodes"]
    return [node for node in nodes if node["state"] == "alive"]


async def _on_its_nodes(client: Client, request: SessionRequest, session: dict[str, Any]) -> dict[str, Any]:
    """A session that has lost some of the nodes that are asked for, once it is back on them, if that is possible."""
    missed, name = session["missed_nodes"], session["name"]
    if not request.nodes or not missed:
        return session
    alive = [node["name"] for node in await _alive(client)]
    if away := [node for node in missed if node not in alive]:
        told = f"{' and '.join(away)} cannot be reached now: {name} goes on without, on {nodes_told(session)}"
        console.print(f"[yellow]{escape(told)}[/]", soft_wrap=True)
        return session
    console.print(escape(f"{' and '.join(missed)} can take part again: {name} is planned anew"), style="dim")
    try:
        path = f"/api/sessions/{session['id']}/rebalance?force=true"
        session = (await client.call("POST", path, patient=True))["session"]
        why = "it does not fit there now"
    except Refused as refusal:
        why = str(refusal)
    if session["missed_nodes"]:
        told = f"{name} stays on {nodes_told(session)}: {escape(why)}"
        console.print(f"[yellow]{told}[/]", soft_wrap=True)
    return session


async def as_it_is_now(client: Client, session: dict[str, Any]) -> dict[str, Any]:
    """A session as it has become since it was asked of; where that cannot be told any more, as it was."""
    with contextlib.suppress(CliError):
        return await client.call("GET", f"/api/sessions/{session['id']}")
    return session


def no_chat_template(session: dict[str, Any]) -> CliError:
    """What to say of a model that cannot be talked to."""
    return CliError(f"{session['name']} has no chat template, so it can only continue the prompt as it is: add --raw")


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


def nodes_told(session: dict[str, Any]) -> str:
    """The nodes of a session's ranks, each as often as it has some."""
    return escape(", ".join(rank["node"] for rank in session["ranks"]))


def _called(session: dict[str, Any]) -> str:
    return escape(f"session {session['name'] or session['id']!r}")


def _to_stop(session: dict[str, Any]) -> str:
    return escape(f"`{stop_command(session)}`")
