"""Anthropic's routes: messages, streamed or whole, and how many tokens they have."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from motley.orchestrator.api.access.slow_clients import give
from motley.orchestrator.api.anthropic.generates import COUNT, MESSAGES, generate_of, prompt_of
from motley.orchestrator.api.anthropic.schema import MessagesRequest
from motley.orchestrator.api.asking import Asking, Given, next_delta
from motley.orchestrator.api.errors import ANTHROPIC, ApiError
from motley.orchestrator.api.events import EventStream, as_json, stream_answer
from motley.orchestrator.api.schema import read, read_json
from motley.orchestrator.serving.errors import ServingError
from motley.protocol.mesh_pb2 import CallPiece, Delta

SIGNATURE = "motley"
"""What stands for a signature behind thoughts, which nobody here asks to see again."""


class AnthropicApi:
    def __init__(self, asking: Asking) -> None:
        self._asking = asking

    def routes(self) -> list[web.RouteDef]:
        return [web.post(ANTHROPIC, self.messages), web.post(f"{ANTHROPIC}/count_tokens", self.count_tokens)]

    async def messages(self, request: web.Request) -> web.StreamResponse:
        """Answer a chat in Anthropic's form."""
        asked = read(MESSAGES, await read_json(request))
        async with self._asking.answers(request, asked.model, [generate_of(asked)], "msg_", asked.adapter) as given:
            return await (_stream if asked.stream else _whole)(request, asked, given)

    async def count_tokens(self, request: web.Request) -> web.Response:
        """Tell how many tokens a chat has, as the model's template writes it."""
        asked = read(COUNT, await read_json(request))
        _, told = await self._asking.told_of_prompt(request, asked.model, prompt_of(asked))
        return web.json_response({"input_tokens": told.prompt_tokens})


class _Blocks:
    """The content of an answer as it comes: blocks that follow each other, of which one at most is open."""

    def __init__(self, *, thoughts: bool) -> None:
        """`thoughts`: whether they are told."""
        self.content: list[dict[str, Any]] = []
        self._thoughts = thoughts
        self._open = False
        self._call = -1
        """Which of the answer's calls the open block is, if it is one."""

    def take(self, delta: Delta) -> list[dict[str, Any]]:
        """Take in a piece of the answer; the events by which it is told."""
        events: list[dict[str, Any]] = []
        if delta.reasoning and self._thoughts:
            self._go_on(events, "thinking", {"thinking": "", "signature": ""})
            self._add(events, "thinking", "thinking_delta", delta.reasoning)
        if delta.text:
            self._go_on(events, "text", {"text": ""})
            self._add(events, "text", "text_delta", delta.text)
        for piece in delta.calls:
            self._take_call(events, piece)
        return events

    def end(self) -> list[dict[str, Any]]:
        """Nothing more comes: the events by which that is told."""
        events: list[dict[str, Any]] = []
        self._close(events)
        for block in self.content:
            if block["type"] == "tool_use":
                block["input"] = _arguments(block["input"])
        return events

    @property
    def calls(self) -> bool:
        """Whether tools are called."""
        return self._call >= 0

    def _take_call(self, events: list[dict[str, Any]], piece: CallPiece) -> None:
        if piece.index != self._call:
            self._close(events)
            self._call = piece.index
            self._begin(events, {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}})
            self.content[-1]["input"] = ""
        if piece.arguments:
            self.content[-1]["input"] += piece.arguments
            events.append(self._delta({"type": "input_json_delta", "partial_json": piece.arguments}))

    def _go_on(self, events: list[dict[str, Any]], kind: str, empty: dict[str, Any]) -> None:
        """Have a block of this kind open."""
        if not (self._open and self.content[-1]["type"] == kind):
            self._close(events)
            self._begin(events, {"type": kind, **empty})

    def _begin(self, events: list[dict[str, Any]], block: dict[str, Any]) -> None:
        events.append({"type": "content_block_start", "index": len(self.content), "content_block": block.copy()})
        self.content.append(block)
        self._open = True

    def _add(self, events: list[dict[str, Any]], field: str, kind: str, text: str) -> None:
        self.content[-1][field] += text
        events.append(self._delta({"type": kind, field: text}))

    def _close(self, events: list[dict[str, Any]]) -> None:
        if not self._open:
            return
        self._open = False
        if self.content[-1]["type"] == "thinking":
            self.content[-1]["signature"] = SIGNATURE
            events.append(self._delta({"type": "signature_delta", "signature": SIGNATURE}))
        events.append({"type": "content_block_stop", "index": len(self.content) - 1})

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}


def _arguments(written: str) -> Any:
    """A call's arguments as an object; what the model wrote that is none stands under ``arguments``."""
    try:
        read_ = json.loads(written or "{}")
    except ValueError:
        read_ = None
    return read_ if isinstance(read_, dict) else {"arguments": written}


def _message(given: Given, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": given.id,
        "type": "message",
        "role": "assistant",
        "model": given.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }


def _stop(last: Delta, calls: bool) -> dict[str, Any]:
    """Why an answer has ended."""
    if last.stopped_by:
        return {"stop_reason": "stop_sequence", "stop_sequence": last.stopped_by}
    if last.finish == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    return {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}


def _usage(last: Delta) -> dict[str, Any]:
    """What an answer has cost; tokens that were found in the caches are apart from the others, as at Anthropic."""
    return {
        "input_tokens": last.prompt_tokens - last.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": last.cached_tokens,
        "output_tokens": last.completion_tokens,
    }


def _blocks_of(asked: MessagesRequest) -> _Blocks:
    return _Blocks(thoughts=asked.thinking is not None and asked.thinking.type != "disabled")


async def _whole(http: web.Request, asked: MessagesRequest, given: Given) -> web.StreamResponse:
    blocks, last = _blocks_of(asked), Delta()
    while not given.answers.ended:
        _, last = await next_delta(given.answers)
        blocks.take(last)
    blocks.end()
    body = {**_message(given, blocks.content), **_stop(last, blocks.calls), "usage": _usage(last)}
    return await give(http, body)


async def _stream(http: web.Request, asked: MessagesRequest, given: Given) -> web.StreamResponse:
    """Server-sent events, see `stream_answer`; an answer that fails later ends with an error event."""

    def fail(events: EventStream, error: ServingError) -> None:
        _tell(events, ApiError.of(error).anthropic_body)

    return await stream_answer(http, given.after, lambda events: _write(events, asked, given), fail)


async def _write(events: EventStream, asked: MessagesRequest, given: Given) -> None:
    """Write an answer as it comes; errors as `EventStream.next`."""
    blocks, last, begun = _blocks_of(asked), Delta(), False
    while not given.answers.ended:
        came = await events.next(given.answers)
        if not begun:
            begun = True
            _tell(events, {"type": "message_start", "message": _message(given, [])})
        if came is None:
            _tell(events, {"type": "ping"})
            continue
        last = came[1]
        for event in blocks.take(last):
            _tell(events, event)
    for event in blocks.end():
        _tell(events, event)
    _tell(events, {"type": "message_delta", "delta": _stop(last, blocks.calls), "usage": _usage(last)})
    _tell(events, {"type": "message_stop"})


def _tell(events: EventStream, event: dict[str, Any]) -> None:
    events.event(as_json(event), event["type"])
