"""gpt-oss's channels: what it thinks, says and calls, however its answer is cut, and kept to something or not."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.sampling.constraint import Constraint
from motley.daemon.text.generation import Generation
from motley.daemon.text.harmony import MARKS, ChannelParts, channel_grammar
from motley.daemon.text.tokenizer import Tokenizer
from motley.protocol import mesh_pb2 as pb
from motley.protocol import worker_pb2 as wp
from tests.daemon.text.made_tokenizers import WriteFolder, bytes_tokenizer
from tests.daemon.text.putting_together import Taken, put_together

THOUGHT = "<|channel|>analysis<|message|>hm, <x>\n<|end|><|start|>assistant"
TEMPLATE = """{% if tools %}{{ tools | length }} tools
{% endif %}{% for m in messages %}{{ m.role }} {{ m.thinking }} {{ m.content }}
{% endfor %}{{ reasoning_effort or "medium" }}<|start|>assistant{# <|channel|> #}"""


def taken(pieces: list[str]) -> Taken:
    parts = ChannelParts()
    out = [part for piece in pieces for part in parts.push(piece)]
    out += parts.flush()
    whole = put_together(out)
    assert parts.complete == len(whole[2])
    return whole


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{THOUGHT}<|channel|>final<|message|>Yes < no.", ("Yes < no.", "hm, <x>\n", [])),
        ("<|channel|>final<|message|>Yes<|end|>", ("Yes", "", [])),
        (
            f'{THOUGHT}<|channel|>commentary to=functions.go <|constrain|>json<|message|>{{"to": "<|"}}',
            ("", "hm, <x>\n", [("go", '{"to": "<|"}')]),
        ),
        (
            f'{THOUGHT} to=functions.go<|channel|>commentary json<|message|>{{"a": 1}}<|end|>',
            ("", "hm, <x>\n", [("go", '{"a": 1}')]),
        ),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
            "<|channel|>commentary to=functions.stay json<|message|>",
            ("I look.", "", [("stay", "")]),
        ),
        (
            "<|channel|>commentary<|message|>One.<|end|><|start|>assistant<|channel|>final<|message|>Two.",
            ("One.\n\nTwo.", "", []),
        ),
        ("<|channel|>analysis to=browser.search code<|message|>x<|end|>", ("", "x", [])),
        ("to tell a text <| here", ("to tell a text <| here", "", [])),
        (" {1}", (" {1}", "", [])),
        ("<|channel|>anal", ("", "", [])),
        ("", ("", "", [])),
    ],
)
def test_an_answer_is_taken_apart_however_it_is_cut(text: str, expected: Taken) -> None:
    @given(st.sets(st.integers(0, len(text))))
    def holds(cuts: set[int]) -> None:
        ends = sorted({*cuts, len(text)})
        assert taken([text[start:end] for start, end in zip([0, *ends], ends, strict=False)]) == expected

    holds()
    assert taken(list(text)) == expected


SCHEMA = {"type": "object", "properties": {"to": {"enum": ["Rome"]}}, "required": ["to"], "additionalProperties": False}
TOOLS: list[Any] = [
    {"function": {"name": "go", "parameters": SCHEMA}},
    {"function": {"name": "stay", "parameters": {"type": "object", "required": ["never"]}}},
]


@pytest.fixture
def tokenizer(folder: WriteFolder) -> Tokenizer:
    backend = bytes_tokenizer()
    backend.add_special_tokens([*MARKS, "<|return|>", "<|call|>"])
    size = backend.get_vocab_size()
    ends = [size - 2, size - 1]
    return Tokenizer.load(folder(backend, TEMPLATE, generation_config={"eos_token_id": ends}))


def drawn(constraint: pb.Constraint, tokenizer: Tokenizer, begun: str, seed: int) -> str:
    """An answer that may come, which begins like this and goes on at random; marks are in it."""
    kept, draw = Constraint(constraint, tokenizer.words), np.random.default_rng(seed)
    answer = tokenizer.encode(begun)
    while len(answer) < 300 and not kept.ends(answer):
        bits = np.unpackbits(kept.masks(answer, [])[0].view(np.uint8), bitorder="little")
        token = int(draw.choice(np.flatnonzero(bits[: tokenizer.vocabulary])))
        assert not kept.trouble
        if token in tokenizer.stop_tokens:
            break
        answer.append(token)
    return tokenizer._decode(answer, False)


def test_calls_are_kept_to_schemas_and_what_comes_before_is_free(tokenizer: Tokenizer) -> None:
    ids = {text: token for token, text in tokenizer.marks(MARKS).items()}
    call = "<|channel|>commentary to=functions.go <|constrain|>json<|message|>"
    for strict in (None, {"go"}):
        constraint = pb.Constraint(grammar=channel_grammar(TOOLS, ids, strict))
        for begun in (THOUGHT + call, f"{THOUGHT} to=functions.go<|channel|>commentary json<|message|>", call):
            said, _, ((name, arguments),) = taken([drawn(constraint, tokenizer, begun, 3)])
            assert (said, name) == ("", "go")
            jsonschema.validate(json.loads(arguments), SCHEMA)
    free = pb.Constraint(grammar=channel_grammar(TOOLS, ids, {"go"}))
    final = f"{THOUGHT}<|channel|>final<|message|>Well"
    assert drawn(free, tokenizer, final, 1).startswith(final)
    bound = Constraint(pb.Constraint(grammar=channel_grammar(TOOLS, ids, None)), tokenizer.words)
    bound.masks(tokenizer.encode(final), [])
    assert bound.trouble, "an answer that is to call a tool says nothing"


