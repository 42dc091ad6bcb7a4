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

from motley.daemon.sampling.constraint import ANSWER, Constraint
from motley.daemon.text.answer_parts import AnswerParts, calls_grammar
from motley.daemon.text.call_formats import BARE, FORMATS, TOLD, CallFormat, call_format
from motley.daemon.text.tokenizer import Tokenizer
from motley.protocol import mesh_pb2 as pb
from tests.e2e.processes import BUNDLED

HERMES, MISTRAL = FORMATS
TOKENIZER = Tokenizer.load(Path(BUNDLED))

Taken = tuple[str, str, list[tuple[str, str]]]
"""What was said, what was thought, and calls: names and arguments."""


def taken(calls: CallFormat | None, pieces: list[str], thinks: bool = False, thinking: bool = False) -> Taken:
    parts = AnswerParts(calls, thinks, thinking)
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
    assert call_format("{{ tools }}") is BARE
    assert call_format("{{ messages }}") is TOLD


SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer", "minimum": 1, "maximum": 9}, "to": {"$ref": "#/$defs/place"}},
    "required": ["count", "to"],
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


@pytest.mark.parametrize("calls", [HERMES, MISTRAL, BARE])
@pytest.mark.parametrize("one", [False, True])
def test_a_text_may_call_tools_and_is_then_kept_to_the_strict_ones(calls: CallFormat, one: bool) -> None:
    loose = {"function": {"name": "stay", "parameters": {"type": "object", "required": ["never"]}}}
    grammar = calls_grammar(calls, [TOOLS[0], loose], one, {}, {"go"})
    plain = "What < you [say]: <tool_x {1}"
    assert drawn(grammar, plain, 1).startswith(plain)
    text, begun = "" if calls is BARE else "Well, \n", f'{calls.begin}{calls.lead}{{"name": '
    for seed in range(4):
        said, _, found = taken(calls, [drawn(grammar, f'{text}{begun}"go"', seed)])
        assert (said.startswith(text.rstrip()), found[0][0]) == (True, "go")
        for name, arguments in found:
            assert isinstance(json.loads(arguments), dict)
            if name == "go":
                jsonschema.validate(json.loads(arguments), SCHEMA)
    _, _, found = taken(calls, [f'{begun}"stay", "{calls.arguments}": {{}}}}'])
    assert found == [("stay", "{}")]
    assert drawn(grammar, f'{begun}"stay", "{calls.arguments}": {{}}', 1), "its schema does not bind"


@pytest.mark.parametrize("calls", [HERMES, MISTRAL])
@pytest.mark.parametrize("one", [False, True])
def test_an_answer_is_what_is_asked_for_or_calls_tools(calls: CallFormat, one: bool) -> None:
    around = calls_grammar(calls, TOOLS, one, {}, {"go"}, f"@{ANSWER}")
    wanted = pb.Constraint(json_schema=json.dumps(SCHEMA), around=around)
    for seed in range(4):
        said, _, found = taken(calls, [drawn(wanted, '{"count"', seed)])
        assert not found
        jsonschema.validate(json.loads(said), SCHEMA)
        said, _, found = taken(calls, [drawn(wanted, f'{calls.begin}{calls.lead}{{"name": "go"', seed)])
        assert (said, found[0][0]) == ("", "go")
        jsonschema.validate(json.loads(found[0][1]), SCHEMA)
    first = np.unpackbits(Constraint(wanted, TOKENIZER.words).masks([], [])[0].view(np.uint8), bitorder="little")
    assert not first[TOKENIZER.encode("W")[0]], "it is no text"


def test_the_mark_of_a_call_may_be_a_special_token() -> None:
    token = min(TOKENIZER.special_tokens - TOKENIZER.stop_tokens)  # any that is special
    grammar = calls_grammar(MISTRAL, TOOLS, True, {MISTRAL.begin: token}, {"go"})
    assert f'opened: SAID <[{token}]> "["' in grammar
    constraint = Constraint(pb.Constraint(grammar=grammar), TOKENIZER.words)
    begun = TOKENIZER.encode("Well, ")
    bits = np.unpackbits(constraint.masks([*begun, token], [])[0].view(np.uint8), bitorder="little")
    assert [TOKENIZER.decode([each]) for each in np.flatnonzero(bits)] == ["["]


@pytest.mark.parametrize("calls", [HERMES, MISTRAL, BARE])
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
                assert re.fullmatch(r"\{\s*\}", arguments)
    assert seen == {"go", "stay"}
