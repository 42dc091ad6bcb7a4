"""Texts that are computed with different adapters, or different rotary tables, have different roots."""

from __future__ import annotations

from itertools import product

from motley.daemon.rank.blocks.roots import root_of


def test_roots_are_apart_by_adapter_and_by_tables() -> None:
    roots = [root_of(tables, adapter) for tables, adapter in product((0, 101, 102), ("", "a" * 64, "b" * 64))]
    assert len(set(roots)) == len(roots)
    assert root_of(0) == 0
    assert all(0 <= root < 2**64 for root in roots)
