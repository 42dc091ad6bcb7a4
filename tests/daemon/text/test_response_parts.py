"""Answers taken apart by a model's own response template: as transformers does it, however they are cut into pieces."""

from __future__ import annotations

import json
import logging
import time
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.text.generation import Generation
from motley.daemon.text.response_parts import ResponseParts
from motley.daemon.text.response_template import InvalidResponseTemplate, read_response_template
from motley.daemon.text.tokenizer import Tokenizer
from motley.protocol import mesh_pb2 as pb
from motley.protocol import worker_pb2 as wp
from tests.daemon.text.made_tokenizers import WriteFolder, bytes_tokenizer
from tests.daemon.text.response_cases import CASES, GOLDEN, TEMPLATES

Taken = tuple[str, str, list[tuple[str, str]]]
"""What was said, what was thought, and calls: names and arguments."""
EXPECTED = json.loads(GOLDEN.read_text(encoding="utf-8"))
SCHEMAS: dict[str, dict[str, Any]] = {"f": {"a": {"type": "string"}, "n": {"type": "integer"}}}


def taken(
    written: dict[str, Any], pieces: list[str], prompt: str = "", schemas: dict[str, dict[str, Any]] | None = None
) -> Taken:
    parts = ResponseParts(read_response_template(written), prompt, schemas or {})
    out = [part for piece in pieces for part in parts.push(piece)]
    out += parts.flush()
    calls: dict[int, list[str]] = {}
    for call in filter(None, (part.call for part in out)):
        assert bool(call.id) == bool(call.name) == (call.index not in calls), "the first piece names it"
        own = calls.setdefault(call.index, ["", ""])
        own[0] += call.name
        own[1] += call.arguments
    assert list(calls) == list(range(len(calls)))
    assert parts.complete <= len(calls)
    said, thought = ("".join(getattr(part, kind) for part in out) for kind in ("content", "reasoning"))
    return said, thought, [(name, arguments) for name, arguments in calls.values()]


@pytest.mark.parametrize("case", CASES)
def test_whole_answers_are_taken_apart_as_transformers_does_it(case: str) -> None:
    template, prompt, answer = CASES[case]
    said, thought, calls = taken(TEMPLATES[template], [answer], prompt)
    expected = EXPECTED[case]
    assert said == expected.get("content", "")
    assert thought == expected.get("reasoning_content", expected.get("thinking", ""))
    functions = [call["function"] for call in expected.get("tool_calls", [])]
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [
        (each["name"], each["arguments"]) for each in functions
    ]


