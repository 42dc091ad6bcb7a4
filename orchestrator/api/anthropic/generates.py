"""What the leader is asked for a request of Anthropic's API. Pure."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from typing import Any

from pydantic import TypeAdapter

from motley.orchestrator.api.anthropic.schema import (
    CountRequest,
    Message,
    MessagesRequest,
    Prompt,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from motley.orchestrator.api.openai.generates import Function, least_top_p, offer
from motley.protocol import WHETHER_TO_THINK
from motley.protocol.mesh_pb2 import Constraint, Generate, Sampling

MESSAGES = TypeAdapter(MessagesRequest)
COUNT = TypeAdapter(CountRequest)


def generate_of(asked: MessagesRequest) -> Generate:
    """What the leader is asked to answer."""
    generate = prompt_of(asked)
    generate.max_tokens = asked.max_tokens
    generate.stop.extend(asked.stop_sequences)
    generate.sampling.CopyFrom(
        Sampling(
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=least_top_p(asked.top_p),
            seed=secrets.randbits(64),
        )
    )
    if asked.output_config and asked.output_config.format:
        schema = json.dumps(asked.output_config.format.schema_)
        generate.constraint.CopyFrom(Constraint(json_schema=schema, param="output_config.format.schema"))
    return generate


def prompt_of(asked: Prompt) -> Generate:
    """What the leader is given, of whatever is asked of it."""
    messages: list[dict[str, Any]] = []
    if system := _joined(asked.system):
        messages.append({"role": "system", "content": system})
    for message in asked.messages:
        _add(messages, message)
    generate = Generate(messages_json=json.dumps(messages, ensure_ascii=False, separators=(",", ":")))
    if asked.output_config and asked.output_config.effort:
        generate.reasoning_effort = asked.output_config.effort
    elif asked.thinking and asked.thinking.type == "disabled":
        generate.template_json = json.dumps(dict.fromkeys(WHETHER_TO_THINK, False))
    choice = asked.tool_choice
    if asked.tools and (choice is None or choice.type != "none"):
        offer(generate, [Function(tool.name, tool.description, tool.input_schema, tool.strict) for tool in asked.tools])
        if choice is not None:
            generate.tool_choice = {"any": "required", "tool": f"={choice.name}"}.get(choice.type, "")
            generate.one_call = choice.disable_parallel_tool_use
    return generate


def _add(messages: list[dict[str, Any]], message: Message) -> None:
    """Add a turn, in the order of its blocks; a text joins the turn before if that is of the same role."""
    if message.role == "user":
        for block in message.content:
            if isinstance(block, ToolResultBlock):
                said = _joined(block.content)
                content = f"Error: {said}" if block.is_error else said
                messages.append({"role": "tool", "content": content, "tool_call_id": block.tool_use_id})
            elif isinstance(block, TextBlock):
                _say(messages, "user", block.text)
        return
    turn: dict[str, Any] = {"role": "assistant", "content": _joined(message.content)}
    if thoughts := "".join(block.thinking for block in message.content if isinstance(block, ThinkingBlock)):
        turn["reasoning_content"] = thoughts
    calls = [block for block in message.content if isinstance(block, ToolUseBlock)]
    if calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.input, ensure_ascii=False)},
            }
            for call in calls
        ]
    if set(turn) == {"role", "content"}:
        _say(messages, "assistant", turn["content"])
    else:
        messages.append(turn)


def _say(messages: list[dict[str, Any]], role: str, text: str) -> None:
    last = messages[-1] if messages else {}
    if last.get("role") == role and last.keys() == {"role", "content"}:
        last["content"] += f"\n{text}"
    else:
        messages.append({"role": role, "content": text})


def _joined(blocks: Iterable[object]) -> str:
    return "".join(block.text for block in blocks if isinstance(block, TextBlock))
