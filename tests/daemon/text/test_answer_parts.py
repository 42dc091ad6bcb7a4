"""What a model thinks, says and calls, taken apart from one text, however it is cut into pieces."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.sampling.constraint import ANSWER, Constraint, ConstraintError
from motley.daemon.text.answer_parts import AnswerParts
from motley.daemon.text.calls.formats import (
    BARE,
    DEEPSEEK,
    DEEPSEEK_FENCED,
    FORMATS,
    GLM,
    GLM_DENSE,
    HERMES,
    KIMI,
    MINIMAX,
    MISTRAL,
    MISTRAL_NAMED,
    QWEN_CODER,
    SEED,
    TOLD,
    CallFormat,
    call_format,
    wants_arguments_as_text,
)
from motley.daemon.text.calls.grammar import calls_grammar
from motley.daemon.text.calls.reading import TaggedCall
from motley.daemon.text.calls.values import as_json
from motley.daemon.text.tokenizer import Tokenizer
from motley.protocol import mesh_pb2 as pb
from tests.e2e.processes import BUNDLED

TOKENIZER = Tokenizer.load(Path(BUNDLED))
ALL = [*FORMATS, BARE]
D_BEGIN, D_CALL, D_SEP, D_END = DEEPSEEK.marks[0], *DEEPSEEK.marks[2:]

Taken = tuple[str, str, list[tuple[str, str]]]
"""What was said, what was thought, and calls: names and arguments."""


def taken(calls: CallFormat | None, pieces: list[str], thinks: bool = False, thinking: bool = False) -> Taken:
    parts = AnswerParts(calls, thinks, thinking, PROPERTIES)
    out = [part for piece in pieces for part in parts.push(piece)]
    out += parts.flush()
    found: dict[int, list[str]] = {}
    for call in filter(None, (part.call for part in out)):
        assert bool(call.id) == bool(call.name) == (call.index not in found), "the first piece names it"
        own = found.setdefault(call.index, ["", ""])
        own[0] += call.name
        own[1] += call.arguments
    assert parts.called == len(found)
    said, thought = ("".join(getattr(part, kind) for part in out) for kind in ("content", "reasoning"))
    return said, thought, [(name, arguments) for name, arguments in found.values()]


PROPERTIES: dict[str, dict[str, Any]] = {
    "f": {"a": {"type": "string"}, "n": {"type": "integer"}, "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}}
}
"""Of the tools that are called."""
F = '{"a": "two\\nlines", "n": 3}'
"""Arguments of f that were written in lines, as JSON."""
ARGUMENTS = '{"a": "}\\\\\\"{", "b": [1, {"c": 2}]}'
CASES: list[tuple[CallFormat | None, str, bool, Taken]] = [
    (
        HERMES,
        f'Hi \n<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>',
        False,
        ("Hi", "", [("f", ARGUMENTS)]),
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
        '<tool_call>{"arguments": {"x": 1}, "name": "g"}</tool_call>',
        False,
        ("", "", [("f", "{}"), ("g", '{"x": 1}')]),
    ),
    (HERMES, "a < b <tool_x  ", False, ("a < b <tool_x  ", "", [])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a', False, ("", "", [("f", '{"a')])),
    (
        HERMES,
        '<think>\nwell</think>\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        True,
        ("", "well", [("f", "{}")]),
    ),
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "x"}, {"name": "g", "arguments": {}}]',
        False,
        ("", "", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    (BARE, ' {"name": "f", "parameters": {"a": {}}}', False, ("", "", [("f", '{"a": {}}')])),
    (BARE, '{"hello": 1} x', False, ('{"hello": 1} x', "", [])),
    (BARE, "plain <b> text ", False, ("plain <b> text ", "", [])),
    (
        QWEN_CODER,
        "Well.\n\n<tool_call>\n<function=f>\n<parameter=a>\ntwo\nlines\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        False,
        ("Well.", "", [("f", F), ("g", "{}")]),
    ),
    (
        QWEN_CODER,
        "<tool_call>\n<function=g>\n<parameter=html>\n<parameter></parameter> </p>\n</parameter>\n<parameter=flag>\n"
        'True\n</parameter>\n<parameter=list>\n["x"]\n</parameter>\n</function>\n</tool_call>',
        False,
        ("", "", [("g", '{"html": "<parameter></parameter> </p>", "flag": true, "list": ["x"]}')]),
    ),
    (QWEN_CODER, f'<tool_call>\n{{"name": "f", "arguments": {F}}}\n</tool_call>', False, ("", "", [("f", F)])),
    (QWEN_CODER, "<tool_call>\n<function=f>\n<parameter=a>\nnever end", False, ("", "", [("f", "")])),
    (
        GLM_DENSE,
        "<tool_call>f<arg_key>n</arg_key><arg_value>3</arg_value><arg_key>a</arg_key><arg_value>x</arg_value>",
        False,
        ("", "", [("f", '{"n": 3, "a": "x"}')]),
    ),
    (
        GLM,
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>two\nlines</arg_value>\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n"
        "</tool_call>\n<tool_call>g\n</tool_call>",
        False,
        ("", "", [("f", F), ("g", "{}")]),
    ),
    (
        GLM_DENSE,
        "<think>hm</think><tool_call>f<arg_key>a</arg_key><arg_value>two\nlines</arg_value><arg_key>n</arg_key>"
        "<arg_value>3</arg_value></tool_call><tool_call>f<arg_key>maybe</arg_key><arg_value>null</arg_value></tool_call>",
        True,
        ("", "hm", [("f", F), ("f", '{"maybe": null}')]),
    ),
    (
        MINIMAX,
        '\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">two\nlines</parameter>\n<parameter name="n">'
        '3</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>',
        False,
        ("", "", [("f", F), ("g", "{}")]),
    ),
    (
        SEED,
        "<seed:tool_call>\n<function=f>\n<parameter=a>two\nlines</parameter>\n<parameter=n>3</parameter>\n</function>\n</seed:tool_call>",
        False,
        ("", "", [("f", F)]),
    ),
    (
        MISTRAL_NAMED,
        f"Hi.[TOOL_CALLS]f[ARGS]{ARGUMENTS}[TOOL_CALLS]g[ARGS]{{}}",
        False,
        ("Hi.", "", [("f", ARGUMENTS), ("g", "{}")]),
    ),
    (
        DEEPSEEK,
        f"{D_BEGIN}{D_CALL}f{D_SEP}{ARGUMENTS}{D_END}{D_CALL}g{D_SEP}{{}}{D_END}{DEEPSEEK.end}",
        False,
        ("", "", [("f", ARGUMENTS), ("g", "{}")]),
    ),
    (
        DEEPSEEK_FENCED,
        f"{D_BEGIN}{D_CALL}function{D_SEP}f\n```json\n{ARGUMENTS}\n```{D_END}\n{D_CALL}function{D_SEP}g\n```json\n{{}}\n```{D_END}",
        False,
        ("", "", [("f", ARGUMENTS), ("g", "{}")]),
    ),
    (
        KIMI,
        f"{KIMI.begin}<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"
        f"<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>{KIMI.end}",
        False,
        ("", "", [("f", ARGUMENTS), ("g", "{}")]),
    ),
    (None, "<think>hm</think>yes", True, ("yes", "hm", [])),
    (None, "<think>hm</think>yes", False, ("<think>hm</think>yes", "", [])),
    (None, "<thin air", True, ("<thin air", "", [])),
]


@pytest.mark.parametrize(("calls", "text", "thinks", "expected"), CASES)
def test_an_answer_is_taken_apart_however_it_is_cut(
    calls: CallFormat | None, text: str, thinks: bool, expected: Taken
) -> None:
    @given(st.sets(st.integers(0, len(text))))
    def holds(cuts: set[int]) -> None:
        ends = sorted({*cuts, len(text)})
        pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        assert taken(calls, pieces, thinks) == expected

    holds()
    assert taken(calls, list(text), thinks) == expected


def test_a_prompt_may_have_begun_the_thoughts() -> None:
    assert taken(None, ["well", "</thi", "nk>\n\nyes"], True, True) == ("yes", "well", [])


def test_arguments_come_as_they_are_written() -> None:
    parts = AnswerParts(HERMES, False, False)
    assert not [*parts.push('<tool_call>{"name": "f", "argu')]
    first, *_ = parts.push('ments": {"a": ')
    assert first.call is not None
    assert first.call.name == "f"
    (piece,) = parts.push("[1, 2")
    assert piece.call is not None
    assert piece.call.arguments == "[1, 2"


def test_the_template_says_how_calls_are_marked() -> None:
    assert call_format("{% if tools %}<tool_call>{% endif %}") is HERMES
    assert call_format("{{ tools }}[TOOL_CALLS]") is MISTRAL
    assert call_format("{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]") is MISTRAL_NAMED
    assert call_format("{% if tools %}<tool_call><function={{ name }}>{% endif %}") is QWEN_CODER
    assert call_format("{% if tools %}<tool_call><arg_key>{{ k }}</arg_key><arg_value>{% endif %}") is GLM_DENSE
    assert call_format("{% if tools %}<tool_call><arg_key>{{ k }}</arg_key>\n<arg_value>{% endif %}") is GLM
    assert call_format("{{ tools }}") is BARE
    assert call_format("{{ messages }}") is TOLD


def test_some_templates_add_arguments_to_a_text() -> None:
    assert wants_arguments_as_text("{{ '<call>' + tool['function']['arguments'] + '</call>' }}")
    assert wants_arguments_as_text("{{ tool.function.name + tool.function.arguments }}")
    assert not wants_arguments_as_text("{% for k, v in tool.function.arguments.items() %}{{ k + v }}{% endfor %}")


SCHEMA = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 1, "maximum": 9},
        "to": {"$ref": "#/$defs/place"},
        "how": {"enum": ["by foot", "by train"]},
        "why": {"type": "string", "pattern": "^[a-c]{2,4}$"},
        "note": {"type": "string", "maxLength": 5},
    },
    "required": ["count", "to", "why"],
    "additionalProperties": False,
    "$defs": {"place": {"enum": ["here", "there"]}},
}
TOOLS: list[Any] = [
    {"function": {"name": "go", "parameters": SCHEMA}},
    {"function": {"name": "stay", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}},
]


def drawn(kept_to: str | pb.Constraint, begun: str, seed: int, most: int = 400) -> str:
    """An answer that a grammar lets pass, which begins like this and goes on at random."""
    wanted = pb.Constraint(grammar=kept_to) if isinstance(kept_to, str) else kept_to
    constraint, draw = Constraint(wanted, TOKENIZER.words), np.random.default_rng(seed)
    answer = TOKENIZER.encode(begun)
    while len(answer) < most and not constraint.ends(answer):
        bits = np.unpackbits(constraint.masks(answer, [])[0].view(np.uint8), bitorder="little")
        token = int(draw.choice(np.flatnonzero(bits)))
        assert not constraint.trouble
        if token in TOKENIZER.stop_tokens:
            break
        answer.append(token)
    return TOKENIZER.decode(answer)


def begins(calls: CallFormat, name: str) -> str:
    """A call, up to its arguments."""
    return f"{calls.begin}{calls.lead}{calls.before}".replace("{name}", name).replace("{index}", "0")


@pytest.mark.parametrize("calls", ALL)
@pytest.mark.parametrize("one", [False, True])
def test_a_text_may_call_tools_and_is_then_kept_to_the_strict_ones(calls: CallFormat, one: bool) -> None:
    loose = {"function": {"name": "stay", "parameters": {"type": "object", "required": ["never"]}}}
    grammar = calls_grammar(calls, [TOOLS[0], loose], one, {}, {"go"})
    plain = "What < you [say]: <tool_x {1}"
    assert drawn(grammar, plain, 1).startswith(plain)
    text = "" if calls is BARE else "Well, \n"
    for seed in range(4):
        most = 400 if calls.joint is None else 10_000  # a text may go on behind marks of one call
        said, _, found = taken(calls, [drawn(grammar, text + begins(calls, "go"), seed, most)])
        assert (said.startswith(text.rstrip()), found[0][0]) == (True, "go")
        for name, arguments in found:
            assert isinstance(json.loads(arguments), dict)
            if name == "go":
                jsonschema.validate(json.loads(arguments), SCHEMA)
    empty = begins(calls, "stay") + ("" if calls.parameter else "{}") + calls.after
    _, _, found = taken(calls, [empty + calls.tail + calls.end])
    assert found == [("stay", "{}")]
    assert drawn(grammar, empty, 1), "its schema does not bind"


@pytest.mark.parametrize("calls", [each for each in ALL if each is not BARE])
@pytest.mark.parametrize("one", [False, True])
def test_an_answer_is_what_is_asked_for_or_calls_tools(calls: CallFormat, one: bool) -> None:
    around = calls_grammar(calls, TOOLS, one, {}, {"go"}, f"@{ANSWER}")
    wanted = pb.Constraint(json_schema=json.dumps(SCHEMA), around=around)
    for seed in range(2):
        said, _, found = taken(calls, [drawn(wanted, '{"count"', seed)])
        assert not found
        jsonschema.validate(json.loads(said), SCHEMA)
        said, _, found = taken(calls, [drawn(wanted, begins(calls, "go"), seed)])
        assert (said, found[0][0]) == ("", "go")
        jsonschema.validate(json.loads(found[0][1]), SCHEMA)
    first = np.unpackbits(Constraint(wanted, TOKENIZER.words).masks([], [])[0].view(np.uint8), bitorder="little")
    assert not first[TOKENIZER.encode("W")[0]], "it is no text"


@pytest.mark.parametrize(("calls", "next_"), [(MISTRAL, "["), (QWEN_CODER, "\n"), (GLM, "g")])
def test_the_mark_of_a_call_may_be_a_special_token(calls: CallFormat, next_: str) -> None:
    token = min(TOKENIZER.special_tokens - TOKENIZER.stop_tokens)  # any that is special
    constraint = Constraint(
        pb.Constraint(grammar=calls_grammar(calls, TOOLS[:1], True, {calls.begin: token}, {"go"})), TOKENIZER.words
    )
    begun = TOKENIZER.encode("Well, ")
    bits = np.unpackbits(constraint.masks([*begun, token], [])[0].view(np.uint8), bitorder="little")
    assert {TOKENIZER.decode([each])[0] for each in np.flatnonzero(bits)} == {next_}


def test_marks_within_a_call_may_be_special_tokens() -> None:
    separator = DEEPSEEK.marks.index(D_SEP)
    grammar = calls_grammar(DEEPSEEK, TOOLS[:1], True, {mark: n for n, mark in enumerate(DEEPSEEK.marks)})
    assert f'"go" <[{separator}]> arguments_0' in grammar


@pytest.mark.parametrize("calls", ALL)
@pytest.mark.parametrize("one", [False, True])
def test_what_is_kept_to_calls_is_taken_apart_as_valid_calls(calls: CallFormat, one: bool) -> None:
    seen = set()
    for seed, offered in enumerate([TOOLS[:1], TOOLS[1:], TOOLS, TOOLS]):
        said, _, found = taken(calls, [drawn(calls_grammar(calls, offered, one, {}), "", seed, most=10_000)])
        assert not said
        assert found
        assert len(found) == 1 or not one
        for name, arguments in found:
            seen.add(name)
            if name == "go":
                jsonschema.validate(json.loads(arguments), SCHEMA)
            else:
                assert json.loads(arguments) == {}
    assert seen == {"go", "stay"}


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("NaN", None, '"NaN"'),
        ("1", {"enum": ["1", "2"]}, '"1"'),
        ("true", {"const": "true"}, '"true"'),
        ("3", {"type": 5}, "3"),
        ("3", {"anyOf": None}, "3"),
        ("3", {"type": ["string", "integer"]}, "3"),
        ("[1", {"type": "array"}, '"[1"'),
    ],
)
def test_values_between_tags_are_json_by_their_schemas(text: str, schema: Any, expected: str) -> None:
    assert as_json(text, schema) == expected


def test_a_long_value_is_looked_through_once() -> None:
    """An answer of a megabyte in one argument, a letter at a time, took hours."""
    parts = AnswerParts(QWEN_CODER, False, False)
    looked = [*parts.push("<tool_call>\n<function=f>\n<parameter=a>\n")]
    reader = parts._reader
    assert isinstance(reader, TaggedCall)
    for _ in range(50):
        looked += parts.push("</parameter> and so on ")
        assert len(parts._held) - reader._at - reader._seen < 60
    looked += parts.push("\n</parameter>\n</function>\n</tool_call>")
    told = "".join(part.call.arguments for part in looked if part.call)
    assert json.loads(told)["a"] == "</parameter> and so on " * 50


@pytest.mark.parametrize(
    ("kind", "valid"),
    [
        ({"type": "string", "pattern": r"^\/tmp\/[a-z]+$"}, r"/tmp/[a-z]+"),
        ({"type": "string", "pattern": "^x+$", "maxLength": 3}, r"x{1,3}"),
    ],
)
def test_texts_between_tags_are_kept_to_their_schemas(kind: dict[str, Any], valid: str) -> None:
    schema = {"type": "object", "properties": {"p": kind}, "required": ["p"]}
    tools = [{"function": {"name": "f", "parameters": schema}}]
    for seed in range(3):
        _, _, ((_, arguments),) = taken(QWEN_CODER, [drawn(calls_grammar(QWEN_CODER, tools, True, {}), "", seed, 2000)])
        assert re.fullmatch(valid, json.loads(arguments)["p"])


@pytest.mark.parametrize("schema", [{"type": "array"}, {"minProperties": 1}, {"required": ["x"]}])
def test_schemas_of_what_is_no_plain_object_are_refused_where_arguments_are_tagged(schema: dict[str, Any]) -> None:
    tools = [{"function": {"name": "f", "parameters": schema}}]
    with pytest.raises(ConstraintError, match=r"'f' has parameters with (type 'array'|'minProperties'|'required')"):
        calls_grammar(QWEN_CODER, tools, True, {})
    assert calls_grammar(QWEN_CODER, tools, True, {}, set()), "nobody wants them to be valid"


def test_the_name_that_a_model_gives_a_call_is_kept() -> None:
    parts = AnswerParts(KIMI, False, False)
    (first, *_) = parts.push(f"{begins(KIMI, 'f')}{{}}")
    assert first.call is not None
    assert first.call.id == "functions.f:0"
