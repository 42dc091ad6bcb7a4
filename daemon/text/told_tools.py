"""Tools for models whose chat templates know of none: a text tells of them, and calls and results are texts, too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from motley.daemon.text.calls.formats import TOLD
from motley.daemon.text.messages import Chat
from motley.daemon.text.tool_results import said_by_user

_ABOUT = """You can call tools. These are there, each with a JSON schema of its arguments:
<tools>
{tools}
</tools>
To call one, write its name and arguments as below, and nothing behind them; the result is what is said to you next.
{begin}
{{"name": "NAME", "arguments": {{...}}}}
{end}
Call none if you need none."""


def with_told_tools(chat: Chat, tools: Sequence[Any]) -> Chat:
    """The same chat, in which the system's message (or else the user's first) tells of the tools, an assistant's calls
    are in its text, and what they came to is said by the user.

    Args:
        chat: as `motley.daemon.text.messages.check_messages` returns it.
        tools: as OpenAI has them; none: nothing is told of any, but the chat may have calls.
    """
    told = said_by_user(list(map(_with_written_calls, chat)))
    if tools:
        _tell(told, tools)
    return told


def _with_written_calls(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls, if it has any, are in its text."""
    if not (calls := message.get("tool_calls")):
        return message
    texts = filter(None, [message["content"], *(_call(call["function"]) for call in calls)])
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": "\n".join(texts)}


def _call(function: Any) -> str:
    written = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
    return f"{TOLD.begin}{TOLD.lead}{written}{TOLD.tail}{TOLD.end}"


def _tell(chat: Chat, tools: Sequence[Any]) -> None:
    """Write of the tools where a chat begins."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    about = _ABOUT.format(tools=lines, begin=TOLD.begin, end=TOLD.end)
    for index, message in enumerate(chat):
        if message["role"] in ("system", "developer"):
            chat[index] = {**message, "content": f"{message['content']}\n\n{about}"}
            return
        if message["role"] == "user":
            chat[index] = {**message, "content": f"{about}\n\n{message['content']}"}
            return
    chat.insert(0, {"role": "user", "content": about})
