"""Stop strings, however the text comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.text.stops import StopChecker


def checked(stops: Sequence[str], chunks: Sequence[str]) -> tuple[str, bool]:
    checker = StopChecker(stops)
    shown = ""
    for chunk in chunks:
        shown += checker.push(chunk)
    return shown + checker.flush(), checker.stopped


ALPHABET = st.sampled_from("ab\n")


@given(st.lists(st.text(ALPHABET, max_size=4), max_size=12), st.text(ALPHABET, min_size=1, max_size=4))
def test_text_ends_before_the_stop_string(chunks: list[str], stop: str) -> None:
    text = "".join(chunks)
    assert checked([stop], chunks) == (text.split(stop)[0], stop in text)


@given(
    st.lists(st.text(ALPHABET, max_size=4), max_size=12),
    st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3),
)
def test_the_cut_of_the_text_does_not_matter(chunks: list[str], stops: list[str]) -> None:
    text = "".join(chunks)
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    expected = text
    if ends:
        longest = max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))
        expected = text[: ends[0] - longest]
    assert checked(stops, chunks) == (expected, bool(ends))


@given(st.lists(st.text(ALPHABET, max_size=4), max_size=12), st.text(ALPHABET, min_size=1, max_size=4))
def test_only_what_may_be_a_stop_string_is_held_back(chunks: list[str], stop: str) -> None:
    checker = StopChecker([stop])
    seen = shown = ""
    for chunk in chunks:
        seen += chunk
        shown += checker.push(chunk)
        if checker.stopped:
            return
        held = seen[len(shown) :]
        assert seen.startswith(shown)
        assert held == "" or (stop.startswith(held) and held != stop)


def test_nothing_comes_after_a_stop() -> None:
    checker = StopChecker(["END"])
    assert [checker.push(text) for text in ("a E", "N", "D b", "c")] == ["a ", "", "", ""]
    assert checker.stopped
    assert checker.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopChecker(["x", ""])
