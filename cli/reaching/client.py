"""Talking to an orchestrator over its public HTTP API, as any client would."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self
from urllib.parse import urlsplit

import typer

from motley.cli.errors import CliError
from motley.cli.reaching.place import USUAL_URL, Place, find_place
from motley.cli.shown.show import console, worker_name

if TYPE_CHECKING:  # elsewhere it is imported where a request begins: most commands make none
    import aiohttp
    from aiohttp.connector import AddrInfoType

CONNECT_S = 5.0
POLL_S = 0.2
SILENCE_S = 330.0
"""Seconds without a word that an answer may have; longer than the orchestrator's own limit."""
AGAIN_S = 1.0
"""Between two looks whether an orchestrator is back."""
_PASSING = ("session_not_ready", "model_not_found")
"""What an orchestrator answers that has just been started, until its nodes are back."""

Url = Annotated[
    str,
    typer.Option(
        envvar="MOTLEY_URL",
        help="The orchestrator's HTTP address. Default: that of the mesh which this machine belongs to.",
        show_default=False,
    ),
]
ApiKey = Annotated[str, typer.Option(envvar="MOTLEY_API_KEY", help="API key, where the orchestrator wants one.")]


class Refused(CliError):
    """The orchestrator refuses; the message is its own, `code` its stable short form, `param` the field to blame."""

    def __init__(self, message: str, code: str | None, param: str | None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param

    @classmethod
    def as_told(cls, error: dict[str, Any]) -> Self:
        """The refusal that is the ``error`` of an answer.

        Raises:
            KeyError, TypeError: it is not of OpenAI's form.
        """
        return cls(error["message"], error["code"], error["param"])


class Unreachable(CliError):
    """No orchestrator answers at the address."""


class BrokeOff(CliError):
    """An orchestrator that has answered does so no more."""


class Client:
    """An orchestrator's API; use as an asynchronous context."""

    def __init__(self, url: str = "", api_key: str = "") -> None:
        """
        Args:
            url: empty: that of the mesh which this machine belongs to, or else the usual one, once it is entered.
            api_key: empty: what this machine has been given for the mesh, if anything.
        """
        self.reached = False
        """Whether an orchestrator has answered yet; one that is silent from then on has gone."""
        self._place = Place(url, api_key)
        self._http: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        """Where the orchestrator is."""
        return self._place.url

    @property
    def missing(self) -> str:
        """Which mesh it is that does not answer, to begin a sentence with."""
        if name := self._place.joined_as:
            return f"the mesh that this machine has joined as {name!r} does not answer at {self.url}"
        return f"no mesh answers at {self.url}"

    @property
    def unreachable(self) -> str:
        """What to say where nobody answers."""
        if self._place.joined_as:
            down = "`motley up` may not run there, or the network is down"
            return f"{self.missing}: {down}. Name another mesh with --url"
        if why := self._place.unread:
            return (
                f"no orchestrator answers at {self.url}, and which mesh this machine belongs to cannot be read ({why}):"
                " give this user that folder and what is in it, or set MOTLEY_HOME to another one"
            )
        return (
            f"no orchestrator answers at {self.url}; start one with `motley up`, join one with `motley join`, or name"
            " one with --url"
        )

    async def __aenter__(self) -> Self:
        import aiohttp

        self._place = place = await find_place(self._place.url, self._place.key)
        secure = place.url.startswith("https://")
        tls = place.tls() if secure else True
        connector = aiohttp.TCPConnector(ssl=tls, socket_factory=_kept_alive)
        headers = {"Authorization": f"Bearer {place.key}"} if place.key else {}
        self._http = aiohttp.ClientSession(headers=headers, connector=connector)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._http is not None, "it was entered"
        await self._http.close()

    async def call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, patient: bool = False
    ) -> dict[str, Any]:
        """One request with a JSON answer; a `patient` one may take as long as a download.

        Raises:
            CliError: nobody answers, or the orchestrator refuses; the message is its own.
        """
        async with self._request(method, path, body, patient=patient) as response:
            answer: dict[str, Any] = await response.json()
            return answer

    async def add_adapter(self, model: str, name: str, folder: str, pinned: bool = False) -> dict[str, Any]:
        """Have the session of a model know an adapter; errors as `call`."""
        body = {"model": model, "name": name, "folder": folder, "pinned": pinned}
        return await self.call("POST", "/api/adapters", body, patient=True)

    async def stream(
        self, path: str, body: dict[str, Any], *, back_within_s: float = 0.0
    ) -> AsyncIterator[dict[str, Any]]:
        """The events of a streamed answer.

        Args:
            back_within_s: where the orchestrator goes in the middle, it may be away for so long: the answer is taken up
                where it stood.

        Raises:
            CliError: as `call`, or the answer broke off.
        """
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        begun, away = False, None
        while True:
            try:
                async for number, event in self._events(path, body, headers):
                    if number:
                        headers["Last-Event-ID"] = number
                    begun, away = True, None
                    yield event
                return
            except CliError as error:
                passes = isinstance(error, BrokeOff | Unreachable) or getattr(error, "code", None) in _PASSING
                if not begun or not passes or not back_within_s:
                    raise
                if away is None:
                    away = time.monotonic()
                    told = "(the orchestrator is away; the answer goes on when it is back, Ctrl-C ends it here)"
                    console.print(f"\n[dim]{told}[/]", soft_wrap=True)
                elif time.monotonic() - away > back_within_s:
                    raise
            await asyncio.sleep(AGAIN_S)

    async def _events(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """The events of one connection, each behind its number."""
        number = ""
        async with self._request("POST", path, {**body, "stream": True}, headers=headers) as response:
            async for line in response.content:
                kind, _, data = line.decode(errors="replace").strip().partition(": ")
                if kind == "id":
                    number = data
                if kind != "data":  # the end of an event, or a comment that keeps the connection alive
                    continue
                if data == "[DONE]":
                    return
                try:
                    event: dict[str, Any] = json.loads(data)
                except ValueError:  # it breaks off here
                    break
                if "error" in event:
                    raise Refused.as_told(event["error"])
                yield number, event
        raise BrokeOff(f"the answer broke off: {gone(self.url)}")

    async def sessions(self) -> list[dict[str, Any]]:
        """All sessions of the mesh, as the API tells them; errors as `call`."""
        answer = await self.call("GET", "/api/sessions")
        found: list[dict[str, Any]] = answer["sessions"]
        return found

    async def wait_ready(self, session: dict[str, Any], show: Callable[[str, int, int], None]) -> dict[str, Any]:
        """Follow a session until it is ready; `show` is told each rank's name and (done, total) bytes.

        Raises:
            CliError: it failed.
        """
        while session["state"] != "ready":
            failure = session["failure"]
            name, reason = session["name"] or session["id"], failure["message"] if failure else "it was closed"
            why = f"session {name!r} did not come up: {reason}"
            if session["state"] == "paused":
                raise CliError(
                    f"session {name!r} is paused, and goes on by itself when a plan fits: {session['interrupted_by']}."
                    f" To end it: `motley stop {session['id']}`"
                )
            if session["explained"]:  # others may miss a rank before it can say itself why it ended
                raise CliError(why)
            for worker in session["ranks"] + session["hosts"]:
                if worker["loading"]["total_bytes"]:
                    show(worker_name(worker), worker["loading"]["done_bytes"], worker["loading"]["total_bytes"])
            await asyncio.sleep(POLL_S)
            try:
                session = await self.call("GET", f"/api/sessions/{session['id']}")
            except Refused as refusal:
                if failure and refusal.code == "session_not_found":  # somebody has closed it
                    raise CliError(why) from refusal
                raise
        return session

    def _request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        *,
        patient: bool = False,
        headers: dict[str, str] | None = None,
    ) -> _Request:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_S, sock_read=None if patient else SILENCE_S)
        assert self._http is not None, "it was entered"
        name = self._place.name or None
        asked = self._http.request(
            method, self.url + path, json=body, timeout=timeout, server_hostname=name, headers=headers
        )
        return _Request(asked, self)


