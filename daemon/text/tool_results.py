"""What calls of tools came to, for chat templates that leave it out where clients say it: in messages of a tool.

Gemma 4's first templates have results in the message that called, as ``tool_responses``. Where a template leaves them
out there, too, the user says them, as llama.cpp has it, rather than that a model answers as if it had called nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from motley.daemon.text.messages import Chat, ChatError

Way = Callable[[Chat], Chat]
"""What makes of a chat one in which results are told in some way."""

_LOOKS_FOR_TOOL = re.compile(r"""role['"]?\]?\s*(?:[!=]=|in)[^%}]*['"]tool['"]""")
"""Where a template looks for messages of a tool."""


def ways(template: str) -> list[Way]:
    """The ways in which a template may take results, the likeliest first."""
    found: list[Way] = [as_they_are, said_by_user]
    if "tool_responses" in template:
        found.insert(1 if _LOOKS_FOR_TOOL.search(template) else 0, with_the_calls)
    return found


def first_that_tells(chat: Chat, tried: Sequence[Way], write: Callable[[Chat], str]) -> tuple[str, Way]:
    """A chat with results as a template writes it, in the first of some ways in which it leaves none out, and that way.

    Raises:
        ChatError: it refuses the chat, or leaves results out in all of them.
    """
    for way in tried:
        text = write(way(chat))
        if text != write(way(_with_other_results(chat))):
            return text, way
    raise ChatError("the model's chat template leaves out what calls of tools came to")


def has_results(chat: Chat) -> bool:
    """Whether there is anything that a template could leave out."""
    return any(message["role"] == "tool" and message["content"] for message in chat)


def as_they_are(chat: Chat) -> Chat:
    """The chat itself, with messages of a tool."""
    return chat


def with_the_calls(chat: Chat) -> Chat:
    """The same chat, in which an assistant's message that calls tools has ``tool_responses``, what that came to."""
    told: Chat = []
    for message in chat:
        if message["role"] == "tool" and told and told[-1].get("tool_calls"):
            caller = told[-1]
            names = {call["id"]: call["function"]["name"] for call in caller["tool_calls"]}
            name = message.get("name") or names.get(message.get("tool_call_id"), "")
            response = {"name": name, "response": _read(message["content"])}
            told[-1] = {**caller, "tool_responses": [*caller.get("tool_responses", ()), response]}
        else:
            told.append(message)
    return said_by_user(told)  # those of calls that are not in the chat


def said_by_user(chat: Chat) -> Chat:
    """The same chat, in which the user says what calls came to."""
    told: Chat = []
    answered = False
    """Whether the message before is the result of a call."""
    for message in chat:
        result = message["role"] == "tool"
        said = (
            {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
            if result
            else message
        )
        if answered and said["role"] == "user":  # many templates take no two messages of a user
            told[-1] = {**told[-1], "content": f"{told[-1]['content']}\n{said['content']}"}
        else:
            told.append(said)
        answered = result
    return told


def _with_other_results(chat: Chat) -> Chat:
    return [
        {**message, "content": "1" if message["content"] == "0" else "0"} if message["role"] == "tool" else message
        for message in chat
    ]


def _read(content: str) -> Any:
    """A result as an object, if it is one in JSON."""
    try:
        value = json.loads(content)
    except ValueError:
        return content
    return value if isinstance(value, dict) else content
