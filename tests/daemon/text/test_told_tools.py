"""Tools of models whose templates know of none: told in a text, and what they came to as well."""

from __future__ import annotations

import json
from typing import Any

import pytest

from motley.daemon.text.answer_parts import AnswerParts
from motley.daemon.text.calls.formats import TOLD
from motley.daemon.text.messages import Chat, check_messages
from motley.daemon.text.tokenizer import Tokenizer
from motley.daemon.text.told_tools import with_told_tools
from tests.daemon.text.made_tokenizers import WriteFolder, bytes_tokenizer

GO = {"type": "function", "function": {"name": "go", "description": "Goes.", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "go", "arguments": '{"to": "Ré"}'}}
USED: list[Any] = [
    {"role": "user", "content": "Go!"},
    {"role": "assistant", "content": "Well,", "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "It is far."},
    {"role": "tool", "tool_call_id": "1", "content": "Very."},
    {"role": "user", "content": "And now?"},
]


@pytest.mark.parametrize(
    ("before", "role"), [([], "user"), ([{"role": "system", "content": "Hi."}], "system"), (USED[1:], "user")]
)
def test_the_first_that_is_said_tells_of_the_tools(before: Chat, role: str) -> None:
    chat = [*before, {"role": "user", "content": "Go!"}]
    (telling,) = (each for each in with_told_tools(chat, [GO]) if "<tools>" in each["content"])
    assert telling["role"] == role
    assert json.dumps(GO["function"]) in telling["content"]
    assert not any("<tools>" in each["content"] for each in with_told_tools(chat, []))


def test_an_assistant_alone_is_told_by_a_user() -> None:
    first, *_ = with_told_tools([{"role": "assistant", "content": "Hm"}], [GO])
    assert first["role"] == "user"


def test_calls_are_written_as_they_are_read_and_turns_alternate() -> None:
    chat = check_messages(USED)
    kept = json.dumps(chat)
    asked, called, told = with_told_tools(chat, [])
    assert [each["role"] for each in (asked, called, told)] == ["user", "assistant", "user"]
    parts = AnswerParts(TOLD, None, False)
    found = [*parts.push(called["content"]), *parts.flush()]
    assert "".join(part.content for part in found) == "Well,"
    assert [part.call.name for part in found if part.call and part.call.name] == ["go", "go"]
    first = "".join(part.call.arguments for part in found if part.call and not part.call.index)
    assert json.loads(first) == {"to": "Ré"}
    answers = "<tool_response>\nIt is far.\n</tool_response>\n<tool_response>\nVery.\n</tool_response>\nAnd now?"
    assert told["content"] == answers
    assert json.dumps(chat) == kept, "the client's own messages stay as they are"


def test_only_templates_that_know_no_tools_are_helped(folder: WriteFolder) -> None:
    chat = [{"role": "user", "content": "Go!"}]
    for template, helped in (
        ("{{ messages[0].content }}", True),
        ("{% if tools %}{% endif %}{{ messages[0].content }}", False),
    ):
        tokenizer = Tokenizer.load(folder(bytes_tokenizer(), template))
        text = tokenizer.decode(tokenizer.encode_chat(chat, {"tools": [GO]}))
        assert text.endswith("Go!")
        assert ("<tools>" in text) == helped