@pytest.mark.parametrize("case", CASES)
def test_an_answer_is_taken_apart_however_it_is_cut(case: str) -> None:
    template, prompt, answer = CASES[case]
    expected = taken(TEMPLATES[template], [answer], prompt, SCHEMAS)

    @given(st.sets(st.integers(0, len(answer))))
    def holds(cuts: set[int]) -> None:
        ends = sorted({*cuts, len(answer)})
        pieces = [answer[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        assert taken(TEMPLATES[template], pieces, prompt, SCHEMAS) == expected

    holds()
    assert taken(TEMPLATES[template], list(answer), prompt, SCHEMAS) == expected


@given(st.data())
def test_answers_may_be_made_of_anything_and_end_anywhere(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(TEMPLATES)))
    whole = st.sampled_from([answer for template, _, answer in CASES.values() if template == name])
    spans = st.builds(lambda text, at, size: text[at : at + size], whole, st.integers(0, 99), st.integers(0, 40))
    answer = "".join(data.draw(st.lists(spans | whole | st.sampled_from(["<", "\n", " x"]), max_size=6)))
    assert taken(TEMPLATES[name], list(answer)) == taken(TEMPLATES[name], [answer])


PATTERNS = [
    *(r"<e>(?:<s>a)?", r"a+b?", r"ab|a", r"a|ab", r"a*?b", r"(?:ab)*c", r"[^<]*<a>", r"a(?=b)", r"\s*<a>", r"(a|b)\1"),
    *(
        r"a$",
        r"(?<=b)a",
        r"a{2,3}",
        r"<a>.*?b",
        r"\Z",
        r"$",
        r"(?:^|a\s*)",
        r"<e>[ab]*(?:<s>)?",
        r"a(?:b|<e>)?",
        r"a(?!b)",
    ),
]


@pytest.mark.parametrize("pattern", PATTERNS)
@given(answer=st.text("ab<>es \n", max_size=12), cut=st.integers(0, 12))
def test_patterns_match_alike_however_an_answer_is_cut(pattern: str, answer: str, cut: int) -> None:
    for fields in ({"content": {"close_pattern": pattern}}, {"thinking": {"open_pattern": pattern, "close": ">"}}):
        template = {"start_anchor": "S", "fields": fields}
        whole = taken(template, [answer])
        assert taken(template, [answer[:cut], answer[cut:]]) == taken(template, list(answer)) == whole


def test_what_is_certain_is_told_at_once() -> None:
    parts = ResponseParts(read_response_template(TEMPLATES["gpt-oss"]))
    pieces = ["<|channel|>", "analysis<|message|>", "Hm, ", "<so", ">.<|en", "d|>"]
    assert ["".join(part.reasoning for part in parts.push(piece)) for piece in pieces] == [
        "",
        "",
        "Hm,",
        " <so",
        ">.",
        "",
    ]
    head = "<|channel|>commentary to=functions.f json<|message|>"
    calls = [part.call for piece in (head, '{"a": ' + 30 * "1", "1", "2") for part in parts.push(piece)]
    assert [(call.name, call.arguments) for call in calls if call] == [
        ("f", ""),
        ("", '{"a": ' + 30 * "1"),
        ("", "1"),
        ("", "2"),
    ]
    assert not parts.complete
    parts = ResponseParts(read_response_template(TEMPLATES["qwen3"]))
    calls = [part.call for part in parts.push('<tool_call>{"name": "f", "arguments": {"a": "x')]
    assert [(call.name, call.arguments) for call in calls if call] == [("f", ""), ("", '{"a": "x')]


def test_schemas_tell_what_values_are() -> None:
    template, prompt, answer = CASES["tags"]
    (_, first), _ = taken(TEMPLATES[template], [answer], prompt, SCHEMAS)[2]
    assert json.loads(first) == {"a": "x\ny", "n": 7}
    template, prompt, answer = CASES["typed tags"]
    text = {"go": {"to": {"type": "string"}, "b": {"type": "string"}}}
    ((_, only),) = taken(TEMPLATES[template], [answer], prompt, text)[2]
    assert json.loads(only) == {"at": [{"x": 1}], "to": ["Rome, it is", "2"], "b": "true"}


@pytest.mark.parametrize(
    ("template", "answer", "expected"),
    [
        ("qwen3", "One.<tool_call>{}</tool_call>Two.", ("One.{}\n\nTwo.", "", [])),
        ("qwen3", "<think>a</think><think>b</think>", ("", "a\n\nb", [])),
        ("qwen3", "<think> </think>\n<think>b</think>\n\n<tool_call>{}</tool_call>\nc", ("{}c", "b", [])),
        ("qwen3", '<tool_call>{"name": "f", "arguments": {"a', ("", "", [("f", '{"a')])),
        ("qwen3.5", "<tool_call><function=f><parameter=a>x</parameter><parameter", ("", "", [("f", '{"a": "x"}')])),
        ("qwen3-coder", " Well.<think>Hm", ("Well.", "Hm", [])),
        ("gemma4", '<|tool_call>call:f{a:<|"|>x', ("", "", [("f", '{"a": "x"}')])),
        ("gemma4", "<|tool_call>call:f none <tool_call|>", ("", "", [("f", "none")])),
        ("gpt-oss", "Not taught.", ("Not taught.", "", [])),
        ("cohere", "<|START_ACTION|>none<|END_ACTION|>", ("none", "", [])),
        ("lfm", "<|tool_call_start|>f()<|tool_call_end|>", ("", "", [("f", "{}")])),
        ("inkling", "<|content_text|>a<|end_message|> aside", ("a", "", [])),
    ],
)
def test_what_transformers_does_not_read_or_keep_is_told(template: str, answer: str, expected: Taken) -> None:
    assert taken(TEMPLATES[template], [answer]) == taken(TEMPLATES[template], list(answer)) == expected


def changed(path: str, value: object, template: str = "gemma4") -> dict[str, Any]:
    """A template with something else at a path, between slashes."""
    written: dict[str, Any] = deepcopy(TEMPLATES[template])
    *place, last = path.split("/")
    inner = written
    for key in place:
        inner = inner.setdefault(key, {})
    inner[last] = value
    return written


CALLS = "fields/tool_calls"
LARGE = [r"(?:a{0,4000000000}){4000000000}", r"(?:(?:a{900}){900}){900}", "a" * 1001]


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("text", "valid dictionary"),
        ([], "valid dictionary"),
        ({}, "fields: Field required"),
        (changed("version", 2), "version"),
        (changed("fields", {}), "fields"),
        (changed("fields", {str(at): {"open": "x"} for at in range(33)}), "fields"),
        (changed("closes", 1), "closes: Extra inputs"),
        (changed("defaults", []), "defaults"),
        (changed("start_anchor", None), "neither start_anchor nor"),
        (changed("start_anchor_pattern", "x"), "start_anchor beside"),
        (changed("start_anchor", ""), "start_anchor: a text is empty"),
        (changed("start_anchor", "x" * 1001), "start_anchor: the texts are too long"),
        (changed("fields/x", 5), "fields.x"),
        (changed("fields/content/opens", "x"), "fields.content.opens: Extra inputs"),
        (changed("fields/content/close", []), "fields.content.close: a text is empty, or there is none"),
        (changed("fields/content/close", [1]), "fields.content.close"),
        (changed("fields/content/content", "yaml"), "fields.content.content"),
        (changed("fields/content/content", "json"), "fields.content: is no plain text"),
        (changed("fields/content/content_args", {"stripe": True}), "fields.content.content_args.stripe: Extra"),
        (changed("fields/content/join", ""), "fields.content: join without repeats"),
        (changed("fields/thinking/content", "text"), "several fields that nothing opens: content, thinking"),
        (changed(f"{CALLS}/open_pattern", "("), "fields.tool_calls.open_pattern: not a valid pattern"),
        (changed(f"{CALLS}/open_pattern", "(" * 500 + ")" * 500), "open_pattern: not a valid pattern"),
        *((changed(f"{CALLS}/open_pattern", pattern), "open_pattern: the pattern is too large") for pattern in LARGE),
        (changed(f"{CALLS}/repeats", "yes"), "fields.tool_calls.repeats"),
        (changed(f"{CALLS}/transform", None), "fields.tool_calls.transform: calls are not made"),
        (changed(f"{CALLS}/transform", "{content}"), "fields.tool_calls.transform: calls are not made"),
        (changed(f"{CALLS}/transform/function/name", "f {name}"), "transform: calls are not made"),
        (changed(f"{CALLS}/transform/function/name", "{other}"), "json with this transform is not supported"),
        (changed(f"{CALLS}/transform/function/strict", True), "transform: calls are not made"),
        (changed(f"{CALLS}/transform/index", 1), "transform: calls are not made"),
        (changed(f"{CALLS}/transform/function", "{content}"), "json with this transform is not supported"),
        (changed(f"{CALLS}/content", "text"), "fields.tool_calls.content: text are no arguments"),
        (changed(f"{CALLS}/content_args/string_delims", [["«", "»"]]), "string_delims: .* is not supported"),
        (changed(f"{CALLS}/content_args/string_delims", [["'"]]), "content_args.string_delims.0"),
        (changed(f"{CALLS}/content_args/tag_pattern", "x", "qwen3.5"), "tag_pattern: no groups 'key' and 'value'"),
        (changed(f"{CALLS}/content_args/value_parser", {"name": "xml-inline"}, "qwen3.5"), "value_parser.name"),
        (changed(f"{CALLS}/content_args/kv_sep", "", "lines"), "content_args.kv_sep"),
        (changed(f"{CALLS}/transform/function/name", "{fn.name}", "cohere"), "with this transform is not supported"),
    ],
)
def test_what_is_malformed_or_not_supported_is_refused_by_name(written: object, why: str) -> None:
    with pytest.raises(InvalidResponseTemplate, match=why):
        read_response_template(written)


