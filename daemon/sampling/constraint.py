"""What an answer must be: a grammar says after every token which tokens may come next.

Grammars are llguidance's, made from a JSON schema, a regular expression, or a grammar as Lark or llama.cpp write it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from motley.protocol import mesh_pb2 as pb
from motley.protocol import worker_pb2 as wp

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

Masks = npt.NDArray[np.int32]
"""i32[N, W]: for each of N tokens that are to be chosen, a bit for every token of the vocabulary, the lowest bit of the
first word first; 1: it may be chosen."""
_WORD = 32
"""Bits in a word of a mask."""
JSON_OPTIONS: JsonCompileOptions = {"lenient": False, "whitespace_pattern": r" |\n[ \t]{0,20}"}
"""How schemas are kept: whole, and with little whitespace between two words, as without a limit a small model can go on
with it until its tokens end."""
ANSWER = "answer"
"""What the grammar around a constraint calls it, behind an ``@``."""
_VOCABULARIES = 2
"""Tokenizers that a process keeps in llguidance's form."""


class ConstraintError(ValueError):
    """A constraint that is malformed, or asks for what is not supported; the message says what is wrong where."""


def grammar_of(constraint: pb.Constraint) -> str:
    """Translate a constraint into llguidance's form, and check it.

    Raises:
        ConstraintError: it is malformed, or has a feature that is not supported.
    """
    try:
        match constraint.WhichOneof("kind"):
            case "json_schema":
                grammar = _of_schema(constraint.json_schema)
            case "regex":
                grammar = LLMatcher.grammar_from_regex(constraint.regex)
            case "grammar":
                grammar = LLMatcher.grammar_from_lark(any_to_lark(constraint.grammar))
            case _:
                raise ConstraintError("says nothing")
    except ConstraintError:
        raise
    except Exception as error:  # the reader of llama.cpp's grammars raises plain Exception
        raise ConstraintError(f"cannot be read: {error}") from error
    if constraint.around:
        own = {"lark_grammar": grammar} if constraint.WhichOneof("kind") == "grammar" else _only(grammar)
        grammar = json.dumps({"grammars": [{"lark_grammar": constraint.around}, own | {"name": ANSWER}]})
    if why := LLMatcher.validate_grammar(grammar):
        raise ConstraintError(f"cannot be kept: {why.strip()}")
    return grammar


def _only(grammars: str) -> dict[str, object]:
    """The one grammar that llguidance has made of a schema or of a regular expression."""
    (own,) = json.loads(grammars)["grammars"]
    return dict(own)


def _of_schema(text: str) -> str:
    schema = json.loads(text)
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise ConstraintError("has x-guidance, which could loosen it: leave it out")
    return LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)


class Constraint:
    """Which tokens may come next in one answer: a function of the constraint and the tokens so far.

    Attributes:
        trouble: why it cannot be kept any further; empty: it can.
    """

    def __init__(self, constraint: pb.Constraint, vocabulary: wp.Vocabulary) -> None:
        """
        Args:
            vocabulary: the tokens that the model has, and which of them end an answer.

        Raises:
            ConstraintError: as `grammar_of`.
        """
        self.trouble = ""
        self._size = vocabulary.size
        self._words = -(-vocabulary.size // _WORD)
        self._stop = frozenset(vocabulary.stop)
        self._thoughts = constraint.thoughts if constraint.HasField("thoughts") else None
        self._matcher = LLMatcher(_tokenizer(vocabulary.SerializeToString()), grammar_of(constraint), log_level=0)
        self._read: list[int] = []
        """The tokens that the matcher has gone by."""
        self._look()

    def masks(self, generated: Sequence[int], guesses: Sequence[int]) -> Masks:
        """Which tokens may come behind those generated so far, and behind each of some guesses: i32[1 + G, W].

        Behind a guess that may not come itself, all may: nobody asks then what does. The same holds once there is
        `trouble`, and while the model thinks.
        """
        masks = np.full((1 + len(guesses), self._words), -1, np.int32)
        tokens = list(generated)
        for row, guess in enumerate([*guesses, None]):
            kept = self._kept(tokens)
            if kept is not None:
                self._follow(kept)
                masks[row] = self._mask(may_think=self._thoughts is not None and not tokens)
                if not row and not self.trouble and not masks[0].any():
                    self.trouble = "no token of the model can go on with what the constraint wants"
            if self.trouble:
                masks[:] = -1
                break
            if guess is None or guess in self._stop or not masks[row, guess // _WORD] >> guess % _WORD & 1:
                break
            tokens.append(guess)
        return masks

    def ends(self, generated: Sequence[int]) -> bool:
        """Whether nothing can come behind these tokens, so that the answer ends with them."""
        kept = self._kept(generated)
        if kept is None:
            return False
        self._follow(kept)
        return bool(self._matcher.is_stopped()) and not self.trouble

    def _kept(self, tokens: Sequence[int]) -> Sequence[int] | None:
        """The tokens of an answer that must keep to the constraint; None: the model still thinks."""
        thoughts = self._thoughts
        if thoughts is None or not (thoughts.begun or list(tokens[:1]) == [thoughts.begin]):
            return tokens
        end, at = list(thoughts.end), -1
        with suppress(ValueError):  # there is none
            while True:
                at = tokens.index(end[0], at + 1)  # not a loop of Python: thoughts are long, and this is each token's
                if list(tokens[at : at + len(end)]) == end:
                    return tokens[at + len(end) :]
        return None

    def _follow(self, tokens: Sequence[int]) -> None:
        """Have the matcher be behind exactly these tokens."""
        common = len(self._read)
        while self._read[:common] != list(tokens[:common]):
            common -= 1
        if common < len(self._read):
            self._matcher.rollback(len(self._read) - common)
        if common < len(tokens):
            self._matcher.consume_tokens(list(tokens[common:]))
        self._read = list(tokens)
        self._look()

    def _mask(self, may_think: bool) -> npt.NDArray[np.int32]:
        """The mask of the matcher's present state, i32[W]; tokens that the model has not are left out."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        mask = np.zeros(self._words, np.int32)
        mask[: len(bits)] = bits[: self._words]
        if spare := self._size % _WORD:
            mask[-1] &= np.int32((1 << spare) - 1)
        if may_think and self._thoughts is not None:
            mask.view(np.uint32)[self._thoughts.begin // _WORD] |= np.uint32(1 << self._thoughts.begin % _WORD)
        self._look()
        return mask

    def _look(self) -> None:
        if self._matcher.is_error():
            self.trouble = self.trouble or str(self._matcher.get_error()).partition("\n")[0]


@lru_cache(_VOCABULARIES)
def _tokenizer(serialised: bytes) -> LLTokenizer:
    """Make llguidance's form of a model's tokenizer, which takes a while."""
    vocabulary = wp.Vocabulary.FromString(serialised)
    return LLTokenizer(vocabulary.tokenizer_json, eos_token=list(vocabulary.stop))
