"""Text of an answer while its tokens come one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.text.streaming import REPLACEMENT, IncrementalDecoder
from motley.daemon.text.tokenizer import Tokenizer
from tests.daemon.text.made_tokenizers import (
    BOS,
    EOS,
    SHAKESPEARE,
    bytes_ids,
    bytes_tokenizer,
    sentencepiece_tokenizer,
    stream,
)

BYTES = Tokenizer(bytes_tokenizer(), vocabulary=259)
PIECES = Tokenizer(sentencepiece_tokenizer(), vocabulary=264)


def test_a_character_comes_with_its_last_byte() -> None:
    decoder = IncrementalDecoder(BYTES)
    deltas = [decoder.push(token) for token in bytes_ids("a👩‍🚀é".encode())]
    assert deltas == ["a", "", "", "", "👩", "", "", "\u200d", "", "", "", "🚀", "", "é"]
    assert decoder.flush() == ""


@given(st.text(max_size=30), st.text(max_size=30))
def test_streamed_text_is_the_text(before: str, text: str) -> None:
    decoder = IncrementalDecoder(BYTES, bytes_ids(before.encode()))
    deltas = [decoder.push(token) for token in bytes_ids(text.encode())]
    assert "".join(deltas) + decoder.flush() == text
    assert REPLACEMENT in text or not any(REPLACEMENT in delta for delta in deltas)


@given(st.binary(max_size=31))
def test_bytes_that_are_no_text_decode_as_all_at_once(data: bytes) -> None:
    assert stream(BYTES, [], bytes_ids(data)) == BYTES.decode(bytes_ids(data))


def test_an_incomplete_end_is_flushed() -> None:
    decoder = IncrementalDecoder(BYTES)
    assert [decoder.push(token) for token in bytes_ids("ab🚀".encode()[:-1])] == ["a", "b", "", "", ""]
    assert decoder.flush() == REPLACEMENT
    assert decoder.flush() == ""


def test_bytes_that_never_end_are_given_up() -> None:
    decoder = IncrementalDecoder(BYTES)
    sent = [decoder.push(token) for token in bytes_ids(b"\x80" * 200)]
    assert sum(map(len, sent)) >= 160
    assert len(decoder._window) <= 64


def test_special_tokens_have_no_text_and_do_not_break_a_character() -> None:
    first, *rest = bytes_ids("é!".encode())
    assert stream(BYTES, [BOS], [first, 2, *rest, EOS]) == "é!"


@given(
    st.lists(st.sampled_from([1, 3, 4, 5, 6, 7]), max_size=6),
    st.lists(
        st.one_of(st.sampled_from([[2], [3], [4], [5], [6], [7]]), st.just([8 + b for b in "é🚀".encode()])),
        max_size=12,
    ),
)
def test_spaces_of_sentencepiece_survive(context: list[int], pieces: list[list[int]]) -> None:
    """The streamed pieces are what decoding everything at once adds to the context's text."""
    ids = [token for piece in pieces for token in piece]
    assert stream(PIECES, context, ids) == PIECES.decode([*context, *ids])[len(PIECES.decode(context)) :]


def test_a_context_that_begins_within_a_character_is_extended() -> None:
    rocket = [8 + byte for byte in "🚀".encode()]
    assert stream(PIECES, [4, *rocket, *rocket], rocket) == "🚀"


def test_a_window_stays_short() -> None:
    decoder = IncrementalDecoder(Tokenizer.load(SHAKESPEARE), range(2, 500))
    for token in range(2, 1000):
        decoder.push(token)
        assert len(decoder._window) <= 64
