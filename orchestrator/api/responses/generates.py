"""What the leader is asked for a request of OpenAI's Responses API. Pure."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from typing import Any

from pydantic import TypeAdapter

from motley.orchestrator.api.openai.generates import Function, least_top_p, offer
from motley.orchestrator.api.openai.schema import JsonFormat
from motley.orchestrator.api.responses.schema import (
    LOGPROBS,
    CallItem,
    JsonSchemaFormat,
    MessageItem,
    NamedTool,
    Part,
    ReasoningItem,
    ResponseRequest,
    ResultItem,
)
from motley.protocol.mesh_pb2 import Constraint, Generate, Sampling

RESPONSE = TypeAdapter(ResponseRequest)


def generate_of(asked: ResponseRequest) -> Generate:
    """What the leader is asked to answer."""
    generate = Generate(
        messages_json=json.dumps(_messages(asked), ensure_ascii=False, separators=(",", ":")),
        max_tokens=asked.max_output_tokens or 0,
        reasoning_effort=(asked.reasoning and asked.reasoning.effort) or "",
        sampling=Sampling(
            temperature=asked.temperature,
            top_p=least_top_p(asked.top_p),
            seed=secrets.randbits(64),
            logprobs=LOGPROBS in asked.include,
            top_logprobs=asked.top_logprobs if LOGPROBS in asked.include else 0,
        ),
    )
    if asked.tools and asked.tool_choice != "none":
        offer(generate, [Function(tool.name, tool.description, tool.parameters, tool.strict) for tool in asked.tools])
        generate.one_call = not asked.parallel_tool_calls
        if isinstance(asked.tool_choice, NamedTool):
            generate.tool_choice = f"={asked.tool_choice.name}"
        elif asked.tool_choice == "required":
            generate.tool_choice = "required"
    match asked.text and asked.text.format:
        case JsonFormat():
            generate.constraint.CopyFrom(Constraint(json_schema='{"type": "object"}', param="text.format"))
        case JsonSchemaFormat(schema_=schema):
            generate.constraint.CopyFrom(Constraint(json_schema=json.dumps(schema), param="text.format.schema"))
    return generate


def _messages(asked: ResponseRequest) -> list[dict[str, Any]]:
    """The turns as chat templates know them: calls, and the thoughts before them, are parts of an assistant's turn."""
    messages: list[dict[str, Any]] = []
    if asked.instructions:
        messages.append({"role": "system", "content": asked.instructions})
    thoughts = ""
    for item in asked.input:
        match item:
            case ReasoningItem():
                thoughts += _joined(item.content) or _joined(item.summary)
            case CallItem():
                last = messages[-1] if messages else {}
                if last.get("role") != "assistant" or thoughts:
                    last = {"role": "assistant", "content": ""}
                    messages.append(last)
                thoughts = _with_thoughts(last, thoughts)
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                last.setdefault("tool_calls", []).append(call)
            case ResultItem():
                messages.append({"role": "tool", "content": _joined(item.output), "tool_call_id": item.call_id})
            case MessageItem():
                role = "system" if item.role == "developer" else item.role
                turn = {"role": role, "content": _joined(item.content)}
                thoughts = _with_thoughts(turn, thoughts) if role == "assistant" else thoughts
                messages.append(turn)
    return messages


def _with_thoughts(turn: dict[str, Any], thoughts: str) -> str:
    """Give a turn the thoughts before it; what is left of them."""
    if thoughts:
        turn["reasoning_content"] = thoughts
    return ""


def _joined(parts: Iterable[Part]) -> str:
    return "".join(part.text or part.refusal for part in parts)
