"""What a model thinks, says and calls, taken apart from one text, however it is cut into pieces."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.daemon.sampling.constraint import ANSWER, Constraint, ConstraintError
from motley.daemon.text.answer_parts import GEMMA_THOUGHT, THINK, AnswerParts, ThoughtMarks, thought_marks
from motley.daemon.text.calls.formats import (
    BARE,
    DEEPSEEK,
    DEEPSEEK_FENCED,
    FORMATS,
    FUNCTION_GEMMA,
    GEMMA,
    GLM,
    GLM_DENSE,
    HERMES,
    KIMI,
    LFM2,
    MINIMAX,
    MISTRAL,
    MISTRAL_NAMED,
    OLMO,
    PYTHONIC,
    QWEN_CODER,
    SEED,
    TOLD,
    CallFormat,
    call_format,
    wants_arguments_as_text,
)
from motley.daemon.text.calls.grammar import calls_grammar
from motley.daemon.text.calls.reading import NamedCall, TaggedCall
from motley.daemon.text.calls.values import as_json
from motley.daemon.text.tokenizer import Tokenizer
from motley.protocol import mesh_pb2 as pb
from tests.daemon.text.putting_together import Taken, put_together
from tests.e2e.processes import BUNDLED

TOKENIZER = Tokenizer.load(Path(BUNDLED))
D_BEGIN, D_CALL, D_SEP, D_END = DEEPSEEK.marks[0], *DEEPSEEK.marks[2:]


def taken(
    calls: CallFormat | None, pieces: list[str], marks: ThoughtMarks | None = None, thinking: bool = False
) -> Taken:
    parts = AnswerParts(calls, marks, thinking, PROPERTIES)
    out = [part for piece in pieces for part in parts.push(piece)]
    out += parts.flush()
    whole = put_together(out)
    assert parts.called == len(whole[2])
    return whole


TEXT = {"type": "string"}
PROPERTIES: dict[str, dict[str, Any]] = {
    "f": {"a": TEXT, "n": {"type": "integer"}, "maybe": {"anyOf": [TEXT, {"type": "null"}]}},
    **{name: {} for name in ("g", "go", "stay")},
}
"""Of the tools that are called."""
F = '{"a": "two\\nlines", "n": 3}'
"""Arguments of f that were written in lines, as JSON."""
ARGUMENTS = '{"a": "}\\\\\\"{", "b": [1, {"c": 2}]}'
Q = '<|"|>'
CASES: list[tuple[CallFormat | None, str, ThoughtMarks | None, Taken]] = [
    (
        HERMES,
        f'Hi \n<tool_call>\n{{"name": "f", "arguments": {ARGUMENTS}}}\n</tool_call>',
        None,
        ("Hi", "", [("f", ARGUMENTS)]),
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
        '<tool_call>{"arguments": {"x": 1}, "name": "g"}</tool_call>',
        None,
        ("", "", [("f", "{}"), ("g", '{"x": 1}')]),
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": 1}, "more": {"b": {}}, "most": []}</tool_call>',
        None,
        ("", "", [("f", '{"a": 1}')]),
    ),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', None, ("", "", [("f", '{"a": 1}')])),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>'
        '\n<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        None,
        ("", "", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    (HERMES, "a < b <tool_x  ", None, ("a < b <tool_x  ", "", [])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a', None, ("", "", [("f", '{"a')])),
    (
        HERMES,
        '<think>\nwell</think>\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        THINK,
        ("", "well", [("f", "{}")]),
    ),
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "x"}, {"name": "g", "arguments": {}}]',
        None,
        ("", "", [("f", '{"a": 1}'), ("g", "{}")]),
    ),
    (BARE, ' {"name": "f", "parameters": {"a": {}}}', None, ("", "", [("f", '{"a": {}}')])),
    (BARE, '{"hello": 1} x', None, ('{"hello": 1} x', "", [])),
    (BARE, "plain <b> text ", None, ("plain <b> text ", "", [])),
    (
        QWEN_CODER,
        "Well.\n\n<tool_call>\n<function=f>\n<parameter=a>\ntwo\nlines\n</parameter>\n<parameter=n>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>",
        None,
        ("Well.", "", [("f", F), ("g", "{}")]),
    ),
    (
        QWEN_CODER,
        "<tool_call>\n<function=g>\n<parameter=html>\n<parameter></parameter> </p>\n</parameter>\n<parameter=flag>\n"
        'True\n</parameter>\n<parameter=list>\n["x"]\n</parameter>\n</function>\n</tool_call>',
        None,
        ("", "", [("g", '{"html": "<parameter></parameter> </p>", "flag": true, "list": ["x"]}')]),
    ),
    (QWEN_CODER, f'<tool_call>\n{{"name": "f", "arguments": {F}}}\n</tool_call>', None, ("", "", [("f", F)])),
    (QWEN_CODER, "<tool_call>\n<function=f>\n<parameter=a>\nnever end", None, ("", "", [("f", "")])),
    (
        GLM_DENSE,
        "<tool_call>f<arg_key>n</arg_key><arg_value>3</arg_value><arg_key>a</arg_key><arg_value>x</arg_value>",
        None,
        ("", "", [("f", '{"n": 3, "a": "x"}')]),
    ),
    (
        GLM,
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>two\nlines</arg_value>\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n"
        "</tool_call>\n<tool_call>g\n</tool_call>",
        None,
        ("", "", [("f", F), ("g", "{}")]),
    ),
    (
        GLM_DENSE,
        "<think>hm</think><tool_call>f<arg_key>a</arg_key><arg_value>two\nlines</arg_value><arg_key>n</arg_key>"
        "<arg_value>3</arg_value></tool_call><tool_call>f<arg_key>maybe</arg_key><arg_value>null</arg_value></tool_call>",
        THINK,
        ("", "hm", [("f", F), ("f", '{"maybe": null}')]),
    ),
    (
        MINIMAX,
        '\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">two\nlines</parameter>\n<parameter name="n">'
        '3</parameter>\n</invoke>\n<invoke name="g">\n</invoke>\n</minimax:tool_call>',
        None,
        ("", "", [("f", F), ("g", "{}")]),
    ),
    (
        SEED,
        "<seed:tool_call>\n<function=f>\n<parameter=a>two\nlines</parameter>\n<parameter=n>3</parameter>\n</function>\n</seed:tool_call>",
        None,
        ("", "", [("f", F)]),
    ),
    (
        MISTRAL_NAMED,
        f"Hi.[TOOL_CALLS]f[ARGS]{ARGUMENTS}[TOOL_CALLS]g[ARGS]{{}}",
        None,
        ("Hi.", "", [("f", ARGUMENTS), ("g", "{}")]),
    ),
    (
        DEEPSEEK,
        f"{D_BEGIN}{D_CALL}f{D_SEP}{ARGUMENTS}{D_END}{D_CALL}g{D_SEP}{{}}{D_END}{DEEPSEEK.end}",
        None,
        ("", "", [("f", ARGUMENTS), ("g", "{}")]),
    ),
    (
        DEEPSEEK_FENCED,
        f"{D_BEGIN}{D_CALL}function{D_SEP}f\n```json\n{ARGUMENTS}\n```{D_END}\n{D_CALL}function{D_SEP}g\n```json\n{{}}\n```{D_END}",
        None,
        ("", "", [("f", ARGUMENTS), ("g", "{}")]),
    ),
    (
        KIMI,
        f"{KIMI.begin}<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>"
        f"<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>{KIMI.end}",
        None,
        ("", "", [("f", ARGUMENTS), ("g", "{}")]),
    ),
    (
        GEMMA,
        f"Sure. <|tool_call>call:f{{a:{Q}two\nlines{Q},n:3}}<tool_call|><|tool_call>call:g{{}}<tool_call|>",
        None,
        ("Sure.", "", [("f", F), ("g", "{}")]),
    ),
    (
        GEMMA,
        f'<|tool_call>call:g{{flag:true,list:[{Q}}}, "]{Q},1.5,null],object:{{a b:{Q}{Q},{Q}c:{Q}:[[]]}}}}<tool_call|>',
        None,
        ("", "", [("g", '{"flag": true, "list": ["}, \\"]", 1.5, null], "object": {"a b": "", "c:": [[]]}}')]),
    ),
    (
        GEMMA,
        "<|channel>thought\nhm\n<channel|>"
        '<|tool_call>call:g{day:2024-01-02,"city":"Rome, \\"Ga\\"",left:}<tool_call|>Done.',
        GEMMA_THOUGHT,
        ("Done.", "hm\n", [("g", '{"day": "2024-01-02", "city": "Rome, \\"Ga\\"", "left": null}')]),
    ),
    (GEMMA, f"<|tool_call>call:f{{a:{Q}never <|", None, ("", "", [("f", '{"a": "never "}')])),
    (GEMMA, f"<|tool_call>call:f{{a:{Q}never}}<tool_call|>So.", None, ("So.", "", [("f", '{"a": "never}"}')])),
    (GEMMA, f"<|tool_call>call:f{{a:[{{b:{Q}c{Q},n:3", None, ("", "", [("f", '{"a": [{"b": "c", "n": null}]}')])),
    (GEMMA, "<|tool_call>call:f{a}<tool_call|>Done.", None, ("Done.", "", [("f", "{}")])),
    (
        GEMMA,
        "<|tool_call>call:f{a:1,b}<tool_call|>Done.<|tool_call>call:f{a:2}<tool_call|>",
        None,
        ("Done.", "", [("f", '{"a": "1"}'), ("f", '{"a": "2"}')]),
    ),
    (
        GEMMA,
        "<|tool_call>call:g{},<|tool_call>call:g{n:1}<tool_call|>",
        None,
        ("", "", [("g", "{}"), ("g", '{"n": 1}')]),
    ),
    (
        FUNCTION_GEMMA,
        "<start_function_call>call:f{a:<escape>two\nlines<escape>,n:3}<end_function_call>"
        '<start_function_call>call:g{list:[<escape>}, "]<escape>,true],object:{k:<escape><escape>}}<end_function_call>',
        None,
        ("", "", [("f", F), ("g", '{"list": ["}, \\"]", true], "object": {"k": ""}}')]),
    ),
    (
        FUNCTION_GEMMA,
        "Well. <start_function_call>call:g{city:<escape>Rome <esc<escape>}<end_function_call>",
        None,
        ("Well.", "", [("g", '{"city": "Rome <esc"}')]),
    ),
    (
        OLMO,
        'Let me see. <function_calls>f(a="two\\nlines", n=3)\ng(yes=true, no=null, part=[.5, {"k": "}"}])\n'
        "g()</function_calls>",
        None,
        (
            "Let me see.",
            "",
            [("f", F), ("g", '{"yes": true, "no": null, "part": [0.5, {"k": "}"}]}'), ("g", "{}")],
        ),
    ),
    (OLMO, "<function_calls>\ng(yes=True)\n</function_calls>", None, ("", "", [("g", '{"yes": true}')])),
    (GEMMA, "<|channel>thought\n<channel|>Yes <|tool", GEMMA_THOUGHT, ("Yes <|tool", "", [])),
    (GEMMA, "<|channel>thoughtful<channel|>Yes", GEMMA_THOUGHT, ("Yes", "thoughtful", [])),
    (GEMMA, "<|channel>though", GEMMA_THOUGHT, ("", "", [])),
    (
        LFM2,
        '<|tool_call_start|>[g(candidate_id="12345")]<|tool_call_end|>Checking the status.',
        None,
        ("Checking the status.", "", [("g", '{"candidate_id": "12345"}')]),
    ),
    (
        LFM2,
        "<think>hm</think>Well.<|tool_call_start|>[f(a='two\\nlines', n=3), g(yes=True, no=None, part=[.5, (07, 1_0)], "
        "map={'k': False, 1: \"}\"},)]<|tool_call_end|>",
        THINK,
        (
            "Well.",
            "hm",
            [("f", F), ("g", '{"yes": true, "no": null, "part": [0.5, [7, 10]], "map": {"k": false, "1": "}"}}')],
        ),
    ),
    (
        LFM2,
        f'<|tool_call_start|>[{{"name": "f", "arguments": {ARGUMENTS}}}, {{"name": "g", "arguments": {{}}}}]'
        "<|tool_call_end|>",
        None,
        ("", "", [("f", ARGUMENTS), ("g", "{}")]),
    ),
    (
        LFM2,
        "<|tool_call_start|>[g(run='sed -n '3,4p' \"a\" | (cat), x', it='it's', raw='''a 'b' \"''', no='')]"
        "<|tool_call_end|>",
        None,
        (
            "",
            "",
            [("g", '{"run": "sed -n \'3,4p\' \\"a\\" | (cat), x", "it": "it\'s", "raw": "a \'b\' \\"", "no": ""}')],
        ),
    ),
    (LFM2, "<|tool_call_start|>[]<|tool_call_end|>None.", None, ("None.", "", [])),
    (LFM2, "<|tool_call_start|>[g('Rome')] <|tool_", None, ("g('Rome')] <|tool_", "", [])),
    (LFM2, "<|tool_call_start|>[g(a='\\x41\\u00e9\\d\\ud8", None, ("", "", [("g", '{"a": "A\\u00e9\\\\d"}')])),
    (LFM2, "<|tool_call_start|>[f(n=1, b)]<|tool_call_end|>Done.", None, ("Done.", "", [("f", '{"n": 1}')])),
    (LFM2, "<|tool_call_start|>[f(n=1, **x)]<|tool_call_end|>Done.", None, ("Done.", "", [("f", '{"n": 1}')])),
    (
        LFM2,
        "<|tool_call_start|>[f(a=date(2020, 1, 1)), g(x=[1, (2, h(3))], y=4), g(y=5)]<|tool_call_end|>Done.",
        None,
        ("Done.", "", [("f", '{"a": null}'), ("g", '{"x": [1, [2]]}'), ("g", '{"y": 5}')]),
    ),
    (
        LFM2,
        "<|tool_call_start|>[f(a=1+(2), b='x)', c=it's(\"\n)), g()]<|tool_call_end|>Done.",
        None,
        ("Done.", "", [("f", '{"a": null}'), ("g", "{}")]),
    ),
    (LFM2, "<|tool_call_start|>[g(a=x((), b=3]<|tool_call_end|>Done.", None, ("Done.", "", [("g", '{"a": null}')])),
    (LFM2, "<|tool_call_start|>[g(a='x', b=3<|tool_call_end|>So.", None, ("So.", "", [("g", '{"a": "x", "b": 3}')])),
    (LFM2, '<|tool_call_start|>[g(a="", b=\'<|tool_call_end|>So.', None, ("So.", "", [("g", '{"a": "", "b": null}')])),
    (PYTHONIC, "[f(a=x(1))] and more", None, ("and more", "", [("f", '{"a": null}')])),
    (PYTHONIC, "[f(a='two\\nlines', n=3), g()]", None, ("", "", [("f", F), ("g", "{}")])),
    (PYTHONIC, '[g(a="x")', None, ("", "", [("g", '{"a": "x"}')])),
    (PYTHONIC, '{"name": "g", "parameters": {}}', None, ("", "", [("g", "{}")])),
    (PYTHONIC, "[1] says (x=2)", None, ("[1] says (x=2)", "", [])),
    (PYTHONIC, "[main(a=1)](https://example.org)", None, ("[main(a=1)](https://example.org)", "", [])),
    (PYTHONIC, " [", None, (" [", "", [])),
    (BARE, "[note] that", None, ("[note] that", "", [])),
    (LFM2, "<|tool_call_start|>[g()\xa0<|tool_call_end|>Done.", None, ("Done.", "", [("g", "{}")])),
    (None, "<think>hm</think>yes", THINK, ("yes", "hm", [])),
    (None, "<think>hm</think>yes", None, ("<think>hm</think>yes", "", [])),
    (None, "<thin air", THINK, ("<thin air", "", [])),
]


@pytest.mark.parametrize(("calls", "text", "marks", "expected"), CASES)
def test_an_answer_is_taken_apart_however_it_is_cut(
    calls: CallFormat | None, text: str, marks: ThoughtMarks | None, expected: Taken
) -> None:
    @given(st.sets(st.integers(0, len(text))))
    def holds(cuts: set[int]) -> None:
        ends = sorted({*cuts, len(text)})
        pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        assert taken(calls, pieces, marks) == expected

    holds()
    assert taken(calls, list(text), marks) == expected


@pytest.mark.parametrize("call", ['{"name": "a\\q", "arguments": {}}', '{"x": ' + "[" * 5000 + "]" * 5000 + "}"])
def test_what_python_cannot_read_is_no_call(call: str) -> None:
    assert taken(HERMES, [f"<tool_call>{call}"]) == taken(HERMES, ["<tool_call>", *call]) == (call, "", [])


def test_a_prompt_may_have_begun_the_thoughts() -> None:
    assert taken(None, ["well", "</thi", "nk>\n\nyes"], THINK, True) == ("yes", "well", [])


def test_arguments_come_as_they_are_written() -> None:
    parts = AnswerParts(HERMES, None, False)
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
    assert call_format("{% if tools %}{{ '<|tool_call>call:' + name + '{' }}{% endif %}") is GEMMA
    assert call_format("{{ tools }}{{ '<start_function_call>call:' + name + '{' }}") is FUNCTION_GEMMA
    assert call_format("<functions>{{ tools | tojson }}</functions>{{ '<function_calls>' + calls }}") is OLMO
    assert call_format("{{ tools }}<|tool_call_start|>[{{ calls | join(', ') }}]<|tool_call_end|>") is LFM2
    assert call_format("List of tools: <|tool_list_start|>[{{ tools }}]<|tool_list_end|>") is LFM2
    assert call_format("<|im_start|>system\nList of tools: [{{ tools }}]") is LFM2
    assert call_format("Use the format [func_name1(params_name1=params_value1), func_name2()]\n{{ tools }}") is PYTHONIC
    assert call_format("{{ tools }}<|python_start|>{{ content }}<|python_end|>{{ '{\"name\": ' }}") is BARE
    assert call_format("{{ tools }}") is BARE
    assert call_format("{{ messages }}") is TOLD


def test_the_template_says_how_thoughts_are_marked() -> None:
    assert thought_marks("{{ '<|channel>thought\n' + text + '<channel|>' }}") is GEMMA_THOUGHT
    assert thought_marks("{{ content.split('</think>') }}") is THINK
    assert thought_marks("{{ content }}") is None


def test_some_templates_add_arguments_to_a_text() -> None:
    assert wants_arguments_as_text("{{ '<call>' + tool['function']['arguments'] + '</call>' }}")
    assert wants_arguments_as_text("{{ tool.function.name + tool.function.arguments }}")
    assert not wants_arguments_as_text("{% for k, v in tool.function.arguments.items() %}{{ k + v }}{% endfor %}")


NAMES = st.from_regex(r"[A-Za-z_][A-Za-z_0-9]{0,7}", fullmatch=True)
TEXTS = (st.text() | st.text("'\"\\{}()[],:= \nabc<|>")).filter(
    lambda text: Q not in text and "<escape>" not in text  # which Gemma cannot write
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda values: st.lists(values, max_size=4) | st.dictionaries(NAMES | TEXTS, values, max_size=4),
)


def in_gemma(value: Any, quote: str = Q) -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case list():
            return f"[{','.join(in_gemma(each, quote) for each in value)}]"
        case dict():
            members = [(key if key.isidentifier() else in_gemma(key, quote), each) for key, each in value.items()]
            return f"{{{','.join(f'{key}:{in_gemma(each, quote)}' for key, each in members)}}}"
    return json.dumps(value)


def written(calls: CallFormat, index: int, name: str, arguments: dict[str, Any], spell: Callable[[Any], str]) -> str:
    inner = json.dumps(arguments, ensure_ascii=False)
    if calls.parameters:
        before, after = calls.parameters.before, calls.parameters.after
        each = [before.replace("{key}", key) + spell(value) + after for key, value in arguments.items()]
        inner = calls.parameters.joint.join(each)
    return calls.before.replace("{name}", name).replace("{index}", str(index)) + inner + calls.after


@pytest.mark.parametrize("calls", [each for each in FORMATS if not each.parameters or each.parameters.quote])
@settings(max_examples=settings().max_examples // 3)  # of each of a dozen formats
@given(data=st.data())
def test_what_is_called_is_read_as_it_was_meant(calls: CallFormat, data: st.DataObject) -> None:
    quote = calls.parameters.quote if calls.parameters else ""
    spell: Callable[[Any], str] = partial(in_gemma, quote=quote)
    if calls not in (GEMMA, FUNCTION_GEMMA):
        spell = data.draw(st.sampled_from([repr, json.dumps, lambda value: json.dumps(value, ensure_ascii=False)]))
    drawn_calls = st.tuples(st.sampled_from(["f", "g", "go"]), st.dictionaries(NAMES, VALUES, max_size=4))
    meant = data.draw(st.lists(drawn_calls, min_size=1, max_size=1 if calls is BARE else 3))
    each = [written(calls, number, *call, spell) for number, call in enumerate(meant)]
    begin, end = calls.begin + calls.lead, calls.tail + calls.end
    if calls.listed:
        text = begin + calls.joint.join(each) + end
    else:
        text = calls.joint.join(begin + call + end for call in each)
    before = "Well, [so] {it} is:" if calls.begin else ""
    cuts = sorted(data.draw(st.sets(st.integers(0, len(before + text)))))
    pieces = [(before + text)[start:stop] for start, stop in zip([0, *cuts], [*cuts, None], strict=True)]
    said, thought, found = taken(calls, pieces)
    assert (said, thought) == (before, "")
    assert [(name, json.loads(arguments)) for name, arguments in found] == meant


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


def lets_pass(grammar: str, text: str) -> bool:
    """Whether an answer may be this text."""
    tokens = TOKENIZER.encode(text)
    masks = Constraint(pb.Constraint(grammar=grammar), TOKENIZER.words).masks([], tokens)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return all(bits[row, token] for row, token in enumerate(tokens))


def begins(calls: CallFormat, name: str) -> str:
    """A call, up to its arguments."""
    return f"{calls.begin}{calls.lead}{calls.before}".replace("{name}", name).replace("{index}", "0")


@pytest.mark.parametrize("calls", FORMATS)
@pytest.mark.parametrize("one", [False, True])
def test_a_text_may_call_tools_and_is_then_kept_to_the_strict_ones(calls: CallFormat, one: bool) -> None:
    loose = {"function": {"name": "stay", "parameters": {"type": "object", "required": ["never"]}}}
    grammar = calls_grammar(calls, [TOOLS[0], loose], one, {}, {"go"})
    plain = "What < you [say]: <tool_x {1}"
    assert drawn(grammar, plain, 1).startswith(plain)
    text = "" if not calls.begin else "Well, \n"
    for seed in range(4):
        most = 400 if not calls.listed else 10_000  # a text may go on behind marks of one call
        said, _, found = taken(calls, [drawn(grammar, text + begins(calls, "go"), seed, most)])
        assert (said.startswith(text.rstrip()), found[0][0]) == (True, "go")
        for name, arguments in found:
            assert isinstance(json.loads(arguments), dict)
            if name == "go":
                jsonschema.validate(json.loads(arguments), SCHEMA)
    empty = begins(calls, "stay") + ("" if calls.parameters else "{}") + calls.after
    _, _, found = taken(calls, [empty + calls.tail + calls.end])
    assert found == [("stay", "{}")]
    assert drawn(grammar, empty, 1), "its schema does not bind"


@pytest.mark.parametrize("calls", [each for each in FORMATS if each.begin])
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


@pytest.mark.parametrize("calls", FORMATS)
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
    parts = AnswerParts(QWEN_CODER, None, False)
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


NESTED = {
    "type": "object",
    "properties": {
        "tree": {"$ref": "#/$defs/tree"},
        "maybe": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}], "default": None},
        "flag": {"type": "boolean"},
        "some": {"type": "array", "items": {"enum": ["a", 1, None, True, ["b"]]}, "minItems": 2, "maxItems": 3},
        "texts": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
        "sizes": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 5}},
        "none": {"type": "object", "additionalProperties": False},
        "two words": {"type": ["string", "null"], "pattern": "^[xy]$"},
        "sum": {"allOf": [{"type": "integer"}, {"minimum": 7, "maximum": 9}]},
        "day": {"type": "string", "format": "date"},
        "held": {"const": {"b:c": 1, "A": ["x", None]}},
    },
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"leaf": {"const": "}"}, "Branch": {"type": "array", "items": {"$ref": "#/$defs/tree"}}},
            "required": ["leaf"],
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize("calls", [GEMMA, FUNCTION_GEMMA, LFM2, OLMO])
def test_values_within_values_are_valid_too_where_they_are_no_json(calls: CallFormat) -> None:
    schema = json.loads(json.dumps(NESTED))
    if calls in (LFM2, OLMO):
        del schema["properties"]["two words"]  # which is no name in Python
    tools = [{"function": {"name": "go", "parameters": schema}}]
    for seed, key in enumerate(schema["properties"]):
        schema["required"] = [*{"flag", key}]
        said, _, ((name, arguments),) = taken(calls, [drawn(calls_grammar(calls, tools, True, {}), "", seed, 20_000)])
        assert (said, name) == ("", "go")
        jsonschema.validate(json.loads(arguments), schema)


@pytest.mark.parametrize("calls", [GEMMA, FUNCTION_GEMMA, LFM2, OLMO])
def test_any_arguments_are_read_back_where_no_schema_binds(calls: CallFormat) -> None:
    tools = [{"function": {"name": "go", "parameters": NESTED}}]
    grammar = calls_grammar(calls, tools, True, {}, set())
    begun = begins(calls, "go") + calls.parameters.before.replace("{key}", "anything")
    for seed in range(4):
        text = drawn(grammar, begun, seed, 60)
        whole = text.removesuffix(calls.tail + calls.end) != text
        _, _, ((_, arguments), *_) = taken(calls, [text])
        assert arguments.startswith('{"anything": ')
        assert not whole or "anything" in json.loads(arguments)


def bound(calls: CallFormat, properties: dict[str, Any]) -> str:
    """The grammar of a call of `go` with some of these arguments."""
    parameters = {"type": "object", "properties": properties, "additionalProperties": False}
    return calls_grammar(calls, [{"function": {"name": "go", "parameters": parameters}}], True, {})


@pytest.mark.parametrize("key", ["two words", "a-b", "1x", "from"])
def test_what_is_no_name_in_python_is_refused(key: str) -> None:
    with pytest.raises(ConstraintError, match=f"'go' has a parameter '{key}', which is no name in the Python"):
        bound(LFM2, {key: {"type": "integer"}})
    assert bound(GEMMA, {key: {"type": "integer"}})


@pytest.mark.parametrize("calls", [GEMMA, LFM2, GLM])
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ({"type": "array", "minItems": 3, "maxItems": 2}, "'minItems' over its 'maxItems'"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "'minLength' over its 'maxLength'"),
        ({"type": "array", "maxItems": True}, "'maxItems' that is no whole number"),
        ({"type": "array", "minItems": -1}, "'minItems' that is no whole number"),
        ({"type": "string", "minLength": "x"}, "'minLength' that is no whole number"),
        ({"type": "string", "maxLength": None}, "'maxLength' that is no whole number"),
    ],
)
def test_limits_that_are_none_are_refused_by_name(calls: CallFormat, kind: dict[str, Any], why: str) -> None:
    with pytest.raises(ConstraintError, match=f"'go' has a parameter 'p' with {why}"):
        bound(calls, {"p": kind})


def test_formats_of_texts_are_refused_between_tags() -> None:
    with pytest.raises(ConstraintError, match="'go' has a parameter 'p' with 'format', which is not supported"):
        bound(QWEN_CODER, {"p": {"type": "string", "format": "date"}})


@pytest.mark.parametrize("calls", [GEMMA, LFM2, GLM])
def test_arguments_may_refer_to_the_schema_of_all_of_them(calls: CallFormat) -> None:
    """It was the part itself that they found: nothing but an endless reference, or lists of lists."""
    schema: dict[str, Any] = {
        "$id": "https://example.org/tree",
        "type": "object",
        "properties": {
            "leaf": {"enum": [1, 2]},
            "parts": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
            "sub": {"$ref": "#"},
            "pair": {"allOf": [{"$ref": "#/properties/leaf"}, {"minimum": 2}]},
        },
        "additionalProperties": False,
        "required": ["leaf"],
    }
    tools = [{"function": {"name": "go", "parameters": schema}}]
    spell = in_gemma if calls is GEMMA else json.dumps
    for arguments in (
        {"leaf": 1},
        {"leaf": 1, "pair": 2, "parts": [{"leaf": 2, "parts": []}, {"leaf": 1}]},
        {"leaf": 1, "sub": {"leaf": 2, "sub": {"leaf": 1}}},
        {"leaf": 1, "pair": 1},
        {"leaf": 1, "parts": [[]]},
        {"leaf": 1, "parts": [{"leaf": 3}]},
        {"leaf": 1, "sub": {"leaf": 2, "sub": {"leaf": 3}}},
    ):
        # in the order of the schema, or of their names
        ordered = sorted(arguments) if calls is GEMMA else [key for key in schema["properties"] if key in arguments]
        call = written(calls, 0, "go", {key: arguments[key] for key in ordered}, spell)
        text = f"{calls.begin}{calls.lead}{call}{calls.tail}{calls.end}"
        valid = jsonschema.Draft202012Validator(schema).is_valid(arguments)
        assert lets_pass(calls_grammar(calls, tools, True, {}), text) == valid, text


def test_objects_are_written_in_one_way_whether_a_schema_names_them_or_their_members() -> None:
    named = bound(GEMMA, {"p": {"const": {"b:c": 1, "A": 2}}})
    assert json.dumps(f"{{A:2,{Q}b:c{Q}:1}}", ensure_ascii=False) in named


def test_schemas_that_nest_too_deep_are_refused() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(1000):
        schema = {"type": "array", "items": schema}
    tools = [{"function": {"name": "go", "parameters": {"type": "object", "properties": {"a": schema}}}}]
    with pytest.raises(ConstraintError, match="nested too deep"):
        calls_grammar(GEMMA, tools, True, {})


def test_the_quotes_of_texts_may_be_special_tokens() -> None:
    assert GEMMA.marks == ["<|tool_call>", "<tool_call|>", Q]
    assert FUNCTION_GEMMA.marks == ["<start_function_call>", "<end_function_call>", "<escape>"]
    assert OLMO.marks == ["<function_calls>", "</function_calls>"]
    grammar = calls_grammar(GEMMA, TOOLS[:1], True, {mark: n for n, mark in enumerate(GEMMA.marks)})
    assert "opened: <[0]>\n" in grammar
    assert '(<[2]> "by foot" <[2]> | <[2]> "by train" <[2]>)' in grammar


def test_a_long_text_comes_as_it_is_written() -> None:
    """Looked through once, and told before it ends."""
    for calls, quote in ((GEMMA, Q), (LFM2, "'")):
        parts = AnswerParts(calls, None, False)
        looked = [*parts.push(f"{begins(calls, 'f')}{calls.parameters.before.replace('{key}', 'a')}{quote}")]
        for _ in range(50):
            looked += parts.push("it's <| so on ")
            told = "".join(part.call.arguments for part in looked if part.call)
            assert told.endswith("so on ")
        reader = parts._reader
        assert isinstance(reader, NamedCall)
        assert len(parts._held) - reader._arguments._at < 20
        looked += parts.push(f"{quote}{calls.after}{calls.tail}{calls.end}")
        told = "".join(part.call.arguments for part in looked if part.call)
        assert json.loads(told) == {"a": "it's <| so on " * 50}


@pytest.mark.parametrize(
    ("calls", "begun", "letter", "ended"),
    [
        (LFM2, "a=", "8", ""),
        (LFM2, "a=1, ", "b", "=1"),
        (LFM2, "a='", "c", "'"),
        (LFM2, "a=date(", "d", ")"),
        (GEMMA, "a:", "8", ""),
        (GEMMA, "", "b", ":1"),
        (GEMMA, f"a:{Q}", "c", Q),
    ],
)
def test_what_is_long_is_looked_through_once_however_it_is_spelt(
    calls: CallFormat, begun: str, letter: str, ended: str
) -> None:
    """Digits and names without quotes were looked through from their beginning with every token."""
    started = time.process_time()
    end = f"{ended}{calls.after}{calls.tail}{calls.end}"
    said, _, ((name, arguments),) = taken(calls, [begins(calls, "g") + begun, *letter * 20_000, end])
    assert (said, name) == ("", "g")
    assert letter * 20_000 in arguments or arguments == '{"a": null}'
    assert time.process_time() - started < 2.5


@pytest.mark.timeout(30)
@pytest.mark.parametrize("begun", ["a", "n=3", "n='x'", "n=3, ", "n=['x'", 'n="x", m', "n"])
def test_a_model_that_goes_on_with_spaces_holds_nobody_up(begun: str) -> None:
    """What is looked at again with each letter is of a length that does not grow, or is looked through once."""
    assert [name for name, _ in taken(LFM2, [f"{LFM2.begin}[g({begun}", *" " * 3000, "\n)]"])[2]] == ["g"] * (
        "=" in begun
    )


def test_the_name_that_a_model_gives_a_call_is_kept() -> None:
    parts = AnswerParts(KIMI, None, False)
    (first, *_) = parts.push(f"{begins(KIMI, 'f')}{{}}")
    assert first.call is not None
    assert first.call.id == "functions.f:0"
