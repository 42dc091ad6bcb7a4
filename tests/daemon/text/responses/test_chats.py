"""Chats are answered by a model's own response template, where its files have one that can be used."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from motley.daemon.text.generation import Generation
from motley.daemon.text.tokenizer import Tokenizer
from motley.protocol import mesh_pb2 as pb
from motley.protocol import worker_pb2 as wp
from tests.daemon.text.made_tokenizers import WriteFolder, bytes_tokenizer
from tests.daemon.text.responses.cases import TEMPLATES
from tests.daemon.text.responses.taking import CALLS, SCHEMAS, Taken, changed

TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if tools %}{{ tools | length }} <tool_call>{% endif %}<|im_start|>assistant
{% if think %}<think>
{% endif %}"""
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": SCHEMAS["f"]}}}]


def chat_tokenizer(folder: WriteFolder, response_template: object, template: str = TEMPLATE) -> Tokenizer:
    backend = bytes_tokenizer()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|START_ACTION|>"])
    settings = {"eos_token": "<|im_end|>", "response_template": response_template}
    return Tokenizer.load(folder(backend, template, tokenizer_config=settings))


def generation(tokenizer: Tokenizer, **fields: Any) -> Generation:
    asked = pb.Generate(
        request_id="r1",
        messages_json=json.dumps([{"role": "user", "content": "Hi"}]),
        sampling=pb.Sampling(top_p=1.0, repetition_penalty=1.0),
        **fields,
    )
    return Generation(asked, tokenizer, 3000)


def told(tokenizer: Tokenizer, by: Generation, answer: str) -> Taken:
    deltas = [by.on_tokens(wp.Tokens(request_id="r1", ids=[token])) for token in tokenizer.encode(answer)]
    deltas.append(by.on_tokens(wp.Tokens(request_id="r1", ids=sorted(tokenizer.stop_tokens), finish="stop")))
    made = [delta for delta in deltas if delta is not None]
    calls = [piece for delta in made for piece in delta.calls]
    names = [piece.name for piece in calls if piece.name]
    arguments = ["".join(piece.arguments for piece in calls if piece.index == at) for at in range(len(names))]
    said, thought = ("".join(getattr(delta, kind) for delta in made) for kind in ("text", "reasoning"))
    return said, thought, list(zip(names, arguments, strict=True))


def answered(tokenizer: Tokenizer, answer: str, **fields: Any) -> Taken:
    return told(tokenizer, generation(tokenizer, **fields), answer)


def test_a_chat_is_answered_by_the_models_own_template(folder: WriteFolder) -> None:
    # Of calls in such marks the chat template says nothing.
    written = changed(f"{CALLS}/open", "<|START_ACTION|>", "smollm")
    tokenizer = chat_tokenizer(folder, written)
    assert not tokenizer.notice
    answer = 'Hm.</think> Well.\n<|START_ACTION|>{"name": "f", "arguments": {"a": "x"}}</tool_call>'
    begun = {"template_json": '{"think": true}', "tools_json": json.dumps(TOOLS)}
    assert answered(tokenizer, answer, **begun) == ("Well.", "Hm.", [("f", '{"a": "x"}')])
    assert answered(tokenizer, answer) == ("Hm.</think> Well.", "", [("f", '{"a": "x"}')])
    written_before = tokenizer.encode(answer)[:12]
    said, thought, _ = answered(tokenizer, answer.removeprefix("Hm.</think> "), written=written_before, **begun)
    assert (said, thought) == ("Well.", ""), "what was told before is not told again"


def test_an_answer_that_is_kept_to_something_is_read_as_it_is_written(folder: WriteFolder) -> None:
    tokenizer = chat_tokenizer(folder, TEMPLATES["cohere"])
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
    asked = {"tools_json": json.dumps(TOOLS), "tool_choice": "required"}
    assert answered(tokenizer, call, **asked) == ("", "", [("f", '{"a": "x"}')])
    schema = pb.Constraint(json_schema='{"type": "integer"}', param="response_format")
    assert answered(tokenizer, "12", constraint=schema) == ("12", "", [])


def test_calls_of_tools_that_a_template_does_not_know_are_read_as_they_are_told(folder: WriteFolder) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
    asked = {"tools_json": json.dumps(TOOLS)}
    for written, template in (
        ({"start_anchor": "S", "fields": {"content": {}}}, TEMPLATE),
        (TEMPLATES["cohere"], "{% for m in messages %}{{ m.content }}{% endfor %}"),
    ):
        tokenizer = chat_tokenizer(folder, written, template)
        assert answered(tokenizer, call, **asked) == ("", "", [("f", '{"a": "x"}')])


@pytest.mark.parametrize("written", [5, {"fields": {"content": {"close_pattern": "("}}, "start_anchor": "S"}])
def test_a_broken_template_leaves_the_model_as_it_was(written: object, folder: WriteFolder) -> None:
    tokenizer = chat_tokenizer(folder, written)
    assert "tokenizer_config.json: response_template is not used, answers are taken apart by what" in tokenizer.notice
    call = 'Well.<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
    assert answered(tokenizer, call, tools_json=json.dumps(TOOLS)) == ("Well.", "", [("f", '{"a": "x"}')])


def test_fields_without_a_place_are_left_out_and_named(folder: WriteFolder) -> None:
    tokenizer = chat_tokenizer(folder, TEMPLATES["lines"])
    assert tokenizer.notice.endswith("answers have no place for these fields of response_template: ['score']")
    assert answered(tokenizer, "One <score>3</score>") == ("One", "", [])


def test_a_template_whose_patterns_take_too_long_is_used_no_longer(
    folder: WriteFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither for what is under way: a node's answers wait for each other's patterns."""
    evil = {"start_anchor": "S", "fields": {"thinking": {"open_pattern": "(a+)+$", "close": "b"}, "content": {}}}
    tokenizer = chat_tokenizer(folder, evil)
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
    under_way = [generation(tokenizer) for _ in range(20)]
    begun = time.thread_time()
    answers = [told(tokenizer, each, 100 * "a" + "c" + call) for each in under_way]
    assert time.thread_time() - begun < 2
    assert answers == 20 * [(100 * "a" + "c" + call, "", [])], "nothing of them is lost"
    assert answered(tokenizer, "Well." + call, tools_json=json.dumps(TOOLS)) == ("Well.", "", [("f", '{"a": "x"}')])
    assert caplog.text.count("patterns take too long") == 1


def test_special_tokens_are_written_out_once(folder: WriteFolder) -> None:
    tokenizer = chat_tokenizer(folder, TEMPLATES["cohere"])
    assert "<|im_end|>" in tokenizer.special_texts.values()
    assert tokenizer.special_texts is tokenizer.special_texts
