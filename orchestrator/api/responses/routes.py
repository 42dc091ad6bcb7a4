"""OpenAI's Responses API: one answer to a list of items, streamed or whole. Nothing is kept between requests."""

from __future__ import annotations

import json
import secrets
from typing import Any

from aiohttp import web

from motley.orchestrator.api.access.slow_clients import give
from motley.orchestrator.api.asking import Asking, Given, next_delta
from motley.orchestrator.api.errors import ApiError
from motley.orchestrator.api.events import EventStream, as_json, stream_answer
from motley.orchestrator.api.openai.routes import chat_logprobs
from motley.orchestrator.api.responses.generates import RESPONSE, generate_of
from motley.orchestrator.api.responses.schema import ResponseRequest
from motley.orchestrator.api.schema import read, read_json
from motley.orchestrator.serving.errors import ServingError
from motley.protocol.mesh_pb2 import CallPiece, Delta

Event = dict[str, Any]


class ResponsesApi:
    def __init__(self, asking: Asking) -> None:
        self._asking = asking

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/responses", self.create)]

    async def create(self, request: web.Request) -> web.StreamResponse:
        """Answer a list of items in the form of the Responses API."""
        asked = read(RESPONSE, await read_json(request))
        async with self._asking.answers(request, asked.model, [generate_of(asked)], "resp_", asked.adapter) as given:
            return await (_stream if asked.stream else _whole)(request, asked, given)


