"""Texts that are computed with different adapters, or different rotary tables, have different roots."""

from __future__ import annotations

from itertools import product

from motley.daemon.rank.blocks.roots import root_of


def test_roots_are_apart_by_adapter_and_by_long_prompts() -> None:
    cases = product((1, 100, 101, 102), ("", "a" * 64, "b" * 64))
    roots = {(prompt if prompt > 100 else 0, adapter): root_of(prompt, 100, adapter) for prompt, adapter in cases}
    assert len(set(roots.values())) == len(roots) == 9
    assert root_of(50, 100) == 0
    assert all(0 <= root < 2**64 for root in roots.values())
