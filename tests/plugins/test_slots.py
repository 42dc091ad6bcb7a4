"""What engines share about sequences: open slots, and how caches grow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.plugins.engine import EngineError
from motley.plugins.slots import Slots, grown_capacity


def test_a_slot_that_is_not_open_is_named_with_those_that_are() -> None:
    slots = Slots({2: "two", 1: "one"})
    assert slots[2] == "two"
    slots.check_free(0)
    for ask in (slots.__getitem__, slots.take):
        with pytest.raises(EngineError, match=r"slot 7 is not open; open: \[1, 2\]"):
            ask(7)
    with pytest.raises(EngineError, match="slot 1 is open already"):
        slots.check_free(1)
    assert slots.take(1) == "one"
    assert 1 not in slots


@given(st.integers(1, 300), st.integers(1, 300), st.data())
def test_caches_grow_to_what_is_needed_seldom_and_never_beyond_the_context(
    first: int, context: int, data: st.DataObject
) -> None:
    capacity, moves = 0, 0
    for tokens in sorted(data.draw(st.lists(st.integers(1, context)))):
        if tokens > capacity:
            grown = grown_capacity(capacity, tokens, first, context)
            assert tokens <= grown <= context
            assert grown >= min(context, max(first, 2 * capacity))
            capacity, moves = grown, moves + 1
    assert moves <= 1 + context.bit_length()