KEYS = ["open", "close", "content", "transform", "content_args", "function", "open_pattern"]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=9)
    | st.sampled_from(["{content}", "json", "(?:a|b)*"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=9,
)


@given(JSON, st.sampled_from(["content", "tool_calls", "fields", "start_anchor", "x"]))
def test_any_json_is_read_or_refused(value: object, place: str) -> None:
    written = changed(place if place in ("fields", "start_anchor") else f"fields/{place}", value)
    try:
        template = read_response_template(written)
    except InvalidResponseTemplate:
        return
    parts = ResponseParts(template)
    for _ in (*parts.push("<|turn>model\nx<channel|>"), *parts.flush()):
        pass


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(?R)", r"(a|aa)+\1b", r"\s*x"])
@pytest.mark.parametrize("key", ["close_pattern", "open_pattern"])
def test_patterns_that_never_end_are_given_up(pattern: str, key: str, caplog: pytest.LogCaptureFixture) -> None:
    fields = {"content": {"close_pattern": pattern}} if key == "close_pattern" else {"x": {key: pattern}, "content": {}}
    evil = {"start_anchor": "S", "fields": fields}
    answer = (" " if "s" in pattern else "a") * 30_000 + "b"
    begun = time.thread_time()
    with caplog.at_level(logging.WARNING):
        said, _, _ = taken(evil, [answer, "more"])
    assert time.thread_time() - begun < 2
    assert said.endswith("bmore")
    assert "takes too long" in caplog.text or "take too long" in caplog.text


def test_patterns_have_a_deadline_for_a_whole_answer(caplog: pytest.LogCaptureFixture) -> None:
    """Of these searches each takes milliseconds."""
    evil = {"start_anchor": "S", "fields": {"content": {"close_pattern": "(?:[,;]*,){4}y"}}}
    parts = ResponseParts(read_response_template(evil))
    begun = time.thread_time()
    told = "".join(part.content for _ in range(150) for part in parts.push(","))
    assert time.thread_time() - begun < 1
    assert told == 150 * ","
    assert caplog.text.count("take too long") == 1


def test_what_the_prompt_has_is_not_told() -> None:
    """Neither where nothing else is outside of all fields."""
    template = read_response_template(TEMPLATES["cohere"])
    start = TEMPLATES["cohere"]["start_anchor"]
    parts = ResponseParts(template, start + "by the prompt<|START_THINKING|><|END_THINKING|>")
    assert "".join(part.content for part in (*parts.push("Not taught."), *parts.flush())) == "Not taught."


def test_tags_that_never_end_cost_a_call_its_arguments(caplog: pytest.LogCaptureFixture) -> None:
    evil = changed(f"{CALLS}/content_args/tag_pattern", r"(?P<key>(a+)+)(?P<value>$)", "qwen3.5")
    calls = taken(evil, ["<tool_call><function=f>" + "a" * 30_000 + "b</function></tool_call>Well."])
    assert calls == ("Well.", "", [("f", "{}")])
    assert "has lost its arguments" in caplog.text


def test_braces_in_texts_are_no_repetitions() -> None:
    assert taken({"start_anchor": "S", "fields": {"content": {"close": ["{900}", "{901}"]}}}, ["a{901}"])[0] == "a"


@pytest.mark.parametrize(("opens", "closes"), [("", ""), (r"(?=x)", r"(?=x)"), (r"\b", r"\b"), ("$", "^")])
def test_delimiters_without_characters_come_to_an_end(opens: str, closes: str) -> None:
    fields = {"thinking": {"open_pattern": opens, "close_pattern": closes}, "content": {}}
    said, thought, _ = taken({"start_anchor": "S", "fields": fields}, ["ax", "x b"])
    assert len((said + thought).replace("\n", "").replace(" ", "")) == 4


def test_long_answers_are_read_in_time() -> None:
    parts = ResponseParts(read_response_template(TEMPLATES["qwen3"]))
    begun, told = time.thread_time(), 0
    for piece in ["<think>", *["thought and "] * 5_000, "</think>", *["answer "] * 5_000]:
        told += sum(len(part.reasoning + part.content) for part in parts.push(piece))
    assert told == len("thought and " * 5_000) + len("answer " * 5_000) - 2
    assert time.thread_time() - begun < 5


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


def answered(tokenizer: Tokenizer, answer: str, **fields: Any) -> Taken:
    asked = pb.Generate(
        request_id="r1",
        messages_json=json.dumps([{"role": "user", "content": "Hi"}]),
        sampling=pb.Sampling(top_p=1.0, repetition_penalty=1.0),
        **fields,
    )
    generation = Generation(asked, tokenizer, 3000)
    ids = tokenizer.encode(answer)
    deltas = [generation.on_tokens(wp.Tokens(request_id="r1", ids=[token])) for token in ids]
    deltas.append(generation.on_tokens(wp.Tokens(request_id="r1", ids=sorted(tokenizer.stop_tokens), finish="stop")))
    told = [delta for delta in deltas if delta is not None]
    calls = [piece for delta in told for piece in delta.calls]
    names = [piece.name for piece in calls if piece.name]
    arguments = ["".join(piece.arguments for piece in calls if piece.index == at) for at in range(len(names))]
    said, thought = ("".join(getattr(delta, kind) for delta in told) for kind in ("text", "reasoning"))
    return said, thought, list(zip(names, arguments, strict=True))


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


def test_what_the_model_calls_a_call_is_told() -> None:
    parts = ResponseParts(read_response_template(TEMPLATES["lines"]))
    first = next(part.call for part in parts.push("#call c12 f\n" + "a: b\n" * 9) if part.call)
    assert (first.name, first.id) == ("f", "c12")
