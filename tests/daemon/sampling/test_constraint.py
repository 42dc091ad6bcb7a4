"""Constraints: which tokens may come next, however the answer came to be what it is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from motley.daemon.rank.constraints import Preparing
from motley.daemon.sampling.constraint import Constraint, ConstraintError, grammar_of
from motley.daemon.text.tokenizer import Tokenizer
from motley.protocol import mesh_pb2 as pb
from motley.protocol import worker_pb2 as wp
from tests.daemon.text.made_tokenizers import bytes_tokenizer, sentencepiece_tokenizer
from tests.e2e.processes import BUNDLED

TOKENIZER = Tokenizer.load(Path(BUNDLED))
WORDS = TOKENIZER.words
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CONSTRAINTS = {
    "schema": pb.Constraint(json_schema=json.dumps(SCHEMA)),
    "regex": pb.Constraint(regex="(ab|cd)+[0-9]{2}"),
    "lark": pb.Constraint(grammar='start: "yes" | "no" (" " "no")*'),
    "gbnf": pb.Constraint(grammar='root ::= ("yes" | "no") "!"?'),
}


def allowed(masks: Any, row: int = 0) -> list[int]:
    bits = np.unpackbits(masks[row].view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def drawn(constraint: Constraint, draw: np.random.Generator, most: int = 200) -> list[int]:
    """An answer of tokens that may come; a token that ends it is left out."""
    tokens: list[int] = []
    while len(tokens) < most and not constraint.ends(tokens):
        token = int(draw.choice(allowed(constraint.masks(tokens, []))))
        assert not constraint.trouble
        if token in TOKENIZER.stop_tokens:
            break
        tokens.append(token)
    return tokens


@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_masks_are_llguidances_at_every_place_with_and_without_guesses(kind: str) -> None:
    own = Constraint(CONSTRAINTS[kind], WORDS)
    tokenizer = LLTokenizer(WORDS.tokenizer_json, eos_token=list(WORDS.stop))

    @given(st.integers(0, 2**32), st.integers(0, 30), st.lists(st.integers(0, WORDS.size - 1), max_size=3))
    @settings(max_examples=30, deadline=None)
    def holds(seed: int, cut: int, wild: list[int]) -> None:
        answer = drawn(Constraint(CONSTRAINTS[kind], WORDS), np.random.default_rng(seed))
        before, guesses = answer[:cut], [*answer[cut : cut + 2], *wild]
        masks = own.masks(before, guesses)
        known = LLMatcher(tokenizer, grammar_of(CONSTRAINTS[kind]))
        known.consume_tokens(before)
        for row, guess in enumerate([*guesses, None]):
            bits = np.unpackbits(np.frombuffer(known.compute_bitmask(), np.uint8), bitorder="little")[: WORDS.size]
            assert allowed(masks, row) == np.flatnonzero(bits).tolist()
            if guess is None or guess in TOKENIZER.stop_tokens or not known.validate_tokens([guess]):
                assert all((masks[later] == -1).all() for later in range(row + 1, len(masks)))
                break
            known.consume_token(guess)

    holds()


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_drawn_is_what_was_asked_for(seed: int) -> None:
    texts = {
        kind: TOKENIZER.decode(drawn(Constraint(constraint, WORDS), np.random.default_rng(seed)))
        for kind, constraint in CONSTRAINTS.items()
    }
    jsonschema.validate(json.loads(texts["schema"]), SCHEMA)
    assert re.fullmatch("(ab|cd)+[0-9]{2}", texts["regex"])
    assert re.fullmatch("yes|no( no)*", texts["lark"])
    assert re.fullmatch("(yes|no)!?", texts["gbnf"])


def test_it_depends_on_the_tokens_alone() -> None:
    """Wherever it was asked before: behind other tokens, or behind more of them."""
    own, fresh = (Constraint(CONSTRAINTS["schema"], WORDS) for _ in range(2))
    first, second = (drawn(own, np.random.default_rng(seed)) for seed in (1, 2))
    assert first != second
    for tokens in (second[:3], first, first[:2], []):
        assert (own.masks(tokens, []) == fresh.masks(tokens, [])).all()
        assert own.ends(tokens) == (tokens == first)


def test_json_may_be_indented_and_has_no_whitespace_without_end() -> None:
    indented = TOKENIZER.encode(json.dumps({"name": "Ann", "age": 7}, indent=4))
    assert Constraint(CONSTRAINTS["schema"], WORDS).ends(indented)
    lines = TOKENIZER.encode("{\n")
    newline = TOKENIZER.encode("\n")[-1]
    assert newline not in allowed(Constraint(CONSTRAINTS["schema"], WORDS).masks(lines, []))


@pytest.mark.parametrize("make", [bytes_tokenizer, sentencepiece_tokenizer])
@pytest.mark.parametrize("text", ["naïve 12", "two  words\n", "日本 ok"])
def test_tokenizers_of_every_kind_say_what_is_asked_for(make: Callable[[], Any], text: str) -> None:
    backend = make()
    tokenizer = Tokenizer(backend, vocabulary=backend.get_vocab_size())
    own = Constraint(pb.Constraint(regex=re.escape(text)), tokenizer.words)
    answer: list[int] = []
    draw = np.random.default_rng(0)
    while not own.ends(answer):
        answer.append(int(draw.choice(allowed(own.masks(answer, [])))))
    assert not own.trouble
    before = tokenizer.encode("a")
    assert tokenizer.decode([*before, *answer]) == f"a{text}"


def test_a_tokenizer_that_cannot_be_read_is_the_trouble_of_one_request() -> None:
    preparing = Preparing(wp.Vocabulary(tokenizer_json="{}", size=3))
    preparing.begin(wp.Decode(request_id="r", constraint=pb.Constraint(regex="a")), 1.0)
    preparing.begin(wp.Decode(request_id="gone", constraint=pb.Constraint(regex="a")), 1.0)
    assert preparing.cancel("gone")
    ready: list[Any] = []
    while not ready:
        ready += preparing.ready()
    ((decode, came, constraint),) = ready
    assert (decode.request_id, came, bool(preparing)) == ("r", 1.0, False)
    with pytest.raises(ConstraintError, match="cannot be kept to a constraint"):
        constraint()


@pytest.mark.parametrize("begun", [False, True])
def test_thoughts_are_kept_to_nothing(begun: bool) -> None:
    begin, end, other, a = 10, 11, 12, TOKENIZER.encode("a")[-1]
    thoughts = pb.Thoughts(begin=begin, end=[end], begun=begun)
    own = Constraint(pb.Constraint(regex="b?a", thoughts=thoughts), WORDS)
    before = [] if begun else [begin]
    if not begun:
        assert {begin, a} < {*allowed(own.masks([], []))}
    assert (own.masks(before, []) == -1).all()
    masks = own.masks(before, [other, end, a, a])
    assert (masks[:2] == -1).all()
    assert a in allowed(masks, 2)
    assert begin not in allowed(masks, 2)
    assert allowed(masks, 3) == [*WORDS.stop]
    assert (masks[4] == -1).all()
    assert not own.ends([*before, other, a])
    assert own.ends([*before, other, end, a])


def test_an_answer_that_is_whole_ends() -> None:
    own = Constraint(pb.Constraint(regex="a"), WORDS)
    assert not own.ends([])
    (token,) = allowed(own.masks([], []))
    assert TOKENIZER.decode([token]) == "a"
    assert own.ends([token])


def test_tokens_that_cannot_have_come_are_told() -> None:
    own = Constraint(pb.Constraint(regex="a"), WORDS)
    assert (own.masks([5, 6], [7]) == -1).all()
    assert own.trouble


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (pb.Constraint(json_schema='{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (pb.Constraint(json_schema='{"x-guidance": {"lenient": true}}'), "x-guidance"),
        (pb.Constraint(json_schema='{"type": "nothing"}'), "Invalid type: nothing"),
        (pb.Constraint(json_schema='{"type": "string", "format": "weird"}'), "weird"),
        (pb.Constraint(json_schema='{"$ref": "http://localhost/x"}'), "http://localhost/x"),
        (pb.Constraint(regex="(a"), "unclosed group"),
        (pb.Constraint(regex="(?=a)b"), "look-ahead"),
        (pb.Constraint(grammar="start: x"), 'unknown name: "x"'),
        (pb.Constraint(grammar="root ::= x"), "x"),
        (pb.Constraint(), "says nothing"),
    ],
)
def test_what_cannot_be_kept_is_refused_and_named(constraint: pb.Constraint, words: str) -> None:
    with pytest.raises(ConstraintError, match=re.escape(words)):
        grammar_of(constraint)
