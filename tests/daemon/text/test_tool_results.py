"""What calls of tools came to reaches the model, whichever way its chat template takes it."""

from __future__ import annotations

from typing import Any

import pytest

from motley.daemon.text.messages import ChatError
from motley.daemon.text.tokenizer import Tokenizer
from tests.daemon.text.made_tokenizers import WriteFolder, bytes_tokenizer

CALLS = [
    {"id": str(number), "type": "function", "function": {"name": name, "arguments": "{}"}}
    for number, name in enumerate(("far", "high"))
]
CHAT: list[Any] = [
    {"role": "user", "content": "How far?"},
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "0", "content": '{"km": 3}'},
    {"role": "tool", "tool_call_id": "1", "content": "[1]"},
]
WRITES = "{% if tools %}{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
LEAVES_OUT = WRITES.replace("{{ m.role }}", "{% if m.role == 'tool' %}{% continue %}{% endif %}{{ m.role }}")
IN_CALLS = (
    "{% for r in m['tool_responses'] or [] %}{{ r.name }}={{ r.response.km if r.response is mapping else r.response }},"
    "{% endfor %}"
)
GEMMA = LEAVES_OUT.replace("{{ m.content }}", IN_CALLS + "{{ m.content }}")
GEMMA_WITHOUT_ROLES = WRITES.replace("{{ m.content }}", IN_CALLS + "{{ m.content }}")
BY_USER = '<tool_response>\n{"km": 3}\n</tool_response>\n<tool_response>\n[1]\n</tool_response>'


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (WRITES, 'user: How far?;assistant: ;tool: {"km": 3};tool: [1];'),
        (GEMMA, "user: How far?;assistant: far=3,high=[1],;"),
        (GEMMA_WITHOUT_ROLES, "user: How far?;assistant: far=3,high=[1],;"),
        (LEAVES_OUT, f"user: How far?;assistant: ;user: {BY_USER};"),
    ],
    ids=["takes them", "in calls, and leaves messages out", "in calls, and knows no tool", "leaves them out"],
)
def test_no_result_is_left_out(template: str, written: str, folder: WriteFolder) -> None:
    tokenizer = Tokenizer.load(folder(bytes_tokenizer(), template))
    for chat in (CHAT, CHAT[:2], CHAT):  # how a template takes them is found out once
        text = tokenizer.decode(tokenizer.encode_chat(chat))
        assert text == (written if chat is CHAT else "user: How far?;assistant: ;")


def test_what_a_template_refuses_is_refused(folder: WriteFolder) -> None:
    refuses = LEAVES_OUT.replace("{% continue %}", "{{ raise_exception('no ids of one digit') }}")
    with pytest.raises(ChatError, match="no ids of one digit"):
        Tokenizer.load(folder(bytes_tokenizer(), refuses)).encode_chat(CHAT)
    needs = WRITES.replace(
        "{{ m.role }}", "{% if not m.content and m.role == 'tool' %}{{ raise_exception('') }}{% endif %}"
    )
    assert Tokenizer.load(folder(bytes_tokenizer(), needs)).encode_chat(CHAT)
    mute = "{% if tools %}{% endif %}Hello"
    with pytest.raises(ChatError, match="leaves out what calls of tools came to"):
        Tokenizer.load(folder(bytes_tokenizer(), mute)).encode_chat(CHAT)


def test_a_result_without_its_call_is_told_and_decides_nothing_for_other_chats(folder: WriteFolder) -> None:
    """A client may have cut the chat between the two."""
    cut: list[Any] = [CHAT[2], {"role": "user", "content": "So?"}]
    tokenizer = Tokenizer.load(folder(bytes_tokenizer(), GEMMA))
    whole = "user: How far?;assistant: far=3,high=[1],;"
    for chat in (cut, CHAT, cut):
        text = tokenizer.decode(tokenizer.encode_chat(chat))
        assert text == whole if chat is CHAT else '{"km": 3}' in text and "So?" in text
