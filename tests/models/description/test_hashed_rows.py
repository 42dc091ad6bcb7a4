"""Rows by hashes of the last tokens: which ones, wherever a sequence is cut, and what they are read from."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.models.description.axes import Axis, Kind, W
from motley.daemon.models.description.hashed_rows import NONE, HashedRows, with_those_before
from motley.daemon.models.files import open_model
from motley.daemon.weights.spec import Piece
from tests.models.cases import golden_case

END = 3
COLUMNS = Axis(Kind.PLAIN, 8, "columns")
SIZES = (11, 13, 17, 19)
ROWS = HashedRows(0, (W("table", Axis(Kind.PLAIN, 64, "rows"), COLUMNS),), (7, 9, 5), SIZES, END)


def by_the_book(text: Sequence[int]) -> list[list[int]]:
    """The rows of each token of a text, in words: what is before an end, or is not there, is an end."""
    found = []
    for at, token in enumerate(text):
        seen, ended = [token], False
        for back in (1, 2):
            ended = ended or at < back or text[at - back] == END
            seen.append(END if ended else text[at - back])
        pair, three = seen[0] * 7 ^ seen[1] * 9, seen[0] * 7 ^ seen[1] * 9 ^ seen[2] * 5
        found.append([pair % 11, pair % 13 + 11, three % 17 + 24, three % 19 + 41])
    return found


@given(
    text=st.lists(st.integers(0, 5), min_size=1, max_size=30),
    cuts=st.lists(st.integers(1, 29), max_size=5),
)
def test_rows_are_the_same_however_a_text_is_cut(text: list[int], cuts: list[int]) -> None:
    told, expected = np.array(text, np.int32), by_the_book(text)
    bounds = [0, *sorted({cut for cut in cuts if cut < len(text)}), len(text)]
    for begin, end in pairwise(bounds):
        numbers = ROWS.numbers(with_those_before(told, begin, end, 2))
        assert numbers.tolist() == expected[begin:end]


def test_tokens_before_a_sequence_are_none() -> None:
    told = np.array([4, 5, 6, 7], np.int32)
    assert with_those_before(told, 0, 2, 3).tolist() == [[4, NONE, NONE, NONE], [5, 4, NONE, NONE]]
    assert with_those_before(told, 2, 3, 1).tolist() == [[6, 5]]


@pytest.mark.parametrize("whole", [False, True])
def test_what_a_step_begins_with_is_read_from_parts_or_a_whole_table(whole: bool, tmp_path: Path) -> None:
    """Which no rank's share has; what transformers keeps of the hashes beside it follows from the config."""
    from safetensors.numpy import load_file, save_file

    case = golden_case("qwen4-exp")
    tensors = load_file(case.folder / "model.safetensors")
    if whole:
        for layer in (0, 2):
            module = f"model.layers.{layer}.ple.ple_embedding"
            name = f"{module}.ngram_embedding"
            tensors[f"{module}.layer_multipliers"] = np.ones(4, np.int64)
            tensors[f"{module}.ngram_heads_offsets"] = tensors[f"{module}.ngram_heads_vocab_sizes"] = np.ones(
                6, np.int64
            )
            parts = [tensors.pop(f"{name}.shard_{number}.weight").astype(np.float32) for number in range(3)]
            tensors[f"{name}.weight"] = np.concatenate(parts)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((case.folder / "config.json").read_bytes())
    with open_model(tmp_path) as opened:
        rows = opened.rows(case.tokens)
        before = with_those_before(np.array(case.tokens, np.int32), 0, len(case.tokens), opened.model.recent)
        at = opened.model.hidden
        for own in opened.model.hashed:
            table = np.concatenate(
                [opened.source.read(Piece(part.name, range(part.out.size), range(8))) for part in own.parts]
            )
            expected = table[own.numbers(before)].reshape(len(case.tokens), -1)
            np.testing.assert_array_equal(rows[:, at : at + own.width], expected)
            at += own.width
        assert at == rows.shape[1]
        later = opened.rows(case.tokens[20:], before[20:])
        np.testing.assert_array_equal(later, rows[20:])
