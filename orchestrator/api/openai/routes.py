"""OpenAI's routes: models, chat completions and completions, streamed or whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from motley.orchestrator.api.access.slow_clients import give
from motley.orchestrator.api.asking import Asking, Served, next_delta
from motley.orchestrator.api.errors import ApiError
from motley.orchestrator.api.events import EventStream, as_json, stream_answer
from motley.orchestrator.api.openai.generates import Generates, chat_generates, completion_generates
from motley.orchestrator.api.schema import read_json
from motley.orchestrator.serving.answering.requests import Answers
from motley.orchestrator.serving.errors import ServingError, unready
from motley.orchestrator.sessions.table import SessionTable
from motley.protocol.mesh_pb2 import CallPiece, Delta, LogprobRow, TokenLogprob

LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""


class OpenAiApi:
    def __init__(self, sessions: SessionTable, asking: Asking) -> None:
        self._sessions = sessions
        self._asking = asking

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/models", self.models),
            web.get("/v1/models/{model:.+}", self.model),
            web.post("/v1/chat/completions", self.chat),
            web.post("/v1/completions", self.completions),
        ]

    async def models(self, _: web.Request) -> web.Response:
        """Models that are served, and each with every adapter that requests may name."""
        served = [
            _model(Served(session, adapter))
            for session in self._sessions
            if session.takes_requests
            for adapter in (None, *session.adapters.values())
        ]
        return web.json_response({"object": "list", "data": served})

    async def model(self, request: web.Request) -> web.Response:
        """A model that is ready; one that is not is refused as a request to it would be."""
        served = self._asking.served(request.match_info["model"])
        if not served.session.takes_requests:
            raise unready(served.session)
        return web.json_response(_model(served))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, chat_generates(await read_json(request)), _Chat)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, completion_generates(await read_json(request)), _Completion)

    async def _answer(self, http: web.Request, asked: Generates, form: type[_Form]) -> web.StreamResponse:
        async with self._asking.answers(http, asked.model, asked.each, form.prefix, asked.adapter) as given:
            envelope = {
                "id": given.id,
                "created": given.created,
                "model": given.model,
                "system_fingerprint": f"fp_{given.session.profile.fingerprint[:12]}",
            }
            choices = [_Choice(form(index)) for index in range(given.count)]
            if asked.stream:
                return await _stream(http, asked, choices, envelope, given.answers, given.after)
            return await _whole(http, asked, choices, envelope, given.answers)


class _Form(ABC):
    """How an answer of one of the two kinds is written: the choices in which it is told. `index` is its number among
    the answers to one request, from 0 on."""

    prefix: str
    object: str
    chunk_object: str

    def __init__(self, index: int) -> None:
        self._index = index

    def opening(self) -> list[dict[str, Any]]:
        """The choices of the chunk before any text; empty if there is no such chunk."""
        return []

    @abstractmethod
    def piece(self, delta: Delta, finish: str | None) -> dict[str, Any]:
        """The choice of a chunk."""

    @abstractmethod
    def whole(self, delta: Delta) -> dict[str, Any]:
        """The choice of an answer that is not streamed, all deltas of which are merged into one."""


class _Chat(_Form):
    prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        return [{"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._calls = False
        """Whether it calls tools."""

    def piece(self, delta: Delta, finish: str | None) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if delta.text or (delta.logprobs and not delta.reasoning and not delta.calls):
            told["content"] = delta.text
        if delta.reasoning:
            told["reasoning_content"] = delta.reasoning
        if delta.calls:
            self._calls = True
            told["tool_calls"] = [_call_piece(piece) for piece in delta.calls]
        return self._choice("delta", told, delta.logprobs, finish)

    def whole(self, delta: Delta) -> dict[str, Any]:
        calls: dict[int, dict[str, Any]] = {}
        for piece in delta.calls:
            call = calls.setdefault(piece.index, {"id": piece.id, "type": "function"})
            function = call.setdefault("function", {"name": piece.name, "arguments": ""})
            function["arguments"] += piece.arguments
        self._calls = bool(calls)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": delta.text if delta.text or not calls else None,
            "refusal": None,
        }
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        if calls:
            message["tool_calls"] = [calls[index] for index in sorted(calls)]
        return self._choice("message", message, delta.logprobs, delta.finish)

    def _choice(
        self, kind: str, told: dict[str, Any], rows: Sequence[LogprobRow], finish: str | None
    ) -> dict[str, Any]:
        finish = "tool_calls" if self._calls and finish == "stop" else finish
        return {"index": self._index, kind: told, "logprobs": chat_logprobs(rows), "finish_reason": finish}


def _call_piece(piece: CallPiece) -> dict[str, Any]:
    if not piece.id:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


class _Completion(_Form):
    prefix = "cmpl-"
    object = chunk_object = "text_completion"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._offset = 0

    def piece(self, delta: Delta, finish: str | None) -> dict[str, Any]:
        rows = self._logprobs(delta.logprobs)
        return {"index": self._index, "text": delta.text, "logprobs": rows, "finish_reason": finish}

    def whole(self, delta: Delta) -> dict[str, Any]:
        return self.piece(delta, delta.finish)

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


class _Choice:
    """An answer as it comes.

    Attributes:
        opened: whether anything of it has been told in a stream.
        deltas: of it so far, where it is not streamed.
        last: its last delta.
    """

    def __init__(self, form: _Form) -> None:
        self.form = form
        self.opened = False
        self.deltas: list[Delta] = []
        self.last = Delta()


def _timings(choices: Sequence[_Choice]) -> dict[str, Any]:
    """What is told of the times of answers that have ended. Not part of OpenAI's API.

    Without the way there and back: ``ttft_ms`` is the time to the first token, ``ms_per_token`` that from each token of
    an answer to the next, in the mean, or null where all came at once, or its node does not tell (before version 10 of
    the protocol); of an answer that went on after a loss, what was written since counts.
    """
    known = [1e3 * choice.last.token_s for choice in choices if choice.last.token_s]
    ttft_ms = 1e3 * min(choice.last.prefill_s for choice in choices)
    return {
        "timings": {
            "ttft_ms": round(ttft_ms, 3),
            "ms_per_token": round(sum(known) / len(known), 3) if known else None,
        }
    }


async def _whole(
    http: web.Request, asked: Generates, choices: Sequence[_Choice], envelope: dict[str, Any], answers: Answers
) -> web.StreamResponse:
    while not answers.ended:
        number, delta = await next_delta(answers)
        choice = choices[number]
        choice.last = delta
        choice.deltas.append(delta)
    body = {
        **envelope,
        "object": choices[0].form.object,
        "choices": [choice.form.whole(_merged(choice.deltas)) for choice in choices],
        "usage": _usage(choices, asked.n),
        **_timings(choices),
    }
    return await give(http, body)


def _merged(deltas: Sequence[Delta]) -> Delta:
    return Delta(
        text="".join(delta.text for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        logprobs=[row for delta in deltas for row in delta.logprobs],
        calls=[piece for delta in deltas for piece in delta.calls],
        finish=deltas[-1].finish,
    )


async def _stream(
    http: web.Request,
    asked: Generates,
    choices: Sequence[_Choice],
    envelope: dict[str, Any],
    answers: Answers,
    after: int | None,
) -> web.StreamResponse:
    """Server-sent events, see `stream_answer`; an answer that fails later ends with an error event and without
    ``[DONE]``."""

    def fail(events: EventStream, error: ServingError) -> None:
        events.event(as_json(ApiError.of(error).body))

    return await stream_answer(
        http, after, lambda events: _write_answers(events, asked, choices, envelope, answers), fail
    )


async def _write_answers(
    events: EventStream,
    asked: Generates,
    choices: Sequence[_Choice],
    envelope: dict[str, Any],
    answers: Answers,
) -> None:
    """Write answers as they come, up to ``[DONE]``; errors as `EventStream.next`."""
    head = as_json({**envelope, "object": choices[0].form.chunk_object}).removesuffix("}")  # the same for each token

    def chunk(told: list[dict[str, Any]], usage: dict[str, Any] | None = None, **more: Any) -> None:
        tail = {"usage": usage} if asked.include_usage else {}
        rest = as_json({"choices": told, **tail, **more}).removeprefix("{")
        events.event(f"{head}, {rest}")

    while not answers.ended:
        came = await events.next(answers)
        if came is None:
            events.comment()
            continue
        choice, delta = choices[came[0]], came[1]
        choice.last = delta
        if not choice.opened:
            choice.opened = True
            if opening := choice.form.opening():
                chunk(opening)
        if delta.text or delta.logprobs or delta.reasoning or delta.calls:
            chunk([choice.form.piece(delta, None)])
        if delta.finish:
            chunk([choice.form.piece(Delta(), delta.finish)], **_timings([choice]))
    if asked.include_usage:
        chunk([], _usage(choices, asked.n))
    events.event("[DONE]")


def _model(served: Served) -> dict[str, Any]:
    parent = {"parent": served.session.name} if served.adapter else {}
    created = int(served.session.created)
    return {"id": served.name, "object": "model", "created": created, "owned_by": "motley", **parent}


def _usage(choices: Sequence[_Choice], n: int) -> dict[str, Any]:
    """What answers have cost that have ended, `n` to each prompt. A prompt counts once; of it, what was found in the
    caches for the answer for which least was: the others find what that has computed."""
    lasts = [choice.last for choice in choices]
    prompt = sum(last.prompt_tokens for last in lasts[::n])
    completion = sum(last.completion_tokens for last in lasts)
    cached = sum(min(last.cached_tokens for last in lasts[at : at + n]) for at in range(0, len(lasts), n))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"accepted_prediction_tokens": sum(last.accepted_drafts for last in lasts)},
    }


def chat_logprobs(rows: Sequence[LogprobRow]) -> dict[str, Any] | None:
    """Log-probabilities as chats tell them; None: there are none."""
    if not rows:
        return None

    def entry(token: TokenLogprob) -> dict[str, Any]:
        return {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(token.raw)}

    content = [
        {
            **entry(row.chosen),
            "top_logprobs": [entry(token) for token in row.top],
        }
        for row in rows
    ]
    return {"content": content, "refusal": None}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
