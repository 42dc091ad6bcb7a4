"""Answers taken apart by a model's own response template: as transformers does it, however they are cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.text.responses.parts import ResponseParts
from motley.daemon.text.responses.template import ResponseField, ResponseTemplate, delimiter_of, read_response_template
from tests.daemon.text.responses.cases import CASES, GOLDEN, TEMPLATES
from tests.daemon.text.responses.taking import SCHEMAS, Taken, taken

EXPECTED = json.loads(GOLDEN.read_text(encoding="utf-8"))


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
        r"<a.*?>>|<b>",
        r"(?x) <a.*?>> | b  # either",
    ),
]


@pytest.mark.parametrize("pattern", PATTERNS)
@given(answer=st.text("ab<>es \n", max_size=12), cut=st.integers(0, 12))
def test_patterns_match_alike_however_an_answer_is_cut(pattern: str, answer: str, cut: int) -> None:
    for fields in ({"content": {"close_pattern": pattern}}, {"thinking": {"open_pattern": pattern, "close": ">"}}):
        template = {"start_anchor": "S", "fields": fields}
        whole = taken(template, [answer])
        assert taken(template, [answer[:cut], answer[cut:]]) == taken(template, list(answer)) == whole


@pytest.mark.parametrize(
    ("opens", "answer"),
    [
        ({"open_pattern": "<a.*?>>|<b>"}, "1<a <b> think ... >> then</>x"),
        ({"open_pattern": "<a.*?>>|<b>"}, "1<a <b> think</>x"),
        ({"open": ["<a> <b> <c>", "<b>"]}, "1<a> <b> <c> think</>x"),
    ],
)
def test_what_begins_before_a_delimiter_may_become_one(opens: dict[str, Any], answer: str) -> None:
    template = {"start_anchor": "S", "fields": {"thinking": opens | {"close": "</>"}, "content": {}}}
    whole = taken(template, [answer])
    assert whole[1] in ("think", "then")
    for cut in range(len(answer)):
        assert taken(template, [answer[:cut], answer[cut:]]) == whole
    assert taken(template, list(answer)) == whole


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


def test_what_the_prompt_has_is_not_told() -> None:
    """Neither where nothing else is outside of all fields."""
    template = read_response_template(TEMPLATES["cohere"])
    start = TEMPLATES["cohere"]["start_anchor"]
    parts = ResponseParts(template, start + "by the prompt<|START_THINKING|><|END_THINKING|>")
    assert "".join(part.content for part in (*parts.push("Not taught."), *parts.flush())) == "Not taught."


def test_braces_in_texts_are_no_repetitions() -> None:
    assert taken({"start_anchor": "S", "fields": {"content": {"close": ["{900}", "{901}"]}}}, ["a{901}"])[0] == "a"


@pytest.mark.parametrize(("opens", "closes"), [("", ""), (r"(?=x)", r"(?=x)"), (r"\b", r"\b"), ("$", "^")])
def test_delimiters_without_characters_come_to_an_end(opens: str, closes: str) -> None:
    fields = {"thinking": {"open_pattern": opens, "close_pattern": closes}, "content": {}}
    said, thought, _ = taken({"start_anchor": "S", "fields": fields}, ["ax", "x b"])
    assert len((said + thought).replace("\n", "").replace(" ", "")) == 4


def test_a_delimiter_that_ends_before_it_starts_does_not_lead_back() -> None:
    """Which templates are refused for; a library has more of such ways than are known."""
    back = delimiter_of(regex.compile(r"(?=abc\K)"))
    fields = (
        ResponseField("thinking", "reasoning", back, back),
        ResponseField("content", "content", None, None, strip=False),
    )
    answer = "1abc2" * 20
    for pieces in ([answer], list(answer)):
        parts = ResponseParts(ResponseTemplate(fields, delimiter_of(regex.compile("S"))))
        told = [part for piece in pieces for part in parts.push(piece)]
        told += parts.flush()
        assert "".join(part.content + part.reasoning for part in told).replace("\n", "") == answer


def test_what_the_model_calls_a_call_is_told() -> None:
    parts = ResponseParts(read_response_template(TEMPLATES["lines"]))
    first = next(part.call for part in parts.push("#call c12 f\na: b\n#end ") if part.call)
    assert (first.name, first.id) == ("f", "c12")