BODIES = [
    pb.Constraint(json_schema=json.dumps(SCHEMA)),
    pb.Constraint(regex=r'\{"to": "[a-z]/[a-z]"\}'),
    pb.Constraint(grammar='start: "{" TO "}"\nTO: /"to": "[a-z]{3}"/'),
    pb.Constraint(grammar='root ::= "{" to "}"\nto ::= "\\"to\\": \\"" [a-z]+ "\\""'),
]


def around(constraint: pb.Constraint, tokenizer: Tokenizer, tools: list[dict[str, Any]]) -> pb.Constraint:
    """The constraint as a chat's request has it at last."""
    asked = pb.Generate(
        messages_json=json.dumps([{"role": "user", "content": "Hi"}]),
        tools_json=json.dumps([{"type": "function", **tool} for tool in tools]) if tools else "",
        sampling=pb.Sampling(top_p=1.0, repetition_penalty=1.0),
        constraint=constraint,
    )
    return Generation(asked, tokenizer, 1000).start().constraint


@pytest.mark.parametrize("body", BODIES, ids=["schema", "regex", "lark", "gbnf"])
def test_an_answer_that_is_to_be_json_thinks_first(body: pb.Constraint, tokenizer: Tokenizer) -> None:
    constraint = around(body, tokenizer, [])
    said, thought, _ = taken([drawn(constraint, tokenizer, f"{THOUGHT}<|channel|>final<|message|>", 1)])
    assert list(json.loads(said)) == ["to"]
    assert thought == "hm, <x>\n"


@pytest.mark.parametrize("body", BODIES, ids=["schema", "regex", "lark", "gbnf"])
@pytest.mark.parametrize(
    "escape",
    [
        "<|channel|>final json<|message|>",
        "<|channel|>final <|constrain|>json<|message|>",
        "<|channel|>final<|message|>no",
        "<|channel|>commentary to=functions.go <|constrain|>json<|message|>",
        "<|call|>",
        "<|return|>",
        "Well",
    ],
)
def test_nothing_escapes_what_an_answer_is_to_be(escape: str, body: pb.Constraint, tokenizer: Tokenizer) -> None:
    kept = Constraint(around(body, tokenizer, []), tokenizer.words)
    begun = tokenizer.encode(THOUGHT)
    for token in tokenizer.encode(escape):
        bits = np.unpackbits(kept.masks(begun, [])[0].view(np.uint8), bitorder="little")
        if not bits[token]:
            return
        begun.append(token)
    pytest.fail("all of it may come")


def test_tools_may_be_called_instead_of_the_answer_that_is_asked_for(tokenizer: Tokenizer) -> None:
    constraint = around(BODIES[0], tokenizer, TOOLS)
    call = "<|channel|>commentary to=functions.go <|constrain|>json<|message|>"
    said, _, ((name, _),) = taken([drawn(constraint, tokenizer, THOUGHT + call + "{}", 1)])
    assert (said, name) == ("", "go")


def test_a_chat_from_template_to_parts(tokenizer: Tokenizer) -> None:
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": []},
    ]
    asked = pb.Generate(
        request_id="r1",
        messages_json=json.dumps(chat),
        tools_json=json.dumps([{"type": "function", **tool} for tool in TOOLS]),
        reasoning_effort="high",
        sampling=pb.Sampling(top_p=1.0, repetition_penalty=1.0),
    )
    generation = Generation(asked, tokenizer, 1000)
    assert tokenizer._decode(generation.start().prompt, False) == (
        "2 tools\nuser  Hi\nassistant hm \nhigh<|start|>assistant"
    )
    answer = f'{THOUGHT}<|channel|>commentary to=functions.go <|constrain|>json<|message|>{{"to": "Rome"}}'
    deltas = []
    for token in [*tokenizer.encode(answer), max(tokenizer.stop_tokens)]:
        finish = "stop" if token in tokenizer.stop_tokens else ""
        delta = generation.on_tokens(wp.Tokens(request_id="r1", ids=[token], finish=finish))
        assert delta is not None
        deltas.append(delta)
    pieces = [piece for delta in deltas for piece in delta.calls]
    assert (pieces[0].name, "".join(piece.arguments for piece in pieces)) == ("go", '{"to": "Rome"}')
    assert "".join(delta.reasoning for delta in deltas) == "hm, <x>\n"
    assert (deltas[-1].finish, "".join(delta.text for delta in deltas)) == ("stop", "")
