from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.training.errors import TrainingError
from motley.training.examples import IGNORED, Example, batch_of, deal, padded, read_examples, tokenised
from motley.training.lines import Text
from tests.training.test_lines import render

END = 1


class Bytes:
    """A token for each character; 0 is the one that begins a text."""

    end: int | None = END

    def encode(self, text: str, whole: bool) -> tuple[list[int], list[tuple[int, int]]]:
        begin = 0 if whole else 1
        return [0] * begin + [ord(each) for each in text], [(0, 0)] * begin + [(i, i + 1) for i in range(len(text))]


def learnt(example: Example) -> str:
    return "".join(map(chr, example.labels[example.labels != IGNORED]))


def test_labels_are_the_next_tokens_of_answers_only() -> None:
    example = tokenised(Text("ab=cd", (range(3, 5),), ends=True), Bytes())
    assert example.tokens.tolist() == [0, *map(ord, "ab=cd"), END]
    assert example.labels.tolist() == [*[IGNORED] * 3, ord("c"), ord("d"), END, IGNORED]


def test_a_template_writes_its_own_special_tokens() -> None:
    text = "<assistant>x</>"
    example = tokenised(Text(text, (range(11, len(text)),), whole=True), Bytes())
    assert example.tokens.tolist() == [ord(each) for each in text]
    assert learnt(example) == "x</>"


def test_the_first_token_of_a_text_is_learnt_after_the_one_that_begins_it() -> None:
    assert learnt(tokenised(Text("all", (range(3),)), Bytes())) == "all"


def file_of(folder: Path, *entries: object) -> Path:
    file = folder / "data.jsonl"
    file.write_text("\n".join(map(json.dumps, entries)))
    return file


def test_what_is_too_long_is_cut_and_counted(tmp_path: Path) -> None:
    file = file_of(
        tmp_path,
        {"prompt": "ab", "completion": "cd"},
        {"prompt": "ab", "completion": "cdefgh"},
        {"prompt": "a" * 9, "completion": "b"},
    )
    read = read_examples(file, render, Bytes(), 6, cut=True)
    assert [learnt(example) for example in read.examples] == ["cd\x01", "cde"]
    assert (read.cut, read.unanswered) == (2, 1)
    assert all(len(example.tokens) <= 6 for example in read.examples)


def test_what_is_too_long_is_refused_with_its_lines(tmp_path: Path) -> None:
    file = file_of(tmp_path, {"text": "abc"}, {"text": "abcdefgh"})
    with pytest.raises(TrainingError, match=r"1 examples are longer than the context of 6 tokens(.|\n)*line 2: 9 tok"):
        read_examples(file, render, Bytes(), 6, cut=False)


def test_data_without_answers_is_refused(tmp_path: Path) -> None:
    nothing = {"prompt": "a", "completion": ""}
    encoder = Bytes()
    encoder.end = None
    with pytest.raises(TrainingError, match=r"no line has an answer to learn \(2 without one\)"):
        read_examples(file_of(tmp_path, nothing, nothing), render, encoder, 6, cut=True)


def test_side_by_side() -> None:
    examples = [tokenised(Text(text, (range(len(text)),)), Bytes()) for text in ("a", "bcd")]
    tokens, labels = padded(examples)
    assert tokens.tolist() == [[0, ord("a"), 0, 0], [0, *map(ord, "bcd")]]
    assert labels.tolist() == [[ord("a"), *[IGNORED] * 3], [*map(ord, "bcd"), IGNORED]]


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 5))
def test_every_epoch_has_each_example_once(count: int, size: int, seed: int) -> None:
    steps = -(-3 * count // size)
    drawn = [index for step in range(steps) for index in batch_of(step, size, count, seed)]
    for epoch in range(3):
        assert sorted(drawn[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_batches_follow_the_seed() -> None:
    assert batch_of(3, 5, 40, seed=1) == batch_of(3, 5, 40, seed=1)
    assert batch_of(3, 5, 40, seed=1) != batch_of(3, 5, 40, seed=2)


@given(st.integers(1, 50), st.floats(0, 0.5))
def test_every_example_is_learnt_or_held_out(count: int, share: float) -> None:
    examples = [Example(np.array([index]), np.array([index])) for index in range(count)]
    learnt, held_out = deal(examples, share, 3)
    assert learnt
    assert bool(held_out) == (share > 0 and count > 1)
    assert sorted(int(example.tokens[0]) for example in (*learnt, *held_out)) == list(range(count))
