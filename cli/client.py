"""Talking to an orchestrator over its public HTTP API, as any client would."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self
from urllib.parse import urlsplit

import typer

from motley.cli.errors import CliError
from motley.cli.show import worker_name

if TYPE_CHECKING:  # elsewhere it is imported where a request begins: most commands make none
    import aiohttp

DEFAULT_URL = "http://127.0.0.1:8000"
CONNECT_S = 5.0
POLL_S = 0.2
SILENCE_S = 330.0
"""Seconds without a word that an answer may have; longer than the orchestrator's own limit."""

Url = Annotated[
    str, typer.Option(envvar="MOTLEY_URL", help="The orchestrator's HTTP address.", show_default=DEFAULT_URL)
]
ApiKey = Annotated[str, typer.Option(envvar="MOTLEY_API_KEY", help="API key, where the orchestrator wants one.")]


class Refused(CliError):
    """The orchestrator refuses; the message is its own, `code` its stable short form, `param` the field to blame."""

    def __init__(self, message: str, code: str | None, param: str | None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class Unreachable(CliError):
    """No orchestrator answers at the address."""


class Client:
    """An orchestrator's API; use as an asynchronous context."""

    def __init__(self, url: str, api_key: str = "") -> None:
        import aiohttp

        self._url = url.rstrip("/")
        self._http = aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"} if api_key else {})

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of a streamed answer.

        Raises:
            CliError: as `call`, or the answer broke off.
        """
        async with self._request("POST", path, {**body, "stream": True}) as response:
            async for line in response.content:
                data = line.decode().strip().removeprefix("data: ")
                if data == "[DONE]":
                    return
                if data:
                    event: dict[str, Any] = json.loads(data)
                    if "error" in event:
                        raise CliError(event["error"]["message"])
                    yield event
        raise CliError("the answer broke off; see what the orchestrator says")

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

    def _request(self, method: str, path: str, body: dict[str, Any] | None, *, patient: bool = False) -> _Request:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, connect=CONNECT_S, sock_read=None if patient else SILENCE_S)
        return _Request(self._http.request(method, self._url + path, json=body, timeout=timeout), self._url)


def broke_off(url: str, error: Exception) -> str:
    """Say what may be wrong at an address where somebody listens but gives no answer."""
    parts, usual = urlsplit(url), urlsplit(DEFAULT_URL).port
    told = f"what listens at {url} has gone, or is no HTTP server ({type(error).__name__})"
    if parts.port == usual:
        return told
    at_usual = f"{parts.scheme}://{re.sub(':[0-9]+$', '', parts.netloc)}:{usual}"
    return (
        f"{told}: is that the port where nodes join? The API has its own, {at_usual} unless `motley up` says otherwise"
    )


class _Request:
    """One HTTP request whose failures become `CliError`."""

    def __init__(self, context: Any, url: str) -> None:
        self._context = context
        self._url = url

    async def __aenter__(self) -> aiohttp.ClientResponse:
        import aiohttp

        try:
            response: aiohttp.ClientResponse = await self._context.__aenter__()
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
            raise CliError(f"{self._url!r} is not an address of the form http://HOST:PORT") from error
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Unreachable(
                f"no orchestrator answers at {self._url}; start one with `motley up` or name one with --url"
            ) from error
        except aiohttp.ClientError as error:
            raise CliError(broke_off(self._url, error)) from error
        if response.status >= 400:
            code = param = None
            try:
                told = (await response.json())["error"]
                message, code, param = told["message"], told["code"], told["param"]
            except (aiohttp.ContentTypeError, ValueError, KeyError, TypeError):
                message = f"{self._url} answers {response.status} {response.reason}; is it a Motley orchestrator?"
            await self._context.__aexit__(None, None, None)
            if code == "invalid_api_key":
                message = (
                    f"the API key for {self._url} is missing or wrong: give the one that `motley up` prints with"
                    " --api-key, or as MOTLEY_API_KEY"
                )
            raise Refused(message, code, param)
        return response

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import aiohttp

        await self._context.__aexit__(kind, error, trace)
        if isinstance(error, aiohttp.ClientError | TimeoutError):
            raise CliError(f"the orchestrator at {self._url} has gone or cannot be reached any more") from error
