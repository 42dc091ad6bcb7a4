"""Shares of adapters in memory: those in slots stay, others as long as there is room."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.rank.adapters.kept_products import AdapterShare, KeptProducts
from motley.plugins.adapted_engine import PreparedAdapter

LIMIT = 100
NAMES = st.sampled_from("abcdef")


def share_of(size: int) -> AdapterShare:
    """Half of it an embedding table."""
    return AdapterShare(PreparedAdapter({}, size - size // 2), np.zeros((1, size // 2), np.uint8))


@given(st.lists(st.tuples(NAMES, st.integers(0, 3), st.integers(0, 10))))
def test_they_are_not_more_than_there_is_room_for_but_for_those_in_slots(what: list[tuple[str, int, int]]) -> None:
    kept = KeptProducts(LIMIT)
    sizes: dict[str, int] = {}
    slots: dict[int, str] = {}
    for name, slot, size in what:
        if kept.get(name) is None:
            sizes[name] = 4 * size
            kept.put(name, share_of(sizes[name]))
        if slot:
            kept.loaded(slot, name)
            slots[slot] = name
        in_slots = sum(sizes[each] for each in {*slots.values(), name})
        assert kept.bytes <= max(LIMIT, in_slots)
        assert kept.get(name) is not None
        assert all(kept.get(each) is not None for each in slots.values())


def test_the_one_that_was_used_longest_ago_goes() -> None:
    kept = KeptProducts(30)
    for name in "abc":
        kept.put(name, share_of(8))
    kept.get("a")
    kept.put("d", share_of(8))
    assert [name for name in "abcd" if kept.get(name)] == ["a", "c", "d"]
