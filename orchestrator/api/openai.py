"""OpenAI's routes: models, chat completions and completions, streamed or whole."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from aiohttp import web

from motley.orchestrator.api.body import read_json
from motley.orchestrator.api.errors import ApiError
from motley.orchestrator.api.events import EventStream
from motley.orchestrator.api.openai_parameters import Parameters, chat_parameters, completion_parameters
from motley.orchestrator.api.slow_clients import Patience, finish
from motley.orchestrator.serving.errors import BusyError, ServingError, unready
from motley.orchestrator.serving.requests import Answer, Requests
from motley.orchestrator.session_table import SessionTable
from motley.orchestrator.sessions import Session, State
from motley.protocol.mesh_pb2 import Delta, LogprobRow

_now = time.perf_counter
LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""


class OpenAiApi:
    def __init__(self, sessions: SessionTable, requests: Requests) -> None:
        self._sessions = sessions
        self._requests = requests

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/models", self.models),
            web.get("/v1/models/{model:.+}", self.model),
            web.post("/v1/chat/completions", self.chat),
            web.post("/v1/completions", self.completions),
        ]

    async def models(self, _: web.Request) -> web.Response:
        served = [_model(session) for session in self._sessions if session.state is State.READY]
        return web.json_response({"object": "list", "data": served})

    async def model(self, request: web.Request) -> web.Response:
        """A model that is ready; one that is not is refused as a request to it would be."""
        session = self._session(request.match_info["model"])
        if session.state is not State.READY:
            raise ApiError.from_failure(unready(session).failure)
        return web.json_response(_model(session))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat_parameters(await read_json(request)), _Chat())

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, completion_parameters(await read_json(request)), _Completion())

    def _session(self, model: str) -> Session:
        session = self._sessions.named(model)
        if session is None:
            served = ", ".join(s.name for s in self._sessions if s.state is State.READY) or "none"
            message = f"no model named {model!r} is served; served: {served}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return session

    async def _answer(self, http: web.Request, parameters: Parameters, form: _Form) -> web.StreamResponse:
        session = self._session(parameters.model)
        envelope = {
            "id": form.prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": session.name,
            "system_fingerprint": f"fp_{session.profile.fingerprint[:12]}",
        }
        try:
            async with self._requests.generate(session, parameters.generate) as answer:
                if parameters.stream:
                    return await _stream(http, parameters, form, envelope, answer)
                return await _whole(http, form, envelope, answer)
        except ServingError as error:
            wait = error.retry_after_s if isinstance(error, BusyError) else None
            raise ApiError.from_failure(error.failure, retry_after_s=wait) from error


class _Form(Protocol):
    """How one of the two kinds of answer is written."""

    prefix: str
    object: str
    chunk_object: str

    def opening(self) -> list[dict[str, Any]]:
        """The choices of the chunk before any text; empty if there is no such chunk."""

    def piece(self, text: str, rows: Sequence[LogprobRow], finish: str | None) -> dict[str, Any]:
        """The choice of a chunk."""

    def whole(self, text: str, rows: Sequence[LogprobRow], finish: str) -> dict[str, Any]:
        """The choice of an answer that is not streamed."""


class _Chat:
    prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]

    def piece(self, text: str, rows: Sequence[LogprobRow], finish: str | None) -> dict[str, Any]:
        delta = {"content": text} if text or rows else {}
        return {"index": 0, "delta": delta, "logprobs": _chat_logprobs(rows), "finish_reason": finish}

    def whole(self, text: str, rows: Sequence[LogprobRow], finish: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": _chat_logprobs(rows), "finish_reason": finish}


class _Completion:
    prefix = "cmpl-"
    object = chunk_object = "text_completion"

    def __init__(self) -> None:
        self._offset = 0

    def opening(self) -> list[dict[str, Any]]:
        return []

    def piece(self, text: str, rows: Sequence[LogprobRow], finish: str | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": self._logprobs(rows), "finish_reason": finish}

    whole = piece

    def _logprobs(self, rows: Sequence[LogprobRow]) -> dict[str, Any] | None:
        if not rows:
            return None
        offsets = []
        for row in rows:
            offsets.append(self._offset)
            self._offset += len(row.chosen.text)
        return {
            "tokens": [row.chosen.text for row in rows],
            "token_logprobs": [_finite(row.chosen.logprob) for row in rows],
            "top_logprobs": [{token.text: _finite(token.logprob) for token in (*row.top, row.chosen)} for row in rows],
            "text_offset": offsets,
        }


class _Pace:
    """How fast the tokens of an answer come. Its pieces of text are no measure: a token may have none, or half a
    character, and what opens a stream is no token."""

    def __init__(self) -> None:
        self._first_at = self._last_at = 0.0
        self._later = 0
        """Tokens that came after those that came first."""

    def on_delta(self, delta: Delta) -> None:
        """Count the tokens of a delta that has come just now."""
        if not delta.ids:
            return
        self._last_at = _now()
        if self._first_at:
            self._later += len(delta.ids)
        else:
            self._first_at = self._last_at

    def timings(self, last: Delta) -> dict[str, Any]:
        """What the last part of an answer tells of its times. Not part of OpenAI's API.

        ``ttft_ms`` is the time to the first token, without the way there and back; ``ms_per_token`` that from each
        token to the next, in the mean, or null where all came at once.
        """
        mean = 1e3 * (self._last_at - self._first_at) / self._later if self._later else None
        return {"timings": {"ttft_ms": round(1e3 * last.prefill_s, 3), "ms_per_token": mean and round(mean, 3)}}


async def _whole(http: web.Request, form: _Form, envelope: dict[str, Any], answer: Answer) -> web.StreamResponse:
    text: list[str] = []
    rows: list[LogprobRow] = []
    pace = _Pace()
    async for delta in answer.deltas():
        pace.on_delta(delta)
        text.append(delta.text)
        rows.extend(delta.logprobs)
    choice = form.whole("".join(text), rows, delta.finish)
    body = {**envelope, "object": form.object, "choices": [choice], "usage": _usage(delta), **pace.timings(delta)}
    response = web.json_response(body)
    with Patience(http), suppress(ConnectionError):
        await response.prepare(http)
        await finish(http, response)
    return response


async def _stream(
    http: web.Request, parameters: Parameters, form: _Form, envelope: dict[str, Any], answer: Answer
) -> web.StreamResponse:
    """Server-sent events. The first delta is awaited before the headers go out, for as long as a stream may be silent,
    so that an answer that fails at once has a status of its own; one that fails later ends with an error event and
    without ``[DONE]``."""
    with Patience(http) as patience, suppress(ConnectionError):  # a client has gone: leaving cancels the request
        stream = EventStream(http, patience)
        try:
            await _write_answer(stream, parameters, form, envelope, answer)
        except ServingError as error:
            if not stream.begun:
                raise
            await stream.event(json.dumps(ApiError.from_failure(error.failure).body, ensure_ascii=False))
        await stream.end()
    return stream.response


async def _write_answer(
    stream: EventStream, parameters: Parameters, form: _Form, envelope: dict[str, Any], answer: Answer
) -> None:
    """Write an answer as it comes, up to ``[DONE]``; errors as `Answer.next` and `EventStream`."""

    async def chunk(choices: list[dict[str, Any]], usage: dict[str, Any] | None = None, **more: Any) -> None:
        tail = {"usage": usage} if parameters.include_usage else {}
        event = {**envelope, "object": form.chunk_object, "choices": choices, **tail, **more}
        await stream.event(json.dumps(event, ensure_ascii=False))

    pace = _Pace()
    opening = form.opening()
    ended = ""
    while not ended:
        delta = await answer.next(stream.quiet_s)
        if delta is None:
            await stream.comment()
            continue
        pace.on_delta(delta)
        if opening:
            await chunk(opening)
            opening = []
        if delta.text or delta.logprobs:
            await chunk([form.piece(delta.text, delta.logprobs, None)])
        ended = delta.finish
    assert delta is not None
    await chunk([form.piece("", [], ended)], **pace.timings(delta))
    if parameters.include_usage:
        await chunk([], _usage(delta))
    await stream.event("[DONE]")


def _model(session: Session) -> dict[str, Any]:
    return {"id": session.name, "object": "model", "created": int(session.created), "owned_by": "motley"}


def _usage(last: Delta) -> dict[str, Any]:
    return {
        "prompt_tokens": last.prompt_tokens,
        "completion_tokens": last.completion_tokens,
        "total_tokens": last.prompt_tokens + last.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": last.cached_tokens},
        "completion_tokens_details": {"accepted_prediction_tokens": last.accepted_drafts},
    }


def _chat_logprobs(rows: Sequence[LogprobRow]) -> dict[str, Any] | None:
    if not rows:
        return None

    def entry(text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}

    content = [
        {
            **entry(row.chosen.text, row.chosen.logprob),
            "top_logprobs": [entry(token.text, token.logprob) for token in row.top],
        }
        for row in rows
    ]
    return {"content": content, "refusal": None}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
