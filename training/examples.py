"""Examples as tokens, of which those of answers are learnt; and the batches of every step, which a seed decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from motley.training.errors import TrainingError, refuse_all
from motley.training.lines import Render, Text, read_lines

I64 = npt.NDArray[np.int64]
IGNORED = -100
"""The label of a position whose next token is not learnt."""


class Encoder(Protocol):
    """What turns texts into tokens.

    Attributes:
        end: the token that ends a text; None: there is none.
    """

    end: int | None

    def encode(self, text: str, whole: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of a text, and from which to which character each one stands; ``(0, 0)`` for special ones that
        the tokenizer adds, which it does unless the text is `whole`."""
        ...


@dataclass(frozen=True)
class Example:
    """A text as tokens.

    Attributes:
        tokens: i64[T].
        labels: i64[T]: after each token, the next one if it is learnt, else `IGNORED`.
    """

    tokens: I64
    labels: I64


@dataclass
class Examples:
    """The examples of a file.

    Attributes:
        cut: how many were longer than the context, and lost their ends.
        unanswered: how many have no answer to learn (within the context), and were left out.
        digest: of all tokens and labels, in hex.
    """

    examples: list[Example] = field(default_factory=list)
    cut: int = 0
    unanswered: int = 0

    @property
    def digest(self) -> str:
        """Hex SHA-256 of all tokens and labels: equal where a training would be."""
        digest = sha256()
        for example in self.examples:
            digest.update(len(example.tokens).to_bytes(8, "little"))
            digest.update(example.tokens.tobytes() + example.labels.tobytes())
        return digest.hexdigest()


def read_examples(file: Path, render: Render, encoder: Encoder, context: int, *, cut: bool) -> Examples:
    """Read a file of examples (see `motley.training.lines`).

    Args:
        context: tokens that the model reads at most.
        cut: examples that are longer lose their ends; otherwise they are refused.

    Raises:
        TrainingError: the file is not as it should be, has examples that are too long, or has no answers.
    """
    read = Examples()
    problems: list[str] = []
    for number, text in read_lines(file, render):
        example = tokenised(text, encoder)
        if len(example.tokens) > context:
            if not cut:
                problems.append(f"{file}, line {number}: {len(example.tokens)} tokens")
            read.cut += 1
            example = Example(example.tokens[:context], np.append(example.labels[: context - 1], IGNORED))
        if (example.labels == IGNORED).all():
            read.unanswered += 1
        else:
            read.examples.append(example)
    if problems:
        problems.insert(0, f"{len(problems)} examples are longer than the context of {context} tokens (cut them?):")
    refuse_all(problems)
    if not read.examples:
        raise TrainingError(f"{file}: no line has an answer to learn ({read.unanswered} without one)")
    return read


def tokenised(text: Text, encoder: Encoder) -> Example:
    """Turn a text into tokens. One is learnt if it begins within an answer, or ends the text where that is learnt."""
    tokens, spans = encoder.encode(text.text, text.whole)
    learnt = [begin < end and any(begin in answer for answer in text.answers) for begin, end in spans]
    if text.ends and encoder.end is not None:
        if tokens and tokens[-1] == encoder.end:  # which the tokenizer has added
            tokens, learnt = tokens[:-1], learnt[:-1]
        tokens, learnt = [*tokens, encoder.end], [*learnt, True]
    ids = np.array(tokens, np.int64)
    labels = np.full(len(ids), IGNORED, np.int64)
    labels[:-1] = np.where(learnt[1:], ids[1:], IGNORED)
    return Example(ids, labels)


def padded(examples: Sequence[Example]) -> tuple[I64, I64]:
    """Examples side by side: tokens i64[B, T] and labels i64[B, T], T as long as the longest, the others filled up.

    What fills up is at the end, where a causal model sees it from nowhere that has a label: it needs no mask.
    """
    longest = max(len(example.tokens) for example in examples)
    tokens = np.zeros((len(examples), longest), np.int64)
    labels = np.full((len(examples), longest), IGNORED, np.int64)
    for row, example in enumerate(examples):
        tokens[row, : len(example.tokens)] = example.tokens
        labels[row, : len(example.labels)] = example.labels
    return tokens, labels


def batch_of(step: int, size: int, count: int, seed: int) -> list[int]:
    """Which of `count` examples the `size` examples of a step are, by number; every epoch has each of them once.

    It depends on the arguments alone, so that a training goes on anywhere as it would have gone on here.
    """
    places = range(step * size, (step + 1) * size)
    return [_order(seed, place // count, count)[place % count] for place in places]


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, count: int) -> list[int]:
    """The numbers below `count` in an epoch's order."""
    order: list[int] = np.random.default_rng([seed, epoch]).permutation(count).tolist()
    return order


def deal(examples: Sequence[Example], share: float, seed: int) -> tuple[list[Example], list[Example]]:
    """Deal out examples: those to learn, and a share of them to evaluate with, at least one where there are two."""
    held_out = max(1, round(share * len(examples))) if share > 0 and len(examples) > 1 else 0
    chosen = set(np.random.default_rng([seed, 1 << 32]).permutation(len(examples))[:held_out].tolist())
    return (
        [example for index, example in enumerate(examples) if index not in chosen],
        [example for index, example in enumerate(examples) if index in chosen],
    )
