"""How much the caches of a session hold, and the blocks of which every rank keeps them."""

from __future__ import annotations

import pytest

from motley.orchestrator.planning.caches import Blocks, Caches


@pytest.mark.parametrize(
    ("caches", "whole", "blocks"),
    [
        (Caches(4096, 4096), False, Blocks(128, 32)),
        (Caches(4096, 4097), False, Blocks(129, 32)),
        (Caches(1, 1), False, Blocks(1, 32)),
        (Caches(4096, 4096), True, Blocks(1, 4096)),
        (Caches(1000, 2001), True, Blocks(3, 1000)),
        (Caches(4096, 1024, 3073), False, Blocks(32, 32, 97)),
    ],
)
def test_blocks_hold_what_was_asked_for(caches: Caches, whole: bool, blocks: Blocks) -> None:
    assert caches.blocks(whole) == blocks
    assert caches.tokens <= blocks.room < caches.tokens + blocks.tokens