class _Output:
    """The items of an answer as they come; they follow each other, and the last one may be open."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.thought = 0
        """Tokens of what the model has thought."""
        self._open = False
        self._call = -1

    def take(self, delta: Delta) -> list[Event]:
        """Take in a piece of the answer; the events by which it is told."""
        events: list[Event] = []
        if delta.reasoning:
            self.thought += len(delta.ids)
            self._go_on(events, "reasoning", {"summary": [], "content": []}, "rs_")
            self._say(events, "reasoning_text", delta.reasoning, {})
        if delta.text or (delta.logprobs and not delta.reasoning and not delta.calls):
            self._go_on(events, "message", {"role": "assistant", "content": []}, "msg_")
            told = chat_logprobs(delta.logprobs)
            self._say(events, "output_text", delta.text, {"logprobs": told["content"] if told else []})
        for piece in delta.calls:
            self._take_call(events, piece)
        return events

    def end(self, status: str = "completed") -> list[Event]:
        """Nothing more comes: the events by which that is told."""
        events: list[Event] = []
        self._close(events, status)
        return events

    def _take_call(self, events: list[Event], piece: CallPiece) -> None:
        if piece.index != self._call:
            self._close(events)
            self._call = piece.index
            self._begin(events, "function_call", {"call_id": piece.id, "name": piece.name, "arguments": ""}, "fc_")
        if piece.arguments:
            self.items[-1]["arguments"] += piece.arguments
            events.append(self._event("response.function_call_arguments.delta", delta=piece.arguments))

    def _go_on(self, events: list[Event], kind: str, empty: dict[str, Any], prefix: str) -> None:
        """Have an item of this kind open."""
        if not (self._open and self.items[-1]["type"] == kind):
            self._close(events)
            self._begin(events, kind, empty, prefix)

    def _begin(self, events: list[Event], kind: str, empty: dict[str, Any], prefix: str) -> None:
        item = {"id": prefix + secrets.token_hex(12), "type": kind, "status": "in_progress", **empty}
        events.append({"type": "response.output_item.added", "output_index": len(self.items), "item": _copy(item)})
        self.items.append(item)
        self._open = True

    def _say(self, events: list[Event], kind: str, text: str, more: dict[str, Any]) -> None:
        """Add text to the only part that an item has, with log-probabilities where they are told."""
        content = self.items[-1]["content"]
        if not content:
            content.append({"type": kind, "text": "", **({"annotations": []} if kind == "output_text" else {})})
            if "logprobs" in more:
                content[0]["logprobs"] = []
            events.append(self._event("response.content_part.added", content_index=0, part=_copy(content[0])))
        content[0]["text"] += text
        content[0].get("logprobs", []).extend(more.get("logprobs", []))
        events.append(self._event(f"response.{kind}.delta", content_index=0, delta=text, **more))

    def _close(self, events: list[Event], status: str = "completed") -> None:
        if not self._open:
            return
        self._open = False
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            events.append(self._event("response.function_call_arguments.done", **done))
        elif item["content"]:
            part = item["content"][0]
            told = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
            events.append(self._event(f"response.{part['type']}.done", content_index=0, text=part["text"], **told))
            events.append(self._event("response.content_part.done", content_index=0, part=_copy(part)))
        events.append({"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": _copy(item)})

    def _event(self, kind: str, **more: Any) -> Event:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **more}


def _copy(told: dict[str, Any]) -> dict[str, Any]:
    """As it is now: it may grow before it is written."""
    copied: dict[str, Any] = json.loads(json.dumps(told))
    return copied


def _response(asked: ResponseRequest, given: Given, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    said = asked.model_dump(by_alias=True, exclude_none=True)
    return {
        "id": given.id,
        "object": "response",
        "created_at": given.created,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions or None,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata,
        "model": given.model,
        "output": output,
        "parallel_tool_calls": asked.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": asked.reasoning.effort if asked.reasoning else None, "summary": None},
        "store": False,
        "temperature": given.sampling.temperature,
        "text": said.get("text") or {"format": {"type": "text"}},
        "tool_choice": said["tool_choice"],
        "tools": said["tools"],
        "top_logprobs": asked.top_logprobs,
        "top_p": given.sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _ended(asked: ResponseRequest, given: Given, output: _Output, last: Delta) -> dict[str, Any]:
    """The response once its last piece has come."""
    status = _status(last)
    body = _response(asked, given, status, output.items)
    if status == "incomplete":
        body["incomplete_details"] = {"reason": "max_output_tokens"}
    body["usage"] = {
        "input_tokens": last.prompt_tokens,
        "input_tokens_details": {"cached_tokens": last.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": last.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": output.thought},
        "total_tokens": last.prompt_tokens + last.completion_tokens,
    }
    return body


def _status(last: Delta) -> str:
    return "incomplete" if last.finish == "length" else "completed"


async def _whole(http: web.Request, asked: ResponseRequest, given: Given) -> web.StreamResponse:
    output, last = _Output(), Delta()
    while not given.answers.ended:
        _, last = await next_delta(given.answers)
        output.take(last)
    output.end(_status(last))
    return await give(http, _ended(asked, given, output, last))


async def _stream(http: web.Request, asked: ResponseRequest, given: Given) -> web.StreamResponse:
    """Server-sent events, see `stream_answer`; an answer that fails later ends with ``response.failed``."""
    output = _Output()

    def fail(events: EventStream, error: ServingError) -> None:
        told = ApiError.of(error)
        failed = _response(asked, given, "failed", output.items)
        failed["error"] = {"code": told.code or "server_error", "message": str(told)}
        _tell(events, {"type": "response.failed", "response": failed})

    return await stream_answer(http, given.after, lambda events: _write(events, asked, given, output), fail)


async def _write(events: EventStream, asked: ResponseRequest, given: Given, output: _Output) -> None:
    """Write an answer as it comes; errors as `EventStream.next`."""
    last = Delta()
    while not given.answers.ended:
        came = await events.next(given.answers)
        if not events.number:
            for kind in ("created", "in_progress"):
                _tell(events, {"type": f"response.{kind}", "response": _response(asked, given, "in_progress", [])})
        if came is None:
            events.comment()
            continue
        last = came[1]
        for event in output.take(last):
            _tell(events, event)
    for event in output.end(_status(last)):
        _tell(events, event)
    body = _ended(asked, given, output, last)
    _tell(events, {"type": f"response.{body['status']}", "response": body})


def _tell(events: EventStream, event: Event) -> None:
    """Tell the next event, with its number, from 0 on."""
    events.event(as_json({**event, "sequence_number": events.number}), event["type"])