def _kept_alive(where: AddrInfoType) -> socket.socket:
    """A socket that notices within a minute that the other machine has lost its power: some requests wait for hours."""
    made = socket.socket(*where[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # macOS lacks the first
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return made


def gone(url: str) -> str:
    """Say that nobody answers any more at an address where an orchestrator was."""
    return f"the orchestrator at {url} has gone or cannot be reached any more"


def broke_off(url: str, error: Exception) -> str:
    """Say what may be wrong at an address where somebody listens but gives no answer."""
    parts, usual = urlsplit(url), urlsplit(USUAL_URL).port
    told = f"what listens at {url} has gone, or is no HTTP server ({type(error).__name__})"
    if parts.port == usual:
        return told
    at_usual = f"{parts.scheme}://{re.sub(':[0-9]+$', '', parts.netloc)}:{usual}"
    return (
        f"{told}: is that the port where nodes join? The API has its own, {at_usual} unless `motley up` says otherwise"
    )


class _Request:
    """One HTTP request whose failures become `CliError`."""

    def __init__(self, context: Any, client: Client) -> None:
        self._context = context
        self._client = client

    async def __aenter__(self) -> aiohttp.ClientResponse:
        import aiohttp

        url = self._client.url
        try:
            response: aiohttp.ClientResponse = await self._context.__aenter__()
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            whole = "" if "://" in url else f": write http://{url}"
            raise CliError(f"{url!r} is not an address of the form http://HOST:PORT{whole}") from error
        except aiohttp.ClientError as error:
            if self._client.reached:
                raise BrokeOff(gone(url)) from error
            if isinstance(error, aiohttp.ClientSSLError) and "WRONG_VERSION_NUMBER" in str(error):
                raise CliError(f"{url} does not speak TLS: write http{url.removeprefix('https')}") from error
            if isinstance(error, aiohttp.ClientSSLError):
                raise CliError(
                    f"{url} is not known to this machine ({error}): let it join the mesh, or name a file with the"
                    " certificate of the mesh's authority as SSL_CERT_FILE (`motley up` says where that is)"
                ) from error
            if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
                raise Unreachable(self._client.unreachable) from error
            raise CliError(broke_off(url, error)) from error
        self._client.reached = True
        if response.status >= 400:
            try:
                refused = Refused.as_told((await response.json())["error"])
            except (aiohttp.ClientError, ValueError, KeyError, TypeError):
                told = f"{url} answers {response.status} {response.reason}; is it a Motley orchestrator?"
                refused = Refused(told, None, None)
            await self._context.__aexit__(None, None, None)
            if refused.code == "invalid_api_key":
                raise CliError(
                    f"the API key for {url} is missing or wrong: give one with --api-key, or as MOTLEY_API_KEY"
                    " (`motley keys create`, on the orchestrator's machine, makes one)"
                )
            raise refused
        return response

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import aiohttp

        await self._context.__aexit__(kind, error, trace)
        if isinstance(error, aiohttp.ClientError | TimeoutError):
            raise BrokeOff(gone(self._client.url)) from error
