"""Blocks of layers with a window: which are kept, for whom, and how far prefixes are found that lack some of them."""

from __future__ import annotations

import pytest

from motley.daemon.rank.blocks.cache_blocks import BlockStore
from motley.daemon.rank.blocks.far_room import FarTier
from motley.daemon.rank.blocks.window_blocks import WindowBlocks

SIZE, WINDOW = 4, 6


def a_store(near: int, windowed: int, far: int = 0) -> BlockStore:
    tiers = [FarTier(range(near, near + far), "disk", lambda pairs: "")] if far else []
    return BlockStore(near, SIZE, tiers, WindowBlocks(windowed, WINDOW, SIZE))


def run(store: BlockStore, tokens: list[int]) -> int:
    """Compute a sequence a block at a time; how many of its tokens were found."""
    blocks, found = store.find(tokens)
    passed = store.first_seen(found)
    position = found
    while position < len(tokens):
        passed = store.let_pass(blocks, passed, position)
        end = min(len(tokens), (position // SIZE + 1) * SIZE)
        if len(blocks) * SIZE < end:
            taken = store.take(1)
            assert taken is not None, "there is always room for one alone"
            blocks += taken
        seen = blocks[store.first_seen(position) :]
        assert -1 not in store.windowed(seen)
        assert len({*store.windowed(seen)}) == len(seen)
        position = end
        store.publish(tokens[:position], blocks)
    store.give_back(tokens, blocks, passed=passed)
    return found


def test_a_sequence_of_any_length_needs_a_few() -> None:
    store = a_store(near=50, windowed=3)
    assert run(store, [*range(200)]) == 0


def test_a_conversation_goes_on_where_it_ended_with_the_window_before() -> None:
    store = a_store(near=20, windowed=3)
    run(store, [*range(42)])
    assert run(store, [*range(50)]) == 42
    assert run(store, [*range(10), 99]) == 0, "the windows of its beginning have gone"


def test_a_prefix_that_many_begin_with_is_found_while_there_is_room_for_its_window() -> None:
    store = a_store(near=50, windowed=10)
    for end in range(3):
        assert run(store, [*range(20), *[100 + end] * 6]) == (20 if end else 0)


def test_a_prefix_is_found_as_far_as_there_are_the_windows_before_its_end() -> None:
    store = a_store(near=50, windowed=8)
    run(store, [*range(30)])
    blocks, found = store.find([*range(12), 99])
    assert (len(blocks), found) == (3, 12)
    store.give_back([*range(12)], blocks, passed=store.first_seen(found))
    run(store, [*range(100, 124)])  # takes six of the eight
    assert run(store, [*range(31)]) == 12


def test_what_has_lost_its_window_gets_one_from_who_computes_it_again() -> None:
    """The tree has these tokens already, without windowed blocks."""
    store = a_store(near=50, windowed=3)
    text = [*range(28)]
    run(store, text)
    run(store, [*range(100, 150)])
    assert run(store, [*text, 30]) == 0
    assert run(store, [*text, 31]) == 28
    assert store.used == 0


def test_what_has_lost_its_window_is_found_again_while_who_computes_it_goes_on() -> None:
    store = a_store(near=50, windowed=20)
    text = [*range(29)]
    run(store, text)
    run(store, [*range(100, 250)])
    assert store.find(text) == ([], 0)
    taken = store.take(7)
    assert taken is not None
    store.publish(text[:28], taken)
    others, found = store.find([*text, 30])
    assert (others, found) == (taken, 28)
    store.give_back(text[:28], taken)
    store.give_back(text[:28], others, passed=store.first_seen(28))
    assert store.used == 0


def test_running_sequences_keep_what_they_see_and_others_do_not_get_it() -> None:
    store = a_store(near=50, windowed=4)
    first = store.take(3)
    assert first is not None
    assert (store.takeable, store.takeable_near) == (1, 47)
    assert store.take(2) is None
    assert not store.fits([*range(30)], 0, 0), "it could not go on"
    assert store.let_pass(first, 0, 4 + WINDOW) == 1
    assert store.takeable == 2
    assert store.fits([*range(8)], 0, 0)
    store.give_back([*range(12)], first, passed=1)
    assert store.takeable == 4


def test_one_alone_always_fits() -> None:
    store = a_store(near=50, windowed=3)
    run(store, [*range(100)])
    assert store.fits([*range(100), 7, 8], 0, 0)
    assert store.fits([*range(1000, 1100)], 0, 0)


def test_windowed_blocks_stay_when_the_others_move_far() -> None:
    store = a_store(near=4, windowed=4, far=8)
    run(store, [*range(16)])
    run(store, [*range(100, 108)])
    blocks, found = store.find([*range(17)])
    assert found == 16
    assert sum(block >= store.near for block in blocks) == 2
    assert -1 not in store.windowed(blocks[store.first_seen(found) :])


def test_windows_need_room_for_a_row() -> None:
    assert WindowBlocks.needed(WINDOW, SIZE) == 3
    with pytest.raises(ValueError, match="2 blocks of 4 tokens are too few for a window of 6 positions"):
        WindowBlocks(2, WINDOW, SIZE)
