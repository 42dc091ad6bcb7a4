"""The tree of sums: one order of additions, however its leaves are dealt out."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from motley.daemon.models.cutting.tree import fold, subtrees


def add(span: range, left: str, right: str) -> str:
    return f"({left}+{right})"


def leaf(number: int) -> tuple[range, str]:
    return range(number, number + 1), str(number)


@given(st.integers(1, 40), st.lists(st.integers(0, 40), max_size=7))
def test_any_ranges_give_the_same_additions(total: int, cuts: list[int]) -> None:
    """Symbolically: each rank writes down its subtrees, and together they spell what one rank alone does."""
    alone = fold(range(total), dict(map(leaf, range(total))), add)
    bounds = [0, *sorted(min(cut, total) for cut in cuts), total]
    sums: dict[range, str] = {}
    for start, stop in pairwise(bounds):
        own = dict(map(leaf, range(start, stop)))
        spans = subtrees(range(start, stop), total)
        assert [number for span in spans for number in span] == list(range(start, stop))
        assert len(spans) <= 2 * max(1, (total - 1).bit_length() - 1)
        sums |= {span: fold(span, own, add) for span in spans}
    assert fold(range(total), sums, add) == alone
    assert alone.count("+") == total - 1


def test_the_tree_is_balanced_and_halves_are_one_term_each() -> None:
    assert fold(range(5), dict(map(leaf, range(5))), add) == "((0+1)+(2+(3+4)))"
    for total in (2, 7, 8, 44):
        assert [len(subtrees(half, total)) for half in (range(total // 2), range(total // 2, total))] == [1, 1]
    assert subtrees(range(3, 7), 8) == [range(3, 4), range(4, 6), range(6, 7)]
    assert subtrees(range(4, 4), 8) == []
