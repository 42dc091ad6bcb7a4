"""The messages of a chat, checked: what a client has sent becomes roles and texts, or is refused."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

Chat: TypeAlias = list[dict[str, Any]]
"""Messages as chat templates take them."""


class ChatError(ValueError):
    """A chat that is malformed, or that the model's chat template refuses; the message says what is wrong where.

    Attributes:
        code: stable and in snake case, for clients; ``invalid_request`` unless it is more special.
    """

    def __init__(self, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.code = code


_KNOWN = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")


def check_messages(messages: object) -> Chat:
    """Check a chat as the orchestrator passes it on.

    Args:
        messages: should be a non-empty list of ``{"role": str, "content": str}``, each with a ``"name"`` or without; of
            an assistant with its ``"tool_calls"`` and ``"reasoning_content"``, of a tool with the ``"tool_call_id"``.
            Other keys must be empty. The orchestrator has joined contents that came in parts.

    Returns:
        The same, with the arguments of calls as objects, as templates want them, and thoughts under both names that
        templates have for them.

    Raises:
        ChatError: they are of another form.
    """
    if not isinstance(messages, list) or not messages:
        raise ChatError("messages must be a non-empty list")
    chat: Chat = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise ChatError(f"{where} must be an object with role and content")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise ChatError(f"{where}.role must be a non-empty string")
        calls = message.get("tool_calls")
        if not isinstance(content, str) and not (content is None and calls):
            raise ChatError(f"{where}.content must be a string")
        # Clients send an answer back with all its fields, most of them empty.
        unknown = [key for key, value in message.items() if key not in _KNOWN and value]
        if unknown:
            raise ChatError(f"{where} has keys that are not supported: {', '.join(map(str, unknown))}")
        checked: dict[str, Any] = {"role": role, "content": content or ""}
        for key in ("name", "tool_call_id", "reasoning_content"):
            if message.get(key):
                checked[key] = str(message[key])
        if message.get("reasoning_content") and not (content and calls):  # gpt-oss takes but one before calls
            checked["thinking"] = checked["reasoning_content"]
        if calls:
            checked["tool_calls"] = _calls(calls, f"{where}.tool_calls")
        chat.append(checked)
    return chat


def with_arguments_as_text(chat: Chat) -> Chat:
    """The same chat, in which the arguments of calls are JSON, as they came."""
    return [
        {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in chat
    ]


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """The calls of an assistant's message; errors as `check_messages`."""
    try:
        return [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])},
            }
            for call in calls
        ]
    except (ValueError, TypeError, LookupError) as error:
        raise ChatError(f"{where} must be calls of functions whose arguments are JSON: {error!r}") from error
