"""Chats: messages that are checked, and templates that render them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from motley.daemon.text.messages import ChatError
from motley.daemon.text.templates import ASKED_AT
from motley.daemon.text.tokenizer import Tokenizer
from tests.daemon.text.made_tokenizers import BOS, EOS, FIRST_BYTE, WriteFolder, bytes_tokenizer

LLAMA_3 = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}"""

QWEN = """{%- if tools %}{{ raise_exception('no tools here') }}{% endif %}
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
{%- endif %}
{%- set state = namespace(last=none) %}
{%- for message in messages %}
    {%- set state.last = message.role %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt and state.last == 'user' %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

MISTRAL = """{{- bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- else %}
        {%- generation %}
        {{- message['content'] + eos_token }}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}"""

ASK = [{"role": "user", "content": " Why? "}]
TALK = [*ASK, {"role": "assistant", "content": "So."}, {"role": "user", "content": "Oh"}]


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (LLAMA_3, ASK, "<s><|start|>user<|end|>\n\nWhy?<|eot|><|start|>assistant<|end|>\n\n"),
        (
            QWEN,
            ASK,
            "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\n Why? <|im_end|>\n<|im_start|>assistant\n",
        ),
        (MISTRAL, TALK, "<s>[INST]  Why?  [/INST]So.</s>[INST] Oh [/INST]"),
        ("{{ messages | tojson }}{{ strftime_now('%%') }}", ASK, '[{"role": "user", "content": " Why? "}]%'),
        ("{% for m in messages %}{% continue %}{% endfor %}{{ tools is none }}", ASK, "True"),
    ],
)
def test_templates_render_as_in_hugging_face(
    folder: WriteFolder, template: str, messages: list[dict[str, Any]], expected: str
) -> None:
    ids = Tokenizer.load(folder(bytes_tokenizer(), template)).encode_chat(messages)
    special = {BOS: "<s>", EOS: "</s>"}
    text = b"".join(special[t].encode() if t in special else bytes([t - FIRST_BYTE]) for t in ids).decode()
    assert text == expected


def test_a_template_may_stand_in_the_settings_plain_or_named(folder: WriteFolder) -> None:
    for value in ("A", [{"name": "tool_use", "template": "B"}, {"name": "default", "template": "A"}]):
        tokenizer = Tokenizer.load(folder(bytes_tokenizer(), tokenizer_config={"chat_template": value}))
        assert tokenizer.decode(tokenizer.encode_chat(ASK)) == "A"
    path = folder(bytes_tokenizer(), "C", tokenizer_config={"chat_template": "A"})
    tokenizer = Tokenizer.load(path)
    assert tokenizer.decode(tokenizer.encode_chat(ASK)) == "C"


def test_what_a_template_refuses_is_told(folder: WriteFolder) -> None:
    tokenizer = Tokenizer.load(folder(bytes_tokenizer(), MISTRAL))
    with pytest.raises(ChatError, match="Roles must alternate"):
        tokenizer.encode_chat([*ASK, *ASK])


@pytest.mark.parametrize(
    "template",
    ["{{ messages[0].content + 1 }}", "{{ missing.field }}", "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"],
)
def test_a_template_that_fails_or_breaks_out_is_an_error(folder: WriteFolder, template: str) -> None:
    with pytest.raises(ChatError, match="chat template"):
        Tokenizer.load(folder(bytes_tokenizer(), template)).encode_chat(ASK)


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([], "non-empty list"),
        ({"role": "user"}, "non-empty list"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\]\.role"),
        ([*ASK, {"role": "user"}], r"messages\[1\]\.content"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], r"messages\[0\]\.content must be a string"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "tool_calls must be calls of functions"),
        ([{"role": "user", "content": "a\ud800"}], "surrogate"),
    ],
)
def test_malformed_messages_are_refused(folder: WriteFolder, messages: object, what: str) -> None:
    tokenizer = Tokenizer.load(folder(bytes_tokenizer(), LLAMA_3))
    with pytest.raises(ChatError, match=what) as refusal:
        tokenizer.encode_chat(messages)
    assert refusal.value.code == "invalid_request"


def test_empty_extra_fields_are_ignored(folder: WriteFolder) -> None:
    tokenizer = Tokenizer.load(folder(bytes_tokenizer(), "{{ messages | tojson }}"))
    ids = tokenizer.encode_chat([{"role": "user", "content": "x", "refusal": None, "tool_calls": []}])
    assert json.loads(tokenizer.decode(ids)) == [{"role": "user", "content": "x"}]


def test_now_is_when_the_client_asked(folder: WriteFolder) -> None:
    tokenizer = Tokenizer.load(folder(bytes_tokenizer(), "{{ strftime_now('%d %b %Y %H:%M') }}"))
    asked = tokenizer.encode_chat(ASK, {ASKED_AT: "2026-02-28T23:59:58"})
    assert tokenizer.decode(asked) == "28 Feb 2026 23:59"
